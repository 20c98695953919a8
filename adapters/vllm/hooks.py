"""The places of vLLM that the plugin needs. It goes by what is there, never by version numbers."""

from __future__ import annotations

import importlib
from typing import Any

BASE = {
    "VllmConfig.additional_config": "vllm.config:VllmConfig.__dataclass_fields__.additional_config",
    "attention backend CUSTOM": "vllm.v1.attention.backends.registry:AttentionBackendEnum.CUSTOM",
    "register_backend": "vllm.v1.attention.backends.registry:register_backend",
    "KVCacheLayout": "vllm.v1.kv_cache_layout:KVCacheLayout",
    "layouts of a backend": "vllm.v1.attention.backend:AttentionBackend.supported_kv_cache_layouts",
    "layouts of a worker": "vllm.v1.worker.worker_base:WorkerBase.get_supported_kv_cache_layouts",
    "strides of a cache": "vllm.v1.kv_cache_interface:KVCacheTensor.__dataclass_fields__.block_stride",
}
"""What every platform needs: what it is, and ``module:attributes``."""

DEVICES = {
    "cpu": {
        "choice of attention": "vllm.platforms.cpu:CpuPlatform.get_attn_backend_cls",
        "choice of block sizes": "vllm.platforms.cpu:CpuPlatform.update_block_size_for_backend",
        "CPUWorker": "vllm.v1.worker.cpu_worker:CPUWorker",
    }
}
"""What a device needs besides."""

CONNECTOR = {
    "KV connector": "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1",
    "talk of workers and scheduler": "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorHandshakeMetadata",
    "cache hit sources": "vllm.v1.metrics.cache_hit_source:CacheHitSource.DISK",
    "full attention": "vllm.v1.kv_cache_interface:FullAttentionSpec",
}
"""What :mod:`pm_ops.adapters.vllm.store_connector` needs."""

VERSION = "0.32"
"""The vLLM that has them all, and is tested."""

WORKERS = {"cpu": ("vllm.v1.worker.cpu_worker.CPUWorker", "pm_ops.adapters.vllm.worker_cpu.PageMajorCPUWorker")}
"""Of each device that is supported: vLLM's own worker class, and ours that takes its place."""


def needed(device: str) -> dict[str, str]:
    """All of them on this device, which need not be supported."""
    return {**BASE, **DEVICES.get(device, {}), **CONNECTOR}


def missing(device: str) -> list[str]:
    """The hooks that the installed vLLM does not have, in words. Imports vLLM."""
    return [f"{what} ({path.replace(':', '.')})" for what, path in needed(device).items() if not _present(path)]


def _present(path: str) -> bool:
    module, _, attributes = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in attributes.split("."):
            found = found[name] if isinstance(found, dict) else getattr(found, name)
    except (ImportError, AttributeError, KeyError):
        return False
    return True
