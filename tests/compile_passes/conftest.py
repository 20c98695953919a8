"""A layer-major model run twice: eager on its own caches, and compiled by the backend with the caches on pages.

The oracle of what lies in the pages is the byte formula of the ``page_major`` format, independent of the library's:
page ``p`` holds, layer after layer, ``page_size`` K rows and then ``page_size`` V rows.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pm_ops import PagePool, page_major
from pm_ops.compile_passes import Binding, PageMajorBackend, bind, page_major_backend

LAYERS, BATCH, HEADS, DIM, PAGE = 2, 2, 2, 8, 4
SLOTS = 20  # of an engine-style cache: 5 pages
SEQ = 14  # of a batched cache: 4 pages a row, the last one half full
SHAPES = {
    "SHD": (SLOTS, HEADS, DIM),
    "PSHD": (SLOTS // PAGE, PAGE, HEADS, DIM),
    "BHSD": (BATCH, HEADS, SEQ, DIM),
    "BSHD": (BATCH, SEQ, HEADS, DIM),
}


class LayerMajor(torch.nn.Module):
    """Every layer writes its caches, in its own way, then reads them; what it read goes into the next one's rows."""

    def __init__(
        self, form: str, writes: Sequence[Callable[..., None]], read: Callable[..., Tensor], dtype: torch.dtype
    ) -> None:
        super().__init__()
        make = [torch.randn(SHAPES[form]).to(dtype) for _ in range(2 * len(writes))]
        self.k, self.v = make[::2], make[1::2]
        self.writes, self.read = writes, read

    def forward(self, *args: Tensor) -> list[Tensor]:
        x, *rest = args
        y, out, outs = x * 0.5, x.float(), []
        for k, v, write in zip(self.k, self.v, self.writes, strict=True):
            write(k, v, x, y, *rest)
            out = self.read(k, v, out, *rest)
            x, y = (x.float() * 0.75 + out.float().mean() * 0.125).to(x.dtype), x
            outs += [out, x]
        return outs


class Paged:
    """A model bound and compiled, beside its eager twin."""

    def __init__(
        self, model: Any, dtype: torch.dtype, pages: int, page: int, dims: str | None, options: dict[str, Any]
    ) -> None:
        self.stock, self.model, self.dtype, self.page = copy.deepcopy(model), model, dtype, page
        self.heads: int = getattr(model, "heads", HEADS)
        self.pool = PagePool(page_major(len(model.k), self.heads, DIM, page, dtype), pages)
        self.pool.buffer.fill_(0xFF)  # NaN in every floating dtype
        shuffle(self.pool)
        self.binding: Binding = bind(self.pool, keys=model.k, values=model.v, dims=dims)
        self.backend: PageMajorBackend = page_major_backend(self.binding, **{"inner": "eager", **options})
        self.compiled = torch.compile(model, backend=self.backend, fullgraph=True)

    def check(self, *args: Tensor, exact: bool = False) -> None:
        """One call of both; outputs are equal."""
        with torch.no_grad():
            expected, got = self.stock(*args), self.compiled(*args)
        tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 2e-5, "atol": 2e-5}
        torch.testing.assert_close(got, expected, **tolerance)

    def cells(self) -> Tensor:
        """Every byte of the pool, as ``[pages, layers, 2, page_size, heads, dim]``."""
        return self.pool.buffer.view(self.dtype).view(-1, len(self.stock.k), 2, self.page, self.heads, DIM)

    def check_pages(self, tolerance: float = 2e-5) -> None:
        """The pages hold the twin's whole caches, and every other byte is the poison it was."""
        bits, used = self.cells().float().clone(), torch.zeros(self.cells().shape, dtype=torch.bool)
        for layer in range(len(self.stock.k)):
            for kind, caches in enumerate((self.stock.k, self.stock.v)):
                rows = self._token_rows(caches[layer]).float()
                pages, offsets = self._places(rows.shape[:2])
                got = bits[:, layer, kind][pages, offsets]
                torch.testing.assert_close(got, rows, rtol=tolerance, atol=tolerance, equal_nan=True)
                used[:, layer, kind][pages, offsets] = True
        rest = self.cells().contiguous().view(torch.uint8).view(*used.shape, -1)[~used]
        assert bool((rest == 0xFF).all())

    def _token_rows(self, cache: Tensor) -> Tensor:
        """``[batch, tokens, heads, dim]``; one row for caches that are addressed by slot."""
        if cache.dim() == 3 or self.binding.page_table is None:
            return cache.reshape(1, -1, self.heads, DIM)
        return cache.transpose(1, 2) if self.binding.planes[0].form == "BHSD" else cache

    def _places(self, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        position = torch.arange(shape[1])
        if self.binding.page_table is None:
            pages = (position // self.page)[None]
        else:
            pages = torch.stack([row[position // self.page] for row in self.binding.page_table.long()])
        return pages, (position % self.page).expand(pages.shape)


def shuffle(pool: PagePool) -> None:
    """Let the allocator hand out pages in an order of no order, so that a page is not told by its number."""
    taken = pool.allocator.alloc(pool.num_pages)
    random.Random(pool.num_pages).shuffle(taken)
    pool.allocator.free(taken)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def paged() -> Callable[..., Paged]:
    """``paged(model)`` or ``paged(form=, write=, read=)``, a write or one a layer; other keywords are the backend's."""

    def make(
        model: Any = None,
        *,
        form: str = "SHD",
        write: Any = None,
        read: Any = None,
        dtype: torch.dtype = torch.float32,
        pages: int | None = None,
        page: int = PAGE,
        dims: str | None = None,
        **options: Any,
    ) -> Paged:
        writes = write if isinstance(write, list) else [write] * LAYERS
        model = LayerMajor(form, writes, read, dtype) if model is None else model
        pages = (SLOTS // page if "B" not in form else 11) if pages is None else pages
        return Paged(model, dtype, pages, page, dims, options)

    return make
