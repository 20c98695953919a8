"""SGLang's Triton kernels: decode and extend attention, store_cache_4d, and the all-layer move of tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from .clock import fastest
from .implementation import ATTENTION, ROPE, STORE, Bound, Implementation, Unsupported
from .loading import import_module, version
from .memory import LAYER_MAJOR, Memory
from .work import AttentionWork, PagesWork, RopeWork, StoreWork

_OPS = "sglang.kernels.ops"
_MAX_SPLITS = 16
_FP8_TOLERANCE = 0.2  # with an fp8 cache it rounds queries and probabilities to fp8 too


class SGLang(Implementation):
    """Layer-major memory as ``[slots, heads, dim]`` at page size 1, page-major as its 4-D views."""

    name = "sglang"
    kinds = ATTENTION | STORE | ROPE | {"move"}
    scope = "none of its Triton kernels copies whole pages"
    _launch = 256
    """Tokens that its memory pool moves in one launch, for rows of less than 8 KiB."""

    def __init__(self, folder: Path | None) -> None:
        decode = import_module(folder, f"{_OPS}.attention.decode_attention")
        extend = import_module(folder, f"{_OPS}.attention.extend_attention")
        cache = import_module(folder, f"{_OPS}.kvcache.cache_move")
        self._decode, self._extend = decode.decode_attention_fwd, extend.extend_attention_fwd
        self._store, self._move = cache.store_cache_4d, cache.copy_all_layer_kv_cache_func
        self._folder = folder
        self._version = version(folder, "sglang", decode, extend, cache)

    def version(self) -> str:
        """Release or digest."""
        return self._version

    def attention(self, work: AttentionWork, memory: Memory) -> Bound:
        """Its decode kernel with the best of four numbers of splits, or its extend kernel."""
        s = work.shape
        key, value, page_size = memory.key, memory.value, memory.page_size
        if memory.pool is None:
            key, value, page_size = key.flatten(0, 1), value.flatten(0, 1), 1
        out = work.query.new_empty(s.tokens, s.q_heads, s.value_dim)
        bind = self._bind_decode if max(s.query_lens) == 1 else self._bind_extend
        run, note = bind(work, key, value, out, page_size)
        return Bound(run, out, None if s.kv_dtype == s.dtype else _FP8_TOLERANCE, note=note)

    def _bind_decode(
        self, work: AttentionWork, key: Tensor, value: Tensor, out: Tensor, page_size: int
    ) -> tuple[Callable[[], Tensor], str]:
        s, device = work.shape, out.device
        first = [max(n - s.window, 0) if s.window else 0 for n in s.seq_lens]
        slots = work.slots(first, s.seq_lens)
        indptr = _cumulative([n - f for f, n in zip(first, s.seq_lens, strict=True)], device)
        parts = torch.empty(s.tokens, s.q_heads, _MAX_SPLITS, s.value_dim, device=device)
        lse = torch.empty(s.tokens, s.q_heads, _MAX_SPLITS, device=device)

        tensors, numbers = (work.query, key, value, out, indptr, slots, parts, lse), (s.head_dim**-0.5, *s.scales)

        def run(splits: Tensor) -> Tensor:
            self._decode(*tensors, splits, _MAX_SPLITS, *numbers, sinks=work.sinks, page_size=page_size)
            return out

        splits = {n: torch.full((s.tokens,), n, dtype=torch.int32, device=device) for n in (1, 4, 8, _MAX_SPLITS)}
        ways = {f"{n} splits of the KV axis": partial(run, number) for n, number in splits.items()}
        return fastest(ways, device)

    def _bind_extend(
        self, work: AttentionWork, key: Tensor, value: Tensor, out: Tensor, page_size: int
    ) -> tuple[Callable[[], Tensor], None]:
        s, device = work.shape, out.device
        if s.kv_dtype != s.dtype:
            raise Unsupported("its extend kernel takes the new rows in the query's dtype, and the case has them stored")
        prefix = [n - q for q, n in zip(s.query_lens, s.seq_lens, strict=True)]
        slots = work.slots([0] * len(prefix), prefix)
        if not any(prefix):
            slots = slots.new_zeros(1)  # nothing reads it, but the kernel wants an address
        indptr = _cumulative(prefix, device)
        new_key, new_value = work.new_rows

        def run() -> Tensor:
            self._extend(
                work.query, new_key, new_value, out, key, value, work.query_start, indptr, slots, None, True, None,
                max(s.query_lens), *s.scales, sm_scale=s.head_dim**-0.5,
                sliding_window_size=s.window - 1 if s.window else -1, sinks=work.sinks, page_size=page_size,
            )  # fmt: skip
            return out

        return run, None

    def store(self, work: StoreWork, memory: Memory) -> Bound:
        """``store_cache_4d``."""
        args = (memory.key, memory.value, work.key, work.value, work.slots, memory.page_size)
        return Bound(lambda: self._store(*args))

    def rope_store(self, work: RopeWork, memory: Memory) -> Bound:
        """Its Triton rotation, in place, all three of whose axes get the same positions, then ``store_cache_4d``."""
        rotate = import_module(self._folder, f"{_OPS}.attention.rotary_triton").triton_mrope_fused
        store, (query, key, restore) = work.store, work.copies()
        tokens, _, dim = query.shape
        positions = work.positions.expand(3, tokens).contiguous()
        flat = (query.view(tokens, -1), key.view(tokens, -1))
        options = ([dim // 2, 0, 0], dim, dim, False, False, True, positions)

        def run() -> Tensor:
            rotate(*flat, work.cos_sin, positions, *options)
            self._store(memory.key, memory.value, key, store.value, store.slots, memory.page_size)
            return query

        return Bound(run, prepare=restore)

    def pages(self, work: PagesWork, layout: str) -> Bound:
        """``copy_all_layer_kv_cache_func`` over one tensor a layer, K and V, with its pool's tiling."""
        s = work.shape
        if layout != LAYER_MAJOR:
            raise Unsupported("its move kernel takes one contiguous tensor for each layer's K and V")
        tile = 512 if s.row_bytes >= 8192 else 256 if s.row_bytes >= 4096 else 128
        config = dict(bytes_per_tile=tile, byte_tiles=-(-s.row_bytes // tile), num_warps=8 if tile == 512 else 4)
        planes = work.layer_major.flatten(0, 1)
        pointers = torch.tensor([p.data_ptr() for p in planes], dtype=torch.uint64, device=planes.device)
        strides = torch.full((len(planes),), s.row_bytes, dtype=torch.int64, device=planes.device)
        most = min(self._launch, s.count)
        chunks = [(work.dst[i : i + most], work.src[i : i + most]) for i in range(0, s.count, most)]

        def run() -> None:
            for dst, src in chunks:
                upper = 1 << (len(src) - 1).bit_length()
                self._move(pointers, strides, dst, src, len(src), upper, config)

        return Bound(run)


class SGLangOneLaunch(SGLang):
    """The same move of tokens, all of them in one launch."""

    name = "sglang_one_launch"
    kinds = frozenset({"move"})
    scope = "it is a second way to move tokens, and nothing else"
    _launch = 1 << 30


def _cumulative(lens: list[int], device: torch.device) -> Tensor:
    return torch.tensor([sum(lens[:b]) for b in range(len(lens) + 1)], dtype=torch.int32, device=device)
