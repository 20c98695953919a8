"""Kernels run in Triton's interpreter where there is no GPU."""

import triton_interpreter  # noqa: F401
