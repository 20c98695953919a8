"""Packed blocks by the planner and the model runners of a vLLM that has no layouts (0.26). No engine runs: no GPU."""

from types import MethodType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engines

import torch
from torch import Tensor

from pm_ops.adapters.vllm import hooks

if hooks.generation() != hooks.PACKED:
    pytest.skip("this vLLM has layouts", allow_module_level=True)

from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.worker.gpu import attn_utils
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.utils import AttentionGroup, bind_kv_cache

from pm_ops.adapters.vllm.backend import PageMajorBackend
from pm_ops.adapters.vllm.config import Settings
from pm_ops.adapters.vllm.layout import locate, page_pools
from pm_ops.adapters.vllm.packed import ORDERS, pack, place_states

TOKENS, BLOCKS = 64, 7
ATTENTION = FullAttentionSpec(block_size=TOKENS, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
STATES = MambaSpec(
    block_size=TOKENS,
    shapes=((3, 512), (4, 32, 16)),
    dtypes=(torch.bfloat16, torch.float32),
    page_size_padded=ATTENTION.page_size_bytes,
)
LAYERS = {
    f"model.layers.{i}.self_attn.attn" if i % 4 == 3 else f"model.layers.{i}.linear_attn": ATTENTION
    if i % 4 == 3
    else STATES
    for i in range(8)
}
CONFIG: Any = SimpleNamespace(
    scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
    cache_config=SimpleNamespace(num_gpu_blocks_override=None, cache_dtype="auto"),
    kv_transfer_config=None,
)


def runner_v1(config: Any, groups: list[Any]) -> dict[str, Any]:
    """The views that model runner V1 makes."""
    runner: Any = SimpleNamespace(
        device="cpu",
        runner_only_attn_layers=set(),
        kv_cache_config=config,
        attn_groups=[[group] for group in groups],
        cache_config=CONFIG.cache_config,
    )
    for name in (
        "_kv_cache_spec_attn_group_iterator",
        "_has_mixed_attention_kv_layout",
        "_update_hybrid_attention_mamba_layout",
    ):
        setattr(runner, name, MethodType(getattr(GPUModelRunner, name), runner))
    raw = GPUModelRunner._allocate_kv_cache_tensors(runner, config)
    return GPUModelRunner._reshape_kv_cache_tensors(runner, raw, [TOKENS] * len(groups))


def runner_v2(config: Any, groups: list[Any]) -> dict[str, Any]:
    """Those of V2."""
    raw = attn_utils._allocate_kv_cache(config, {}, torch.device("cpu"))
    return attn_utils._reshape_kv_cache(groups, raw, "auto", [TOKENS] * len(groups), {}, config)


@pytest.mark.parametrize("layout", ["page_major", "BLHNC"])
@pytest.mark.parametrize("runner", [runner_v1, runner_v2])
def test_every_layers_block_lies_in_its_page_of_that_block(runner: Any, layout: str) -> None:
    class Backend(PageMajorBackend):
        @staticmethod
        def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
            return ORDERS[Settings(layout).engine_layout]

    page = ATTENTION.page_size_bytes
    groups = get_kv_cache_groups(CONFIG, LAYERS)
    plan = get_kv_cache_config_from_groups(CONFIG, groups, 2 * BLOCKS * page)
    config = pack(plan)
    assert config.needs_kv_cache_zeroing and config.num_blocks == BLOCKS
    attention = [AttentionGroup(Backend, g.layer_names, g.kv_cache_spec, i) for i, g in enumerate(groups)]
    impl = SimpleNamespace(locate=lambda cache: locate(cache, layout, ATTENTION.head_size, ATTENTION.dtype))
    layers: dict[str, Any] = {name: SimpleNamespace(kv_cache=None, impl=impl) for name in LAYERS}
    held: list[Any] = []
    bind_kv_cache(runner(config, attention), layers, held, 1)
    place_states(config, layers)

    pools = page_pools(config, layers, layout)
    assert [len(pool.layout.layers) for pool in pools] == [2, 2, 2, 2]
    buffer = pools[0].buffer
    assert buffer.numel() == 2 * BLOCKS * page
    held_by_runner = {view.data_ptr() for entry in held for view in ([entry] if isinstance(entry, Tensor) else entry)}
    buffer.random_(generator=torch.Generator().manual_seed(0))
    for tensor in config.kv_cache_tensors:
        for name in tensor.shared_by:
            cache = layers[name].kv_cache
            views = [cache] if isinstance(cache, Tensor) else cache
            assert {view.data_ptr() for view in views} <= held_by_runner
            for block in range(BLOCKS):
                before = buffer.clone()
                for view in views:
                    view[block] = view[block].clone().view(torch.uint8).bitwise_not().view(view.dtype)
                changed = (buffer != before).nonzero().flatten()
                begin = block * 2 * page + tensor.offset
                own = sum(view[block].numel() * view.element_size() for view in views)
                assert len(changed) == own and begin == changed[0] and changed[-1] == begin + own - 1
