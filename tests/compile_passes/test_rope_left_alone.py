"""Graphs in which a rotation and a store may not become one: fuse_rope=True leaves them as they are, and says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rotary_forms import FORMS, llama, qwen3
from torch import Tensor

HEADS, DIM, SLOTS = 2, 8, 20
INV_FREQ, Q_WEIGHT, K_WEIGHT = FORMS["qwen3"].tensors
Body = Callable[..., Tensor]
CASES: dict[str, tuple[str, Body]] = {}
SEEN: list[Tensor] = []

_library = torch.library.Library("pm_ops_test_rope", "DEF")
_library.define("look(Tensor x) -> ()")
_library.impl("look", lambda x: SEEN.append(x.clone()), "CompositeExplicitAutograd")
torch.library.register_fake("pm_ops_test_rope::look", lambda x: None, lib=_library)


class Layer(torch.nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.k, self.v = [torch.randn(SLOTS, HEADS, DIM)], [torch.randn(SLOTS, HEADS, DIM)]
        self.body = body

    def forward(self, *args: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = self.body(self.k[0], self.v[0], *args)
        return out, self.k[0][args[3]], self.v[0][args[3]]


def case(reason: str) -> Callable[[Body], Body]:
    def register(body: Body) -> Body:
        CASES[body.__name__] = (reason, body)
        return body

    return register


@case("is changed between rotation and store")
def key_scaled_before_the_store(k_cache, v_cache, q, k, v, slots, positions):
    q, k = llama(q, k, positions, INV_FREQ)
    k_cache[slots], v_cache[slots] = k * 2, v
    return q


@case("is changed between rotation and store")
def key_written_in_place_before_the_store(k_cache, v_cache, q, k, v, slots, positions):
    q, k = llama(q, k, positions, INV_FREQ)
    k.mul_(2)
    k_cache[slots], v_cache[slots] = k, v
    return q


@case("no rotary embedding that this pass knows")
def input_written_in_place_after_the_rotation(k_cache, v_cache, q, k, v, slots, positions):
    x = k + 1
    q, k = llama(q, x, positions, INV_FREQ)
    x.zero_()
    k_cache[slots], v_cache[slots] = k, v
    return q


@case("is changed between rotation and store")
def stored_under_a_condition(k_cache, v_cache, q, k, v, slots, positions):
    q, k = llama(q, k, positions, INV_FREQ)
    k_cache[slots], v_cache[slots] = torch.where(positions[:, None, None] > 3, k, k_cache[slots]), v
    return q


@case("is changed between rotation and store")
def key_rounded_on_the_way(k_cache, v_cache, q, k, v, slots, positions):
    q, k = llama(q, k, positions, INV_FREQ)
    k_cache[slots], v_cache[slots] = k.to(torch.float8_e4m3fn).float(), v
    return q


@case("no rotary embedding that this pass knows")
def products_of_a_coarser_type(k_cache, v_cache, q, k, v, slots, positions):
    cos, sin = FORMS["vllm_neox"].tensors[0][positions][:, None].chunk(2, -1)

    def rotate(x):
        a, b = x.bfloat16().chunk(2, -1)
        c, s = cos.bfloat16(), sin.bfloat16()
        return torch.cat(((a * c).float() - (b * s).float(), (b * c).float() + (a * s).float()), -1)

    q, k = rotate(q), rotate(k)
    k_cache[slots], v_cache[slots] = k, v
    return q


@case("K and V are stored apart")
def other_slots_for_values(k_cache, v_cache, q, k, v, slots, positions):
    q, k = llama(q, k, positions, INV_FREQ)
    k_cache[slots], v_cache[slots.flip(0)] = k, v
    return q


@case("K and V are stored apart")
def read_between_the_stores(k_cache, v_cache, q, k, v, slots, positions):
    q, k = llama(q, k, positions, INV_FREQ)
    k_cache[slots] = k
    v_cache[slots] = v + k_cache[slots]
    return q


@case("by the same angles")
def other_positions_for_the_query(k_cache, v_cache, q, k, v, slots, positions):
    q, _ = llama(q, k, slots, INV_FREQ)
    _, k = llama(q, k, positions, INV_FREQ)
    k_cache[slots], v_cache[slots] = k, v
    return q


@case("by the same angles")
def another_table_for_the_query(k_cache, v_cache, q, k, v, slots, positions):
    q, _ = llama(q, k, positions, INV_FREQ * 2)
    _, k = llama(q, k, positions, INV_FREQ)
    k_cache[slots], v_cache[slots] = k, v
    return q


@case("by the same angles")
def other_pairs_for_the_query(k_cache, v_cache, q, k, v, slots, positions):
    table = FORMS["vllm_neox"].tensors[0]
    q, _ = FORMS["vllm_gptj"].rotate(q, k, positions, table)
    _, k = FORMS["vllm_neox"].rotate(q, k, positions, table)
    k_cache[slots], v_cache[slots] = k, v
    return q


@case("no rotary embedding that this pass knows")
def halves_of_the_table_that_may_differ(k_cache, v_cache, q, k, v, slots, positions):
    cos, sin = FORMS["vllm_neox"].tensors[0][positions][:, None], FORMS["vllm_neox"].tensors[0][positions + 1][:, None]
    half = lambda x: torch.cat((-x[..., DIM // 2 :], x[..., : DIM // 2]), -1)  # noqa: E731
    q, k = q * cos + half(q) * sin, k * cos + half(k) * sin
    k_cache[slots], v_cache[slots] = k, v
    return q


@case("no rotary embedding that this pass knows")
def turned_the_other_way(k_cache, v_cache, q, k, v, slots, positions):
    cos, sin = FORMS["vllm_neox"].tensors[0][positions][:, None].chunk(2, -1)

    def back(x):
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos + b * sin, b * cos - a * sin), -1)

    q, k = back(q), back(k)
    k_cache[slots], v_cache[slots] = k, v
    return q


@case("no rotary embedding that this pass knows")
def cosines_of_each_head(k_cache, v_cache, q, k, v, slots, positions):
    cos, sin = FORMS["vllm_neox"].tensors[0][positions][:, None].chunk(2, -1)
    cos = cos * torch.arange(1.0, HEADS + 1)[:, None]

    def rotate(x, c):
        a, b = x.chunk(2, -1)
        return torch.cat((a * c - b * sin, b * c + a * sin), -1)

    q, k = rotate(q, cos.repeat(1, 2, 1)), rotate(k, cos)
    k_cache[slots], v_cache[slots] = k, v
    return q


@case("used before the store")
def query_that_reads_the_cache_before_the_store(k_cache, v_cache, q, k, v, slots, positions):
    q, k = llama(q, k, positions, INV_FREQ)
    found = q[:, :HEADS] * k_cache[slots.flip(0)]
    q_in_place = torch.zeros_like(q)
    q_in_place.add_(q)
    k_cache[slots], v_cache[slots] = k, v
    return found.sum(1, keepdim=True) + q_in_place


@case("computed from the rotated key or query")
def values_made_of_the_rotated_key(k_cache, v_cache, q, k, v, slots, positions):
    q, k = llama(q, k, positions, INV_FREQ)
    k_cache[slots], v_cache[slots] = k, v + k
    return q


@case("used before the store")
def query_joined_with_what_is_written_after(k_cache, v_cache, q, k, v, slots, positions):
    q, k = llama(q, k, positions, INV_FREQ)
    x = v + 1
    out = torch.cat([q, x], 1)
    x.zero_()
    k_cache[slots], v_cache[slots] = k, v
    return out


@case("used before the store")
def query_given_to_an_operator_without_results(k_cache, v_cache, q, k, v, slots, positions):
    q, k = llama(q, k, positions, INV_FREQ)
    torch.ops.pm_ops_test_rope.look(q)
    k_cache[slots], v_cache[slots] = k, v
    return q


@case("is rotated once more")
def key_rotated_twice(k_cache, v_cache, q, k, v, slots, positions):
    _, once = llama(q, k, positions, INV_FREQ)
    _, k = llama(q, once, positions, INV_FREQ)
    k_cache[slots], v_cache[slots] = k, v
    return once


@case("by the same angles")
def angles_written_in_place_between(k_cache, v_cache, q, k, v, slots, positions):
    angles = positions[:, None].float() * INV_FREQ

    def rotate(x):
        angles[:3].add_(1)  # a part, so that only how often that happened is known
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    q, k = rotate(q), rotate(k)
    k_cache[slots], v_cache[slots] = k, v
    return q


@case("by the same angles")
def another_scaling_for_the_query(k_cache, v_cache, q, k, v, slots, positions):
    cos, sin = FORMS["vllm_neox"].tensors[0][positions][:, None].chunk(2, -1)

    def rotate(x, scale):
        a, b = x.chunk(2, -1)
        c, s = cos * scale, sin * scale
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    q, k = rotate(q, 1.25), rotate(k, 1.0)
    k_cache[slots], v_cache[slots] = k, v
    return q


@case("is changed between rotation and store")
def key_stored_with_its_sign_bits_flipped(k_cache, v_cache, q, k, v, slots, positions):
    q, k = llama(q, k, positions, INV_FREQ)
    k_cache[slots], v_cache[slots] = torch._neg_view(k), v
    return q


@case("is changed between rotation and store")
def key_repeated_for_its_group(k_cache, v_cache, q, k, v, slots, positions):
    q, k = llama(q, k[:, :1], positions, INV_FREQ)
    k_cache[slots], v_cache[slots] = k.expand(-1, HEADS, -1), v
    return q


def arguments() -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    q, k, v = torch.randn(5, 2 * HEADS, DIM), torch.randn(5, HEADS, DIM), torch.randn(5, HEADS, DIM)
    return q, k, v, torch.tensor([3, 17, 4, 9, 0]), torch.tensor([2, 5, 3, 8, 30])


@pytest.mark.parametrize("name", CASES)
def test_a_graph_that_may_not_be_fused_is_left_alone_with_the_reason(paged: Any, name: str) -> None:
    reason, body = CASES[name]
    left, strict = paged(Layer(body), fuse_rope=True, strict=False), paged(Layer(body), fuse_rope=True)
    left.check(*arguments())
    left.check_pages()
    assert "rope_store_kv" not in left.backend.graphs[0]
    assert reason in str(left.binding.report()) and left.binding.report().fused == 0
    with torch.no_grad(), pytest.raises(Exception, match=rf"layer 0: [\s\S]*{reason}[\s\S]*_cache\[slots\]"):
        strict.compiled(*arguments())


def test_norms_that_differ_stay_in_front_of_the_fused_rotation(paged: Any) -> None:
    def body(k_cache, v_cache, q, k, v, slots, positions):
        q = q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + 1e-3) * Q_WEIGHT
        k = k * torch.rsqrt(k.pow(2).mean(-1, keepdim=True) + 1e-5) * K_WEIGHT
        q, k = llama(q, k, positions, INV_FREQ)
        k_cache[slots], v_cache[slots] = k, v
        return q

    twin = paged(Layer(body), fuse_rope=True)
    twin.check(*arguments(), exact=True)
    twin.check_pages(0)
    assert twin.backend.graphs[0].count("rsqrt.default(") == 2 and "rope_store_kv" in twin.backend.graphs[0]


def test_zeroing_a_cache_is_no_store_that_is_left(paged: Any) -> None:
    def body(k_cache, v_cache, q, k, v, slots, positions):
        k_cache.zero_()
        q, k = qwen3(q, k, positions, INV_FREQ, Q_WEIGHT, K_WEIGHT)
        k_cache[slots], v_cache[slots] = k, v
        return q

    twin = paged(Layer(body), fuse_rope=True)
    twin.check(*arguments())
    assert twin.binding.report().fused == 1 and not twin.binding.report().unfused


def test_an_operator_without_results_still_runs(paged: Any) -> None:
    """Even one that nothing else in the graph depends on, beside a store that is fused."""

    def body(k_cache, v_cache, q, k, v, slots, positions):
        torch.ops.pm_ops_test_rope.look(v)
        q, k = llama(q, k, positions, INV_FREQ)
        k_cache[slots], v_cache[slots] = k, v
        return q

    twin = paged(Layer(body), fuse_rope=True)
    SEEN.clear()
    twin.check(*arguments())
    assert len(SEEN) == 2 and torch.equal(*SEEN) and twin.binding.report().fused == 1


def test_a_key_stored_by_its_bits_is_left_alone(paged: Any) -> None:
    """A bfloat16 key in a float16 cache: the fused store would convert numbers."""

    def body(k_cache, v_cache, q, k, v, slots, positions):
        q, k = llama(q.bfloat16(), k.bfloat16(), positions, INV_FREQ)
        k_cache[slots], v_cache[slots] = k.view(torch.float16), v.half()
        return q

    layer = Layer(body)
    layer.k, layer.v = [t.half() for t in layer.k], [t.half() for t in layer.v]
    twin = paged(layer, fuse_rope=True, strict=False, dtype=torch.float16)
    twin.check(*arguments(), exact=True)
    twin.check_pages()
    assert twin.binding.report().fused == 0


def test_copies_that_leave_the_graph_share_no_memory(paged: Any) -> None:
    def body(k_cache, v_cache, q, k, v, slots, positions):
        q, k = llama(q, k, positions, INV_FREQ)
        k_cache[slots], v_cache[slots] = k, v
        return q, q.clone(), k, k.clone()

    twin = paged(Layer(body), fuse_rope=True)
    twin.check(*arguments())
    with torch.no_grad():
        found = twin.compiled(*arguments())[0]
    assert twin.binding.report().fused == 1
    assert len({t.untyped_storage().data_ptr() for t in found}) == 4


def test_another_pools_stores_are_none_of_this_pass(paged: Any) -> None:
    plane, other = [0, 512, 64, 32, 5], torch.zeros(5 * 512, dtype=torch.uint8)

    def body(k_cache, v_cache, q, k, v, slots, positions):
        torch.ops.pm_ops.store_kv(other, v, None, slots, plane, None, 4, torch.float32, None)
        q, k = llama(q, k, positions, INV_FREQ)
        k_cache[slots], v_cache[slots] = k, v
        return q

    twin = paged(Layer(body), fuse_rope=True)
    twin.check(*arguments())
    twin.check_pages()
    assert twin.backend.graphs[0].count("rope_store_kv.default") == 1
    assert bool(other.any())


def test_no_tokens_are_no_failure(paged: Any) -> None:
    def body(k_cache, v_cache, q, k, v, slots, positions):
        q, k = llama(q, k, positions, INV_FREQ)
        k_cache[slots], v_cache[slots] = k, v
        return q

    twin = paged(Layer(body), fuse_rope=True)
    twin.check(*(a[:0] for a in arguments()))
    twin.check(*arguments())
    twin.check_pages()
    assert twin.binding.report().fused == 1 and not twin.binding.report().unfused
