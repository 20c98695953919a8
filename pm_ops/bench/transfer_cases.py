"""The shapes of the suite ``transfer``: pages between device and host, and between layouts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import PageLayout, RepackPlan, page_major, vllm


@dataclass(frozen=True)
class TransferShape:
    """Scattered pages of all layers between a device and pinned host memory. Defaults are an 8B Llama's."""

    name: str
    verb: str
    """``offload``, ``restore``, ``both ways`` at once; ``first layer``, ``last layer``: a restore until that has
    arrived."""
    count: int
    """Pages that move, each way."""
    pages: int
    """Of the device's pool."""
    layers: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    host_time: bool = False
    """Whether it is measured how long the calling thread is busy, instead of how long the pages take."""

    @property
    def layout(self) -> PageLayout:
        """Of the pool's pages."""
        return page_major(self.layers, self.kv_heads, self.head_dim, self.page_size, self.dtype)

    @property
    def host_pages(self) -> int:
        """Pages on the host: those to restore, and as many that an offload finds free."""
        return self.count * (1 if self.verb in ("first layer", "last layer") else 2)

    @property
    def nbytes(self) -> int:
        """Bytes that have to cross, in both directions together, until the call has done what it is timed for."""
        page = self.layout.page_bytes
        share = {"both ways": 2.0, "first layer": 1 / self.layers}.get(self.verb, 1.0)
        return int(self.count * page * share)


@dataclass(frozen=True)
class RepackShape:
    """Pages of one layout written as pages of another, on the device or from it to another GPU."""

    name: str
    count: int
    """Source pages."""
    formats: tuple[str, str]
    """Of source and target: ``page_major``, or one of vLLM's orders, ``BLNHC``."""
    page_sizes: tuple[int, int] = (16, 16)
    heads: tuple[int, int, int] | None = None
    """As :class:`pm_ops.RepackPlan` takes them; the target has no others."""
    layers: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    target_dtype: torch.dtype | None = None
    """Of the target's elements, where it is a wider one."""
    peer: bool = False
    """Whether the target is on another GPU of the host."""

    @property
    def plan(self) -> RepackPlan:
        """What moves where."""
        source, target = (self._layout(side) for side in (0, 1))
        return RepackPlan(source, target, heads=self.heads)

    @property
    def tokens(self) -> int:
        """Of the sequence that moves: all its pages are full."""
        return self.count * self.page_sizes[0]

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Of source and target."""
        return self.dtype, self.target_dtype or self.dtype

    @property
    def nbytes(self) -> int:
        """Read and written; or what crosses to the other GPU."""
        read = self.tokens * self.plan.bytes_per_token
        source, target = (dtype.itemsize for dtype in self.dtypes)
        return read if self.peer else read + read * target // source

    def _layout(self, side: int) -> PageLayout:
        heads = self.heads[2] if side == 1 and self.heads is not None else self.kv_heads
        args = (self.layers, heads, self.head_dim, self.page_sizes[side], self.dtypes[side])
        return page_major(*args) if self.formats[side] == "page_major" else vllm(*args, self.formats[side])


# Real pages: of 16 tokens, of all 8 heads or of a rank's 2 of them; and of 1 token, as SGLang has by default.
_PAGES: dict[str, dict[str, Any]] = {
    "2 MiB": dict(page_size=16),
    "512 KiB": dict(page_size=16, kv_heads=2),
    "128 KiB": dict(page_size=1),
    "32 KiB": dict(page_size=1, kv_heads=2),
}
_VERBS = ("offload", "restore", "both ways")


def _moved(size: str, **options: Any) -> list[TransferShape]:
    return [TransferShape(f"{verb} 256 pages of {size}", verb, 256, 1024, **_PAGES[size], **options) for verb in _VERBS]


def _timed(shape: TransferShape) -> TransferShape:
    return replace(shape, name=f"host time, {shape.name}", host_time=True)


_PREFIX = [
    TransferShape(f"restore 32768 tokens, until {what} is there", verb, 2048, 2304)
    for verb, what in (("first layer", "layer 0"), ("last layer", "all"))
]
_PAGE_MAJOR = ("page_major", "page_major")
PEER = (
    RepackShape("to another GPU, 256 pages of 2 MiB", 256, _PAGE_MAJOR, peer=True),
    RepackShape("to another GPU, 256 pages of 64 KiB", 256, _PAGE_MAJOR, layers=1, peer=True),
    RepackShape("to another GPU, heads 4 to 7 of 8, 256 pages of 2 MiB", 256, _PAGE_MAJOR, heads=(4, 0, 4), peer=True),
)
"""Of the suite ``peer``, for a host with two GPUs."""
_TINY: dict[str, Any] = dict(layers=2, kv_heads=2, head_dim=32, dtype=torch.float32)

GPU: tuple[TransferShape | RepackShape, ...] = (
    *_moved("2 MiB"),
    *_moved("32 KiB"),
    *_PREFIX,
    RepackShape("repack 256 pages of 2 MiB to vLLM's order", 256, ("page_major", "BLNHC")),
    _timed(_moved("2 MiB")[0]),
    *_moved("512 KiB"),
    *_moved("128 KiB"),
    RepackShape("repack 256 pages of 2 MiB from vLLM's order", 256, ("BLNHC", "page_major")),
    RepackShape("repack pages of 16 as pages of 64, 512 MiB", 256, _PAGE_MAJOR, (16, 64)),
    RepackShape("repack heads 4 to 7 of 8, 256 pages of 2 MiB", 256, _PAGE_MAJOR, heads=(4, 0, 4)),
    RepackShape("repack 256 pages of 2 MiB as float32", 256, _PAGE_MAJOR, target_dtype=torch.float32),
    *(_timed(_moved(size)[i]) for size, i in (("2 MiB", 1), ("32 KiB", 0), ("32 KiB", 1))),
)
"""The first ones are the most telling."""

CPU: tuple[TransferShape | RepackShape, ...] = (
    *(TransferShape(f"{verb} 16 pages of 4 KiB", verb, 16, 64, page_size=4, **_TINY) for verb in _VERBS),
    *(replace(shape, name=shape.name.replace("32768", "64"), count=16, pages=32, page_size=4, **_TINY)
      for shape in _PREFIX),
    RepackShape("repack 16 pages of 4 KiB to vLLM's order", 16, ("page_major", "BLNHC"), (4, 4), **_TINY),
    RepackShape("repack pages of 4 as pages of 8, 64 KiB", 16, _PAGE_MAJOR, (4, 8), **_TINY),
    RepackShape("repack head 1 of 2, 16 pages", 16, _PAGE_MAJOR, (4, 4), (1, 0, 1), **_TINY),
    RepackShape("repack 16 pages of 2 KiB as float32", 16, _PAGE_MAJOR, (4, 4), target_dtype=torch.float32,
                **{**_TINY, "dtype": torch.bfloat16}),
    TransferShape("host time, offload 16 pages", "offload", 16, 64, page_size=4, host_time=True, **_TINY),
)  # fmt: skip
