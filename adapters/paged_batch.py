"""PagedBatch: which pages hold the tokens of a batch of sequences that grow together, one forward pass at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pm_ops import PagePool
from pm_ops.layout import counted


@dataclass
class Row:
    """One sequence: its pages in order, and how many of their slots hold tokens."""

    pages: list[int] = field(default_factory=list)
    length: int = 0


@dataclass(frozen=True)
class Step:
    """One forward pass: the columns ``start`` to ``start + length`` of every row, the same for all layers.

    ``slots`` int64 ``[rows * length]``, -1 for padding; ``page_table`` int32 ``[rows, W]`` and ``seq_lens`` int32
    ``[rows]`` as they stand after the pass. Where columns are padding, ``tokens`` int64 names those of the
    ``rows * length`` that are not, and ``query_start`` int32 ``[rows + 1]`` counts them up; else both are None.
    """

    start: int
    length: int
    slots: Tensor
    page_table: Tensor
    seq_lens: Tensor
    tokens: Tensor | None
    query_start: Tensor | None


class PagedBatch:
    """Page accounting for a batch of sequences over a pool; no K or V passes through here.

    The batch is rectangular for its caller: every pass adds the same number of *columns* to all *rows*. Columns that a
    mask calls padding take no slot, so a row's pages hold its own tokens back to back, and what a page contains does
    not depend on the batch around it. Rows may share pages (beams); a shared page is copied before it is written.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.rows: list[Row] = []
        self.length = 0
        """Columns, padding included."""
        self._real = torch.ones(0, 0, dtype=torch.bool)  # [rows, columns]: False is padding
        self._announced: Tensor | None = None
        self._step: Step | None = None

    @property
    def padded(self) -> bool:
        """Whether any row has fewer tokens than columns."""
        return any(row.length != self.length for row in self.rows)

    def announce(self, mask: Tensor | None, rows: int, length: int) -> None:
        """Tell which tokens of the coming pass are padding, before its first layer stores them.

        Args:
            mask: bool ``[rows, columns so far + length]``, True for tokens; ``None``: all are tokens.
            rows, length: of the coming pass.

        Raises:
            ValueError: the mask has another shape, or changes its mind about earlier columns.
        """
        columns = self.length + length
        mask = torch.ones(rows, columns, dtype=torch.bool) if mask is None else mask.to("cpu", torch.bool)
        if mask.shape != (rows, columns):
            raise ValueError(
                f"attention_mask has shape {list(mask.shape)}, a pass of {counted(rows, 'sequence')} with "
                f"{self.length} cached and {counted(length, 'new token')} needs [{rows}, {columns}]{self._remedy()}"
            )
        if self.rows:
            self._require_rows(rows)
            if not torch.equal(mask[:, : self.length], self._real):
                raise ValueError(
                    "attention_mask hides or shows other cached tokens than when they were stored; pass the mask of "
                    f"all tokens so far, unchanged, with the new tokens' behind it{self._remedy()}"
                )
        self._announced = mask[:, self.length :]

    def step(self, start: int, rows: int, length: int) -> Step:
        """The pass that stores columns ``start`` to ``start + length``; the first layer to ask for it makes room.

        Raises:
            ValueError: the batch size or the length differs from the batch's or the announced ones.
            RuntimeError: too few free pages (nothing has changed then), or a layer missed a pass.
        """
        if start == self.length:
            self._step = self._advance(rows, length)
        elif self._step is None or (start, rows, length) != (self._step.start, len(self.rows), self._step.length):
            raise RuntimeError(
                f"a layer with {counted(start, 'token')} stores {rows} x {length} more, while the cache is at "
                f"{counted(self.length, 'token')} of {counted(len(self.rows), 'sequence')}; every layer has to store "
                "every pass. Start over with cache.reset()"
            )
        return self._step

    def crop(self, columns: int) -> None:
        """Forget the last ``columns`` columns; pages that hold nothing else lose an owner."""
        columns = min(columns, self.length)
        removed = self._real[:, self.length - columns :].sum(1).tolist()
        for row, count in zip(self.rows, removed, strict=True):
            row.length -= count
            keep = -(-row.length // self.pool.page_size)
            self.pool.allocator.free(row.pages[keep:])
            del row.pages[keep:]
        self.length -= columns
        self._real = self._real[:, : self.length]
        self._forget()

    def select(self, indices: Sequence[int]) -> None:
        """Row ``i`` becomes what row ``indices[i]`` was. No bytes move: rows that came from one share its pages."""
        rows = [Row(list(self.rows[i].pages), self.rows[i].length) for i in indices]
        self.pool.allocator.retain(page for row in rows for page in row.pages)
        self.pool.allocator.free(page for row in self.rows for page in row.pages)
        self.rows = rows
        self._real = self._real[list(indices)]
        self._forget()

    def reset(self) -> None:
        """Give all pages back."""
        self.pool.allocator.free(page for row in self.rows for page in row.pages)
        self.rows, self.length = [], 0
        self._real = torch.ones(0, 0, dtype=torch.bool)
        self._forget()

    def column_slots(self) -> Tensor:
        """int64 ``[rows, columns]``: the slot of every column, -1 for padding."""
        return self._slots(self._real, torch.zeros(len(self.rows), dtype=torch.int64))

    def _advance(self, rows: int, length: int) -> Step:
        if self.rows:
            self._require_rows(rows)
        new = self._announced if self._announced is not None else torch.ones(rows, length, dtype=torch.bool)
        if new.shape != (rows, length):
            raise ValueError(
                f"{rows} x {counted(length, 'token')} to store, but the attention mask spoke of {list(new.shape)}"
            )
        counts = new.sum(1)
        members = self.rows or [Row() for _ in range(rows)]
        self._make_room(members, counts.tolist())
        self.rows = members
        before = torch.tensor([row.length for row in self.rows])
        after = before + counts
        for row, n in zip(self.rows, after.tolist(), strict=True):
            row.length = n
        start = self.length
        self.length += length
        self._real = torch.cat((self._real.view(rows, start), new), 1)
        self._announced = None
        tensors = [self._slots(new, before).flatten(), self._table().int(), after.int()]
        if not new.all():
            tensors += [new.flatten().nonzero()[:, 0], torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()]
        slots, table, lengths, *packed = (x.to(self.pool.device) for x in tensors)
        return Step(start, length, slots, table, lengths, *(packed or (None, None)))

    def _make_room(self, rows: list[Row], counts: list[int]) -> None:
        """Pages for ``counts[i]`` more tokens of ``rows[i]``: fresh ones, and copies of shared ones to be written."""
        allocator, page_size = self.pool.allocator, self.pool.page_size
        fresh = [-(-(row.length + n) // page_size) - len(row.pages) for row, n in zip(rows, counts, strict=True)]
        open_rows = [row for row, n in zip(rows, counts, strict=True) if n and row.length % page_size]
        writers = Counter(row.pages[-1] for row in open_rows)
        # The last owner left writes in place.
        copies = sum(min(n, allocator.refcount(page) - 1) for page, n in writers.items())
        if sum(fresh) + copies > allocator.num_free:
            raise RuntimeError(
                f"out of pages: this pass needs {sum(fresh)} new and {counted(copies, 'copy')} of shared ones, "
                f"{allocator.num_free} of {self.pool.num_pages} are free; give the pool more pages, or call "
                "cache.reset() on caches that are done"
            )
        shared = [(row, row.pages[-1]) for row in open_rows]
        for row, page in shared:
            row.pages[-1] = allocator.writable(page)
        moved = [(page, row.pages[-1]) for row, page in shared if row.pages[-1] != page]
        if moved:
            self.pool.copy([src for src, _ in moved], [dst for _, dst in moved])
        for row, n in zip(rows, fresh, strict=True):
            row.pages += allocator.alloc(n)

    def _table(self) -> Tensor:
        """int64 ``[rows, W]``; entries past a row's last page are 0 and never read."""
        width = max((len(row.pages) for row in self.rows), default=0)
        padded = [row.pages + [0] * (width - len(row.pages)) for row in self.rows]
        return torch.tensor(padded, dtype=torch.int64).view(len(self.rows), width)

    def _slots(self, real: Tensor, before: Tensor) -> Tensor:
        """The slots of columns ``real [rows, n]`` that follow ``before [rows]`` tokens; -1 where one is padding."""
        table, page_size = self._table(), self.pool.page_size
        if table.shape[1] == 0:  # nothing but padding so far
            return torch.full(real.shape, -1)
        position = (before[:, None] + real.cumsum(1) - 1).clamp(min=0)
        slots = table.gather(1, position // page_size) * page_size + position % page_size
        return torch.where(real, slots, -1)

    def _require_rows(self, rows: int) -> None:
        if rows != len(self.rows):
            raise ValueError(
                f"{counted(rows, 'sequence')} for a cache of {len(self.rows)}; keep to the batch, or choose from it "
                f"with cache.batch_select_indices(){self._remedy()}"
            )

    def _remedy(self) -> str:
        """How a message ends where the cache may just be a used one."""
        return (
            f"; the cache holds {counted(self.length, 'token')} already: cache.reset() starts anew" if self.rows else ""
        )

    def _forget(self) -> None:
        self._announced = self._step = None
