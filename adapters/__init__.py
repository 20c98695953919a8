"""Adapters: engines and model libraries on the page-major layout, without a fork. Import the one you need."""
