"""Which pages a tier of fixed size keeps, under which keys, and which of them goes first. Moves no bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(eq=False, slots=True)
class Page:
    """A page of the tier.

    Attributes:
        number: which one, from 0 on.
        key: what it is kept under.
        ready: whether its bytes are there.
        users: transfers that write or read it, which keep it from being evicted.
    """

    number: int
    key: Hashable
    ready: bool = False
    users: int = 0


class PageIndex:
    """The pages by key, and the order in which those that nobody uses are evicted: the one used longest ago first.

    Attributes:
        evicted: how many pages were given to another key.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.evicted = 0
        self._pages: dict[Hashable, Page] = {}
        self._idle: OrderedDict[Page, None] = OrderedDict()  # not in use, the oldest first
        self._free = list(range(num_pages - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: Hashable) -> bool:
        """Whether there is a page for the key; its bytes may still be on their way."""
        return key in self._pages

    def find(self, key: Hashable) -> Page | None:
        """The page whose bytes are there."""
        page = self._pages.get(key)
        return page if page is not None and page.ready else None

    def run(self, keys: Iterable[Hashable]) -> list[Page]:
        """The pages of the first keys, up to one that has none whose bytes are there."""
        found, page_of = [], self._pages.get
        for key in keys:
            page = page_of(key)
            if page is None or not page.ready:
                break
            found.append(page)
        return found

    def add(self, key: Hashable) -> Page | None:
        """A page to be written, for a key that has none; None where all others are in use. ``release`` it then."""
        assert key not in self._pages
        if not self._free:
            if not self._idle:
                return None
            self.drop(next(iter(self._idle)))
            self.evicted += 1
        page = self._pages[key] = Page(self._free.pop(), key, users=1)
        return page

    def hold(self, *pages: Page) -> None:
        """Use pages; they are not evicted before they were released."""
        for page in pages:
            if not page.users:
                del self._idle[page]
            page.users += 1

    def release(self, *pages: Page) -> None:
        """Undo one ``hold``, or ``add``, of each, in order. A page that nobody uses any more is the newest."""
        for page in pages:
            page.users -= 1
            if not page.users:
                if self._pages.get(page.key) is page:
                    self._idle[page] = None
                else:
                    self._free.append(page.number)

    def touch(self, keys: Iterable[Key]) -> list[Key]:
        """Make the pages of these keys, one after another, the newest. Returns the keys that have none, in order."""
        absent, page_of = [], self._pages.get
        for key in keys:
            page = page_of(key)
            if page is None:
                absent.append(key)
            elif not page.users:
                self._idle.move_to_end(page)
        return absent

    def drop(self, page: Page) -> None:
        """Find a page no more. It is used again when it was released."""
        if self._pages.get(page.key) is page:
            del self._pages[page.key]
            if not page.users:
                del self._idle[page]
                self._free.append(page.number)

    def clear(self) -> None:
        """Drop all pages."""
        for page in list(self._pages.values()):
            self.drop(page)
