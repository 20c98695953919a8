"""Geometry read off vLLM's views of its cache equals the named formats."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import pm_ops
from pm_ops.adapters.vllm.layout import locate, page_pools

LAYERS, BLOCKS, HEADS, TOKENS, KEY, VALUE = 3, 5, 2, 4, 8, 6
AXES = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS}


def views(order: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Tensor]]:
    """A buffer in one of vLLM's orders, and each layer's view ``[blocks, heads, tokens, content]``."""
    content = KEY + VALUE
    buffer = torch.zeros([AXES[axis] for axis in order[:4]] + [content], dtype=dtype)
    logical = buffer.permute(*(order.index(axis) for axis in "LBHN"), 4)
    return buffer, list(logical)


@pytest.mark.parametrize("order", ["BLNHC", "BLHNC", "BHLNC"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vllms_layouts_are_the_formats_of_their_names(order: str, dtype: torch.dtype) -> None:
    buffer, layers = views(order, dtype)
    layout = pm_ops.vllm(LAYERS, HEADS, KEY, TOKENS, dtype, order, value_dim=VALUE)
    assert_same(buffer, layers, layout, order)


def test_page_major_is_blnhc_with_each_run_read_as_keys_then_values() -> None:
    buffer, layers = views("BLNHC")
    layout = pm_ops.page_major(LAYERS, HEADS, KEY, TOKENS, torch.float32, value_dim=VALUE)
    assert_same(buffer, layers, layout, "page_major")


def assert_same(buffer: Tensor, layers: list[Tensor], layout: pm_ops.PageLayout, name: str) -> None:
    pool = pm_ops.PagePool(layout, BLOCKS)
    for number, view in enumerate(layers):
        cache = locate(view, name, KEY, view.dtype)
        assert cache.key == pool.plane(number, "key").geometry
        assert cache.value == pool.plane(number, "value").geometry
        assert (cache.page_size, cache.heads, cache.key_dim, cache.value_dim) == (TOKENS, HEADS, KEY, VALUE)
        assert cache.planes(number) == [layout.plane(number, "key"), layout.plane(number, "value")]
        assert cache.buffer.data_ptr() == buffer.data_ptr()
        assert cache.buffer.numel() == buffer.numel() * buffer.element_size() == BLOCKS * layout.page_bytes


def test_page_major_over_other_strides_is_refused() -> None:
    _, layers = views("BLHNC")
    with pytest.raises(ValueError, match="page_major needs blocks of vLLM's layout BLNHC"):
        locate(layers[1], "page_major", KEY, torch.float32)


def test_an_fp8_cache_of_bytes_has_the_element_type_that_is_stored() -> None:
    _, layers = views("BLNHC", torch.uint8)
    cache = locate(layers[2], "page_major", KEY, torch.float8_e4m3fn)
    layout = pm_ops.page_major(LAYERS, HEADS, KEY, TOKENS, torch.float8_e4m3fn, value_dim=VALUE)
    assert cache.planes(2) == [layout.plane(2, "key"), layout.plane(2, "value")]


@pytest.mark.engines
def test_layers_that_do_not_share_one_buffer_of_the_engines_blocks_are_refused() -> None:
    pytest.importorskip("vllm")
    buffer, layers = views("BLNHC")
    names = [f"model.layers.{number}.attn" for number in range(LAYERS)]
    stride = buffer.stride(0) * buffer.element_size()
    impl = SimpleNamespace(locate=lambda cache: locate(cache, "BLNHC", KEY, cache.dtype))
    config = SimpleNamespace(
        num_blocks=BLOCKS,
        kv_cache_groups=[SimpleNamespace(layer_names=names)],
        kv_cache_tensors=[SimpleNamespace(layers=names, block_stride=stride, size=BLOCKS * stride)],
    )

    def pools(caches: list[Tensor]) -> list[pm_ops.PagePool]:
        bound = {name: SimpleNamespace(kv_cache=cache, impl=impl) for name, cache in zip(names, caches, strict=True)}
        return page_pools(config, bound, "BLNHC")

    (pool,) = pools(layers)
    assert pool.layout == pm_ops.vllm(LAYERS, HEADS, KEY, TOKENS, torch.float32, "BLNHC", value_dim=VALUE)
    elsewhere = views("BLNHC")[1]
    with pytest.raises(RuntimeError, match="the KV cache lies in 2 buffers"):
        pools([*layers[:2], elsewhere[2]])
    with pytest.raises(RuntimeError, match=rf"layers.1.attn has 4 blocks, {stride} bytes apart; the cache has 5 of"):
        pools([layers[0], layers[1][:-1], layers[2]])
    with pytest.raises(RuntimeError, match=rf"layers.2.attn has 5 blocks, {stride // 3} bytes apart; the cache has 5"):
        pools([*layers[:2], layers[2].as_strided(layers[2].shape, (stride // 12, *layers[2].stride()[1:]))])
