"""Plain torch: what a program without any of these libraries would write."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .implementation import ATTENTION, LATENT, PAGES, REPACK, ROPE, STORE, TRANSFER, Bound, Implementation
from .memory import PAGE_MAJOR, Memory
from .transfer_torch import one_by_one, repack
from .transfer_work import RepackWork, TransferWork
from .work import AttentionWork, PagesWork, RopeWork, StoreWork


class Torch(Implementation):
    """index_put and advanced indexing; on the CPU also SDPA over gathered K and V."""

    name = "torch"
    compiles = False

    def __init__(self, device: torch.device) -> None:
        self.kinds = STORE | ROPE | PAGES | TRANSFER | REPACK
        if device.type == "cuda":
            self.scope = "SDPA over gathered K and V is measured on the CPU only"
        else:
            self.kinds |= ATTENTION | LATENT

    def attention(self, work: AttentionWork, memory: Memory) -> Bound:
        """Gather each sequence's rows, then SDPA with a mask."""
        shape, starts = work.shape, work.query_start.tolist()
        if shape.sinks:
            return Bound(lambda: _with_sinks(work, memory, starts))
        return Bound(lambda: _by_sequence(work, memory, starts, _sdpa))

    def latent(self, work: AttentionWork, memory: Memory) -> Bound:
        """The same: rows are keys, and their first elements values."""
        return self.attention(work, memory)

    def store(self, work: StoreWork, memory: Memory) -> Bound:
        """``cache[pages, tokens] = rows``."""
        at = (work.slots // memory.page_size, work.slots % memory.page_size)

        def run() -> None:
            memory.key[at] = work.key
            memory.value[at] = work.value

        return Bound(run)

    def rope_store(self, work: RopeWork, memory: Memory) -> Bound:
        """The rotation in float32, as models spell it, and the same."""
        store = work.store
        at = (store.slots // memory.page_size, store.slots % memory.page_size)

        def rotated(rows: Tensor) -> Tensor:
            cos, sin = work.cos_sin[work.positions][:, None].chunk(2, -1)
            first, second = rows.float().chunk(2, -1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(rows.dtype)

        def run() -> Tensor:
            memory.key[at] = rotated(store.key)
            memory.value[at] = store.value
            return rotated(work.query)

        return Bound(run)

    def pages(self, work: PagesWork, layout: str) -> Bound:
        """Advanced indexing of whole pages, or of tokens."""
        shape, src, dst = work.shape, work.src, work.dst
        if shape.verb == "move":
            return Bound(_move(work, layout))
        if layout == PAGE_MAJOR:
            # In words of 8 bytes where there are such: indexing single bytes is slow.
            word = torch.int64 if work.pool.layout.page_bytes % 8 == 0 else torch.uint8
            pages, rows = work.pool.pages.view(word), work.rows.view(word)
            verbs: dict[str, Callable[[], Tensor | None]] = {
                "copy": lambda: _assign(pages, (dst,), pages[src]),
                "gather": lambda: torch.index_select(pages, 0, src).view(torch.uint8),
                "scatter": lambda: _assign(pages, (dst,), rows),
            }
            return Bound(verbs[shape.verb])
        cache = work.layer_major.view(torch.int64)
        everywhere = slice(None)
        incoming = work.rows.view(torch.int64).view(shape.count, shape.layers, 2, -1).permute(1, 2, 0, 3)
        verbs = {
            "copy": lambda: _assign(cache, (everywhere, everywhere, dst), cache[:, :, src]),
            "gather": lambda: cache[:, :, src].view(torch.uint8),
            "scatter": lambda: _assign(cache, (everywhere, everywhere, dst), incoming),
        }
        return Bound(verbs[shape.verb])

    def transfer(self, work: TransferWork, layout: str) -> Bound:
        """One ``copy_`` for each run of bytes."""
        return one_by_one(work, layout)

    def repack(self, work: RepackWork, layout: str) -> Bound:
        """Views of both layouts, a gather and an assignment."""
        return repack(work, layout)


def _assign(target: Tensor, index: tuple[Tensor | slice, ...], rows: Tensor) -> None:
    target[index] = rows


def _move(work: PagesWork, layout: str) -> Callable[[], None]:
    s = work.shape
    words = s.row_bytes // 8
    if layout == PAGE_MAJOR:
        cache = work.pool.pages.view(torch.int64).view(s.pages, 2 * s.layers, s.page_size, words)
        src, dst = ((i // s.page_size, slice(None), i % s.page_size) for i in (work.src, work.dst))
        return lambda: _assign(cache, dst, cache[src])
    slots = work.layer_major.view(torch.int64).view(2 * s.layers, s.pages * s.page_size, words)
    return lambda: _assign(slots, (slice(None), work.dst), slots[:, work.src])


def _by_sequence(
    work: AttentionWork, memory: Memory, starts: list[int], attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    shape, out = work.shape, []
    for b, (n, s) in enumerate(zip(shape.query_lens, shape.seq_lens, strict=True)):
        pages = work.page_table[b, : -(-s // memory.page_size)].long()
        key, value = memory.key[pages].flatten(0, 1)[:s], memory.value[pages].flatten(0, 1)[:s]
        query = work.query[starts[b] : starts[b] + n]
        key, value = (x.to(query.dtype) * scale for x, scale in zip((key, value), shape.scales, strict=True))
        position, j = torch.arange(s - n, s)[:, None], torch.arange(s)
        seen = (j <= position) & (j > position - (shape.window or s + 1))
        out.append(attend(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), seen).transpose(0, 1))
    return torch.cat(out)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    return scaled_dot_product_attention(query[None], key[None], value[None], seen[None, None], enable_gqa=True)[0]


def _with_sinks(work: AttentionWork, memory: Memory, starts: list[int]) -> Tensor:
    """SDPA knows no sinks: one more key with the sink as its logit, and nothing for its value."""
    sinks = work.sinks
    assert sinks is not None

    def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        heads, n, dim = query.shape
        group = heads // key.shape[0]
        logit = (sinks / dim**-0.5)[:, None, None].expand(heads, n, 1)
        query = torch.cat((query, logit), -1)
        key = torch.cat((key.repeat_interleave(group, 0), torch.zeros(heads, key.shape[1], 1)), -1)
        extra = torch.zeros(heads, 1, dim + 1)
        extra[..., -1] = 1.0
        value = torch.cat((value.repeat_interleave(group, 0), torch.zeros(heads, 1, value.shape[2])), 1)
        mask = torch.cat((seen, torch.ones(n, 1, dtype=torch.bool)), 1)
        return scaled_dot_product_attention(
            query[None], torch.cat((key, extra), 1)[None], value[None], mask[None, None], scale=dim**-0.5
        )[0]

    return _by_sequence(work, memory, starts, attend)
