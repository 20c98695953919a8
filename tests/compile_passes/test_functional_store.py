"""RopeStorePass on programs that call our own store: ``store_kv`` behind a rotation becomes ``rope_store_kv``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from rotary_forms import DIM, FORMS
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import reorder_for_locality

import pm_ops
from pm_ops.compile_passes import RopeStorePass
from pm_ops.compile_passes.functional_store import IN_PLACE

HEADS, LAYERS, TOKENS, PAGE = 2, 2, 5, 4
FORM = FORMS["vllm_neox"]
STORE, ROPE_STORE = IN_PLACE.values()


def pool_of(layers: int = LAYERS) -> pm_ops.PagePool:
    pool = pm_ops.PagePool(pm_ops.page_major(layers, HEADS, DIM, PAGE, torch.float32), 6)
    pool.buffer.view(torch.float32).normal_()
    return pool


class Model(torch.nn.Module):
    """Layers of a model that was written for pages; ``change`` is done to keys between their rotation and the store.

    A token's position is its slot, too; ``advance``: the next step's are written in place of them in the end.
    """

    def __init__(
        self, pools: list[pm_ops.PagePool], change: Callable[[Tensor], Tensor], read: bool, advance: bool
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = [torch.randn(6, 4 * HEADS * DIM) * 0.3 for _ in range(LAYERS)]
        self.pools, self.change, self.read, self.advance = pools, change, read, advance
        self.table, self.lens = torch.tensor([[3, 1]]), torch.tensor([TOKENS])

    def forward(self, x: Tensor, positions: Tensor, *tensors: Tensor) -> Tensor:
        for layer, weight in enumerate(self.weights):
            pool, index = self.pools[layer % len(self.pools)], layer // len(self.pools)
            q, k, v = (x @ weight).split([2 * HEADS * DIM, HEADS * DIM, HEADS * DIM], -1)
            q, k, v = (t.unflatten(-1, (-1, DIM)) for t in (q, k, v))
            q, k = FORM.rotate(q, k, positions, *tensors)
            pm_ops.store_kv(pool, index, self.change(k), v, positions)
            out = pm_ops.attention(pool, index, q, self.table, self.lens) if self.read else q
            x = torch.tanh(out.flatten(1))[:, :6]
        if self.advance:
            positions.add_(1)
        return x


def run(
    pools: list[pm_ops.PagePool],
    *,
    change: Callable[[Tensor], Tensor] = lambda k: k,
    read: bool = True,
    advance: bool = False,
    version: int = 2,
    **settings: Any,
) -> tuple[RopeStorePass, list[Any]]:
    """Compile as Inductor does and compare results and bytes with eager's; the pass, and what stores are in the end."""
    model, rope, found = Model(pools, change, read, advance), RopeStorePass("test", **settings), list[Any]()
    x, positions = torch.randn(TOKENS, 6), torch.tensor([12, 13, 14, 15, 4])

    def compiled(gm: Any, _: Any) -> Any:
        reorder_for_locality(gm.graph)  # Inductor moves a query's rotation behind the store with it
        rope(gm.graph)
        gm.graph.lint()
        gm.recompile()
        found.extend(n.args[0] for n in gm.graph.nodes if n.args and n.args[0] in (STORE, ROPE_STORE))
        assert not any(n.target in IN_PLACE for n in gm.graph.nodes)
        return make_boxed_func(gm.forward)

    options = {"decompositions": select_decomp_table(), "keep_inference_input_mutations": True}
    backend = aot_autograd(fw_compiler=compiled, **options)
    before = [pool.buffer.clone() for pool in pools]
    with torch.no_grad(), torch._inductor.config.patch(enable_auto_functionalized_v2=version == 2):
        expected, kept = model(x, positions.clone(), *FORM.tensors), [pool.buffer.clone() for pool in pools]
        for pool, old in zip(pools, before, strict=True):
            pool.buffer.copy_(old)
        got = torch.compile(model, backend=backend, fullgraph=True)(x, positions, *FORM.tensors)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert all(torch.equal(pool.buffer, its) for pool, its in zip(pools, kept, strict=True))
    return rope, found


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("version", [1, 2])
def test_layers_that_share_a_buffer_are_fused_one_by_one(version: int, read: bool) -> None:
    """Each takes the buffer that the one before gives; also where nothing reads what was stored."""
    pool = pool_of()
    rope, stores = run([pool], version=version, read=read)
    assert stores == [ROPE_STORE] * LAYERS and not rope.report.unfused
    starts = [pool.plane(layer, "key").geometry[0] for layer in range(LAYERS)]
    assert [name.split()[1] for name in rope.report.fused] == list(map(str, starts))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("version", [1, 2])
def test_slots_that_are_written_after_the_store_are_read_before(version: int, fused: bool) -> None:
    """A graph ends in writes to its inputs: to the slots in front of that to the buffer, here all that reads it."""
    change = (lambda k: k) if fused else (lambda k: k + 1)
    _, stores = run([pool_of()], change=change, read=False, advance=True, version=version)
    assert stores == [ROPE_STORE if fused else STORE] * LAYERS


def test_layers_of_buffers_of_their_own_are_told_apart() -> None:
    rope, stores = run([pool_of(1), pool_of(1)])
    assert stores == [ROPE_STORE] * LAYERS and len(rope.report.fused) == LAYERS


def test_stores_to_one_layer_are_told_apart() -> None:
    pool = pool_of(1)
    rope, stores = run([pool, pool])
    assert stores == [ROPE_STORE] * 2
    first, second = rope.report.fused
    assert second == f"{first}, store 2"


@pytest.mark.parametrize("version", [1, 2])
def test_a_store_that_cannot_be_fused_stays(version: int) -> None:
    rope, stores = run([pool_of()], change=lambda k: k + 1, version=version)
    assert stores == [STORE] * LAYERS and len(rope.report.unfused) == LAYERS and not rope.report.fused
    with pytest.raises(BackendCompilerFailed, match="RewriteError: rope_store_kv: 0 layers of this graph are fused"):
        run([pool_of()], change=lambda k: k + 1, strict=True)
