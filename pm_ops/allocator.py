"""Which pages are in use, and by how many owners. Bookkeeping on the host; no bytes move here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import Tensor

from .layout import counted
from .ops._common import page_ids


class PageAllocator:
    """Hands out page ids with reference counts; the last page freed is the first handed out again.

    Args:
        num_pages: pages of the pool.
        reserve_null: keep page 0 out, as a sink for padding rows (vLLM's block 0, SGLang's page 0).
    """

    def __init__(self, num_pages: int, *, reserve_null: bool = False) -> None:
        if num_pages < 1 + reserve_null:
            raise ValueError(f"num_pages={num_pages} leaves no page to hand out; need at least {1 + reserve_null}")
        self.num_pages = num_pages
        self.reserve_null = reserve_null
        self._counts = [0] * num_pages
        self._free = list(range(num_pages - 1, int(reserve_null) - 1, -1))

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def refcount(self, page: int) -> int:
        """Owners of a page; 0 is free."""
        return self._counts[self._checked(page)]

    def alloc(self, n: int = 1) -> list[int]:
        """``n`` free pages, each with one owner. All or nothing: raises RuntimeError when fewer are free."""
        if n < 0:
            raise ValueError(f"cannot allocate {counted(n, 'page')}; n must not be negative")
        if n > len(self._free):
            raise RuntimeError(
                f"out of pages: {n} asked for, {len(self._free)} of {self.num_pages} free; free some first, or "
                "make a larger pool"
            )
        pages = self._free[: -n - 1 : -1]
        del self._free[len(self._free) - n :]
        for page in pages:
            self._counts[page] = 1
        return pages

    def retain(self, pages: Tensor | Iterable[int]) -> None:
        """One more owner for each page (a shared prefix). Raises RuntimeError for a page nobody owns."""
        pages = self._all_owned(pages, "retain")
        for page in pages:
            self._counts[page] += 1

    def free(self, pages: Tensor | Iterable[int]) -> None:
        """One owner less for each page; without owners it is free again. A double free raises RuntimeError."""
        pages, counts = self._all_owned(pages, "free"), self._counts
        if len(set(pages)) < len(pages):
            for page, times in Counter(pages).items():
                if times > counts[page]:
                    owners = counted(counts[page], "owner")
                    raise RuntimeError(f"page {page} freed {times} times at once, but has {owners}")
        for page in pages:
            counts[page] -= 1
            if counts[page] == 0:
                self._free.append(page)

    def writable(self, page: int) -> int:
        """The page itself if it has one owner; else a new page, taken over from it (copy-on-write).

        Where the returned id differs, the caller copies the old page's bytes to it before writing.
        """
        self._owned(page, "write to")
        if self._counts[page] == 1:
            return page
        (copy,) = self.alloc()
        self._counts[page] -= 1
        return copy

    def _all_owned(self, pages: Tensor | Iterable[int], verb: str) -> list[int]:
        """The ids as a list; raises as :meth:`_owned` does for the first that has no owner."""
        ids = page_ids(pages, ordered=False)
        known = not ids or (min(ids) >= 0 and max(ids) < self.num_pages)
        if not (known and all(map(self._counts.__getitem__, ids))):  # one by one takes several times as long
            for page in ids:
                self._owned(page, verb)
        return ids

    def _checked(self, page: int) -> int:
        if not 0 <= page < self.num_pages:
            raise ValueError(f"page {page} is outside this allocator's pages 0 to {self.num_pages - 1}")
        return page

    def _owned(self, page: int, verb: str) -> int:
        if self._counts[self._checked(page)] == 0:
            what = "the reserved null page" if self.reserve_null and page == 0 else "free already"
            raise RuntimeError(f"cannot {verb} page {page}: it is {what}")
        return page
