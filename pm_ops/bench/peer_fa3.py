"""FlashAttention 3, in the build that comes with vLLM: ``torch.ops._vllm_fa3_C``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..kernels import fa3
from .clock import fastest
from .implementation import ATTENTION, Bound, Implementation, Missing
from .loading import vllm_library
from .memory import Memory
from .work import AttentionWork

_FP8_TOLERANCE = 0.2  # queries and probabilities are fp8 too where the cache is


class FA3(Implementation):
    """One varlen call over pages; scheduled ahead of it, as vLLM does once a step, where that is faster."""

    name = "fa3"
    kinds = ATTENTION
    scope = "it is an attention kernel: it stores and moves nothing by itself"
    compiles = False

    def __init__(self, folder: Path | None) -> None:
        library, self._version = vllm_library(folder, "vllm_flash_attn", fa3.LIBRARY)
        if torch.cuda.get_device_capability()[0] != 9:
            raise Missing("its kernels are for compute capability 9.x")
        try:
            fa3.load(library)
        except (OSError, RuntimeError) as error:
            raise Missing(f"{fa3.LIBRARY} does not load with torch {torch.__version__}: {error}") from error

    def version(self) -> str:
        """vLLM's release, or the library's digest."""
        return self._version

    def attention(self, work: AttentionWork, memory: Memory) -> Bound:
        """``fwd``. With an fp8 cache it takes an fp8 query."""
        s = work.shape
        quantised = s.kv_dtype.itemsize == 1
        query = work.query.to(s.kv_dtype) if quantised else work.query
        batch = (len(s.seq_lens), s.kv_heads)
        q_scale, k_scale, v_scale = (
            torch.full(batch, scale, device=query.device) if quantised else None for scale in (1.0, *s.scales)
        )
        left, right = (s.window - 1, 0) if s.window else (-1, -1)
        out = work.query.new_empty(s.tokens, s.q_heads, s.value_dim)

        def call(schedule: Tensor | None) -> Callable[[], Tensor]:
            def run() -> Tensor:
                fa3.vllm_forward(
                    query, memory.key, memory.value, work.page_table, work.seq_lens, work.query_start,
                    max_query_len=max(s.query_lens), max_keys=max(s.seq_lens), softmax_scale=s.head_dim**-0.5,
                    causal=True, window=(left, right), sinks=work.sinks, descale=(q_scale, k_scale, v_scale),
                    schedule=schedule, out=out,
                )  # fmt: skip
                return out

            return run

        ways = {"scheduled within the call": call(None)}
        try:
            schedule = self._schedule(work, memory.page_size, query.dtype, left, right)
            ways["scheduled ahead of the call"] = call(schedule)
        except RuntimeError as error:
            ways = {f"scheduled within the call (not ahead: {error})": call(None)}
        run, note = fastest(ways, out.device)
        return Bound(run, out, _FP8_TOLERANCE if quantised else None, note=note)

    def _schedule(self, work: AttentionWork, page_size: int, dtype: torch.dtype, left: int, right: int) -> Tensor:
        s = work.shape
        return torch.ops._vllm_fa3_C.get_scheduler_metadata(
            len(s.seq_lens), max(s.query_lens), max(s.seq_lens), s.q_heads, s.kv_heads, s.head_dim, s.value_dim,
            dtype, work.seq_lens, work.query_start, None, None, None, None, page_size, 0,
            True, left, right, False, 0, None, 0,
        )  # fmt: skip
