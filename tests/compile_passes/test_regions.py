"""Where a view of a cache lies: symbolic positions in later rows and layers, indices out of range, empty views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pm_ops.ops import _common

HEADS, DIM, ROWS, LAYERS = 2, 8, 3, 3


class Model(torch.nn.Module):
    """``body(cache, x, *args)`` done to K and V; the stacked form's cache is ``[layers, slots, heads, dim]``."""

    def __init__(self, form: str, seq: int, body: Callable[..., Any], heads: int = HEADS) -> None:
        super().__init__()
        self.body, self.heads = body, heads
        if form == "stacked":
            base = torch.randn(2, LAYERS, seq, heads, DIM)
            self.caches, self.k, self.v = [base[0], base[1]], list(base[0]), list(base[1])
        else:
            shape = {"SHD": (seq,), "BSHD": (ROWS, seq), "BHSD": (ROWS, heads, seq)}[form]
            self.k, self.v = ([torch.randn(*shape, *((DIM,) if form == "BHSD" else (heads, DIM)))] for _ in range(2))
            self.caches = [*self.k, *self.v]

    def forward(self, x: Tensor, *args: Any) -> list[Any]:
        return [self.body(cache, x * (i + 1), *args) for i, cache in enumerate(self.caches)]


def twins_of(paged: Any, model: Model, form: str, seq: int, dynamic: bool | None = None) -> Any:
    pages = ROWS * -(-seq // 4) + 2 if "B" in form else -(-seq // 4)
    twins = paged(model, pages=pages, dims="SHD" if form == "stacked" else form)
    twins.compiled = torch.compile(model, backend=twins.backend, fullgraph=True, dynamic=dynamic)
    return twins


def put(view: Tensor, x: Tensor) -> Tensor:
    view.copy_(x.expand_as(view))
    return x + 1


def set_to(view: Tensor, index: Any, x: Any) -> Tensor:
    view[index] = x
    return torch.ones(2)


# A body gets a cache, x [1, dim], a position n >= 1 and a row or layer b.
AT_N: dict[str, tuple[str, int, Callable[..., Any]]] = {
    "token before n of a row": ("BSHD", HEADS, lambda c, x, n, b: put(c[1, n - 1 : n], x)),
    "token before n of the last rows": ("BSHD", HEADS, lambda c, x, n, b: put(c[1:, n - 1 : n], x)),
    "token before n of row b": ("BSHD", HEADS, lambda c, x, n, b: put(c.select(0, b)[n - 1 : n], x)),
    "tokens from n on of row b": ("BSHD", HEADS, lambda c, x, n, b: put(c.narrow(0, b, 1)[:, n : n + 3], x)),
    "token n of the flat second row": ("BSHD", HEADS, lambda c, x, n, b: put(c.flatten(0, 1)[c.shape[1] + n - 1], x)),
    "read of a row": (
        "BSHD", HEADS, lambda c, x, n, b: put(c[0, n], x) + c[2, n - 1 : n].index_select(0, torch.tensor([0])),
    ),
    "token before n, heads first": ("BHSD", HEADS, lambda c, x, n, b: put(c[1:, :, n - 1 : n], x)),
    "token before n of row b, heads first": ("BHSD", HEADS, lambda c, x, n, b: put(c.select(0, b)[:, n - 1 : n], x)),
    "token before n, one head": ("BHSD", 1, lambda c, x, n, b: put(c[1:, :, n - 1 : n], x)),
    "slot before n": ("SHD", HEADS, lambda c, x, n, b: put(c[n - 1 : n], x)),
    "slots up to the n-th last": ("SHD", HEADS, lambda c, x, n, b: put(c[-n - 1 : -n], x)),
    "page and offset": ("SHD", HEADS, lambda c, x, n, b: put(c.view(-1, 2, HEADS, DIM)[n // 2, n % 2], x)),
    "slot before n of a layer": ("stacked", HEADS, lambda c, x, n, b: put(c[1, n - 1 : n], x)),
    "slot of layer b": ("stacked", HEADS, lambda c, x, n, b: put(c[b : b + 1, 3], x)),
    "slot n of layer b": ("stacked", HEADS, lambda c, x, n, b: put(c[b : b + 1, n], x)),
    "slots by tensor of layer b": (
        "stacked", HEADS, lambda c, x, n, b: set_to(c[b : b + 1], (slice(None), torch.tensor([5, 0])), x),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("dynamic", "whole_pages"),
    [(False, False), (True, True), (None, False)],
    ids=["static, slack", "dynamic=True, whole pages", "automatic, slack"],
)
@pytest.mark.parametrize("case", AT_N)
def test_a_view_at_a_symbolic_position_is_eagers(
    paged: Any, case: str, whole_pages: bool, dynamic: bool | None
) -> None:
    """Where the length is no multiple of the page size, a wrong slot may lie in a page's slack, unnoticed by a read."""
    form, heads, body = AT_N[case]
    seq = (16 if whole_pages else 14) if "B" in form else (20 if whole_pages else 18)
    twins = twins_of(paged, Model(form, seq, body, heads), form, seq, dynamic)
    for n, b in ((7, 1), (2, 2), (1, 0), (11, 2)):
        twins.check(torch.randn(1, DIM), n, b)
    twins.check_pages()


@pytest.mark.parametrize("form", ["SHD", "BSHD"])
def test_a_view_that_ends_at_a_number_of_one_value_left_is_eagers(paged: Any, form: str) -> None:
    """Dynamo's 0 is symbolic still, but has no symbol: arithmetic with it cannot be recorded."""

    def zeroed(c: Tensor, x: Tensor, n: int) -> Tensor:
        c[:n].zero_()
        return x + 1

    seq = 20 if form == "SHD" else 14
    twins = twins_of(paged, Model(form, seq, zeroed), form, seq, dynamic=True)
    for n in (0, 1, 3, 2):
        twins.check(torch.randn(1, DIM), n)
    twins.check_pages()


def test_a_read_by_an_index_whose_length_a_write_has_settled_is_eagers(paged: Any) -> None:
    """Three rows are written through it, so its symbolic length is 3 from there on, and has no symbol any more."""

    def body(c: Tensor, x: Tensor, at: Tensor) -> Tensor:
        set_to(c, (slice(None), at), x.expand(ROWS, 3, HEADS, DIM))
        return c[:, at + 1] + c[1, at]

    twins = twins_of(paged, Model("BSHD", 14, body), "BSHD", 14, dynamic=True)
    twins.check(torch.randn(1, DIM), torch.tensor([4, 0, 11]))
    twins.check_pages()


def test_a_view_at_a_number_read_from_a_tensor_is_refused(paged: Any) -> None:
    def body(c: Tensor, x: Tensor, n: Tensor) -> Tensor:
        at = (n + 1).item()
        torch._check(at >= 0)
        torch._check(at < 14)
        return put(c[1].narrow(0, at, 1), x)  # this line

    twins = twins_of(paged, Model("BSHD", 14, body), "BSHD", 14)
    with (
        torch._dynamo.config.patch(capture_scalar_outputs=True),
        torch.no_grad(),
        pytest.raises(Exception, match=r"(?s)RewriteError.*test_regions\.py"),
    ):
        twins.compiled(torch.randn(1, DIM), torch.tensor(3))


def test_a_flat_view_over_two_layers_is_refused(paged: Any) -> None:
    twins = twins_of(paged, Model("stacked", 20, lambda c, x, at: put(c.flatten(0, 1)[at], x)), "stacked", 20)
    with torch.no_grad(), pytest.raises(Exception, match="does not follow the axes of one bound cache"):
        twins.compiled(torch.randn(1, DIM), slice(3, 30))


OUTSIDE: dict[str, tuple[str, Callable[..., Any], list[int]]] = {
    "behind the last position": ("BHSD", lambda c, x, at: set_to(c, (slice(None), slice(None), at), x), [14, 15]),
    "twice before the first position": ("BHSD", lambda c, x, at: set_to(c, (slice(None), slice(None), at), x), [-15]),
    "behind the last row": ("BSHD", lambda c, x, at: set_to(c, (at, 5), x), [3, -4]),
    "behind a flat view": ("BSHD", lambda c, x, at: set_to(c.view(-1, HEADS, DIM), at, x), [3 * 14, -3 * 14 - 1]),
    "behind a part of the slots": ("SHD", lambda c, x, at: set_to(c[2:5], at, x), [7, 3, -4]),
    "behind a view of one slot": ("SHD", lambda c, x, at: set_to(c[11:12], at - 1, x), [3, -1, 6]),
    "behind the last slot": ("SHD", lambda c, x, at: set_to(c, at, x), [18, 19, 1 << 40]),
    "a slot behind a page": ("SHD", lambda c, x, at: set_to(c[:16].view(4, 4, HEADS, DIM), (at - at, at), x), [4, -5]),
    "counted back by index_copy": ("SHD", lambda c, x, at: c.index_copy_(0, at, x.expand(len(at), HEADS, DIM)), [-1]),
    "counted back by scatter": (
        "SHD",
        lambda c, x, at: c.scatter_(
            0, at.view(-1, 1, 1).expand(-1, HEADS, DIM), x.expand(len(at), HEADS, DIM).contiguous()
        ),
        [-1, 18],
    ),
    "filled": ("SHD", lambda c, x, at: c.index_fill_(0, at, 0.5), [18, -19]),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_where_eager_raises_for_an_index_no_cell_is_written(paged: Any, case: str) -> None:
    form, body, outside = OUTSIDE[case]
    seq = 14 if "B" in form else 18

    def run(c: Tensor, x: Tensor, at: Tensor) -> Tensor:
        body(c, x, at)
        return x + 1

    twins = twins_of(paged, Model(form, seq, run), form, seq)
    x = torch.randn(1, DIM)
    with torch.no_grad():
        for index in outside:
            with pytest.raises((IndexError, RuntimeError)):
                run(twins.stock.k[0], x, torch.tensor([index]))
            before = twins.pool.buffer.clone()
            torch.testing.assert_close(twins.compiled(x, torch.tensor([index])), [x + 1, x * 2 + 1])
            assert torch.equal(twins.pool.buffer, before)
    twins.check(x, torch.tensor([1]))
    twins.check_pages()


@pytest.mark.parametrize("case", OUTSIDE)
def test_with_checks_such_an_index_is_refused(paged: Any, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but padding, which is the length of an axis of slots."""
    monkeypatch.setattr(_common, "CHECKS", True)
    form, body, outside = OUTSIDE[case]
    seq, x = 14 if "B" in form else 18, torch.randn(1, DIM)

    def run(c: Tensor, x: Tensor, at: Tensor) -> Tensor:
        body(c, x, at)
        return x + 1

    lengths = {"behind a part of the slots": 3, "behind a view of one slot": 2, "a slot behind a page": 4}
    padding = lengths.get(case, 18) if form == "SHD" else None
    twins = twins_of(paged, Model(form, seq, run), form, seq)
    before = twins.pool.buffer.clone()
    with torch.no_grad():
        for index in outside:
            if index == padding:
                twins.compiled(x, torch.tensor([index]))
            else:
                with pytest.raises(ValueError, match="slots has .*, but there are .* slots in the pool"):
                    twins.compiled(x, torch.tensor([index]))
            assert torch.equal(twins.pool.buffer, before)
    twins.check(x, torch.tensor([1]))
    twins.check_pages()


READS: dict[str, tuple[str, Callable[..., Tensor], list[int]]] = {
    "index": ("SHD", lambda c, at: c[at], [1, 18, -18, -19, 19]),
    "index_select": ("SHD", lambda c, at: c[:16].index_select(0, at), [1, 16, -1, 15]),
    "gather": ("SHD", lambda c, at: c.gather(0, at.view(-1, 1, 1).expand(-1, HEADS, DIM)), [-1, 17, 18]),
    "positions": ("BSHD", lambda c, at: c[1:, at].transpose(0, 1), [13, 14, -14, -15]),
    "index of one slot": ("SHD", lambda c, at: c[11:12][at], [0, -1, 1, 5]),
}


@pytest.mark.parametrize("case", READS)
def test_where_eager_raises_for_an_index_zeros_are_read(paged: Any, case: str) -> None:
    form, read, indices = READS[case]
    seq = 14 if "B" in form else 18
    twins = twins_of(paged, Model(form, seq, lambda c, x, at: read(c, at) + 0), form, seq)
    with torch.no_grad():
        got = twins.compiled(torch.randn(1, DIM), torch.tensor(indices))
        for cache, rows in zip((twins.stock.k[0], twins.stock.v[0]), got, strict=True):
            for index, row in zip(indices, rows, strict=True):
                try:
                    expected = read(cache, torch.tensor([index]))[0]
                except (IndexError, RuntimeError):
                    expected = torch.zeros_like(row)
                torch.testing.assert_close(row, expected, rtol=0, atol=0)


def test_with_checks_so_is_a_read(paged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_common, "CHECKS", True)
    twins = twins_of(paged, Model("BSHD", 14, lambda c, x, at: c[:, at] + 0), "BSHD", 14)
    twins.check(torch.randn(1, DIM), torch.tensor([13, -14]))
    for index in (14, -15):
        with torch.no_grad(), pytest.raises(ValueError, match=r"slots has (\d+), but there are \1 slots"):
            twins.compiled(torch.randn(1, DIM), torch.tensor([0, index]))


FILLS: dict[str, tuple[str, Callable[..., Any]]] = {
    "a number to a slice": ("SHD", lambda c, x, at: set_to(c, slice(3, 5), 0.5)),
    "a tensor to a slice": ("SHD", lambda c, x, at: c[3:5].fill_(x.mean())),
    "a number to a row": ("BSHD", lambda c, x, at: set_to(c, (1, slice(2, None)), 2)),
    "fill_": ("BHSD", lambda c, x, at: c.fill_(0)),
    "zero_": ("BHSD", lambda c, x, at: c[1:].zero_()),
    "index_fill_": ("SHD", lambda c, x, at: c.index_fill_(0, at, 0.75)),
    "index_fill_ counted back": ("SHD", lambda c, x, at: c.index_fill_(0, at - 18, 0.75)),
    "index_fill_ of positions": ("BHSD", lambda c, x, at: c[1:].index_fill_(2, at, x.amax())),
}


@pytest.mark.parametrize("case", FILLS)
def test_a_fill_is_eagers(paged: Any, case: str) -> None:
    form, fill = FILLS[case]

    def body(c: Tensor, x: Tensor, at: Tensor) -> Tensor:
        fill(c, x, at)
        return x + 1

    seq = 14 if "B" in form else 18
    twins = twins_of(paged, Model(form, seq, body), form, seq)
    for at in ([0, 13, 7], [2, 3, 4]):
        twins.check(torch.randn(1, DIM), torch.tensor(at))
    twins.check_pages()


EMPTY: dict[str, tuple[str, Callable[..., Any]]] = {
    "slots": ("SHD", lambda c, x: set_to(c, slice(18, 18), x[:0, None])),
    "a number": ("SHD", lambda c, x: set_to(c, slice(18, None), 1.0)),
    "positions": ("BSHD", lambda c, x: set_to(c, (slice(None), slice(14, None)), x)),
    "positions, heads first": ("BHSD", lambda c, x: c[:, :, 14:].copy_(x)),
    "rows": ("BSHD", lambda c, x: c[3:].zero_()),
    "slots of a layer": ("stacked", lambda c, x: c[2, 18:].fill_(1)),
}


@pytest.mark.parametrize("case", EMPTY)
def test_a_write_to_an_empty_slice_at_the_end_does_nothing(paged: Any, case: str) -> None:
    form, write = EMPTY[case]

    def body(c: Tensor, x: Tensor) -> Tensor:
        write(c, x)
        return x + 1

    seq = 14 if "B" in form else 18
    twins = twins_of(paged, Model(form, seq, body), form, seq)
    twins.check(torch.randn(1, DIM))
    twins.check_pages()


def test_a_slice_that_becomes_empty_at_the_end_is_eagers(paged: Any) -> None:
    def body(c: Tensor, x: Tensor, n: int) -> Tensor:
        c[:, n : n + x.shape[0]] = x[:, None]
        return x + 1

    twins = twins_of(paged, Model("BSHD", 14, body), "BSHD", 14)
    for n, tokens in ((3, 2), (5, 4), (14, 0), (9, 5)):
        twins.check(torch.randn(tokens, DIM), n)
    twins.check_pages()


def test_parts_that_begin_elsewhere_have_slots_of_their_own(paged: Any) -> None:
    """Of one index, in parts of one shape: K's and V's rows lie side by side, and are not."""

    class Parts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k, self.v = [torch.randn(20, HEADS, DIM)], [torch.randn(20, HEADS, DIM)]

        def forward(self, x: Tensor, at: Tensor) -> Tensor:
            k, v = self.k[0][2:6], self.v[0][3:7]
            k[at], v[at] = x, x * 2
            return k[at] + v[at - 1]

    twins = paged(Parts(), pages=5)
    for at in ([1, 0, 3], [2, 3, 1]):
        twins.check(torch.randn(3, HEADS, DIM), torch.tensor(at), exact=True)
    twins.check_pages()


def test_rows_and_slots_that_change_between_two_writes_are_written_as_they_were(paged: Any) -> None:
    class Changing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k, self.v = [torch.randn(20, HEADS, DIM)], [torch.randn(20, HEADS, DIM)]

        def forward(self, x: Tensor, at: Tensor) -> tuple[Tensor, ...]:
            x, at, (k,), (v,) = x.clone(), at.clone(), self.k, self.v
            k[at] = x
            v[at] = x
            x.mul_(2)
            at.add_(1)
            k[at] = x
            x.add_(1)
            return k[at] + v[at - 1], x, at

    twins = paged(Changing(), pages=5)
    for at in ([1, 7, 2], [18, 0, 9]):
        twins.check(torch.randn(3, HEADS, DIM), torch.tensor(at), exact=True)
    twins.check_pages()
