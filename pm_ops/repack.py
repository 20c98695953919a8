"""A plan to move pages between two layouts of the same content: other order, page size, width, heads or layers.

Pure arithmetic but for :meth:`RepackPlan.run`, which calls the operator ``repack_pages``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import NamedTuple

import torch
from torch import Tensor

from .capture import refuse_capture
from .layout import PageLayout, Plane, counted, dtype_name
from .ops.repack import WIDER
from .pool import PagePool


class RepackRun(NamedTuple):
    """``nbytes`` that are contiguous in both pages, and become ``written`` bytes: as many, or more of a wider dtype.

    Those of the token in slot ``s`` of a source page and slot ``t`` of a target page go from ``source_offset + s *
    source_stride`` to ``target_offset + t * target_stride``. A state's run belongs to the page; its strides are 0, as
    are those of pages of one token.
    """

    source_offset: int
    source_stride: int
    target_offset: int
    target_stride: int
    nbytes: int
    written: int


@dataclass(frozen=True)
class RepackPlan:
    """How to write pages of ``source`` as pages of ``target``: which bytes go where.

    Layers, kinds and dims are the same on both sides; order, strides, padding and page size may differ. Scale planes go
    along like any other; state planes only between pages of equal size.

    Planes of one dtype move bit for bit. A plane may also get wider where every number stays what it is: float16 and
    bfloat16 to float32, float8_e4m3fn and float8_e5m2 to float16, bfloat16 or float32, one such pair in a plan. A NaN
    stays a NaN, of no particular sign and payload. What was stored divided by a scale of the tensor's is still so.

    Args:
        source, target: the layouts.
        layers: ``{source layer: target layer}``, a pipeline stage's share, say: ``{l: l - 16 for l in range(16, 32)}``.
            Other layers are neither read nor written. Default: every layer as it is, and both have the same. The plan
            keeps them as pairs.
        heads: ``(first source head, first target head, count)``, for tensor parallelism: rank ``r`` of ``n`` gets
            ``(r * H // n, 0, H // n)`` of ``H`` heads, and gives ``(0, r * H // n, H // n)`` to a merge. Other heads
            are neither read nor written. Default: every head, and both have as many. Where layers have different
            numbers of heads, give each group of layers a plan.
        kinds: the kinds of planes that move, ``["key"]`` where K and V are pools of their own, say. Others are neither
            read nor written. Default: every kind, and both have the same.

    Raises:
        ValueError: the layouts do not hold the same content; the message names the first plane that differs.
    """

    source: PageLayout
    target: PageLayout
    layers: Mapping[int, int] | tuple[tuple[int, int], ...] | None = None
    heads: tuple[int, int, int] | None = None
    kinds: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name in ("source", "target"):
            if not isinstance(getattr(self, name), PageLayout):
                given = type(getattr(self, name)).__name__
                raise ValueError(f"{name} must be a PageLayout, such as PagePool.layout, got {given}")
        # what the caller may change later is copied, into what can be hashed
        if self.layers is not None:
            object.__setattr__(self, "layers", _pairs(self.layers))
        if self.heads is not None:
            object.__setattr__(self, "heads", _heads(self.heads))
        if self.kinds is not None:
            object.__setattr__(self, "kinds", tuple(self.kinds))
        # what does not fit is refused here; and a first call of run may be a compiled one
        _ = self.runs, self.widening, self._tables

    @cached_property
    def layer_pairs(self) -> tuple[tuple[int, int], ...]:
        """``(source layer, target layer)`` of every layer that moves."""
        ours, theirs = self.source.layers, self.target.layers
        if self.layers is None:
            if ours != theirs:
                raise ValueError(
                    f"the source has layers {_listed(ours)}, the target {_listed(theirs)}; pass "
                    "layers={source layer: target layer} to move some of them"
                )
            return tuple((layer, layer) for layer in ours)
        pairs = _pairs(self.layers)
        targets = [b for _, b in pairs]
        missing = [f"source layer {a}" for a, _ in pairs if a not in ours]
        missing += [f"target layer {b}" for b in targets if b not in theirs]
        if not pairs or missing or len(set(targets)) != len(targets):
            wrong = ", ".join(missing) + " does not exist" if missing else "it is empty, or names a target layer twice"
            raise ValueError(
                f"layers={dict(pairs)} is {{source layer: target layer}}, of {_listed(ours)} and {_listed(theirs)}: "
                f"{wrong}"
            )
        return pairs

    @cached_property
    def runs(self) -> tuple[RepackRun, ...]:
        """Every run of bytes, rows merged where they are contiguous in both pages, in the target page's order."""
        return tuple(sorted((*self._runs[0], *self._runs[1]), key=lambda run: run.target_offset))

    @cached_property
    def _runs(self) -> tuple[list[RepackRun], list[RepackRun]]:
        """The runs of tokens, and those of states."""
        rows: tuple[list[RepackRun], list[RepackRun]] = ([], [])
        for ours, theirs in self.layer_pairs:
            for kind in self._kinds(ours, theirs):
                plane = self.source.plane(ours, kind)
                rows[plane.token_stride is None].extend(self._rows(plane, self.target.plane(theirs, kind)))
        return _merged(rows[0]), _merged(rows[1])

    @cached_property
    def widening(self) -> tuple[torch.dtype, torch.dtype] | None:
        """The dtype that gets wider and the one it becomes, where there is one."""
        pairs: dict[tuple[torch.dtype, torch.dtype], str] = {}
        for ours, theirs in self.layer_pairs:
            for kind in self._kinds(ours, theirs):
                pair = self.source.plane(ours, kind).dtype, self.target.plane(theirs, kind).dtype
                if pair[0] != pair[1]:
                    pairs.setdefault(pair, f"{kind!r} of layer {ours} {' to '.join(map(dtype_name, pair))}")
        if len(pairs) > 1:
            raise ValueError(f"{', '.join(pairs.values())}: give each pair of dtypes a plan, with layers= or kinds=")
        return next(iter(pairs), None)

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes that are read for each token; states not counted."""
        return sum(run.nbytes for run in self._runs[0])

    @cached_property
    def bytes_per_page(self) -> int:
        """Bytes of states that are read for each page."""
        return sum(run.nbytes for run in self._runs[1])

    @cached_property
    def fragments_per_token(self) -> int:
        """Contiguous pieces in which one token moves."""
        return len(self._runs[0])

    def run(
        self,
        source: PagePool,
        target: PagePool,
        src_pages: Tensor | Sequence[int],
        dst_pages: Tensor | Sequence[int],
        tokens: int | None = None,
    ) -> None:
        """Move a sequence of tokens, in one launch. No byte but theirs is written.

        A CUDA graph may capture it: after one run, or :meth:`table`, on this device, with the pages as tensors there,
        and both pools on one GPU. Keep the plan, the pools and those tensors as long as the graph.

        Args:
            source, target: pools of the two layouts, in buffers of their own: on one device, or on two GPUs of one host
                with access to one another's memory. The source's GPU then writes the target's pages, between what is
                queued on the two current streams before this call and after it.
            src_pages, dst_pages: int32 or int64 page ids on the source's device, in the sequence's order: token ``t``
                lies in page ``t // page_size`` of either list. What has a page < 0 on either side is skipped. No
                target page twice.
            tokens: length of the sequence. Default: all that both lists hold, with no page to spare in either.

        Raises:
            ValueError: pools of other layouts, lists too short; on CPU also a page out of range or named twice.
            RuntimeError: the source's GPU has no access to the target's memory; or a CUDA graph is being captured, and
                this is the plan's first run on the device.
        """
        for name, pool, layout in (("source", source, self.source), ("target", target, self.target)):
            if pool.layout is not layout and pool.layout != layout:  # the first is sooner known
                raise ValueError(
                    f"the {name} pool's pages are not the plan's: {pool!r} for {layout.name}, {layout.page_bytes} B, "
                    f"{counted(layout.page_size, 'token')} a page; make a plan of the pools' layouts"
                )
        table = self.table(source.device)
        src_pages, dst_pages = source._ids(src_pages), source._ids(dst_pages)
        if tokens is None:
            tokens = self._all_tokens(src_pages.shape[0], dst_pages.shape[0])
        sizes = (tokens, source.page_size, target.page_size)
        if source.device.type == "cuda" and not torch.compiler.is_dynamo_compiling():
            # or its memory could be reused, where the plan is dropped, before a stream other than its own has read it
            table.record_stream(torch.cuda.current_stream(source.device))
        args = (source.buffer, target.buffer, src_pages, dst_pages, table, *sizes, source.region, target.region)
        torch.ops.pm_ops.repack_pages(*args, *(self.widening or ()))

    def table(self, device: torch.device) -> Tensor:
        """``runs`` as int64 ``[R, 6]`` on a device, as the operator takes them; made once for each device.

        Raises RuntimeError where a CUDA graph is being captured and it is not made yet.
        """
        if device not in self._tables:
            if device.type == "cuda" and not torch.compiler.is_dynamo_compiling():
                remedy = f'run the plan once before that, or call plan.table(torch.device("{device}"))'
                refuse_capture(f"this plan has no table on {device} yet; {remedy}", device)
            self._tables[device] = torch.tensor(self.runs, dtype=torch.int64, device=device)
        return self._tables[device]

    def __str__(self) -> str:
        sides = [f"{side.name} ({counted(side.page_size, 'token')} a page)" for side in (self.source, self.target)]
        moved = [counted(len(self.layer_pairs), "layer")]
        if self.layers is not None:
            ours, theirs = zip(*self.layer_pairs, strict=True)
            moved[0] += f" {_listed(ours)} as {_listed(theirs)}"
        if self.heads is not None:
            first, at, count = self.heads
            noun = "head" if count == 1 else "heads"
            here, there = (f"{noun} {_listed(range(start, start + count))}" for start in (first, at))
            moved.append(f"source {here} as {there}")
        if self.kinds is not None:
            moved.append(" and ".join(self.kinds))
        if self.widening is not None:
            moved.append(" as ".join(map(dtype_name, self.widening)))
        lengths = sorted({run.nbytes for run in self._runs[0]})
        if lengths:
            of = " to ".join(map(str, sorted({lengths[0], lengths[-1]})))
            pieces = counted(self.fragments_per_token, "fragment")
            moved.append(f"{self.bytes_per_token} B a token in {pieces} of {of} B")
        if self.bytes_per_page:
            moved.append(f"{self.bytes_per_page} B of states a page")
        return f"{sides[0]} -> {sides[1]}: {', '.join(moved)}"

    @cached_property
    def _tables(self) -> dict[torch.device, Tensor]:
        return {}

    def _kinds(self, ours: int, theirs: int) -> Sequence[str]:
        """The kinds of planes that move between two layers."""
        here, there = self.source.kinds(ours), self.target.kinds(theirs)
        has = f"layer {ours} of the source has {', '.join(here)}, layer {theirs} of the target {', '.join(there)}"
        if self.kinds is None:
            if set(here) != set(there):
                raise ValueError(f"{has}; both must hold the same kinds, or pass kinds= to move some of them")
            return here
        if not self.kinds or not set(self.kinds) <= set(here) & set(there) or len(set(self.kinds)) < len(self.kinds):
            raise ValueError(f"{has}; kinds={list(self.kinds)} must name one or more that both have, each once")
        return self.kinds

    def _rows(self, ours: Plane, theirs: Plane) -> list[RepackRun]:
        """A plane's rows, one a head."""
        where = f"{ours.kind!r} of source layer {ours.layer} and target layer {theirs.layer}"
        state = ours.token_stride is None
        if state != (theirs.token_stride is None) or ours.shape[1:] != theirs.shape[1:]:
            raise ValueError(f"{where}: {_described(ours)} against {_described(theirs)}; dims must be equal")
        if ours.dtype != theirs.dtype and theirs.dtype not in WIDER.get(ours.dtype, ()):
            raise ValueError(
                f"{where}: {_described(ours)} against {_described(theirs)}; {_lossy(ours.dtype, theirs.dtype)}"
            )
        if state and (self.source.page_size != self.target.page_size or self.heads is not None):
            raise ValueError(
                f"{where}: a state belongs to a whole page; it moves only between pages of equal size (here "
                f"{self.source.page_size} and {self.target.page_size} tokens) and without heads=; leave its layer out "
                "with layers="
            )
        count = ours.shape[0]
        first, at, count = (0, 0, count) if self.heads is None else self.heads
        if self.heads is None and ours.shape[0] != theirs.shape[0]:
            raise ValueError(
                f"{where}: {counted(ours.shape[0], 'head')} against {theirs.shape[0]}; pass heads=(first source head, "
                "first target head, count)"
            )
        if first + count > ours.shape[0] or at + count > theirs.shape[0]:
            raise ValueError(
                f"{where}: heads={self.heads} is (first source head, first target head, count), but there are "
                f"{ours.shape[0]} and {counted(theirs.shape[0], 'head')}"
            )
        # in pages of one token the stride means nothing; 0 for all lets rows of different strides be merged
        sides = ((self.source, ours), (self.target, theirs))
        strides = [0 if layout.page_size == 1 else plane.token_stride or 0 for layout, plane in sides]
        return [
            RepackRun(
                ours.offset + (first + h) * ours.head_stride, strides[0],
                theirs.offset + (at + h) * theirs.head_stride, strides[1], ours.row_bytes, theirs.row_bytes,
            )
            for h in range(count)
        ]  # fmt: skip

    def _all_tokens(self, src_count: int, dst_count: int) -> int:
        sizes = self.source.page_size, self.target.page_size
        tokens = min(src_count * sizes[0], dst_count * sizes[1])
        if -(-tokens // sizes[0]) != src_count or -(-tokens // sizes[1]) != dst_count:
            raise ValueError(
                f"{counted(src_count, 'page')} of {counted(sizes[0], 'token')} against {counted(dst_count, 'page')} of "
                f"{sizes[1]}: not the same sequence; pass tokens= to say how long it is"
            )
        return tokens


def _pairs(layers: Mapping[int, int] | tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    try:
        pairs = layers.items() if isinstance(layers, Mapping) else layers
        return tuple(sorted((index(ours), index(theirs)) for ours, theirs in pairs))
    except (TypeError, ValueError):
        raise ValueError(f"layers={layers!r}: give {{source layer: target layer}}, integers") from None


def _heads(heads: tuple[int, int, int]) -> tuple[int, int, int]:
    try:
        first, at, count = map(index, heads)  # a fraction would be bytes between two heads
    except (TypeError, ValueError):
        first = at = count = -1
    if min(first, at) < 0 or count < 1:
        raise ValueError(
            f"heads={heads!r}: give (first source head, first target head, count), integers, and count >= 1"
        )
    return first, at, count


def _merged(rows: list[RepackRun]) -> list[RepackRun]:
    out: list[RepackRun] = []
    for row in sorted(rows, key=lambda r: r.target_offset):
        if out and _continues(out[-1], row):
            last = out[-1]
            out[-1] = last._replace(nbytes=last.nbytes + row.nbytes, written=last.written + row.written)
        else:
            out.append(row)
    return out


def _continues(run: RepackRun, row: RepackRun) -> bool:
    strides = run.source_stride == row.source_stride and run.target_stride == row.target_stride
    alike = (run.nbytes == run.written) == (row.nbytes == row.written)  # both as they are, or both wider
    source, target = run.source_offset + run.nbytes, run.target_offset + run.written
    return strides and alike and source == row.source_offset and target == row.target_offset


def _lossy(ours: torch.dtype, theirs: torch.dtype) -> str:
    """Why elements of one dtype do not become those of another."""
    if torch.int8 in (ours, theirs):
        return "int8 means numbers by its scales alone; load_kv and store_kv convert it"
    wider = " or ".join(map(dtype_name, WIDER.get(ours, ()))) or "nothing else"
    return f"not every {dtype_name(ours)} is a {dtype_name(theirs)}, {wider} would do; load_kv and store_kv round"


def _described(p: Plane) -> str:
    kind = "a state" if p.token_stride is None else "rows"
    return f"{kind} of {' x '.join(map(str, p.shape))} {dtype_name(p.dtype)}"


def _listed(layers: Sequence[int]) -> str:
    if len(layers) > 2 and tuple(layers) == tuple(range(layers[0], layers[0] + len(layers))):
        return f"{layers[0]} to {layers[-1]}"
    return ", ".join(map(str, layers))
