"""Models written for layer-major caches, compiled onto pages.

::

    binding = bind(pool, keys=[...], values=[...])            # or bind(pool, static_cache)
    model = torch.compile(model, backend=page_major_backend(binding))
    model(...)                                                # the model's own code
    print(binding.report())
"""

from .backend import PageMajorBackend, page_major_backend, pm_ops_backend
from .binding import Binding, bind
from .engine_ops import (
    Attend,
    RmsNorm,
    Rotate,
    Store,
    register_attention_op,
    register_norm_op,
    register_rotary_op,
    register_store_op,
)
from .post_grad import RopeStorePass, register_fused_store
from .report import Entry, RewriteError, RewriteReport

__all__ = [
    "Attend",
    "Binding",
    "Entry",
    "PageMajorBackend",
    "RewriteError",
    "RewriteReport",
    "RmsNorm",
    "RopeStorePass",
    "Rotate",
    "Store",
    "bind",
    "page_major_backend",
    "pm_ops_backend",
    "register_attention_op",
    "register_fused_store",
    "register_norm_op",
    "register_rotary_op",
    "register_store_op",
]
