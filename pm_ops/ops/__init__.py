"""The operators, one file a family: schema, fake and CPU kernel on one screen. Importing this registers them all.

Attention's are in three: its arguments, its specification, and the choice of an implementation.
"""

from . import attention, attention_choice, conv, gated_delta, merge, mla, pages, repack, rope, selective, store

__all__ = [
    "attention",
    "attention_choice",
    "conv",
    "gated_delta",
    "merge",
    "mla",
    "pages",
    "repack",
    "rope",
    "selective",
    "store",
]
