"""What repack_pages must do, from the formats' byte formulas, written out here independently of the code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import pm_ops

VLLM = ("BLNHC", "BLHNC", "BHLNC")
HICACHE = {"page_first_direct": "LNH", "page_first": "NLH", "page_head": "HNL"}
FORMATS = ("page_major", "token_major", *VLLM, *HICACHE)
ROTATED = [(a, FORMATS[i - 3]) for i, a in enumerate(FORMATS)]
"""Pairs in which each format is the source once, and the target once."""
BY_SIZE = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32}


@dataclass(frozen=True)
class Layer:
    """Heads, dims of K and V, bytes of an element, and whether each row has a scale beside it."""

    heads: int
    key: int
    value: int
    item: int
    scaled: bool = False

    def row(self, kind: str) -> int:
        return {"key": self.key * self.item, "value": self.value * self.item}.get(kind, 4)

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("key", "value", "key_scale", "value_scale") if self.scaled else ("key", "value")


Model = tuple[Layer, ...]
UNIFORM: Model = (Layer(4, 8, 8, 2),) * 3
UNEQUAL: Model = (Layer(4, 8, 3, 2),) * 3  # rows of 16 and of 6 bytes
MIXED: Model = (Layer(2, 8, 8, 4), Layer(1, 24, 6, 2), Layer(4, 16, 8, 1))
SCALED: Model = (Layer(2, 16, 12, 1, True), Layer(4, 16, 16, 1, True))
HALF_SCALED: Model = (Layer(2, 16, 16, 1, True), Layer(4, 8, 8, 2))


def heads_of(model: Model, count: int) -> Model:
    return tuple(Layer(count, la.key, la.value, la.item, la.scaled) for la in model)


def layout_of(name: str, model: Model, page_size: int) -> pm_ops.PageLayout:
    if name not in ("page_major", "token_major"):
        first = model[0]
        dtype = BY_SIZE[first.item]
        if name in HICACHE:
            return pm_ops.hicache(len(model), first.heads, first.key, page_size, dtype, name)
        return pm_ops.vllm(len(model), first.heads, first.key, page_size, dtype, name, value_dim=first.value)
    make = getattr(pm_ops, name)
    args = ([la.heads for la in model], [la.key for la in model], page_size, [BY_SIZE[la.item] for la in model])
    return make(len(model), *args, value_dim=[la.value for la in model], scales=any(la.scaled for la in model))


def row_start(name: str, model: Model, page_size: int, layer: int, kind: str, token: Any, head: int) -> Any:
    """Byte of the page at which a row begins, of one token or of each of a tensor of tokens."""
    la = model[layer]
    data = [lb.heads * (lb.key + lb.value) * lb.item for lb in model]  # of a token, a layer
    if name == "page_major":
        if kind in ("key", "value"):
            start = page_size * sum(data[:layer]) + (page_size * la.heads * la.row("key") if kind == "value" else 0)
            return start + (token * la.heads + head) * la.row(kind)
        at = page_size * sum(data) + -(page_size * sum(data)) % 16
        for i, lb in enumerate(model):
            for other in lb.kinds[2:]:
                if (i, other) == (layer, kind):
                    return at + (head * page_size + token) * 4
                at += page_size * lb.heads * 4 + -(page_size * lb.heads * 4) % 16
        raise AssertionError
    if name == "token_major":
        used = sum(data)
        scales = used + -used % 4
        places = {}
        for i, lb in enumerate(model):
            for other in lb.kinds[2:]:
                places[i, other] = scales
                scales += lb.heads * 4
        entry = scales if places else used
        entry += -entry % 32
        if kind in ("key", "value"):
            at = sum(data[:layer]) + (la.heads * la.row("key") if kind == "value" else 0)
        else:
            at = places[layer, kind]
        return token * entry + at + head * la.row(kind)
    sizes, index = {"L": len(model), "H": la.heads, "N": page_size}, {"L": layer, "H": head, "N": token}
    if name in HICACHE:
        place = int(kind == "value")
        for axis in HICACHE[name]:
            place = place * sizes[axis] + index[axis]
        return place * la.row("key")
    place = 0
    for axis in name[1:4]:
        place = place * sizes[axis] + index[axis]
    return place * (la.row("key") + la.row("value")) + (la.row("key") if kind == "value" else 0)


@dataclass
class Side:
    """A pool of random bytes, in a larger buffer with gaps between the pages."""

    name: str
    model: Model
    page_size: int
    pages: list[int]
    pool: pm_ops.PagePool

    def starts(self, layer: int, kind: str, head: int, tokens: int) -> Tensor:
        """Bytes of the buffer at which a row of each of the sequence's tokens begins; -1 in a page that is skipped."""
        token = torch.arange(tokens)
        page = torch.tensor(self.pages)[token // self.page_size]
        start = row_start(self.name, self.model, self.page_size, layer, kind, token % self.page_size, head)
        return torch.where(page < 0, -1, self.pool.base + page * self.pool.page_stride + start)


def side(
    name: str, model: Model, page_size: int, tokens: int, seed: int, device: str = "cpu", base: int = 32, gap: int = 16
) -> Side:
    """A pool with pages for some tokens, in an order of their own, and two pages to spare."""
    layout = layout_of(name, model, page_size)
    count = -(-tokens // page_size)
    generator = torch.Generator().manual_seed(seed)
    stride = layout.page_bytes + gap
    buffer = torch.randint(0, 256, (base + (count + 2) * stride + 7,), dtype=torch.uint8, generator=generator)
    pages = torch.randperm(count + 2, generator=generator)[:count].tolist()
    pool = pm_ops.PagePool(layout, count + 2, buffer=buffer.to(device), base=base, page_stride=stride)
    return Side(name, model, page_size, pages, pool)


def rows(
    model: Model, layers: dict[int, int], heads: tuple[int, int, int] | None
) -> Iterator[tuple[int, int, str, int, int]]:
    """``(source layer, target layer, kind, source head, target head)`` of every row of a token."""
    for a, b in layers.items():
        for kind in model[a].kinds:
            first, at, count = heads or (0, 0, model[a].heads)
            for h in range(count):
                yield a, b, kind, first + h, at + h


def expected(
    source: Side,
    target: Side,
    tokens: int,
    layers: dict[int, int] | None = None,
    heads: tuple[int, int, int] | None = None,
) -> Tensor:
    """The target's whole buffer after the move; what is not of the sequence stays."""
    before, after = source.pool.buffer.cpu(), target.pool.buffer.cpu().clone()
    layers = layers or {i: i for i in range(len(source.model))}
    for a, b, kind, h, j in rows(source.model, layers, heads):
        byte = torch.arange(source.model[a].row(kind))
        at, to = source.starts(a, kind, h, tokens), target.starts(b, kind, j, tokens)
        moved = (at >= 0) & (to >= 0)
        after[to[moved, None] + byte] = before[at[moved, None] + byte]
    return after


def models_of(*names: str) -> Sequence[Model]:
    """The models that these formats can hold: vLLM's layers are alike and have no scales; HiCache's K and V too."""
    if all(name in ("page_major", "token_major") for name in names):
        return UNIFORM, UNEQUAL, MIXED, SCALED, HALF_SCALED
    return (UNIFORM,) if any(name in HICACHE for name in names) else (UNIFORM, UNEQUAL)


NUMBERS = {
    torch.float16: (5, 10), torch.bfloat16: (8, 7), torch.float32: (8, 23), torch.float8_e4m3fn: (4, 3),
    torch.float8_e5m2: (5, 2),
}  # fmt: skip
"""Bits of the exponent and of the mantissa."""


def numbers(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """What the bytes of contiguous elements mean, in fp64, by the formats' definition; the least byte comes first."""
    exponent, mantissa = NUMBERS[dtype]
    item = (1 + exponent + mantissa) // 8
    bits = sum(rows.reshape(-1, item)[:, i].long() << 8 * i for i in range(item))
    sign, e, m = bits >> exponent + mantissa, bits >> mantissa & (1 << exponent) - 1, bits & (1 << mantissa) - 1
    bias, most = (1 << exponent - 1) - 1, (1 << exponent) - 1
    size = torch.where(e > 0, 2.0**mantissa + m, m).double() * 2.0 ** (e.clamp(min=1) - bias - mantissa).double()
    if dtype == torch.float8_e4m3fn:  # no infinity, and one NaN
        size[(e == most) & (m == 7)] = torch.nan
    else:
        size[(e == most) & (m == 0)] = torch.inf
        size[(e == most) & (m > 0)] = torch.nan
    return torch.where(sign > 0, -size, size)


def same_numbers(ours: Tensor, theirs: Tensor) -> bool:
    """Equal, zeros' signs included, with a NaN for each NaN."""
    known = ~ours.isnan()
    signs = torch.equal(ours.signbit()[known], theirs.signbit()[known])
    return torch.equal(theirs.isnan(), ~known) and torch.equal(ours[known], theirs[known]) and signs


EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
WIDENINGS = [
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float32),
    *((eight, to) for eight in EIGHT_BITS for to in (torch.float16, torch.bfloat16, torch.float32)),
]


def wider_pools(
    ours: torch.dtype, theirs: torch.dtype, dims: tuple[int, int], sizes: tuple[int, int], device: str = "cpu"
) -> tuple[pm_ops.PagePool, pm_ops.PagePool, list[int], list[int], int]:
    """Pools of two layers, of which the first gets wider and the other has that dtype already, and where tokens lie.

    The source's first layer holds every element that there is, all other bytes are random.
    """
    heads = 2
    layouts = [
        pm_ops.page_major(2, heads, dims[0], sizes[0], [ours, theirs], value_dim=dims[1]),
        pm_ops.token_major(2, heads, dims[0], sizes[1], theirs, value_dim=dims[1]),
    ]
    tokens = -(-(256**ours.itemsize) // (heads * max(dims))) + 1
    pools, pages = [], []
    for seed, layout in enumerate(layouts):
        count = -(-tokens // layout.page_size)
        generator = torch.Generator().manual_seed(seed)
        stride = layout.page_bytes + 32
        buffer = torch.randint(0, 256, (64 + (count + 1) * stride,), dtype=torch.uint8, generator=generator)
        pools.append(pm_ops.PagePool(layout, count + 1, buffer=buffer.to(device), base=64, page_stride=stride))
        pages.append(torch.randperm(count + 1, generator=generator)[:count].tolist())
    for kind, dim in zip(("key", "value"), dims, strict=True):
        elements = (torch.arange(pools[0].num_slots * heads * dim) % 256**ours.itemsize).view(-1, sizes[0], heads, dim)
        bits = elements.to({1: torch.uint8, 2: torch.int16}[ours.itemsize]).view(ours).to(device)
        pools[0].view(0, kind)[pages[0]] = bits[: len(pages[0])]
    return pools[0], pools[1], pages[0], pages[1], tokens


def check_wider(pools: Sequence[pm_ops.PagePool], lists: Sequence[list[int]], tokens: int, before: Tensor) -> None:
    """Every element of the sequence is in the target with its number, and no other byte has changed."""
    token = torch.arange(tokens)
    sides = [(pool, torch.tensor(ids)[token // pool.page_size], token % pool.page_size)
             for pool, ids in zip(pools, lists, strict=True)]  # fmt: skip
    after = before.clone()
    written = pm_ops.PagePool(
        pools[1].layout, pools[1].num_pages, buffer=after, base=64, page_stride=pools[1].page_stride
    )
    for layer, kind in ((0, "key"), (0, "value"), (1, "key"), (1, "value")):
        a, b = (pool.view(layer, kind).cpu()[page, slot] for pool, page, slot in sides)
        if layer == 0:
            assert same_numbers(*(numbers(x.view(torch.uint8), x.dtype) for x in (a, b)))
        else:
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        page, slot = sides[1][1:]
        written.view(layer, kind)[page, slot] = b
    assert torch.equal(pools[1].buffer.cpu(), after)
