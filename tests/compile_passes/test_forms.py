"""Every way to write a cache, with every way to read it, gives what eager gives on the layer-major model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

BATCH, HEADS, DIM, PAGE, SLOTS, SEQ = 2, 2, 8, 4, 20, 14


def both(one: Callable[..., Any]) -> Callable[..., None]:
    """A write of one cache, done to K and V."""

    def write(k: Tensor, v: Tensor, x: Tensor, y: Tensor, *rest: Tensor) -> None:
        one(k, x, *rest)
        one(v, y, *rest)

    return write


def _set(cache: Tensor, key: Any, value: Tensor) -> None:
    cache[key] = value


def _scatter(cache: Tensor, dim: int, at: Tensor, x: Tensor) -> None:
    shape = [1] * x.dim()
    shape[dim] = -1
    cache.scatter_(dim, at.view(shape).expand(x.shape), x)


# x is [T, H, D] (by slot) or [B, H, T, D] (batched); at are slots or positions, the same for K and V.
WRITES: dict[str, dict[str, Callable[..., Any]]] = {
    "SHD": {
        "index": lambda c, x, at: _set(c, at, x),
        "negative index": lambda c, x, at: _set(c, at - SLOTS, x),
        "two indices": lambda c, x, at: _set(c.view(-1, PAGE, HEADS, DIM), (at // PAGE, at % PAGE), x),
        "flat rows": lambda c, x, at: _set(c.view(SLOTS, HEADS * DIM), at, x.view(-1, HEADS * DIM)),
        "index_copy": lambda c, x, at: c.index_copy_(0, at, x),
        "slice": lambda c, x, at: _set(c, slice(5, 5 + x.shape[0]), x),
        "slice copy": lambda c, x, at: c[2 : 2 + 2 * x.shape[0] : 2].copy_(x),
        "scatter": lambda c, x, at: _scatter(c, 0, at, x),
        "one slot": lambda c, x, at: _set(c, 7, x[0]),
        "one slot of a tensor": lambda c, x, at: c.index_put_((at[0],), x[1]),
        "broadcast": lambda c, x, at: _set(c, at, x[:1]),
    },
    "PSHD": {
        "two indices": lambda c, x, at: _set(c, (at // PAGE, at % PAGE), x),
        "flat slots": lambda c, x, at: _set(c.view(-1, HEADS, DIM), at, x),
        "flat index_copy": lambda c, x, at: c.flatten(0, 1).index_copy_(0, at, x),
        "one page": lambda c, x, at: _set(c, (3, slice(0, x.shape[0])), x),
        "page by page": lambda c, x, at: _set(c, at[:2] % 5, x[:2, None].expand(-1, PAGE, -1, -1)),
    },
    "BHSD": {
        "index_copy": lambda c, x, at: c.index_copy_(2, at, x),
        "index": lambda c, x, at: _set(c, (slice(None), slice(None), at), x),
        "negative index": lambda c, x, at: _set(c, (slice(None), slice(None), at - SEQ), x),
        "slice": lambda c, x, at: _set(c, (slice(None), slice(None), slice(3, 3 + x.shape[2])), x),
        "slice copy": lambda c, x, at: c[:, :, 6 : 6 + x.shape[2]].copy_(x),
        "scatter": lambda c, x, at: _scatter(c, 2, at, x),
        "a position a row": lambda c, x, at: _set(
            c, (torch.arange(BATCH)[:, None], slice(None), torch.stack([at, at - 1])), x.transpose(1, 2)
        ),
        "one row": lambda c, x, at: _set(c[1], (slice(None), at), x[1]),
        "one token": lambda c, x, at: _set(c, (slice(None), slice(None), 5), x[:, :, 0]),
        "one token of a row": lambda c, x, at: _set(c, (1, slice(None), 6), x[1, :, 0]),
        "one token of a tensor": lambda c, x, at: torch.ops.aten.index_put_(c, [None, None, at[1]], x[:, :, 1]),
        "transposed": lambda c, x, at: _set(c.transpose(1, 2), (slice(None), at), x.transpose(1, 2)),
    },
    "BSHD": {
        "index_copy": lambda c, x, at: c.index_copy_(1, at, x.transpose(1, 2)),
        "index": lambda c, x, at: _set(c, (slice(None), at), x.transpose(1, 2)),
        "slice": lambda c, x, at: _set(c, (slice(None), slice(3, 3 + x.shape[2])), x.transpose(1, 2)),
        "scatter": lambda c, x, at: _scatter(c, 1, at, x.transpose(1, 2)),
        "a position a row": lambda c, x, at: _set(
            c, (torch.arange(BATCH)[:, None], torch.stack([at, at - 1])), x.transpose(1, 2)
        ),
        "flat": lambda c, x, at: _set(
            c.view(-1, HEADS, DIM), (torch.arange(BATCH)[:, None] * SEQ + at).flatten(), x.transpose(1, 2).flatten(0, 1)
        ),
    },
}


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]


def _repeat_kv(x: Tensor, n: int) -> Tensor:
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, n, s, d).reshape(b, h * n, s, d)


def _query(out: Tensor, heads: int = HEADS, batch: int = 1) -> Tensor:
    """Five query rows made of whatever the layer before put out."""
    seed = out.float().mean()
    grid = torch.arange(batch * heads * 5 * DIM, dtype=torch.float32).view(batch, heads, 5, DIM)
    return torch.sin(grid + seed)


def _mask(s: int) -> Tensor:
    return (torch.arange(5)[:, None] * 3 + torch.arange(s)) % 4 != 0


def _attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), **options).transpose(-3, -2).contiguous()


READS: dict[str, dict[str, Callable[..., Tensor]]] = {
    "SHD": {
        "gather": lambda k, v, out, at: k[at] + v[at],
        "gather in two dimensions": lambda k, v, out, at: k[at.view(1, -1).expand(3, -1)] * v[at],
        "two indices": lambda k, v, out, at: k.view(-1, PAGE, HEADS, DIM)[at // PAGE, at % PAGE] - v[-at],
        "index_select": lambda k, v, out, at: k.index_select(0, at) + v.index_select(0, at),
        "gather op": lambda k, v, out, at: k.gather(0, at.view(-1, 1, 1).expand(-1, HEADS, DIM)) + v[at],
        "attention over a gather": lambda k, v, out, at: _attend(_query(out), _heads_first(k[at]), _heads_first(v[at])),
        "attention over a slice": lambda k, v, out, at: _attend(
            _query(out), _heads_first(k[4:17]), _heads_first(v[4:17])
        ),
        "attention of one sequence": lambda k, v, out, at: _attend(
            _query(out)[0], k[:17].transpose(0, 1), v[:17].transpose(0, 1), attn_mask=_mask(SLOTS)[:, :17]
        ),
    },
    "PSHD": {
        "two indices": lambda k, v, out, at: k[at // PAGE, at % PAGE] + v[at // PAGE, at % PAGE],
        "whole pages": lambda k, v, out, at: k[at % 5] + v[at % 5],
        "flat": lambda k, v, out, at: k.flatten(0, 1)[at] + v.view(-1, HEADS, DIM).index_select(0, at),
        "attention": lambda k, v, out, at: _attend(
            _query(out), _heads_first(k.flatten(0, 1)[:18]), _heads_first(v.flatten(0, 1)[:18]), is_causal=True
        ),
    },
    "BHSD": {
        "gather": lambda k, v, out, at: k[:, :, at] + v[:, :, at],
        "index_select": lambda k, v, out, at: k.index_select(2, at) + v.index_select(2, at),
        "gather op": lambda k, v, out, at: (
            k.gather(2, at.view(1, 1, -1, 1).expand(BATCH, HEADS, -1, DIM)) + v[:, :, at]
        ),
        "attention": lambda k, v, out, at: _attend(_query(out, HEADS, BATCH), k, v, scale=0.3),
        "causal": lambda k, v, out, at: _attend(_query(out, HEADS, BATCH), k, v, is_causal=True),
        "causal, fewer keys": lambda k, v, out, at: _attend(
            _query(out, HEADS, BATCH), k[:, :, :3], v[:, :, :3], is_causal=True
        ),
        "bool mask": lambda k, v, out, at: _attend(_query(out, HEADS, BATCH), k, v, attn_mask=_mask(SEQ)),
        "float mask": lambda k, v, out, at: _attend(
            _query(out, HEADS, BATCH), k, v, attn_mask=torch.where(_mask(SEQ), 0.5, -torch.inf)[None, None]
        ),
        "broadcast mask": lambda k, v, out, at: _attend(
            _query(out, HEADS, BATCH), k, v, attn_mask=torch.tensor([0.5, 1.0]).view(BATCH, 1, 1, 1)
        ),
        "repeat_kv": lambda k, v, out, at: _attend(
            _query(out, 6, BATCH), _repeat_kv(k, 3), _repeat_kv(v, 3), attn_mask=_mask(SEQ)
        ),
        "repeat_interleave": lambda k, v, out, at: _attend(
            _query(out, 6, BATCH), k.repeat_interleave(3, dim=1), v.repeat_interleave(3, dim=1), attn_mask=_mask(SEQ)
        ),
        "enable_gqa": lambda k, v, out, at: _attend(_query(out, 6, BATCH), k, v, enable_gqa=True),
        "a slice": lambda k, v, out, at: _attend(_query(out, HEADS, BATCH), k[:, :, :9], v[:, :, :9]),
        "a slice, a part of a mask": lambda k, v, out, at: _attend(
            _query(out, 6, BATCH), _repeat_kv(k[:, :, :9], 3), _repeat_kv(v[:, :, :9], 3), attn_mask=_mask(SEQ)[:, :9]
        ),
        "a row without its batch, a mask a head": lambda k, v, out, at: _attend(
            _query(out, 6)[0],
            k[1, :, :9].repeat_interleave(3, dim=0),
            v[1, :, :9].repeat_interleave(3, dim=0),
            attn_mask=torch.where(_mask(9), torch.arange(6.0)[:, None, None], -torch.inf),
        ),
        "pages from the second on": lambda k, v, out, at: _attend(
            _query(out, HEADS, BATCH), k[:, :, PAGE:], v[:, :, PAGE:]
        ),
        "one row": lambda k, v, out, at: _attend(_query(out), k[1:], v[1:]),
        "a view that expects its strides": lambda k, v, out, at: F.scaled_dot_product_attention(
            _query(out, HEADS, BATCH), k, v, attn_mask=_mask(SEQ)
        ).flatten(1),
    },
    "BSHD": {
        "gather": lambda k, v, out, at: k[:, at] + v[:, at],
        "flat": lambda k, v, out, at: k.view(-1, HEADS, DIM)[at * 2] + v.flatten(0, 1)[at * 2],
        "a position a row": lambda k, v, out, at: k[torch.arange(BATCH), at[:2]] + v[torch.arange(BATCH), at[:2]],
        "attention": lambda k, v, out, at: _attend(
            _query(out, HEADS, BATCH), k.transpose(1, 2), v.transpose(1, 2), attn_mask=_mask(SEQ)
        ),
        "repeat_kv": lambda k, v, out, at: _attend(
            _query(out, 4, BATCH), _repeat_kv(k.transpose(1, 2), 2), _repeat_kv(v.transpose(1, 2), 2)
        ),
    },
}
CASES = [(form, read) for form in READS for read in READS[form]]
CALLS = {"by slot": ([3, 11, 0], [19, 6, 7]), "batched": ([4, 9, 2], [13, 1, 7])}


def rows(form: str) -> Tensor:
    return torch.randn(BATCH, HEADS, 3, DIM) if "B" in form else torch.randn(3, HEADS, DIM)


def calls(form: str) -> list[tuple[Tensor, Tensor]]:
    return [(rows(form), torch.tensor(at)) for at in CALLS["batched" if "B" in form else "by slot"]]


@pytest.mark.parametrize(("form", "read"), CASES, ids=["-".join(c) for c in CASES])
def test_every_write_form_before_a_read_form_is_eagers(paged: Any, form: str, read: str) -> None:
    """One layer a write form, each followed by this read; outputs of every layer and whole caches are compared."""
    writes = [both(one) for one in WRITES[form].values()]
    twins = paged(form=form, write=writes, read=READS[form][read])
    for x, at in calls(form):
        twins.check(x, at)
    twins.check_pages()
    report = twins.binding.report()
    assert (report.writes_rewritten, report.materialized) == (2 * len(writes), 0)
    assert report.reads_rewritten in (len(writes), 2 * len(writes))  # an attention reads K and V at once
    twins.binding.release()
    torch.testing.assert_close([*twins.model.k, *twins.model.v], [*twins.stock.k, *twins.stock.v], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("form", ["SHD", "BHSD"])
def test_caches_of_other_dtypes_are_moved_bit_for_bit(paged: Any, form: str, dtype: torch.dtype) -> None:
    def read(k: Tensor, v: Tensor, out: Tensor, at: Tensor) -> Tensor:
        return k[at].float() + v[at].float() if form == "SHD" else k[:, :, at].float() + v[:, :, at].float()

    def write(k: Tensor, v: Tensor, x: Tensor, y: Tensor, at: Tensor) -> None:
        for cache, rows in ((k, x), (v, y)):
            cache[3:6].copy_(rows) if form == "SHD" else cache[:, :, 3:6].copy_(rows)

    twins = paged(form=form, write=write, read=read, dtype=dtype)
    for x, at in calls(form):
        x.view(-1)[:4] = torch.tensor([1e30, -500.0, float("nan"), 1e-9])
        x.view(-1)[:4] = x.view(-1)[:4].clamp(-1e4, 1e4)
        with torch.no_grad():
            torch.testing.assert_close(twins.compiled(x, at), twins.stock(x, at), rtol=0, atol=0, equal_nan=True)
    twins.check_pages(tolerance=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_attention_reads_through_a_widening_cast_of_the_cache(paged: Any, dtype: torch.dtype) -> None:
    def write(k: Tensor, v: Tensor, x: Tensor, y: Tensor, at: Tensor) -> None:
        k[:, :, 3:6], v[:, :, 3:6] = x.to(k.dtype), y.to(v.dtype)

    twins = paged(form="BHSD", write=write, read=READS["BHSD"]["repeat_kv"], dtype=dtype)
    for x, at in calls("BHSD"):
        twins.check(x, at)
    assert twins.binding.report().reads_rewritten == 2


@pytest.mark.parametrize(
    ("dtype", "to"), [(torch.float16, torch.bfloat16), (torch.float32, torch.float16)], ids=["as wide", "narrower"]
)
def test_attention_through_a_cast_that_loses_precision_is_refused(
    paged: Any, dtype: torch.dtype, to: torch.dtype
) -> None:
    def read(k: Tensor, v: Tensor, out: Tensor, at: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(_query(out, HEADS, BATCH).to(to), k.to(to), v.to(to)).float()

    twins = paged(form="BHSD", write=lambda k, v, *_: (k.zero_(), v.zero_()), read=read, dtype=dtype)
    with torch.no_grad(), pytest.raises(Exception, match=f"is cast from {dtype} to {to}"):
        twins.compiled(*calls("BHSD")[0])
