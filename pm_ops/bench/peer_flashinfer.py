"""FlashInfer: its wrappers over paged K and V, planned ahead of the call, its append and its rotation."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .implementation import ATTENTION, ROPE, STORE, Bound, Implementation, Missing, Unsupported
from .memory import Memory
from .work import AttentionWork, RopeWork, StoreWork

_WORKSPACE = 256 << 20


class FlashInferPeer(Implementation):
    """The package, as it is installed, and a workspace for its wrappers."""

    def __init__(self) -> None:
        if importlib.util.find_spec("flashinfer") is None:
            raise Missing("flashinfer is not installed")
        try:
            self._module = importlib.import_module("flashinfer")
        except Exception as error:  # whatever another project does while it loads
            raise Missing(f"flashinfer does not import: {type(error).__name__}: {error}") from error
        self._memory: Tensor | None = None

    def version(self) -> str:
        """The package's."""
        return str(self._module.__version__)

    def workspace(self, device: torch.device) -> Tensor:
        """Made by the first call that needs it."""
        if self._memory is None:
            self._memory = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)
        return self._memory


class FlashInfer(FlashInferPeer):
    """The decode wrapper, on tensor cores for grouped heads; the prefill wrapper for the rest; their sink variant."""

    name = "flashinfer"
    kinds = ATTENTION | STORE | ROPE
    scope = "it has no kernel that copies pages or moves tokens"

    def attention(self, work: AttentionWork, memory: Memory) -> Bound:
        """Plan, and bind ``run``."""
        s = work.shape
        if s.head_dim % 64 or s.value_dim % 64:
            raise Unsupported("its kernels take head dims that are multiples of 64")
        if s.head_dim != s.value_dim and memory.key.stride() != memory.value.stride():
            raise Unsupported("its kernels take K and V with equal strides")
        pages = [-(-n // memory.page_size) for n in s.seq_lens]
        host = torch.tensor([[sum(pages[:b]) for b in range(len(pages) + 1)]], dtype=torch.int32)[0]
        ids = torch.cat([work.page_table[b, :count] for b, count in enumerate(pages)])
        last = torch.tensor([(n - 1) % memory.page_size + 1 for n in s.seq_lens], dtype=torch.int32)
        indices = [x.to(work.query.device) for x in (host, ids, last)]
        options: dict[str, Any] = dict(
            q_data_type=s.dtype, kv_data_type=s.kv_dtype, window_left=s.window - 1 if s.window else -1
        )
        run = (self._bind_decode if max(s.query_lens) == 1 and not s.sinks else self._bind_prefill)(
            work, memory, indices, options
        )
        out = work.query.new_empty(s.tokens, s.q_heads, s.value_dim)
        return Bound(lambda: run(out), out)

    def _bind_decode(
        self, work: AttentionWork, memory: Memory, indices: list[Tensor], options: dict[str, Any]
    ) -> Callable[[Tensor], Tensor]:
        s = work.shape
        wrapper = self._module.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace(work.query.device), "NHD", use_tensor_cores=s.q_heads > s.kv_heads
        )
        wrapper.plan(*indices, s.q_heads, s.kv_heads, s.head_dim, memory.page_size, **options)
        scales = dict(k_scale=s.scales[0], v_scale=s.scales[1]) if s.kv_dtype != s.dtype else {}
        return lambda out: wrapper.run(work.query, (memory.key, memory.value), out=out, **scales)

    def _bind_prefill(
        self, work: AttentionWork, memory: Memory, indices: list[Tensor], options: dict[str, Any]
    ) -> Callable[[Tensor], Tensor]:
        s, extra = work.shape, tuple[Any, ...]()
        if s.kv_dtype != s.dtype:
            raise Unsupported("an fp8 cache with a query of another dtype is measured with its decode wrapper only")
        if work.sinks is None:
            wrapper = self._module.BatchPrefillWithPagedKVCacheWrapper(self.workspace(work.query.device), "NHD")
        else:
            wrapper = self._module.BatchAttentionWithAttentionSinkWrapper(
                self.workspace(work.query.device), "NHD", head_dim_qk=s.head_dim, head_dim_vo=s.value_dim, **options
            )
            extra = (work.sinks.float(), s.head_dim**-0.5)
        wrapper.plan(
            work.query_start, *indices, s.q_heads, s.kv_heads, s.head_dim, memory.page_size,
            head_dim_vo=s.value_dim, causal=True, **options,
        )  # fmt: skip
        return lambda out: wrapper.run(work.query, (memory.key, memory.value), *extra, out=out)

    def store(self, work: StoreWork, memory: Memory) -> Bound:
        """``append_paged_kv_cache``."""
        return Bound(self._append(work, memory, work.key))

    def rope_store(self, work: RopeWork, memory: Memory) -> Bound:
        """``apply_rope_with_cos_sin_cache_inplace``, then the same."""
        query, key, restore = work.copies()
        tokens, _, dim = query.shape
        rotated = (query.view(tokens, -1), key.view(tokens, -1), dim, work.cos_sin)
        append = self._append(work.store, memory, key)

        def run() -> Tensor:
            self._module.apply_rope_with_cos_sin_cache_inplace(work.positions, *rotated)
            append()
            return query

        return Bound(run, prepare=restore)

    def _append(self, work: StoreWork, memory: Memory, key: Tensor) -> Callable[[], None]:
        """All pages as those of one sequence, in order: a row's position in it is its slot."""
        device = key.device
        pages = memory.key.shape[0]
        where = (torch.zeros_like(work.slots, dtype=torch.int32), work.slots.int())
        cache = (memory.key, memory.value)
        ids = torch.arange(pages, dtype=torch.int32, device=device)
        indptr = torch.tensor([0, pages], dtype=torch.int32, device=device)
        last = torch.tensor([memory.page_size], dtype=torch.int32, device=device)
        return lambda: self._module.append_paged_kv_cache(key, work.value, *where, cache, ids, indptr, last)
