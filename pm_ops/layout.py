"""Where every byte of a page lives: pure arithmetic, no tensors.

A *page* holds ``page_size`` token slots of every layer in one contiguous run of ``page_bytes`` bytes. A *plane* is one
layer's one kind of data inside that page. Element ``(token, head, d)`` of a plane lies at byte

    offset + token * token_stride + head * head_stride + d * itemsize

of its page (a state plane has no token axis). Every operator, view and transfer derives from this one formula.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch


class SlotRun(NamedTuple):
    """``nbytes`` contiguous bytes of one token slot: token ``t``'s run starts at ``offset + t * token_stride``."""

    offset: int
    token_stride: int
    nbytes: int


class PageRun(NamedTuple):
    """``nbytes`` contiguous bytes of a page, from ``offset`` on."""

    offset: int
    nbytes: int


@dataclass(frozen=True)
class Plane:
    """One layer's one kind of data in a page. Offsets and strides are in bytes, relative to the page's first byte.

    Args:
        layer: index of the layer.
        kind: what the plane holds: ``"key"``, ``"value"``, ``"latent"``, ``"key_scale"``, ``"value_scale"``,
            ``"conv"``, ``"ssm"``, or any other name.
        offset: byte of token 0, head 0.
        token_stride: bytes from one token to the next; ``None`` for a state plane, which has no token axis.
        head_stride: bytes from one entry of the first axis of ``shape`` to the next; the other axes are contiguous.
        shape: ``(heads, dim)``; a state plane may have any rank.
        dtype: element type.
    """

    layer: int
    kind: str
    offset: int
    token_stride: int | None
    head_stride: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str):
            raise ValueError(f"kind={self.kind!r} must be a string, such as 'key'")
        object.__setattr__(self, "shape", tuple(self.shape))

    @property
    def row_bytes(self) -> int:
        """Bytes of one contiguous row: everything behind the first axis of ``shape``."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of data of one token (of one page, for a state plane), without padding."""
        return self.shape[0] * self.row_bytes

    @property
    def slot_runs(self) -> tuple[SlotRun, ...]:
        """The plane's rows of one token, one run a head. A state plane has token stride 0 here."""
        stride = self.token_stride or 0
        return tuple(SlotRun(self.offset + h * self.head_stride, stride, self.row_bytes) for h in range(self.shape[0]))


