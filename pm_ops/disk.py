"""Pages in files: safetensors with a :class:`PageHeader` in the metadata, replaced whole or not at all.

A file is one uint8 tensor ``pages [n, page_bytes]``, which any reader of safetensors opens, and the header as the
metadata ``pm_ops``. The pages begin at a multiple of 4096 bytes. Files are mapped, and read where they lie, so that
one must be replaced, never rewritten in place, while somebody may read it.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from .descriptors import checked_pages, require_memory
from .header import PageHeader, byte_view
from .pool import PagePool

ALIGN = 4096
"""Bytes to a multiple of which the file's header is padded."""
MAX_HEADER = 100_000_000
"""Bytes of a file's header that the safetensors library reads at most."""
TEMPORARY = (".pm_ops-", ".tmp")
"""How the names of unfinished files begin and end."""


def save_pages(
    path: str | os.PathLike[str], pool: PagePool, pages: Tensor | Sequence[int], *, model: str
) -> PageHeader:
    """Write these pages to a file, every layer of each. A file that was there is replaced in one step.

    A crash at any moment leaves the old file or the new one; a killed process may leave a ``.pm_ops-*.tmp`` beside it,
    which nothing reads.

    Args:
        pages: page ids, one or more; -1 is refused.
        model: see :class:`PageHeader`.

    Raises:
        ValueError: a page is not there, or there are none.
        OSError: the file cannot be written; what was there is as it was.
    """
    content = packed(pool, pages, model)
    with finished(Path(path).parent, content) as temporary:
        publish(temporary, Path(path))
    return content.header


def load_pages(
    path: str | os.PathLike[str], pool: PagePool, pages: Tensor | Sequence[int] | None = None, *, model: str
) -> list[int]:
    """Read a file's pages into the pool, and return the page ids they have there.

    Args:
        pages: where they go, distinct page ids, as many as the file has. Default: pages of ``pool.allocator``.
        model: what :func:`save_pages` was given.

    Raises:
        ValueError: the file is of another layout, model or number of pages, or is corrupted or truncated, with the
            page at which; no byte of the pool has changed.
        RuntimeError: the allocator has too few pages.
        OSError: the file cannot be opened.
    """
    with open(path, "rb") as file:
        return read_into(file, path, pool, pages, model)


class Content(NamedTuple):
    """What a file holds."""

    header: PageHeader
    head: bytes
    """All bytes up to page 0."""
    rows: Tensor
    """The pages, uint8 ``[n, page_bytes]`` on the CPU."""

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(self.head) + self.rows.nbytes


def packed(pool: PagePool, pages: Tensor | Sequence[int], model: str) -> Content:
    """These pages as a file will hold them."""
    require_memory(pool)
    ids = checked_pages(pool, pages)
    if not ids:
        raise ValueError("no pages to save; name one at least")
    rows = pool.gather(ids).cpu()
    header = PageHeader.of(pool.layout, model, rows)
    return Content(header, _head(header), rows)


@contextmanager
def finished(folder: Path, content: Content) -> Iterator[Path]:
    """A whole, flushed file in this folder under a temporary name, for the block to rename; else it is removed."""
    with _new(folder) as file:
        temporary = Path(file.name)
        try:
            file.write(content.head)
            file.write(byte_view(content.rows))
            file.flush()
            os.fsync(file.fileno())
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)
            fcntl.flock(file, fcntl.LOCK_UN)  # closing alone leaves it to a child that was forked meanwhile


def publish(temporary: Path, path: Path) -> None:
    """Rename a finished file, so that it is there after a power failure too."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)  # first: one without this right replaces nothing
    try:
        os.replace(temporary, path)
        os.fsync(folder)
    finally:
        os.close(folder)


def read_into(
    file: BinaryIO, name: object, pool: PagePool, pages: Tensor | Sequence[int] | None, model: str
) -> list[int]:
    """:func:`load_pages` from an open file, whose name in messages is ``name``."""
    require_memory(pool)
    ids = None if pages is None else checked_pages(pool, pages, distinct=True)
    try:
        header, start = read_header(file)
        header.check(pool.layout, model, None if ids is None else len(ids))
        rows = _mapped(file, header, start)
        header.verify(rows)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    rows = rows.to(pool.device)
    if ids is not None:
        pool.scatter(ids, rows)
        return ids
    ids = pool.allocator.alloc(len(rows))
    try:
        pool.scatter(ids, rows)
    except BaseException:
        pool.allocator.free(ids)
        raise
    return ids


def read_header(file: BinaryIO) -> tuple[PageHeader, int]:
    """A file's header, and the byte at which its pages begin. The pages themselves are not read.

    Raises ValueError where the file has no such header, or is of another length than that says.
    """
    size = os.fstat(file.fileno()).st_size
    start = 8 + int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
    if size < 8 or start > min(size, 8 + MAX_HEADER):
        raise ValueError(f"truncated or no safetensors file: it ends at byte {size}, before page 0")
    try:
        record = json.loads(os.pread(file.fileno(), start - 8, 8).decode())
        header = PageHeader.from_bytes(record["__metadata__"]["pm_ops"].encode())
        tensors = {name: entry for name, entry in record.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"corrupted before page 0, or no file of save_pages: {error}") from error
    if tensors != _tensors(header):
        raise ValueError(f"corrupted before page 0: tensors {tensors} for {_tensors(header)}")
    page_bytes, count = header.layout.page_bytes, header.num_pages
    if size < start + count * page_bytes:
        raise ValueError(f"truncated: it ends at byte {size}, inside page {(size - start) // page_bytes} of {count}")
    if size > start + count * page_bytes:
        raise ValueError(f"{size - start - count * page_bytes} bytes follow page {count - 1}, the last")
    return header, start


def _mapped(file: BinaryIO, header: PageHeader, start: int) -> Tensor:
    """The pages of a file, uint8 ``[n, page_bytes]``: private memory that is read from the file where it is touched."""
    shape = header.num_pages, header.layout.page_bytes
    end = start + shape[0] * shape[1]
    mapping = mmap.mmap(file.fileno(), end, access=mmap.ACCESS_COPY)  # ACCESS_READ would make torch warn
    return torch.frombuffer(mapping, dtype=torch.uint8, offset=start).view(shape)


def _new(folder: Path) -> BinaryIO:
    """A new file, locked as long as it is open: one without a lock was left by a process that died."""
    begin, end = TEMPORARY
    while True:
        file = open(folder / f"{begin}{secrets.token_hex(8)}{end}", "xb")  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink:
                return file
        except BaseException:
            os.unlink(file.name)
            file.close()
            raise
        file.close()  # somebody took it for left over, before it was locked


def _tensors(header: PageHeader) -> dict[str, Any]:
    """What the file says of its tensors."""
    shape = [header.num_pages, header.layout.page_bytes]
    return {"pages": {"dtype": "U8", "shape": shape, "data_offsets": [0, shape[0] * shape[1]]}}


def _head(header: PageHeader) -> bytes:
    """The file up to its first page: safetensors' 8 bytes of length, then JSON, padded with blanks."""
    record = {"__metadata__": {"pm_ops": header.to_bytes().decode()}, **_tensors(header)}
    text = json.dumps(record, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGN)
    if len(text) > MAX_HEADER:
        raise ValueError(
            f"the header of {header.num_pages} pages is {len(text)} bytes, safetensors reads {MAX_HEADER}; save them "
            "in several files"
        )
    return len(text).to_bytes(8, "little") + text
