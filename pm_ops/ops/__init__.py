"""The operators, one file a family: schema, fake and CPU kernel on one screen. Importing this registers them all."""

from . import attention, conv, gated_delta, merge, mla, pages, repack, rope, selective, store

__all__ = ["attention", "conv", "gated_delta", "merge", "mla", "pages", "repack", "rope", "selective", "store"]
