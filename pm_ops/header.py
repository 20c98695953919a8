"""What travels ahead of pages: whose they are, how their bytes lie, and the digests of what has to arrive."""

from __future__ import annotations

import ctypes
import hashlib
import json
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from .layout import PageLayout, counted

FORMAT = "pm_ops pages"
VERSION = 1


@dataclass(frozen=True)
class PageHeader:
    """Describes pages that are stored or sent, so that the receiver can refuse them before a byte lands.

    Args:
        layout: the pages' geometry.
        model: whose content it is: whatever must be equal for the bytes to mean the same, such as checkpoint, revision
            and tensor-parallel rank. Any string; it is compared, not read.
        digests: SHA-256 of every page's bytes, padding included, hexadecimal, in the pages' order.
    """

    layout: PageLayout
    model: str
    digests: tuple[str, ...]

    @classmethod
    def of(cls, layout: PageLayout, model: str, rows: Tensor) -> PageHeader:
        """The header of these pages, uint8 ``[n, page_bytes]`` as :meth:`PagePool.gather` gives them."""
        if not isinstance(model, str):
            raise ValueError(f"model must be a string that names whose pages these are, got {type(model).__name__}")
        _require_rows(rows, layout)
        return cls(layout, model, tuple(_digest(row) for row in rows.cpu()))

    @property
    def num_pages(self) -> int:
        """Pages that are described."""
        return len(self.digests)

    def to_bytes(self) -> bytes:
        """ASCII JSON, with a digest of its own; :meth:`from_bytes` gives an equal header back."""
        layout = json.loads(self.layout.to_json())
        record = {"format": FORMAT, "version": VERSION, "layout": layout, "model": self.model, "pages": self.digests}
        return sealed(record)

    @classmethod
    def from_bytes(cls, data: bytes) -> PageHeader:
        """Read :meth:`to_bytes`. Raises ValueError for other data, another version, and where a byte has changed."""
        try:
            record = unsealed(data, FORMAT, VERSION)
            layout = PageLayout.from_json(json.dumps(record["layout"]))
            return cls(layout, record["model"], tuple(record["pages"]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a header of pages: {error}") from error

    def check(self, layout: PageLayout, model: str, num_pages: int | None = None) -> None:
        """Refuse pages that do not belong into a pool of this layout and model, or that are not so many.

        Raises ValueError saying everything that differs. Call it before the first byte is written.
        """
        differences = []
        if self.layout != layout:
            differences.append(f"layout {_difference(self.layout, layout)}")
        if self.model != model:
            differences.append(f"model {self.model!r} instead of {model!r}")
        if num_pages is not None and self.num_pages != num_pages:
            differences.append(f"{counted(self.num_pages, 'page')} instead of {num_pages}")
        if differences:
            raise ValueError(f"these pages do not fit: {'; '.join(differences)}")

    def verify(self, rows: Tensor) -> None:
        """Compare pages, uint8 ``[n, page_bytes]``, with the digests. Raises ValueError naming one that differs."""
        _require_rows(rows, self.layout)
        if len(rows) != self.num_pages:
            raise ValueError(f"{counted(len(rows), 'row')} for a header of {counted(self.num_pages, 'page')}")
        wrong = [i for i, row in enumerate(rows.cpu()) if _digest(row) != self.digests[i]]
        if wrong:
            others = f", and {counted(len(wrong) - 1, 'other page')}" if len(wrong) > 1 else ""
            raise ValueError(f"page {wrong[0]} of {self.num_pages} is corrupted: its digest does not match{others}")


def sealed(record: dict[str, Any]) -> bytes:
    """ASCII JSON of a record with its ``format`` and ``version``, and of its digest."""
    return _canonical({**record, "digest": _record_digest(record)})


def unsealed(data: bytes, form: str, version: int) -> dict[str, Any]:
    """Read :func:`sealed`. Raises ValueError for another format or version, and where a byte has changed."""
    record = json.loads(data.decode())
    if not isinstance(record, dict) or record.get("format") != form:
        raise ValueError(f"it does not say {form!r}")
    if record["version"] != version:
        raise ValueError(f"format version {record['version']!r}, this pm_ops reads version {version}")
    if record.pop("digest") != _record_digest(record):
        raise ValueError("it has changed since it was written: its digest does not match")
    return record


def byte_view(rows: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied; the tensor must outlive the view."""
    return memoryview((ctypes.c_ubyte * rows.nbytes).from_address(rows.data_ptr()))


def _digest(row: Tensor) -> str:
    row = row.contiguous()
    return hashlib.sha256(byte_view(row)).hexdigest()


def _require_rows(rows: Tensor, layout: PageLayout) -> None:
    if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] != layout.page_bytes:
        raise ValueError(
            f"rows must be uint8 [pages, {layout.page_bytes}], as PagePool.gather gives them; got {rows.dtype} "
            f"{list(rows.shape)}"
        )


def _canonical(record: dict[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()


def _record_digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(record)).hexdigest()


def _difference(got: PageLayout, wanted: PageLayout) -> str:
    """The two fingerprints, and the first thing in which the geometries differ."""
    names = f"{got.fingerprint} ({got.name}) instead of {wanted.fingerprint} ({wanted.name})"
    for field in ("page_size", "page_bytes"):
        if getattr(got, field) != getattr(wanted, field):
            return f"{names}: {field} {getattr(got, field)} instead of {getattr(wanted, field)}"
    theirs, ours = ({(p.layer, p.kind): p for p in layout.planes} for layout in (got, wanted))
    key = min(key for key in {*theirs, *ours} if theirs.get(key) != ours.get(key))
    a, b = theirs.get(key), ours.get(key)
    if a is None or b is None:
        return f"{names}: plane {a} instead of {b}"
    differ = [f.name for f in fields(a) if getattr(a, f.name) != getattr(b, f.name)]
    values = ", ".join(f"{name} {getattr(a, name)} instead of {getattr(b, name)}" for name in differ)
    return f"{names}: {a.kind!r} of layer {a.layer}: {values}"
