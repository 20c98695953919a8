"""What repack_pages must do, from the formats' byte formulas, written out here independently of the code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import pm_ops

FORMATS = ("page_major", "token_major", "BLNHC", "BLHNC", "BHLNC")
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
        return pm_ops.vllm(len(model), first.heads, first.key, page_size, dtype, name, value_dim=first.value)
    make = getattr(pm_ops, name)
    args = ([la.heads for la in model], [la.key for la in model], page_size, [BY_SIZE[la.item] for la in model])
    return make(len(model), *args, value_dim=[la.value for la in model], scales=any(la.scaled for la in model))


def row_start(name: str, model: Model, page_size: int, layer: int, kind: str, token: int, head: int) -> int:
    """Byte of the page at which a row begins."""
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

    def byte(self, layer: int, kind: str, token: int, head: int) -> int | None:
        """Byte of the buffer at which a row of the sequence's token begins; None in a page that is skipped."""
        page = self.pages[token // self.page_size]
        if page < 0:
            return None
        start = row_start(self.name, self.model, self.page_size, layer, kind, token % self.page_size, head)
        return self.pool.base + page * self.pool.page_stride + start


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
        nbytes = source.model[a].row(kind)
        for t in range(tokens):
            at, to = source.byte(a, kind, t, h), target.byte(b, kind, t, j)
            if at is not None and to is not None:
                after[to : to + nbytes] = before[at : at + nbytes]
    return after


def models_of(*names: str) -> Sequence[Model]:
    """The models that these formats can hold: vLLM's layers are alike and have no scales."""
    plain = all(name in ("page_major", "token_major") for name in names)
    return (UNIFORM, UNEQUAL, MIXED, SCALED, HALF_SCALED) if plain else (UNIFORM, UNEQUAL)
