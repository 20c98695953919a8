"""The shapes that are measured: those of serving on a GPU, tiny ones on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from . import gated_delta_cases, mla_cases, state_cases, transfer_cases
from .attention_shape import AttentionShape, decode
from .case import Case
from .limits import has_peer
from .transfer_cases import RepackShape, TransferShape

SUITES = (
    "limits", "store", "decode", "prefill", "extend", "mixed", "mla", "pages", "transfer", "peer", "state", "host",
)  # fmt: skip
ATTENTION_SUITES = ("decode", "prefill", "extend", "mixed")


@dataclass(frozen=True)
class StoreShape:
    """One layer's new rows to random slots."""

    name: str
    tokens: int
    pages: int = 4096
    layers: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def nbytes(self) -> int:
        """K and V rows, read and written."""
        return 4 * self.tokens * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class RopeShape(StoreShape):
    """The same with query and key rotated by their positions first."""

    q_heads: int = 32
    positions: int = 8192

    @property
    def nbytes(self) -> int:
        """Query, K and V, read and written."""
        return 2 * self.tokens * (self.q_heads + 2 * self.kv_heads) * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class PagesShape:
    """A verb on scattered pages, or ``move`` on scattered tokens, of all layers."""

    name: str
    verb: str
    """``copy``, ``gather``, ``scatter`` or ``move``."""
    count: int
    """Pages, or tokens of a move."""
    pages: int
    layers: int
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def row_bytes(self) -> int:
        """One token's K, or V, in one layer."""
        return self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Read and written."""
        tokens = self.count if self.verb == "move" else self.count * self.page_size
        return 2 * tokens * 2 * self.layers * self.row_bytes


class CaseShape(Protocol):
    """A shape that makes its case itself."""

    @property
    def name(self) -> str:
        """Of the case."""

    def case(self, suite: str) -> Case:
        """What is built, bound, checked and counted."""


Shape = AttentionShape | StoreShape | PagesShape | TransferShape | RepackShape | CaseShape


def _tokens(n: int) -> str:
    return "1 token" if n == 1 else f"{n} tokens"


_FP8 = dict(kv_dtype=torch.float8_e4m3fn)
_GPU: dict[str, tuple[Shape, ...]] = {
    "store": (
        *(StoreShape(_tokens(n), n) for n in (1, 256, 8192)),
        *(RopeShape(f"{_tokens(n)}, rotated", n) for n in (1, 256, 8192)),
    ),
    "decode": (
        decode("", 64, 4096),
        decode("", 1, 131072),
        decode("heads 64/8", 256, 1024, q_heads=64),
        decode("", 8, 2048),
        decode("fp8 KV", 64, 4096, **_FP8),
        decode("window 128, sinks, heads 64/8, dim 64", 64, 4096, q_heads=64, head_dim=64, value_dim=64, window=128,
               sinks=True),
        decode("heads 32/32", 32, 2048, kv_heads=32),
        decode("heads 28/4", 64, 4096, q_heads=28, kv_heads=4),
        decode("heads 40/8", 64, 4096, q_heads=40),
        decode("heads 48/1", 256, 4096, q_heads=48, kv_heads=1),
        decode("dim 64", 64, 4096, head_dim=64, value_dim=64),
        decode("dim 80", 64, 4096, head_dim=80, value_dim=80),
        decode("dim 96", 64, 4096, head_dim=96, value_dim=96),
        decode("dims 192/128", 64, 4096, head_dim=192),
        decode("dim 256", 64, 2048, head_dim=256, value_dim=256),
        *(decode(f"page size {ps}", 64, 4096, page_size=ps) for ps in (1, 64, 128, 544)),
    ),
    "prefill": (
        AttentionShape("B8 x 4096", (4096,) * 8, (4096,) * 8),
        AttentionShape("B1 x 32768", (32768,), (32768,)),
    ),
    "extend": (AttentionShape("B8, 512 new on 7680", (512,) * 8, (8192,) * 8),),
    "mixed": (AttentionShape("4 prefills of 2048, 60 decodes of 4096", (2048,) * 4 + (1,) * 60,
                             (2048,) * 4 + (4096,) * 60),),
    "mla": mla_cases.GPU,
    "pages": (
        *(PagesShape(f"{verb} 256 pages of 2 MiB", verb, 256, 2048, 32) for verb in ("copy", "gather", "scatter")),
        *(PagesShape(f"{verb} 256 pages of 64 KiB", verb, 256, 16384, 1) for verb in ("copy", "gather", "scatter")),
        PagesShape("move 1024 tokens, 32 layers", "move", 1024, 2048, 32),
    ),
    "transfer": transfer_cases.GPU,
    "peer": transfer_cases.PEER,
    "state": gated_delta_cases.GPU + state_cases.GPU,
    "host": (StoreShape("store 8 tokens", 8, pages=64), replace(decode("", 8, 512), name="attention B8 x 512")),
}  # fmt: skip
_QUICK = {
    "store": 6,
    "decode": 6,
    "prefill": 1,
    "extend": 1,
    "mixed": 1,
    "mla": mla_cases.QUICK,
    "pages": 7,
    "transfer": 10,
    "peer": 3,
    "state": 3,
    "host": 2,
}

_TINY: dict[str, Any] = dict(
    q_heads=4, kv_heads=2, head_dim=32, value_dim=32, page_size=4, dtype=torch.float32, kv_dtype=torch.float32, layers=2
)
_ROWS: dict[str, Any] = dict(kv_heads=2, head_dim=32, page_size=4, dtype=torch.float32)
_CPU: dict[str, tuple[Shape, ...]] = {
    "store": (
        *(StoreShape(_tokens(n), n, pages=64, layers=2, **_ROWS) for n in (1, 64)),
        RopeShape("64 tokens, rotated", 64, pages=64, layers=2, q_heads=4, positions=64, **_ROWS),
    ),
    "decode": (
        decode("", 4, 64, **_TINY),
        decode("window 8, sinks", 4, 64, **_TINY, window=8, sinks=True),
        decode("fp8 KV", 4, 64, **{**_TINY, **_FP8}),
    ),
    "prefill": (AttentionShape("B2 x 64", (64,) * 2, (64,) * 2, **_TINY),),
    "extend": (AttentionShape("B2, 8 new on 56", (8,) * 2, (64,) * 2, **_TINY),),
    "mixed": (AttentionShape("1 prefill of 32, 3 decodes of 64", (32, 1, 1, 1), (32, 64, 64, 64), **_TINY),),
    "mla": mla_cases.CPU,
    "pages": (
        *(PagesShape(f"{verb} 16 pages of 4 KiB", verb, 16, 64, 2, **_ROWS) for verb in ("copy", "gather", "scatter")),
        PagesShape("move 32 tokens, 2 layers", "move", 32, 64, 2, **_ROWS),
    ),
    "transfer": transfer_cases.CPU,
    "peer": (),
    "state": gated_delta_cases.CPU + state_cases.CPU,
    "host": (
        StoreShape("store 8 tokens", 8, pages=16, layers=2, **_ROWS),
        replace(decode("", 4, 32, **_TINY), name="attention B4 x 32"),
    ),
}


def shapes(suite: str, device: torch.device, quick: bool) -> tuple[Shape, ...]:
    """The shapes of a suite on this device; quick: the first, most telling ones. None of ``peer`` on a lone GPU."""
    if suite == "limits":
        return ()
    if device.type != "cuda":
        return _CPU[suite]
    if suite == "peer" and not has_peer(device):
        return ()
    return _GPU[suite][: _QUICK[suite] if quick else None]
