"""What a rewrite did and did not do: the errors it raises and the report it leaves."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from pm_ops.layout import counted

from .internals import operator_name

_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)\n(?P<code>.*)')
_FACADE = os.path.join("compile_passes", "facade.py")  # compiled code passes through there; the caller is meant
_PACKAGES = re.compile(r"^\S.*?/(?:site|dist)-packages/")


class RewriteError(RuntimeError):
    """The graph does something with a bound cache that has no exact counterpart on pages.

    torch.compile raises it as the ``inner_exception`` of a ``torch._dynamo.exc.BackendCompilerFailed``.
    """


def user_line(node: Node) -> str:
    """``file:line: code`` of the statement that a graph node comes from, as its author wrote it."""
    frames = [m for m in _FRAME.finditer(node.meta.get("stack_trace") or "") if not m["file"].endswith(_FACADE)]
    if not frames:
        return f"graph node {node.name} ({form_of(node)})"
    last = frames[-1]
    return f"{last['file']}:{last['line']}: {last['code'].strip()}"


def form_of(node: Node) -> str:
    """A node's operator, without namespace and overload."""
    name = operator_name(node.target)
    return "scaled_dot_product_attention" if name == "sdpa" else name


@dataclass(frozen=True)
class Entry:
    """One thing that a graph does with a layer's planes.

    Args:
        layer, kinds: which planes; an attention reads two at once.
        action: ``"write"``, ``"read"``, ``"materialize"``, or ``"rotate"`` for a rotary embedding that goes with
            a write.
        form: the operation found, for example ``aten.index_copy_``.
        line: the user's line.
        became: the operator that it became.
        value_layer: of the plane that an attention reads as values, where it is another than the keys'.
    """

    layer: int
    kinds: tuple[str, ...]
    action: str
    form: str
    line: str
    became: str
    value_layer: int | None = None

    @property
    def planes(self) -> tuple[tuple[int, str], ...]:
        """Every ``(layer, kind)``."""
        layers = (self.layer, self.layer if self.value_layer is None else self.value_layer)
        return tuple(zip(layers, self.kinds, strict=False))

    @property
    def label(self) -> str:
        """The kinds, for people: ``key+value``, or ``key+value of L3``."""
        return "+".join(self.kinds) + ("" if self.value_layer is None else f" of L{self.value_layer}")


@dataclass
class RewriteReport:
    """What became of a model's cache accesses. Counts are of (layer, planes), however many graphs were compiled.

    Args:
        planes: every bound ``(layer, kind)``.
        bytes_released: bytes of the layer-major caches that binding gave back.
    """

    planes: Sequence[tuple[int, str]]
    bytes_released: int
    entries: list[Entry] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    unfused: list[str] = field(default_factory=list)
    graphs: int = 0

    def add(self, found: Iterable[Entry]) -> None:
        """Merge the entries of one compiled graph; a recompiled graph adds nothing new."""
        known = set(self.entries)
        for entry in found:
            if entry not in known:
                known.add(entry)
                self.entries.append(entry)
        self.graphs += 1

    def leave(self, unfused: Iterable[str]) -> None:
        """Note the stores that ``fuse_rope`` found no rotation for; ``layer: reason``, and the user's line."""
        self.unfused += [reason for reason in dict.fromkeys(unfused) if reason not in self.unfused]

    @property
    def fused(self) -> int:
        """Layers whose rotary embedding goes with the store."""
        return len({e.layer for e in self.entries if e.action == "rotate"})

    @property
    def writes_rewritten(self) -> int:
        """Planes whose writes go to pages."""
        return len({plane for e in self.entries if e.action == "write" for plane in e.planes})

    @property
    def reads_rewritten(self) -> int:
        """Reads that go to pages: an attention over a layer's K and V counts once, a gather once a plane."""
        return len({e.planes for e in self.entries if e.action == "read"})

    @property
    def materialized(self) -> int:
        """Planes that are copied out of the pages on every call, because a read of them asked for a dense tensor."""
        return len({plane for e in self.entries if e.action == "materialize" for plane in e.planes})

    def untouched(self, action: str) -> list[tuple[int, str]]:
        """Bound planes that no compiled graph has written (``"write"``) or read (``"read"``) so far."""
        reads = ("read", "materialize")
        actions = reads if action == "read" else (action,)
        seen = {plane for e in self.entries if e.action in actions for plane in e.planes}
        return [plane for plane in self.planes if plane not in seen]

    def __str__(self) -> str:
        alike: dict[tuple[str, ...], list[int]] = {}
        for e in self.entries:
            row = (e.label, e.action, e.form, e.became, _PACKAGES.sub("", e.line))
            alike.setdefault(row, []).append(e.layer)
        rows = [(_spans(layers), f"{len(layers)} x", *row) for row, layers in alike.items()]
        rows = [("layers", "", "planes", "does", "form found", "became", "line"), *_cut(rows)]
        widths = [max(len(row[i]) for row in rows) for i in range(6)]
        table = "\n".join("  ".join([*(c.ljust(w) for c, w in zip(r, widths, strict=False)), r[6]]) for r in rows)
        return "\n".join(
            [
                table,
                self._summary(),
                *(f"refused: {reason}" for reason in self.refused),
                *(f"not fused: {reason}" for reason in self.unfused),
            ]
        )

    def _summary(self) -> str:
        lines = [
            f"{counted(self.graphs, 'graph')}: {counted(self.writes_rewritten, 'write')} and "
            f"{counted(self.reads_rewritten, 'read')} rewritten, {self.materialized} materialized; "
            f"{counted(self.bytes_released, 'byte')} of layer-major cache released"
        ]
        if not self.entries:
            lines.append("nothing was rewritten: no graph compiled so far writes or reads a bound cache")
        for action in ("write", "read"):
            missing = self.untouched(action)
            if missing:
                shown = ", ".join(f"L{layer} {kind}" for layer, kind in missing[:6])
                more = f" and {len(missing) - 6} more" if len(missing) > 6 else ""
                lines.append(f"no {action} seen yet of {shown}{more}")
        return "\n".join(lines)


def _cut(rows: list[tuple[str, ...]], limit: int = 24) -> list[tuple[str, ...]]:
    """The middle left out of the table of a deep model whose layers differ."""
    if len(rows) <= limit:
        return rows
    half = limit // 2
    return [*rows[:half], ("...", "", f"({len(rows) - limit} more)", "", "", "", ""), *rows[-half:]]


def _spans(layers: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` → ``"0-2, 5"``."""
    spans: list[list[int]] = []
    for layer in sorted(set(layers)):
        if spans and layer == spans[-1][1] + 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    return ", ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in spans)
