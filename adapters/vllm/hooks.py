"""The places of vLLM that the plugin needs. It goes by what is there, never by version numbers.

Two generations place a cache block by block. One has an enum of layouts, and allocates the one that the engine, its
workers and backends agree on. The one before it (vLLM 0.26) keeps a tensor a layer, but its model runners can also read
a plan in which every block holds the pages of all layers, which :mod:`.packed` makes.
"""

from __future__ import annotations

import importlib
from typing import Any

LAYOUTS, PACKED = "layouts", "packed"

BASE = {
    "VllmConfig.additional_config": "vllm.config:VllmConfig.__dataclass_fields__.additional_config",
    "attention backend CUSTOM": "vllm.v1.attention.backends.registry:AttentionBackendEnum.CUSTOM",
    "register_backend": "vllm.v1.attention.backends.registry:register_backend",
    "strides of a cache": "vllm.v1.kv_cache_interface:KVCacheTensor.__dataclass_fields__.block_stride",
}
"""What every vLLM needs: what it is, and ``module:attributes``."""

_KV = "vllm.distributed.kv_transfer.kv_connector.v1.base"
STORE_CONNECTOR = {
    "KV connector": f"{_KV}:KVConnectorBase_V1",
    "talk of workers and scheduler": f"{_KV}:KVConnectorHandshakeMetadata",
    "full attention": "vllm.v1.kv_cache_interface:FullAttentionSpec",
}
"""What :mod:`pm_ops.adapters.vllm.store_connector` needs."""

HOST_CONNECTOR = {
    "KV connector": f"{_KV}:KVConnectorBase_V1",
    "connectors of several cache groups": f"{_KV}:SupportsHMA",
    "news of workers": f"{_KV}:KVConnectorWorkerMetadata",
    "news of steps without work": f"{_KV}:KVConnectorBase_V1.has_pending_push_work",
    "owners of blocks": f"{_KV}:KVConnectorBase_V1.bind_gpu_block_pool",
    "statistics of a connector": "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorStats",
    "full attention": "vllm.v1.kv_cache_interface:FullAttentionSpec",
    "sliding windows": "vllm.v1.kv_cache_interface:SlidingWindowSpec",
}
"""What :mod:`pm_ops.adapters.vllm.host_connector` needs. Several cache groups need ``get_transfer_results`` besides."""

FUSE_ROPE = {
    "context of a layer": "vllm.model_executor.layers.attention.attention:get_attention_context",
    "kernels of vLLM": "vllm._custom_ops:rotary_embedding",
    "norms of vLLM": "vllm.ir.ops:rms_norm",
    "operator of cache writes": "torch:ops.vllm.unified_kv_cache_update",
    "operator of norms": "torch:ops.vllm_ir.rms_norm",
    "operator of rotary embeddings": "torch:ops._C.rotary_embedding",
}
"""What :mod:`pm_ops.adapters.vllm.rope` needs; the modules of the first three define the operators."""

GENERATIONS = {
    LAYOUTS: {
        "KVCacheLayout": "vllm.v1.kv_cache_layout:KVCacheLayout",
        "layouts of a backend": "vllm.v1.attention.backend:AttentionBackend.supported_kv_cache_layouts",
        "layouts of a worker": "vllm.v1.worker.worker_base:WorkerBase.get_supported_kv_cache_layouts",
    },
    PACKED: {
        "layers of a cache": "vllm.v1.kv_cache_interface:KVCacheTensor.__dataclass_fields__.shared_by",
        "place in a block": "vllm.v1.kv_cache_interface:KVCacheTensor.__dataclass_fields__.offset",
        "strides of a backend": "vllm.v1.attention.backend:AttentionBackend.get_kv_cache_stride_order",
        "zeroing of blocks": "vllm.v1.worker.utils:KVBlockZeroer.zero_block_ids",
    },
}
"""What a generation needs besides."""

DEVICES = {
    "cpu": {
        "choice of attention": "vllm.platforms.cpu:CpuPlatform.get_attn_backend_cls",
        "choice of block sizes": "vllm.platforms.cpu:CpuPlatform.update_block_size_for_backend",
        "CPUWorker": "vllm.v1.worker.cpu_worker:CPUWorker",
    },
    "cuda": {"Worker": "vllm.v1.worker.gpu_worker:Worker"},
}
"""What a device needs besides."""

VERSION = "0.32 or newer, or on a GPU 0.26"
"""The versions of vLLM that have them all, and are tested."""

_CPU = ("vllm.v1.worker.cpu_worker.CPUWorker", "pm_ops.adapters.vllm.worker_cpu.PageMajorCPUWorker")
_CUDA = ("vllm.v1.worker.gpu_worker.Worker", "pm_ops.adapters.vllm.worker_cuda.PageMajorGPUWorker")
WORKERS = {(LAYOUTS, "cpu"): _CPU, (LAYOUTS, "cuda"): _CUDA, (PACKED, "cuda"): _CUDA}
"""Of each generation and device that are supported: vLLM's own worker class, and ours that takes its place."""

NEVER_RUN = {(LAYOUTS, "cuda")}
"""Those of them that are written after vLLM's sources, and have not run yet."""


def generation() -> str:
    """Which of :data:`GENERATIONS` the installed vLLM is of. Imports vLLM."""
    return LAYOUTS if _present(GENERATIONS[LAYOUTS]["KVCacheLayout"]) else PACKED


def device() -> str:
    """What vLLM runs on. To vLLM, ROCm is a kind of CUDA; here it is not."""
    from vllm.platforms import current_platform

    return "rocm" if current_platform.is_rocm() else current_platform.device_type


def needed(device: str) -> dict[str, str]:
    """All of them on this device, which need not be supported."""
    return {**BASE, **GENERATIONS[generation()], **DEVICES.get(device, {})}


def missing(hooks: dict[str, str]) -> list[str]:
    """Those of the hooks that the installed vLLM does not have, in words. Imports vLLM."""
    return [f"{what} ({path.replace(':', '.')})" for what, path in hooks.items() if not _present(path)]


def supported(generation: str) -> str:
    """The devices on which this generation is supported, in words."""
    return ", ".join(on for of, on in WORKERS if of == generation)


def _present(path: str) -> bool:
    module, _, attributes = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in attributes.split("."):
            found = found[name] if isinstance(found, dict) else getattr(found, name)
    except (ImportError, AttributeError, KeyError):
        return False
    return True