@dataclass(frozen=True)
class PageLayout:
    """The geometry of one kind of page. Hashable, comparable, printable; round-trips through JSON.

    Args:
        page_size: token slots of a page.
        page_bytes: bytes of a page, padding included.
        planes: every plane, in any order; one per ``(layer, kind)``.
        name: the format's name, for people; it takes no part in comparisons.

    Raises:
        ValueError: planes overlap, leave the page, repeat, or are not aligned to their dtype.
    """

    page_size: int
    page_bytes: int
    planes: tuple[Plane, ...]
    name: str = "custom"
    _by_key: dict[tuple[int, str], Plane] = field(init=False, repr=False)
    _identity: tuple[int, int, frozenset[Plane]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "planes", tuple(self.planes))
        _validate(self)
        # no cached_property: its lock, up to Python 3.11, cannot be traced where a first call is a compiled one
        object.__setattr__(self, "_by_key", {(p.layer, p.kind): p for p in self.planes})
        object.__setattr__(self, "_identity", (self.page_size, self.page_bytes, frozenset(self.planes)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PageLayout) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def plane(self, layer: int, kind: str) -> Plane:
        """The plane of a layer. Raises ValueError, naming the planes the layer has."""
        found = self._by_key.get((layer, kind))
        if found is None:
            kinds = self.kinds(layer)
            have = f"layer {layer} has {', '.join(kinds)}" if kinds else f"layers are {_spans(self.layers)}"
            raise ValueError(f"no plane {kind!r} of layer {layer} in this layout: {have}")
        return found

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Indices of the layers that have a plane, ascending."""
        return tuple(sorted({p.layer for p in self.planes}))

    def kinds(self, layer: int) -> tuple[str, ...]:
        """Kinds of planes that a layer has, in page order."""
        return tuple(p.kind for p in sorted(self.planes, key=lambda p: p.offset) if p.layer == layer)

    @cached_property
    def scaled_kinds(self) -> frozenset[str]:
        """Kinds that have a scale plane beside them in some layer: ``"key"`` where there is a ``"key_scale"``."""
        return frozenset(p.kind.removesuffix("_scale") for p in self.planes if p.kind.endswith("_scale"))

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of data of one token over all layers, without padding and without state planes."""
        return sum(p.nbytes for p in self.planes if p.token_stride is not None)

    @cached_property
    def copies_per_page_layer_major(self) -> int:
        """Copies that moving one page takes when every plane is a tensor of its own (layer-major): one a plane."""
        return len(self.planes)

    @cached_property
    def slot_runs(self) -> tuple[SlotRun, ...]:
        """The byte runs of one token slot over all token planes, adjacent runs merged, ascending by offset."""
        return tuple(_merged(run for p in self.planes if p.token_stride is not None for run in p.slot_runs))

    @cached_property
    def page_runs(self) -> tuple[PageRun, ...]:
        """The byte runs of one page that hold data, adjacent runs merged, ascending; what is between is padding."""
        return self.layer_runs(self.layers)

    def layer_runs(self, layers: Iterable[int]) -> tuple[PageRun, ...]:
        """The byte runs of one page that hold the data of these layers, adjacent runs merged, ascending."""
        wanted = set(layers)
        planes = [p for p in self.planes if p.layer in wanted]
        runs = list(_merged(run for p in planes if p.token_stride is None for run in p.slot_runs))
        for run in _merged(run for p in planes if p.token_stride is not None for run in p.slot_runs):
            if run.nbytes == run.token_stride:  # tokens back to back
                runs.append(SlotRun(run.offset, 0, self.page_size * run.nbytes))
            else:
                runs += [SlotRun(run.offset + t * run.token_stride, 0, run.nbytes) for t in range(self.page_size)]
        return tuple(PageRun(r.offset, r.nbytes) for r in _merged(runs))

    def part(self, *kinds: str, layers: Iterable[int] | None = None) -> PageLayout:
        """The planes of these kinds, of these layers (default: all), as a layout of their own.

        Its page is what lies between their first byte and their last: for caches that keep K and V, or layers, in
        tensors of their own, such as ``page_major(1, …).part("key")``, and for :class:`RepackPlan`'s ``kinds``.
        """
        wanted = set(self.layers if layers is None else layers)
        planes = [p for p in self.planes if p.kind in kinds and p.layer in wanted]
        if not planes:
            have = ", ".join(sorted({p.kind for p in self.planes}))
            raise ValueError(
                f"no plane of {kinds} in layers {sorted(wanted)}; there are {have} in {_spans(self.layers)}"
            )
        whole = PageLayout(self.page_size, self.page_bytes, tuple(planes))
        first, last = whole.page_runs[0], whole.page_runs[-1]
        moved = tuple(replace(p, offset=p.offset - first.offset) for p in planes)
        return PageLayout(
            self.page_size, last.offset + last.nbytes - first.offset, moved, f"{self.name} {'+'.join(kinds)}"
        )

    def numbered(self, layers: Sequence[int]) -> PageLayout:
        """The same pages with these numbers for their layers, in order: a part of the layers of a hybrid model."""
        if len(layers) != len(self.layers) or len(set(layers)) != len(layers):
            raise ValueError(
                f"{list(layers)}: give a number of its own to each of {counted(len(self.layers), 'layer')}"
            )
        number = dict(zip(self.layers, layers, strict=True))
        return replace(self, planes=tuple(replace(p, layer=number[p.layer]) for p in self.planes))

    @cached_property
    def fingerprint(self) -> str:
        """A stable hexadecimal digest of the geometry, the same in every process; the name does not count."""
        planes = sorted(self.planes, key=lambda p: (p.layer, p.kind))
        record = [self.page_size, self.page_bytes, [_plane_record(p) for p in planes]]
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """A JSON object; ``from_json`` gives an equal layout back."""
        record = {"name": self.name, "page_size": self.page_size, "page_bytes": self.page_bytes}
        return json.dumps({**record, "planes": [_plane_record(p) for p in self.planes]})

    @classmethod
    def from_json(cls, text: str) -> PageLayout:
        """Read ``to_json``'s object. Raises ValueError where a field is missing or a dtype is unknown."""
        try:
            record = json.loads(text)
            planes = tuple(_plane_of(r) for r in record["planes"])
            return cls(record["page_size"], record["page_bytes"], planes, record.get("name", "custom"))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"not a page layout's JSON: {error!r}; write it with PageLayout.to_json()") from error

    def __str__(self) -> str:
        return draw(self)


def draw(layout: PageLayout, max_rows: int = 14) -> str:
    """A drawing of the page's bytes: one row a plane in page order, the middle cut out of deep models."""
    planes = sorted(layout.planes, key=lambda p: p.offset)
    rows = [_plane_row(p, layout.page_size) for p in planes]
    if len(rows) > max_rows:
        half = max_rows // 2
        cut = ("", "...", counted(len(rows) - 2 * half, "more plane"), "")
        rows = rows[:half] + [cut] + rows[-half:]
    padding = layout.page_bytes - sum(run.nbytes for run in layout.page_runs)
    rows.append((f"{layout.page_bytes}", "end", f"padding {padding} B" if padding else "no padding", ""))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    body = "\n".join(f"  {r[0]:>{widths[0]}}  {r[1]:<{widths[1]}}  {r[2]:<{widths[2]}}  {r[3]}".rstrip() for r in rows)
    size = f"{counted(layout.page_size, 'token')}, {counted(len(layout.layers), 'layer')}, {layout.page_bytes} B"
    return f"{layout.name}: a page of {size} ({layout.token_bytes} B a token)\n{body}"


