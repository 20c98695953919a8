"""The operators, one file a family: schema, fake and CPU kernel on one screen. Importing this registers them all."""

from . import attention, merge, mla, pages, repack, rope, store

__all__ = ["attention", "merge", "mla", "pages", "repack", "rope", "store"]
