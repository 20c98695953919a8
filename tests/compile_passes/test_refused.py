"""What has no exact counterpart on pages is refused before anything is written, and the message names the line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

import pm_ops
from pm_ops.compile_passes import RewriteError, register_store_op

HEADS, DIM = 2, 8


def gather(k: Tensor, v: Tensor, out: Tensor, at: Tensor) -> Tensor:
    return k[at] + v[at]


def write(k: Tensor, v: Tensor, x: Tensor, y: Tensor, at: Tensor) -> None:
    k[at], v[at] = x, y


def mul_(k: Tensor, v: Tensor, x: Tensor, y: Tensor, at: Tensor) -> None:
    k.mul_(2)  # this line


def add_index(k: Tensor, v: Tensor, x: Tensor, y: Tensor, at: Tensor) -> None:
    k.index_put_((at,), x, accumulate=True)  # this line


def mask_write(k: Tensor, v: Tensor, x: Tensor, y: Tensor, at: Tensor) -> None:
    k[torch.arange(k.shape[0]) == at[0]] = x[:1]  # this line


def where_write(k: Tensor, v: Tensor, x: Tensor, y: Tensor, at: Tensor) -> None:
    k.copy_(torch.where(at.sum() > 3, k, -k))  # this line


def masked_fill(k: Tensor, v: Tensor, x: Tensor, y: Tensor, at: Tensor) -> None:
    k.masked_fill_(at.sum() > 3, 0.0)  # this line


def part_of_heads(k: Tensor, v: Tensor, x: Tensor, y: Tensor, at: Tensor) -> None:
    k[at, :1] = x[:, :1]  # this line


def part_of_a_head(k: Tensor, v: Tensor, x: Tensor, y: Tensor, at: Tensor) -> None:
    k[:, :, 2:][at] = x[:, :, 2:]  # this line


def index_heads(k: Tensor, v: Tensor, x: Tensor, y: Tensor, at: Tensor) -> None:
    k[:3].index_copy_(1, at[:2] % 2, x)  # this line


def uneven_scatter(k: Tensor, v: Tensor, x: Tensor, y: Tensor, at: Tensor) -> None:
    k.scatter_(0, at.view(-1, 1, 1).repeat(1, HEADS, DIM), x)  # this line


def expanded_write(k: Tensor, v: Tensor, x: Tensor, y: Tensor, at: Tensor) -> None:
    k[0:1].expand(3, -1, -1)[at % 3] = x  # this line


def from_another_cache(k: Tensor, v: Tensor, x: Tensor, y: Tensor, at: Tensor) -> None:
    k[0:3] = v[3:6]  # this line


def slice_scatter(k: Tensor, v: Tensor, x: Tensor, y: Tensor, at: Tensor) -> None:
    k.copy_(k.slice_scatter(x, 0, 0, 3))  # this line


def bits(k: Tensor, v: Tensor, x: Tensor, y: Tensor, at: Tensor) -> None:
    k.view(torch.int32)[at] = 0  # this line


WRITES = [
    mul_,
    add_index,
    mask_write,
    where_write,
    masked_fill,
    part_of_heads,
    part_of_a_head,
    index_heads,
    uneven_scatter,
    expanded_write,
    from_another_cache,
    slice_scatter,
    bits,
]


@pytest.mark.parametrize("form", WRITES, ids=lambda f: f.__name__)
def test_a_write_that_is_not_exact_is_refused(paged: Any, form: Callable[..., None]) -> None:
    twins = paged(form="SHD", write=form, read=gather)
    before = twins.pool.buffer.clone()
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match="# this line") as raised:
        twins.compiled(torch.randn(3, HEADS, DIM), torch.tensor([1, 7, 2]))
    assert isinstance(raised.value.inner_exception, RewriteError), "as page_major_backend says"
    assert "test_refused.py" in str(raised.value)
    assert torch.equal(twins.pool.buffer, before)
    assert len(twins.binding.report().refused) == 1
    assert "refused:" in str(twins.binding.report())


def test_integers_written_to_a_cache_are_refused(paged: Any) -> None:
    class Quantised(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k, self.v = ([torch.zeros(20, HEADS, DIM, dtype=torch.int8)] for _ in range(2))

        def forward(self, x: Tensor, at: Tensor) -> Tensor:
            self.k[0][at] = x  # this line
            return at + 1

    twins = paged(Quantised(), pages=5, dtype=torch.int8)
    with torch.no_grad(), pytest.raises(Exception, match="RewriteError: .*int8.*register_store_op[\\s\\S]*# this line"):
        twins.compiled(torch.ones(3, HEADS, DIM, dtype=torch.int8), torch.tensor([1, 7, 2]))


BY_HAND: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "an operator": ("SHD", "buffer", lambda binding, view, at: pm_ops.load_kv(binding.pool, 0, at, "key")),  # this line
    "a view": ("SHD", "buffer", lambda binding, view, at: view[at].sum()),  # this line
    "a write through a view": ("SHD", "buffer", lambda binding, view, at: view.zero_()),  # this line
    "the table": ("BHSD", "page table", lambda binding, view, at: binding.page_table.sum()),  # this line
}


@pytest.mark.parametrize("case", BY_HAND)
def test_the_pool_by_hand_beside_its_caches_is_refused(paged: Any, case: str) -> None:
    """A write to a cache may be recorded later than it stands, with its partner; a graph has no input twice."""
    form, used, touch = BY_HAND[case]
    bound: list[Any] = []

    def by_hand(k: Tensor, v: Tensor, x: Tensor, y: Tensor, at: Tensor) -> None:
        k.zero_()
        touch(*bound, at)

    twins = paged(form=form, write=by_hand, read=gather)
    bound += [twins.binding, twins.pool.view(0, "key")]
    message = (
        f"(?s)RewriteError: beside bound caches the model reads or writes the pool .*, here the {used};.*# this line"
    )
    with torch.no_grad(), pytest.raises(Exception, match=message):
        twins.compiled(torch.randn(3, HEADS, DIM), torch.tensor([1, 7, 2]))


def dense_math(k: Tensor, v: Tensor, out: Tensor, at: Tensor) -> Tensor:
    return k * 2 + v  # this line


def matmul(k: Tensor, v: Tensor, out: Tensor, at: Tensor) -> Tensor:
    return torch.einsum("shd,thd->hst", k[:5], v)  # this line


def mask_read(k: Tensor, v: Tensor, out: Tensor, at: Tensor) -> Tensor:
    return k[(torch.arange(k.shape[0]) % 2).bool()[:, None].expand(-1, HEADS)] + 0  # this line


def heads_tiled(k: Tensor, v: Tensor, out: Tensor, at: Tensor) -> Tensor:
    q = torch.ones(1, 2 * HEADS, 5, DIM)
    k, v = (c.transpose(0, 1)[None].repeat(1, 2, 1, 1) for c in (k, v))
    return F.scaled_dot_product_attention(q, k, v)  # this line


def unaligned(k: Tensor, v: Tensor, out: Tensor, at: Tensor) -> Tensor:
    k, v = (c[3:].transpose(0, 1)[None] for c in (k, v))
    return F.scaled_dot_product_attention(torch.ones(1, HEADS, 5, DIM), k, v)  # this line


def other_tokens(k: Tensor, v: Tensor, out: Tensor, at: Tensor) -> Tensor:
    k, v = k[:8].transpose(0, 1)[None], v[4:12].transpose(0, 1)[None]
    return F.scaled_dot_product_attention(torch.ones(1, HEADS, 5, DIM), k, v)  # this line


def half_cached(k: Tensor, v: Tensor, out: Tensor, at: Tensor) -> Tensor:
    k, v = k[:8].transpose(0, 1)[None], torch.ones(1, HEADS, 8, DIM)
    return F.scaled_dot_product_attention(torch.ones(1, HEADS, 5, DIM), k, v)  # this line


def other_ranks(k: Tensor, v: Tensor, out: Tensor, at: Tensor) -> Tensor:
    k, v = k[:8].transpose(0, 1)[None], v[:8].transpose(0, 1)[None]
    return F.scaled_dot_product_attention(torch.ones(HEADS, 5, DIM), k, v)  # this line


def stale_copy(k: Tensor, v: Tensor, out: Tensor, at: Tensor) -> Tensor:
    k2, v2 = (c[:8].transpose(0, 1)[None].repeat_interleave(2, 1) for c in (k, v))
    k[at] = torch.ones(at.shape[0], HEADS, DIM)
    return F.scaled_dot_product_attention(torch.ones(1, 2 * HEADS, 5, DIM), k2, v2)  # this line


def leaving_view(k: Tensor, v: Tensor, out: Tensor, at: Tensor) -> Tensor:
    return k[2:5]


READS = [
    dense_math, matmul, mask_read, heads_tiled, unaligned, other_tokens, other_ranks, half_cached, stale_copy,
]  # fmt: skip


@pytest.mark.parametrize("form", READS, ids=lambda f: f.__name__)
def test_a_read_without_a_rule_is_refused(paged: Any, form: Callable[..., Tensor]) -> None:
    twins = paged(form="SHD", write=write, read=form)
    with torch.no_grad(), pytest.raises(Exception, match="RewriteError") as raised:
        twins.compiled(torch.randn(3, HEADS, DIM), torch.tensor([1, 7, 2]))
    assert "# this line" in str(raised.value) or form is heads_tiled  # there the line is the copy's
    assert "test_refused.py" in str(raised.value)


@pytest.mark.parametrize("form", [dense_math, matmul, heads_tiled, unaligned, other_tokens, other_ranks, half_cached])
def test_materialize_on_request_is_eagers(paged: Any, form: Callable[..., Tensor]) -> None:
    twins = paged(form="SHD", write=write, read=form, on_unsupported_read="materialize")
    for at in ([1, 7, 2], [19, 0, 4]):
        twins.check(torch.randn(3, HEADS, DIM), torch.tensor(at))
    twins.check_pages()
    assert twins.binding.report().materialized >= 2


def scores_by_hand(k: Tensor, v: Tensor, out: Tensor, at: Tensor) -> Tensor:
    query = out.mean() * torch.arange(1.0, 1 + DIM).expand(2, HEADS, 3, DIM)
    return torch.softmax(query @ k.transpose(2, 3), -1) @ v


def heads_and_tokens_flat(k: Tensor, v: Tensor, out: Tensor, at: Tensor) -> Tensor:
    return k.flatten(0, 1) * 2 - v.flatten(0, 1)[1:].sum()


def tokens_and_heads_flat(k: Tensor, v: Tensor, out: Tensor, at: Tensor) -> Tensor:
    return k.flatten(-3, -2) * 2 - v.flatten(-3, -2)[..., 1:, :].sum()


WHOLE: list[tuple[str, Callable[..., Any], Callable[..., Tensor]]] = [
    ("BHSD", lambda k, v, x, y, at: (k.index_copy_(2, at, x), v.index_copy_(2, at, y)), scores_by_hand),
    ("BHSD", lambda k, v, x, y, at: k.index_copy_(2, at, x), heads_and_tokens_flat),
    ("BSHD", lambda k, v, x, y, at: v.index_copy_(1, at, x.transpose(1, 2)), tokens_and_heads_flat),
    (
        "PSHD",
        lambda k, v, x, y, at: k.view(-1, HEADS, DIM).index_copy_(0, at, x[0].transpose(0, 1)),
        tokens_and_heads_flat,
    ),
]


@pytest.mark.parametrize(("form", "write", "read"), WHOLE, ids=lambda x: getattr(x, "__name__", x))
def test_a_cache_whose_axes_a_view_mixes_is_materialized_whole(
    paged: Any, form: str, write: Callable[..., Any], read: Callable[..., Tensor]
) -> None:
    """As attention by hand does, which multiplies matrices of all sequences and heads."""
    twins = paged(form=form, write=write, read=read, on_unsupported_read="materialize")
    for at in ([1, 7, 2], [13, 0, 4]):
        twins.check(torch.randn(2, HEADS, 3, DIM), torch.tensor(at))
    twins.check_pages()
    assert "load_kv of the whole cache" in str(twins.binding.report())


def expanded(k: Tensor, v: Tensor, out: Tensor, at: Tensor) -> Tensor:
    k, v = (c[:, None].expand(-1, 3, -1, -1) for c in (k, v))
    return k.clone().view(-1) + v.double().as_strided((960,), (1,))


def test_what_a_materialized_read_gives_lies_in_memory_as_eagers_does(paged: Any) -> None:
    """Code behind it looks at that in another shape, or by strides of its own."""
    twins = paged(form="SHD", write=write, read=expanded, on_unsupported_read="materialize")
    twins.check(torch.randn(3, HEADS, DIM), torch.tensor([1, 7, 2]))


def test_a_copy_between_caches_is_materialized_on_request(paged: Any) -> None:
    twins = paged(form="SHD", write=from_another_cache, read=gather, on_unsupported_read="materialize")
    twins.check(torch.randn(3, HEADS, DIM), torch.tensor([1, 7, 2]))
    twins.check_pages()


@pytest.mark.parametrize("form", [stale_copy, mask_read], ids=lambda f: f.__name__)
def test_what_materializing_would_get_wrong_is_still_refused(paged: Any, form: Callable[..., Tensor]) -> None:
    twins = paged(form="SHD", write=write, read=form, on_unsupported_read="materialize")
    with torch.no_grad(), pytest.raises(Exception, match="RewriteError"):
        twins.compiled(torch.randn(3, HEADS, DIM), torch.tensor([1, 7, 2]))


def test_a_view_of_a_cache_does_not_leave_the_graph(paged: Any) -> None:
    class Leaks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k, self.v = [torch.randn(20, HEADS, DIM)], [torch.randn(20, HEADS, DIM)]

        def forward(self, x: Tensor, at: Tensor) -> Tensor:
            self.k[0][at] = x
            return self.k[0][2:5]

    twins = paged(Leaks(), pages=5)
    with torch.no_grad(), pytest.raises(Exception, match="leaves the compiled graph"):
        twins.compiled(torch.randn(3, HEADS, DIM), torch.tensor([1, 7, 2]))


def test_gradients_are_refused(paged: Any) -> None:
    twins = paged(form="SHD", write=write, read=gather)
    with pytest.raises(Exception, match=r"torch\.no_grad"):
        twins.compiled(torch.randn(3, HEADS, DIM, requires_grad=True), torch.tensor([1, 7, 2]))


def test_gradients_of_what_is_only_written_are_refused(paged: Any) -> None:
    """No output has one, but eager would keep it in the cache, for what reads that."""
    twins = paged(form="SHD", write=write, read=gather)

    def prefill(x: Tensor, at: Tensor) -> Tensor:
        twins.model.k[0][2:5] = x * 2
        return at + 1

    compiled = torch.compile(prefill, backend=twins.backend, fullgraph=True)
    x, at = torch.randn(3, HEADS, DIM), torch.tensor([1])
    with pytest.raises(Exception, match=r"torch\.no_grad"):
        compiled(x.clone().requires_grad_(), at)
    compiled(x, at)
    with torch.no_grad():
        compiled(x.clone().requires_grad_(), at)


def test_nothing_rewritten_is_an_error_unless_asked_otherwise(paged: Any) -> None:
    class Other(torch.nn.Module):
        """Keeps copies of the caches that are bound, as a model that was deep-copied would."""

        def __init__(self) -> None:
            super().__init__()
            self.k, self.v = [torch.randn(20, HEADS, DIM)], [torch.randn(20, HEADS, DIM)]
            self.own = self.k[0].clone()

        def forward(self, x: Tensor, at: Tensor) -> Tensor:
            self.own[at] = x
            return self.own.sum()

    x, at = torch.randn(3, HEADS, DIM), torch.tensor([1, 7, 2])
    with torch.no_grad(), pytest.raises(Exception, match="nothing was rewritten"):
        paged(Other(), pages=5).compiled(x, at)
    relaxed = paged(Other(), pages=5, strict=False)
    relaxed.check(x, at)
    report = relaxed.binding.report()
    assert (report.writes_rewritten, report.reads_rewritten) == (0, 0)
    assert "no write seen yet of L0 key, L0 value" in str(report)


def test_bad_options_are_refused(paged: Any) -> None:
    with pytest.raises(ValueError, match="on_unsupported_read='copy'"):
        paged(form="SHD", write=write, read=gather, on_unsupported_read="copy")
    for inner in ("inductr", None, 3):
        with pytest.raises(ValueError, match=f"inner={inner!r} is no backend .*, or one of .*eager.* inductor"):
            paged(form="SHD", write=write, read=gather, inner=inner)
    with pytest.raises(ValueError, match="expected an operator"):
        register_store_op("store", lambda: None)
    assert issubclass(RewriteError, RuntimeError)
