"""Which axis of a cache tensor is what: slots, pages, batch, heads, positions.

A form is a string of axis letters: ``S`` token slots or positions, ``P`` pages, ``B`` sequences, ``H`` heads, ``D``
elements of a head. ``SHD`` and ``PSHD`` are an engine's caches, addressed by physical slot; ``BHSD`` and ``BSHD`` are a
batch of sequences, addressed by position, whose pages the binding's page table names. Recurrent states are ``SHD``
too, where they are addressed by page, or ``BHD``, one a sequence: a state's first axis is the heads, and all behind it
the elements of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FORMS = ("SHD", "PSHD", "BHSD", "BSHD")


@dataclass(frozen=True)
class CachePlane:
    """One bound cache tensor and the plane of the pool that takes its place. Strides and offset are in elements.

    Args:
        layer, kind: the plane.
        form: axis letters of ``shape``, see the module.
        shape, stride, storage_offset, dtype: the cache tensor's.
        heads, dim: of one token's row.
        geometry: ``PagePool.plane(layer, kind).geometry``.
        page_size: the pool's; 1 for a state.
        storage: number of the storage that it lies in, within its binding.
        column: of the page table, where a sequence's pages of this plane begin.
    """

    layer: int
    kind: str
    form: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    dtype: torch.dtype
    heads: int
    dim: int
    geometry: tuple[int, ...]
    page_size: int
    storage: int
    column: int = 0

    @property
    def paged(self) -> bool:
        """Addressed by (sequence, position) through the page table, not by physical slot."""
        return "B" in self.form

    @property
    def state_of_sequence(self) -> bool:
        """A recurrent state a sequence, which is read and written as a whole."""
        return self.form == "BHD"

    @property
    def columns(self) -> int:
        """Pages of one sequence."""
        return -(-self.size("S") // self.page_size)

    @property
    def label(self) -> str:
        """For messages."""
        return f"layer {self.layer} {self.kind}"

    def size(self, letter: str) -> int:
        """Length of an axis; 1 if there is none."""
        return self.shape[self.form.index(letter)] if letter in self.form else 1

    @property
    def axes(self) -> list[tuple[str, int, int]]:
        """``(letter, stride, size)`` of every axis longer than 1, widest stride first; pages and slots are one axis."""
        axes = [(f, st, n) for f, st, n in zip(self.form, self.stride, self.shape, strict=True)]
        if self.form == "PSHD":
            axes = [("S", self.stride[1], self.shape[0] * self.shape[1]), *axes[2:]]
        return sorted((a for a in axes if a[2] > 1), key=lambda a: -a[1])

    @property
    def gapless(self) -> bool:
        """Does nothing else lie between its elements?"""
        run = 1
        for _, stride, size in reversed(self.axes):
            if stride != run:
                return False
            run *= size
        return True

    def merged(self, outer: str, inner: str) -> bool:
        """Do two axes step through memory as one?"""
        if outer not in self.form or inner not in self.form:
            return False
        i = self.form.index(inner)
        return self.stride[self.form.index(outer)] == self.size(inner) * self.stride[i]


def form_of(tensor: Tensor, heads: int, dim: int, page_size: int, num_pages: int, dims: str | None) -> str:
    """The form of a cache tensor, read off its shape or said by ``dims``.

    Raises:
        ValueError: no form fits, several do, or ``dims`` does not.
    """
    shape, want = tuple(tensor.shape), f"heads={heads}, head_dim={dim}, page_size={page_size}, {num_pages} pages"
    fitting = [f for f in FORMS if _fits(shape, f, heads, dim, page_size)]
    if dims is not None:
        if dims not in FORMS:
            raise ValueError(f"dims={dims!r} is unknown; supported: {', '.join(FORMS)}")
        fitting = [f for f in fitting if f == dims]
    elif "PSHD" in fitting and "BSHD" in fitting:  # rows of one page each: an engine's pages, unless said otherwise
        fitting.remove("BSHD")
    if not fitting:
        asked = f"is no {dims} cache" if dims else "fits no cache form"
        raise ValueError(
            f"a tensor of shape {list(shape)} {asked} of a plane with {want}; supported: SHD [slots, heads, head_dim], "
            "PSHD [pages, page_size, heads, head_dim], BHSD [batch, heads, seq, head_dim] and "
            "BSHD [batch, seq, heads, head_dim]"
        )
    if len(fitting) > 1:
        raise ValueError(f"a cache of shape {list(shape)} could be {' or '.join(fitting)}; say which with dims=")
    form = fitting[0]
    if "B" not in form and (pages := -(-shape[0] // page_size) if form == "SHD" else shape[0]) != num_pages:
        raise ValueError(
            f"a {form} cache of shape {list(shape)} is addressed by physical slot and has {pages} pages of {page_size} "
            f"slots, the pool has {num_pages}; make the pool with num_pages={pages}"
        )
    return form


def _fits(shape: tuple[int, ...], form: str, heads: int, dim: int, page_size: int) -> bool:
    if len(shape) != len(form):
        return False
    size = dict(zip(form, shape, strict=True))
    return (size["H"], size["D"]) == (heads, dim) and (form != "PSHD" or size["S"] == page_size)
