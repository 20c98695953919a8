"""pm_ops: the page-major KV and state cache layout for any PyTorch program.

Everything that one page of tokens needs, of every layer, lies in one contiguous run of bytes, so that moving,
offloading or freeing a page is one copy instead of two a layer. Here are the layout as data, a page pool, and the torch
custom operators over it; :mod:`pm_ops.compile_passes` rewrites layer-major models into them, and
:mod:`pm_ops.adapters` brings them into engines.
"""

from . import ops
from .allocator import PageAllocator
from .descriptors import count_layer_major, page_descriptors, page_regions, pair_descriptors
from .disk import load_pages, save_pages
from .formats import hicache, mla, page_major, state_page, token_major, vllm
from .functional import (
    attention,
    attention_impl,
    load_kv,
    merge_attention,
    rope_store_kv,
    store_kv,
)
from .gated_delta import gated_delta_prefill, gated_delta_update
from .header import PageHeader
from .host import HostPool
from .hybrid import HybridPool, TwoEndedPool
from .latent import mla_attention, store_index_key, store_latent
from .layout import PageLayout, Plane
from .nixl import NixlPages
from .page_store import PageStore
from .pool import PagePool
from .repack import RepackPlan
from .state import conv1d_prefill, conv1d_update, selective_scan_prefill, selective_state_update

__version__ = "0.1.0"

__all__ = [
    "HostPool",
    "HybridPool",
    "NixlPages",
    "PageAllocator",
    "PageHeader",
    "PageLayout",
    "PagePool",
    "PageStore",
    "Plane",
    "RepackPlan",
    "TwoEndedPool",
    "attention",
    "attention_impl",
    "conv1d_prefill",
    "conv1d_update",
    "count_layer_major",
    "gated_delta_prefill",
    "gated_delta_update",
    "hicache",
    "load_kv",
    "load_pages",
    "merge_attention",
    "mla",
    "mla_attention",
    "ops",
    "page_descriptors",
    "page_major",
    "page_regions",
    "pair_descriptors",
    "rope_store_kv",
    "save_pages",
    "selective_scan_prefill",
    "selective_state_update",
    "state_page",
    "store_index_key",
    "store_kv",
    "store_latent",
    "token_major",
    "vllm",
]
