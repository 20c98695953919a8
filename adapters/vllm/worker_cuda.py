"""vLLM's CUDA worker, of both generations and with either model runner, with the cache as one buffer of pages."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu_worker import Worker

from pm_ops.kernels import fa3

from . import hooks
from .packed import pack, place_states, replace_zeroer
from .warm_up import warm_up
from .worker import PageMajorWorker, logger


class PageMajorGPUWorker(PageMajorWorker, Worker):
    """Takes ``Worker``'s place in engines that asked for pm_ops."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        if self.pm_ops_settings.impl == "fa3" and isinstance(library := fa3.library(), str):
            raise RuntimeError(f"pm_ops: impl fa3 was asked for, but FlashAttention 3 is not there: {library}")
        if (hooks.generation(), "cuda") in hooks.NEVER_RUN:
            logger.warning("pm_ops is written for this generation of vLLM on CUDA, but has never run there")
        if vllm_config.speculative_config is not None:
            logger.warning("pm_ops: speculative decoding has run in vLLM's CPU build alone, never on CUDA")

    def allocate_cache(self, kv_cache_config: Any) -> None:
        """In packed blocks where vLLM has no layouts."""
        if hooks.generation() != hooks.PACKED:
            super().allocate_cache(kv_cache_config)
            return
        packed = pack(kv_cache_config)
        super().allocate_cache(packed)
        place_states(packed, self.vllm_config.compilation_config.static_forward_context)
        if packed.needs_kv_cache_zeroing:
            replace_zeroer(self.model_runner, self.pools[0])

    def compile_or_warm_up_model(self) -> Any:
        """First the kernels of pm_ops, then what vLLM compiles and captures."""
        model = self.vllm_config.model_config
        with torch.inference_mode():
            warm_up(self.vllm_config.compilation_config.static_forward_context, model.dtype, model.max_model_len)
        torch.cuda.synchronize()
        return super().compile_or_warm_up_model()
