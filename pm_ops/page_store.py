"""PageStore: a folder of pages by key, bounded in size, for any number of processes at once."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from .descriptors import checked_pages
from .disk import TEMPORARY, finished, packed, publish, read_header, read_into
from .pool import PagePool

SUFFIX = ".pages.safetensors"
"""Of the entries' files. No other file of the folder is read or removed, weights of a model say."""
KEY = re.compile(r"[0-9A-Za-z_-][0-9A-Za-z_.-]{0,199}")
SPARE = 16
"""One part in this many of ``max_bytes`` is the most that is freed beyond what a new entry needs."""


class _Entry(NamedTuple):
    used: int
    """When it was last used, in nanoseconds."""
    nbytes: int
    path: Path


class PageStore:
    """Groups of pages by key: one file of :func:`save_pages` each, at most ``max_bytes`` in all.

    An entry is ``<key>.pages.safetensors``. Other files of the folder neither count nor are touched: nor are entries of
    versions that wrote ``<key>.safetensors``, which are to be deleted by hand.

    The least recently used entries make room for new ones. Several processes may share a folder. A reader keeps what
    it has opened, also while another process evicts it. A process that dies leaves no entry that is not whole; the
    file it was writing is removed when room is made, or the folder opened, the next time.

    Args:
        folder: made where it is not there. On a file system with ``flock``.
        max_bytes: bytes of all entries, headers included; files still being written come on top.
        model: see :class:`PageHeader`. Entries of another model or layout are refused, not overwritten: what tells
            them apart belongs into the folder's name or the key.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int, *, model: str) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes={max_bytes}: give the bytes that the store may take, 1 or more")
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        self.model = model
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._locked() as lock:
            _write_total(lock, self._evict(0))

    def put(self, key: str, pool: PagePool, pages: Tensor | Sequence[int], *, used: int | None = None) -> bool:
        """Keep these pages under a key. False where the key is there already: the entry stays, and counts as used.

        Args:
            key: a hash of what the pages hold, such as of all token ids up to their end: letters, digits, ``_.-``.
            used: when the entry counts as used, in nanoseconds as of ``time.time_ns``, which is the default. Of entries
                that are of use only with others, such as the blocks of a prefix, these should be the later ones.

        Raises:
            ValueError: the entry that is there is of another layout, model or number of pages, or has no readable
                header, or is cut (``discard`` removes it); these pages alone are more than ``max_bytes``; or ``used``
                is no such time.
        """
        _require_time(used)
        path, ids = self._path(key), checked_pages(pool, pages)
        if self._present(path, pool, len(ids), used):
            return False
        content = packed(pool, ids, self.model)
        if content.nbytes > self.max_bytes:
            raise ValueError(f"an entry of {content.nbytes} bytes in a store of {self.max_bytes}; raise max_bytes")
        with finished(self.folder, content) as temporary, self._locked() as lock:
            if self._present(path, pool, len(ids), used):  # another process was faster
                return False
            total = self._total(lock)
            if total + content.nbytes > self.max_bytes:
                total = self._evict(content.nbytes)
            _write_total(lock, total + content.nbytes)
            if used is not None:
                _touch(temporary, used)
            publish(temporary, path)
        return True

    def get(
        self, key: str, pool: PagePool, pages: Tensor | Sequence[int] | None = None, *, used: int | None = None
    ) -> list[int] | None:
        """Read an entry's pages into the pool: the page ids they have there, or None where the key is not there.

        ``pages`` and errors as in :func:`load_pages`, ``used`` as in :meth:`put`; an entry that is refused stays until
        :meth:`discard`.
        """
        _require_time(used)
        try:
            file = open(self._path(key), "rb")  # noqa: SIM115
        except FileNotFoundError:
            return None
        with file:
            ids = read_into(file, self._path(key), pool, pages, self.model)
            _touch(file.fileno(), used)
            return ids

    def touch(self, key: str, *, used: int | None = None) -> bool:
        """Count an entry as used, now or as in :meth:`put`, without reading it; whether there is one."""
        _require_time(used)
        try:
            _touch(self._path(key), used)
        except FileNotFoundError:
            return False
        return True

    def discard(self, key: str) -> bool:
        """Remove an entry; whether there was one."""
        try:
            self._path(key).unlink()
        except FileNotFoundError:
            return False
        return True

    def keys(self) -> list[str]:
        """All keys, the least recently used first."""
        return [entry.path.name.removesuffix(SUFFIX) for entry in self._entries()]

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(entry.nbytes for entry in self._entries())

    def __contains__(self, key: str) -> bool:
        return self._path(key).exists()

    def __len__(self) -> int:
        return len(self._entries())

    def __repr__(self) -> str:
        return f"PageStore({str(self.folder)!r}, max_bytes={self.max_bytes}, model={self.model!r})"

    def _path(self, key: str) -> Path:
        if not isinstance(key, str) or not KEY.fullmatch(key):
            raise ValueError(
                "key must be a string of 1 to 200 letters, digits, '_', '.' and '-', not beginning with '.', got "
                f"{key!r:.210}"
            )
        return self.folder / f"{key}{SUFFIX}"

    def _present(self, path: Path, pool: PagePool, num_pages: int, used: int | None) -> bool:
        """Whether an entry is there, which then counts as used. Raises ValueError where it is not of this kind."""
        try:
            file = open(path, "rb")  # noqa: SIM115
        except FileNotFoundError:
            return False
        with file:
            try:
                read_header(file)[0].check(pool.layout, self.model, num_pages)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
            _touch(file.fileno(), used)
            return True

    def _entries(self) -> list[_Entry]:
        """The entries, the least recently used first."""
        found = []
        for path in self.folder.glob(f"[!.]*{SUFFIX}"):
            with suppress(FileNotFoundError):  # evicted by another process
                status = path.stat()
                found.append(_Entry(status.st_mtime_ns, status.st_size, path))
        return sorted(found)

    def _evict(self, nbytes: int) -> int:
        """Remove what dead processes left, and the least recently used entries until ``nbytes`` more fit.

        Small entries make more room, up to a :data:`SPARE` of it, so that a full store is not listed for each of them.
        Returns the bytes of all entries that stay.
        """
        begin, end = TEMPORARY
        for path in self.folder.glob(f"{begin}*{end}"):
            # one of another user may be unreadable, or not ours to remove
            with suppress(FileNotFoundError, BlockingIOError, PermissionError), open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
        entries = self._entries()
        total = sum(entry.nbytes for entry in entries)
        if total + nbytes <= self.max_bytes:
            return total
        least = self.max_bytes - nbytes - self.max_bytes // SPARE
        for entry in entries:
            if total + nbytes <= self.max_bytes and total - entry.nbytes < least:
                break
            entry.path.unlink(missing_ok=True)
            total -= entry.nbytes
        return total

    def _total(self, lock: int) -> int:
        """The bytes of all entries, or more: what disappears without a put is noticed when the folder is listed."""
        kept = os.pread(lock, 8, 0)
        return int.from_bytes(kept, "little") if len(kept) == 8 else self.nbytes  # it is new, or was cut

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """One process at a time makes room and adds an entry, so that together they keep to ``max_bytes``."""
        lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield lock
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)  # closing alone leaves it to a child that was forked meanwhile
        finally:
            os.close(lock)


def _write_total(lock: int, total: int) -> None:
    os.pwrite(lock, total.to_bytes(8, "little"), 0)


def _require_time(used: int | None) -> None:
    if used is not None and not (hasattr(used, "__index__") and 0 <= used < 1 << 63):
        raise ValueError(f"used={used!r}: give nanoseconds as of time.time_ns(), a whole number from 0 on below 2**63")


def _touch(file: int | Path, used: int | None) -> None:
    """Mark as used, None: now. A file of another user keeps the time at which it was written."""
    with suppress(PermissionError):
        when = time.time_ns() if used is None else used
        os.utime(file, ns=(when, when))