def counted(n: int, noun: str) -> str:
    """``"1 page"``, ``"2 pages"``: a number and its noun, for messages."""
    if n == 1:
        return f"1 {noun}"
    return f"{n} {noun[:-1] + 'ies' if noun.endswith('y') else noun + 's'}"


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` → ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """``"bfloat16"`` or ``"torch.bfloat16"`` → ``torch.bfloat16``. Raises ValueError for a name torch does not know."""
    dtype = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}; use torch's names, such as 'bfloat16' or 'float8_e4m3fn'")
    return dtype


def _plane_row(p: Plane, page_size: int) -> tuple[str, str, str, str]:
    shape = " x ".join(map(str, p.shape))
    if p.token_stride is None:
        return f"{p.offset}", f"L{p.layer} {p.kind}", f"{shape} {dtype_name(p.dtype)}", "state"
    span = f"{counted(page_size, 'token')} x {shape} {dtype_name(p.dtype)}"
    return f"{p.offset}", f"L{p.layer} {p.kind}", span, f"strides: token {p.token_stride} B, head {p.head_stride} B"


def _plane_record(p: Plane) -> dict[str, Any]:
    return {
        "layer": p.layer,
        "kind": p.kind,
        "offset": p.offset,
        "token_stride": p.token_stride,
        "head_stride": p.head_stride,
        "shape": list(p.shape),
        "dtype": dtype_name(p.dtype),
    }


def _plane_of(record: dict[str, Any]) -> Plane:
    fields = dict(record)
    return Plane(**{**fields, "shape": tuple(fields["shape"]), "dtype": dtype_of(fields["dtype"])})


def _merged(runs: Iterable[SlotRun]) -> list[SlotRun]:
    """Sorted runs, where one begins at the byte at which another of the same token stride ends, as one."""
    out: list[SlotRun] = []
    for run in sorted(runs):
        if out and out[-1].token_stride == run.token_stride and out[-1].offset + out[-1].nbytes == run.offset:
            out[-1] = out[-1]._replace(nbytes=out[-1].nbytes + run.nbytes)
        else:
            out.append(run)
    return out


def _validate(layout: PageLayout) -> None:
    numbers = [layout.page_size, layout.page_bytes]
    for p in layout.planes:
        numbers += [p.layer, p.offset, p.token_stride or 0, p.head_stride, *p.shape]
    if not all(isinstance(n, int) for n in numbers):
        raise ValueError(f"sizes, offsets and strides must be integers, got {numbers}")
    if layout.page_size < 1 or layout.page_bytes < 1 or not layout.planes:
        raise ValueError(
            f"a layout needs page_size >= 1, page_bytes >= 1 and at least one plane; got page_size="
            f"{layout.page_size}, page_bytes={layout.page_bytes}, {counted(len(layout.planes), 'plane')}"
        )
    if len({(p.layer, p.kind) for p in layout.planes}) != len(layout.planes):
        raise ValueError("two planes of one layer and kind; give each plane of a layer a kind of its own")
    for p in layout.planes:
        where = f"plane {p.kind!r} of layer {p.layer}"
        if not p.shape or min(p.shape) < 1 or (p.token_stride is not None and len(p.shape) != 2):
            raise ValueError(f"{where}: shape {p.shape} must be positive, and (heads, dim) for a token plane")
        strides = [s for s in (p.token_stride, p.head_stride) if s is not None]
        if p.offset < 0 or min(strides) < 0:
            raise ValueError(f"{where}: offset and strides must not be negative: {p}")
        if any(n % p.dtype.itemsize for n in (p.offset, *strides, layout.page_bytes)):
            raise ValueError(
                f"{where}: offset {p.offset}, strides {strides} and page_bytes {layout.page_bytes} must be multiples "
                f"of {dtype_name(p.dtype)}'s {p.dtype.itemsize} bytes; pad the page or pass align="
            )
    end = 0
    for run in layout.page_runs:
        if run.offset < end:
            raise ValueError(f"planes overlap at byte {run.offset} of the page: {_at(layout, run.offset)}")
        end = run.offset + run.nbytes
    if end > layout.page_bytes:
        raise ValueError(
            f"planes need {counted(end, 'byte')}, the page has {layout.page_bytes}: {_at(layout, end - 1)}"
        )


def _at(layout: PageLayout, byte: int) -> str:
    near = sorted(layout.planes, key=lambda p: abs(p.offset - byte))[:3]
    return "near " + ", ".join(f"{p.kind!r} of layer {p.layer} (offset {p.offset})" for p in near)


def _spans(layers: tuple[int, ...]) -> str:
    if layers == tuple(range(len(layers))):
        return f"0 to {len(layers) - 1}"
    return ", ".join(map(str, layers))
