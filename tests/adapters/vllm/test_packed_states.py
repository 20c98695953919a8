"""States in packed blocks, on views as vLLM 0.26 makes them: where they lie, what is zeroed, what cannot be there."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm_packed import KVCacheConfig, KVCacheTensor, views

from pm_ops import PageLayout, PagePool, Plane
from pm_ops.adapters.vllm.packed import BlockZeroer, pack, place_states, replace_zeroer

BF16 = torch.bfloat16
BLOCKS, HEADS, TOKENS, DIM = 5, 2, 16, 32
PAGE = 2 * HEADS * TOKENS * DIM * BF16.itemsize
SHAPES, DTYPES = ((3, 24), (2, 8, 16)), (BF16, torch.float32)


def spec(kind: str = "GDN_ATTENTION", dtypes: tuple[torch.dtype, ...] = DTYPES) -> Any:
    """What is used of a ``MambaSpec``."""
    return SimpleNamespace(shapes=SHAPES, dtypes=dtypes, mamba_type=SimpleNamespace(name=kind))


def hybrid(states: Any, page: int = PAGE, blocks: int = BLOCKS) -> KVCacheConfig:
    """Two layers of states to one of attention, twice: three groups, whose layers share a tensor."""
    names = [[f"model.layers.{i}.linear_attn" for i in layers] for layers in ((0, 3), (1, 4))]
    names.append([f"model.layers.{i}.self_attn.attn" for i in (2, 5)])
    specs = [states, states, SimpleNamespace(head_size=DIM)]
    groups = [SimpleNamespace(layer_names=of, kv_cache_spec=spec) for of, spec in zip(names, specs, strict=True)]
    tensors = [KVCacheTensor(page * blocks, [of[i] for of in names]) for i in range(2)]
    return KVCacheConfig(blocks, tensors, groups)


def bound(config: KVCacheConfig) -> dict[str, Any]:
    """The layers, with the views that vLLM's runners give them: of states those of a tensor of their own."""
    attention = views(config, "BLNHC", TOKENS, HEADS, DIM, BF16)
    raw = torch.empty(0, dtype=torch.int8).set_(attention[0].untyped_storage())
    layers: dict[str, Any] = {}
    for tensor, keys in zip(config.kv_cache_tensors, attention, strict=True):
        *linear, full = tensor.shared_by
        layers[full] = SimpleNamespace(kv_cache=keys)
        for layer in linear:
            states, begin = [], 0
            for shape, dtype in zip(SHAPES, DTYPES, strict=True):
                inner = torch.empty(shape).stride()
                strides = (PAGE // dtype.itemsize, *inner)
                states.append(raw.view(dtype).as_strided((BLOCKS, *shape), strides, begin // dtype.itemsize))
                begin += torch.Size(shape).numel() * dtype.itemsize
            layers[layer] = SimpleNamespace(kv_cache=states)
    return layers


def written(buffer: Tensor, view: Tensor, block: int) -> list[int]:
    """The bytes of the buffer that a write to this block of a view changes: the first, the last, and how many."""
    value = view[block].clone()
    before = buffer.clone()
    view[block] = value.view(torch.uint8).bitwise_not().view(value.dtype)
    changed = (buffer != before).nonzero().flatten()
    return [int(changed[0]), int(changed[-1]), len(changed)]


def test_states_move_to_their_page_of_their_block_for_all_who_hold_them() -> None:
    config = pack(hybrid(spec()))
    layers = bound(config)
    held = {name: layer.kv_cache for name, layer in layers.items()}
    buffer = torch.empty(0, dtype=torch.uint8).set_(held["model.layers.2.self_attn.attn"].untyped_storage())
    buffer.random_(generator=torch.Generator().manual_seed(0))
    attention = [cache for cache in held.values() if isinstance(cache, Tensor)]
    before = [(cache.stride(), cache.storage_offset()) for cache in attention]
    place_states(config, layers)
    conv, ssm = 3 * 24 * 2, 2 * 8 * 16 * 4
    for i, tensor in enumerate(config.kv_cache_tensors):
        for layer in tensor.shared_by[:2]:
            for block in range(BLOCKS):
                page = block * 2 * PAGE + i * PAGE
                assert written(buffer, held[layer][0], block) == [page, page + conv - 1, conv]
                assert written(buffer, held[layer][1], block) == [page + conv, page + conv + ssm - 1, ssm]
    assert [(cache.stride(), cache.storage_offset()) for cache in attention] == before


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_blocks_are_zeroed_whole_and_no_other(device: str) -> None:
    layout = PageLayout(1, 48, (Plane(0, "ssm", 8, None, 12, (2, 3), torch.float32),), "packed")
    pool = PagePool(layout, 6, device=device)
    pool.buffer.random_(1, 256)
    expected = pool.pages.clone()
    expected[[1, 4]] = 0
    BlockZeroer(pool).zero_block_ids([4, 1])
    assert torch.equal(pool.pages, expected)


@pytest.mark.parametrize("name", ["_kv_block_zeroer", "kv_block_zeroer"])
def test_either_model_runner_zeroes_by_ours(name: str) -> None:
    pool = PagePool(PageLayout(1, 16, (Plane(0, "ssm", 0, None, 4, (1, 4), torch.float32),), "packed"), 3)
    pool.buffer.fill_(1)
    runner = SimpleNamespace(**{name: "vLLM's"})
    replace_zeroer(runner, pool)
    assert isinstance(getattr(runner, name), BlockZeroer) and vars(runner).keys() == {name}
    assert pool.pages.sum(1).tolist() == [0, 16, 16], "block 0 belongs to nobody"
    with pytest.raises(RuntimeError, match="SimpleNamespace has none of _kv_block_zeroer, kv_block_zeroer"):
        replace_zeroer(SimpleNamespace(kv_block_zeroer=None), pool)


def test_states_that_cannot_be_addressed_there_are_refused() -> None:
    with pytest.raises(RuntimeError, match="states of torch.float32, which cannot lie 50 bytes into blocks of 100"):
        pack(hybrid(spec(), page=50))
    sizes = {"page": 1 << 20, "blocks": 1 << 13}  # 16 GiB, 1 << 32 elements of float32
    pack(hybrid(spec("MAMBA1"), **sizes))
    pack(hybrid(spec("MAMBA2", (torch.float32, BF16)), **sizes))
    refusal = "0.linear_attn is a Mamba-1 layer, whose scan .* too few of torch.bfloat16 for .*=8589934592"
    with pytest.raises(RuntimeError, match=refusal):
        pack(hybrid(spec("MAMBA1", (torch.float32, BF16)), **sizes))
