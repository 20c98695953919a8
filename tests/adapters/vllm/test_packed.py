"""Packed blocks, of a vLLM that has no layouts; on its plans and views as they are there, without that vLLM."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm_packed import KVCacheConfig, KVCacheTensor, views

import pm_ops
from pm_ops.adapters.vllm import hooks, packed
from pm_ops.adapters.vllm.config import Settings
from pm_ops.adapters.vllm.layout import locate
from pm_ops.adapters.vllm.packed import PackedViews, pack

BF16 = torch.bfloat16


def plan(pages: list[int], blocks: int = 5) -> KVCacheConfig:
    """Tensors of pages of these many bytes."""
    names = [f"model.layers.{i}.self_attn.attn" for i in range(len(pages))]
    tensors = [KVCacheTensor(page * blocks, [name]) for page, name in zip(pages, names, strict=True)]
    spec = SimpleNamespace(head_size=128, head_size_v=128)
    return KVCacheConfig(blocks, tensors, [SimpleNamespace(layer_names=names, kv_cache_spec=spec)])


def test_the_pages_of_a_block_follow_one_another_in_as_many_bytes() -> None:
    before = plan([64, 64, 32])
    after = pack(before)
    assert [(t.size, t.offset, t.block_stride) for t in after.kv_cache_tensors] == [
        (800, 0, 160),
        (800, 64, 160),
        (800, 128, 160),
    ]
    assert [t.shared_by for t in after.kv_cache_tensors] == [t.shared_by for t in before.kv_cache_tensors]
    assert after.num_blocks == 5 and after.kv_cache_groups == before.kv_cache_groups
    assert sum(t.size for t in before.kv_cache_tensors) == 800
    assert before == plan([64, 64, 32]), "the engine's own plan stays as it is"


@pytest.mark.parametrize("name", ["page_major", "BLNHC", "BLHNC"])
@pytest.mark.parametrize(("layers", "heads", "dim", "tokens"), [(32, 8, 128, 16), (3, 2, 64, 16), (2, 1, 80, 1)])
def test_its_views_are_the_formats_of_their_names(name: str, layers: int, heads: int, dim: int, tokens: int) -> None:
    page = 2 * tokens * heads * dim * BF16.itemsize
    config = pack(plan([page] * layers))
    made = views(config, Settings(name).engine_layout, tokens, heads, dim, BF16)
    if name == "page_major":
        layout = pm_ops.page_major(layers, heads, dim, tokens, BF16)
    else:
        layout = pm_ops.vllm(layers, heads, dim, tokens, BF16, name)
    if (layers, name) == (32, "page_major"):
        assert made[0].stride() == (1048576, 256, 2048, 1), "as it was read off the engine on a GPU"
    for number, view in enumerate(made):
        cache = locate(view, name, dim, BF16)
        assert cache.planes(number) == [layout.plane(number, "key"), layout.plane(number, "value")]
        assert cache.key[1] == cache.value[1] == layout.page_bytes
        assert cache.buffer.data_ptr() == made[0].untyped_storage().data_ptr()
        assert cache.buffer.numel() == 5 * layout.page_bytes


def test_layers_of_two_groups_keep_the_tensor_that_they_share() -> None:
    config = replace(plan([64]), kv_cache_tensors=[KVCacheTensor(320, ["full.0", "window.1"])])
    (tensor,) = pack(config).kv_cache_tensors
    assert tensor.shared_by == ["full.0", "window.1"] and tensor.block_stride == 64


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(RuntimeError, match="keeps no KV cache"):
        pack(KVCacheConfig(1, []))
    config = plan([64, 64])
    config.kv_cache_tensors[1].size = 321
    with pytest.raises(RuntimeError, match=r"layers.1.self_attn.attn is not 5 pages of their own, but 321 bytes"):
        pack(config)
    with pytest.raises(RuntimeError, match="but 640 bytes with a block stride of 128"):
        pack(pack(plan([64, 64])))
    wide = plan([64])
    wide.kv_cache_groups[0].kv_cache_spec = SimpleNamespace(head_size=192, head_size_v=128)
    with pytest.raises(RuntimeError, match="keys of 192 and values of 128 are not supported"):
        pack(wide)
    several = plan([64, 64])
    same, other = several.kv_cache_groups[0].layer_names
    specs = {same: SimpleNamespace(head_size=64), other: SimpleNamespace(head_size=64, head_size_v=32)}
    several.kv_cache_groups[0].kv_cache_spec = SimpleNamespace(kv_cache_specs=specs)
    with pytest.raises(RuntimeError, match="keys of 64 and values of 32"):
        pack(several)


def test_layouts_that_packed_blocks_cannot_have_are_refused() -> None:
    for layout in ("page_major", "BLNHC", "BLHNC"):
        packed.refuse(Settings(layout))
    with pytest.raises(ValueError, match="layout BHLNC needs a vLLM that has layouts"):
        packed.refuse(Settings("BHLNC"))


def test_one_tensor_over_all_layers_is_not_offered() -> None:
    pytest.importorskip("vllm")
    with pytest.raises(NotImplementedError):
        PackedViews.get_kv_cache_stride_order(include_num_layers_dimension=True)


@pytest.mark.parametrize(("has_layouts", "expected"), [(True, hooks.LAYOUTS), (False, hooks.PACKED)])
def test_generations_are_told_apart_by_what_is_there(
    monkeypatch: pytest.MonkeyPatch, has_layouts: bool, expected: str
) -> None:
    monkeypatch.setattr(hooks, "_present", lambda path: has_layouts and "KVCacheLayout" in path)
    assert hooks.generation() == expected
    needed = hooks.needed("cuda")
    assert ("layers of a cache" in needed) == (expected == hooks.PACKED)
    assert "Worker" in needed and "CPUWorker" not in needed
    assert hooks.supported(hooks.PACKED) == "cuda" and hooks.supported(hooks.LAYOUTS) == "cpu, cuda"
