"""What vLLM's workers do for pm_ops on every device: one buffer of whole pages, and its pools."""

from __future__ import annotations

import multiprocessing
from copy import deepcopy
from typing import Any

from vllm.logger import init_logger

import pm_ops

from .backend import install
from .config import Settings
from .layout import page_pools

PROCESSES = ("EngineCore", "VllmWorker")
"""What the names of vLLM's own processes begin with."""
logger = init_logger("vllm.pm_ops")  # below vLLM's own, so that its logging settings apply


class PageMajorWorker:
    """The part of a worker class that stands before vLLM's own; see :mod:`pm_ops.adapters.vllm.plugin`."""

    vllm_config: Any
    model_runner: Any

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        settings = Settings.of(vllm_config)
        assert settings is not None, "the plugin writes this class into configurations that ask for it"
        self.pm_ops_settings = settings
        install()
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """The one layout that was asked for, if every attention and state layer of the model can use it."""
        supported: list[str] = super().get_supported_kv_cache_layouts()  # type: ignore[misc]
        wanted = self.pm_ops_settings.engine_layout
        if wanted not in supported:
            raise ValueError(
                f"pm_ops: layout {self.pm_ops_settings.layout} is {wanted} to vLLM, and this model's layers support "
                f"{', '.join(supported)}; run it without pm_ops"
            )
        return [wanted]

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the cache, make sure that it is a pool of whole pages, and say so."""
        drafts, groups = self.vllm_config.speculative_config, len(kv_cache_config.kv_cache_groups)
        if drafts is not None and drafts.method == "draft_model" and groups > 1:
            raise RuntimeError(
                f"pm_ops: draft models are supported where all layers make one cache group, and here are {groups}, as "
                "some have sliding windows; draft with n-grams (method ngram), or run without pm_ops"
            )
        self.allocate_cache(kv_cache_config)
        pools = self.pools
        if not pools:
            raise RuntimeError("pm_ops: this model keeps no KV cache; run it without pm_ops")
        layers = sum(len(pool.layout.layers) for pool in pools)
        logger.info(
            "pm_ops %s: KV cache %s, %d layers in %d pages of %d bytes, one buffer; attention by pm_ops, impl %s",
            pm_ops.__version__,
            self.pm_ops_settings.layout,
            layers,
            pools[0].num_pages,
            pools[0].layout.page_bytes,
            self.pm_ops_settings.impl,
        )

    def allocate_cache(self, kv_cache_config: Any) -> None:
        """As vLLM does. Its runner looks for the layers that read another one's cache where a group of unlike layers
        has its specs, and vLLM lists those with a cache of their own there."""
        kv_cache_config = deepcopy(kv_cache_config)
        layers = self.vllm_config.compilation_config.static_forward_context
        targets = {name: getattr(layer, "kv_sharing_target_layer_name", None) for name, layer in layers.items()}
        for group in kv_cache_config.kv_cache_groups:
            specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
            specs |= {name: specs[target] for name, target in targets.items() if target in specs}
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]

    @property
    def pools(self) -> list[pm_ops.PagePool]:
        """The engine's cache as pools, one a cache group; page ``i`` is vLLM's block ``i``."""
        runner = self.model_runner
        layers = self.vllm_config.compilation_config.static_forward_context
        return page_pools(runner.kv_cache_config, layers, self.pm_ops_settings.layout)

    def page_pools(self) -> list[pm_ops.PagePool]:
        """:attr:`pools`, for ``LLM.collective_rpc`` of an engine in the caller's process.

        Raises:
            RuntimeError: vLLM has given the worker a process of its own, which a pool cannot leave. Its thread that
                sends results would end there, and the caller wait for ever.
        """
        process = multiprocessing.current_process().name
        if process.startswith(PROCESSES):
            raise RuntimeError(
                f"pm_ops: the cache lies in the process {process}, and a pool cannot leave it; set "
                "VLLM_ENABLE_V1_MULTIPROCESSING=0 for an LLM of one worker, or send a function there, which takes "
                "worker.pools"
            )
        return self.pools
