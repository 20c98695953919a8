"""FlashAttention 3, in the build that comes with vLLM: ``torch.ops._vllm_fa3_C``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from .clock import fastest
from .implementation import ATTENTION, Bound, Implementation, Missing
from .loading import digest
from .memory import Memory
from .work import AttentionWork

_LIBRARY = "_vllm_fa3_C.abi3.so"
_FP8_TOLERANCE = 0.2  # queries and probabilities are fp8 too where the cache is


class FA3(Implementation):
    """One varlen call over pages; scheduled ahead of it, as vLLM does once a step, where that is faster."""

    name = "fa3"
    kinds = ATTENTION
    scope = "it is an attention kernel: it stores and moves nothing by itself"
    compiles = False

    def __init__(self, folder: Path | None) -> None:
        library, self._version = _library(folder)
        if torch.cuda.get_device_capability()[0] != 9:
            raise Missing("its kernels are for compute capability 9.x")
        try:
            torch.ops.load_library(str(library))
        except (OSError, RuntimeError) as error:
            raise Missing(f"{_LIBRARY} does not load with torch {torch.__version__}: {error}") from error
        self._ops = torch.ops._vllm_fa3_C

    def version(self) -> str:
        """vLLM's release, or the library's digest."""
        return self._version

    def attention(self, work: AttentionWork, memory: Memory) -> Bound:
        """``fwd``. With an fp8 cache it takes an fp8 query."""
        s = work.shape
        quantised = s.kv_dtype.itemsize == 1
        query = work.query.to(s.kv_dtype) if quantised else work.query
        batch = (len(s.seq_lens), s.kv_heads)
        descale = [torch.full(batch, scale, device=query.device) if quantised else None for scale in (1.0, *s.scales)]
        left, right = (s.window - 1, 0) if s.window else (-1, -1)
        out = work.query.new_empty(s.tokens, s.q_heads, s.value_dim)

        def call(schedule: Tensor | None) -> Callable[[], Tensor]:
            args = (
                query, memory.key, memory.value, None, None, None, out,
                work.query_start, None, None, None, work.seq_lens, max(s.query_lens), max(s.seq_lens),
                work.page_table, None, None, None, None, None, *descale,
                s.head_dim**-0.5, True, left, right, 0.0, True, schedule, 0, None, 0, work.sinks, 1, 0, None,
            )  # fmt: skip

            def run() -> Tensor:
                self._ops.fwd(*args)
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
        return self._ops.get_scheduler_metadata(
            len(s.seq_lens), max(s.query_lens), max(s.seq_lens), s.q_heads, s.kv_heads, s.head_dim, s.value_dim,
            dtype, work.seq_lens, work.query_start, None, None, None, None, page_size, 0,
            True, left, right, False, 0, None, 0,
        )  # fmt: skip


def _library(folder: Path | None) -> tuple[Path, str]:
    """The library's file, and its version."""
    if folder is not None and (folder / _LIBRARY).is_file():
        return folder / _LIBRARY, digest(folder / _LIBRARY)
    present = sys.modules.get("vllm")
    spec = importlib.util.find_spec("vllm") if present is None else present.__spec__
    if spec is not None and spec.origin is not None:
        installed = Path(spec.origin).parent / "vllm_flash_attn" / _LIBRARY
        if installed.is_file():
            return installed, f"vllm {importlib.metadata.version('vllm')}"
    raise Missing(f"{_LIBRARY} is neither in vLLM's installation nor in the folder that --peers names")
