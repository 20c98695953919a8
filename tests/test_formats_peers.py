"""The named formats put every byte where SGLang and vLLM put it; their own code is the oracle."""

import random
from types import ModuleType
from typing import Any

import pytest
import torch

import peers
import pm_ops
from pm_ops.ops._common import bits
from pm_ops.testing import fill_random

pytestmark = pytest.mark.engines

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)


def geometry(seed: int, dims: tuple[int, ...]) -> dict[str, Any]:
    """A random model shape and page size."""
    rng = random.Random(seed)
    return {
        "layers": rng.randint(1, 5),
        "kv_heads": rng.choice((1, 2, 3, 8)),
        "head_dim": rng.choice(dims),
        "value_dim": rng.choice(dims),
        "page_size": rng.choice((1, 2, 3, 16, 48)),
        "dtype": rng.choice(DTYPES),
    }


def assert_same_bytes(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Two views lie on the very same bytes."""
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    assert ours.data_ptr() == theirs.data_ptr()
    sizes = zip(ours.shape, ours.stride(), theirs.stride(), strict=True)
    assert all(a == b for n, a, b in sizes if n > 1), f"strides {ours.stride()} against {theirs.stride()}"


@pytest.fixture(scope="module")
def page_major() -> ModuleType:
    return peers.load(peers.SGLANG_PAGE_MAJOR, "sglang/srt/mem_cache/layout/page_major.py")


@pytest.fixture(scope="module")
def token_major() -> ModuleType:
    msgspec = peers.stub("msgspec", Struct=peers.Struct)
    return peers.load(peers.SGLANG_TOKEN_MAJOR, "sglang/srt/mem_cache/layout/token_major.py", {"msgspec": msgspec})


@pytest.fixture(scope="module")
def unified_pool(token_major: ModuleType) -> ModuleType:
    """SGLang's unified pool: its specs say which parts a token's entry has."""
    hollow = (
        "sglang.kernels.ops.kvcache.copy_pages",
        "sglang.kernels.ops.kvcache.zero_pages",
        "sglang.srt.constants",
        "sglang.srt.environ",
        "sglang.srt.mem_cache.kv_vmm_backing",
        "sglang.srt.mem_cache.layout.fused_draft",
        "sglang.srt.mem_cache.memory_pool",
        "sglang.srt.mem_cache.swa_memory_pool",
        "sglang.srt.utils.torch_memory_saver_adapter",
    )
    stubs = {name: peers.hollow(name) for name in hollow}
    stubs["sglang.srt.mem_cache.layout.token_major"] = token_major
    return peers.load(peers.SGLANG_TOKEN_MAJOR, "sglang/srt/mem_cache/unified_memory_pool.py", stubs)


@pytest.fixture(scope="module")
def host_pool() -> type:
    """SGLang's HiCache host pool, MHATokenToKVPoolHost, with plain memory in place of pinned."""
    memory = type("Memory", (), {"available": 1 << 40})
    stubs = {
        "psutil": peers.stub("psutil", virtual_memory=memory),
        "sglang.kernels.ops.kvcache.hicache": peers.hollow("hicache"),
        "sglang.srt.mem_cache.memory_pool": peers.hollow("memory_pool"),
        "sglang.srt.mem_cache.pool_host.common": peers.stub(
            "common",
            ALLOC_MEMORY_FUNCS={"cpu": lambda dims, dtype, **_: torch.zeros(dims, dtype=dtype)},
            get_allocator_from_storage=lambda kind: None,
            _cuda_host_unregister=lambda buffer: None,
        ),
        "sglang.srt.utils": peers.stub(
            "utils", **{f"is_{device}": lambda: False for device in ("cuda", "hip", "mps", "npu", "xpu")}
        ),
    }
    folder = "sglang/srt/mem_cache/pool_host"
    stubs["sglang.srt.mem_cache.pool_host.base"] = peers.load(peers.SGLANG_HICACHE, f"{folder}/base.py", stubs)
    return peers.load(peers.SGLANG_HICACHE, f"{folder}/mha.py", stubs).MHATokenToKVPoolHost


@pytest.fixture(scope="module")
def kv_cache_layout() -> ModuleType:
    return peers.load(peers.VLLM, "vllm/v1/kv_cache_layout.py")


@pytest.fixture(scope="module")
def cache_move() -> ModuleType:
    utils = peers.stub("sglang.srt.utils", is_cpu=lambda: False)
    return peers.load(peers.SGLANG_PAGE_MAJOR, "sglang/kernels/ops/kvcache/cache_move.py", {"sglang.srt.utils": utils})


@pytest.mark.parametrize("seed", range(24))
def test_page_major_is_sglangs_page_major(seed: int, page_major: ModuleType) -> None:
    """page_major's views are SGLang 0.5.17's build_page_major_mha_views, also behind an anchor in a larger buffer."""
    shape = geometry(seed, dims=(8, 33, 64, 96, 128, 192))
    layout = pm_ops.page_major(**shape)
    num_pages, anchor = 1 + seed % 4, (seed % 3) * 64
    # SGLang views the whole buffer as the cache's dtype: its length must be a multiple of the element.
    buffer = torch.zeros(anchor + num_pages * layout.page_bytes, dtype=torch.uint8)
    pool = pm_ops.PagePool(layout, num_pages, buffer=buffer, base=anchor)
    keys, values = page_major.build_page_major_mha_views(
        buffer,
        layer_num=shape["layers"],
        head_num=shape["kv_heads"],
        head_dim=shape["head_dim"],
        v_head_dim=shape["value_dim"],
        store_dtype=shape["dtype"],
        page_size=shape["page_size"],
        num_pages=num_pages,
        anchor_bytes=anchor,
    )
    for layer in range(shape["layers"]):
        assert_same_bytes(pool.view(layer, "key"), keys[layer])
        assert_same_bytes(pool.view(layer, "value"), values[layer])
    entry = page_major.mha_entry_bytes(
        layer_num=shape["layers"],
        head_num=shape["kv_heads"],
        head_dim=shape["head_dim"],
        v_head_dim=shape["value_dim"],
        itemsize=shape["dtype"].itemsize,
    )
    assert layout.page_bytes == shape["page_size"] * entry
    assert layout.token_bytes == entry


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_mla_is_sglangs_page_major_mla(page_size: int, page_major: ModuleType) -> None:
    """Layer l's row t is row (t // ps) * ps * layers + t % ps of SGLang 0.5.17's overlapping view l."""
    layers, num_pages, anchor = 3, 4, 128
    layout = pm_ops.mla(layers, page_size, torch.bfloat16)
    buffer = torch.zeros(anchor + (num_pages + 1) * layout.page_bytes, dtype=torch.uint8)  # its views need a tail
    pool = pm_ops.PagePool(layout, num_pages, buffer=buffer, base=anchor)
    views = page_major.build_dense_mla_views(
        buffer, layer_num=layers, kv_cache_dim=576, store_dtype=torch.bfloat16, page_size=page_size,
        num_pages=num_pages, anchor_bytes=anchor,
    )  # fmt: skip
    for layer in range(layers):
        for t in range(num_pages * page_size):
            theirs = views[layer][t // page_size * page_size * layers + t % page_size]
            assert_same_bytes(pool.view(layer, "latent")[t // page_size, t % page_size], theirs)
    entry = page_major.mla_entry_bytes(layer_num=layers, kv_cache_dim=576, itemsize=2)
    assert layout.page_bytes == page_size * entry and layout.token_bytes == entry


def test_state_planes_are_sglangs_mamba_entry(page_major: ModuleType) -> None:
    """State planes laid [conv0 x layers][conv1 x layers][ssm x layers] are SGLang's build_page_major_mamba_views."""
    layers, slots, conv_shapes, ssm_shape = 3, 5, ((6, 3), (4, 3)), (2, 8, 4)
    planes = []
    end = 0
    for kind, shape, dtype in (("conv0", (6, 3), torch.bfloat16), ("conv1", (4, 3), torch.bfloat16)):
        for layer in range(layers):
            planes.append(pm_ops.Plane(layer, kind, end, None, shape[1] * dtype.itemsize, shape, dtype))
            end += shape[0] * shape[1] * dtype.itemsize
    for layer in range(layers):
        planes.append(pm_ops.Plane(layer, "ssm", end, None, 8 * 4 * 4, ssm_shape, torch.float32))
        end += 2 * 8 * 4 * 4
    pool = pm_ops.PagePool(pm_ops.PageLayout(1, end, tuple(planes)), slots)
    convs, ssm = page_major.build_page_major_mamba_views(
        pool.buffer,
        layer_num=layers,
        conv_state_shapes=conv_shapes,
        conv_dtype=torch.bfloat16,
        temporal_state_shape=ssm_shape,
        temporal_dtype=torch.float32,
        max_slots=slots,
    )
    for layer in range(layers):
        assert_same_bytes(pool.view(layer, "conv0"), convs[0][layer])
        assert_same_bytes(pool.view(layer, "conv1"), convs[1][layer])
        assert_same_bytes(pool.view(layer, "ssm"), ssm[layer])


@pytest.mark.parametrize("seed", range(24))
def test_token_major_is_sglangs_token_major(seed: int, token_major: ModuleType, unified_pool: ModuleType) -> None:
    """token_major's views are those SGLang 0.5.23 builds from its own MHA sub-pool's entry."""
    shape = geometry(seed, dims=(16, 32, 64, 80, 128, 192))  # SGLang takes rows of whole 16-byte words only
    layout = pm_ops.token_major(**shape)
    num_pages, anchor = 1 + seed % 4, (seed % 3) * 64
    num_slots = num_pages * shape["page_size"]
    spec = unified_pool.MHASubPoolSpec(
        name="full",
        layer_num=shape["layers"],
        grow_direction="up",
        head_num=shape["kv_heads"],
        head_dim=shape["head_dim"],
        v_head_dim=shape["value_dim"],
        store_dtype=shape["dtype"],
        kv_cache_dtype=torch.float8_e4m3fn if shape["dtype"] == torch.uint8 else None,  # stored as uint8
    )
    buffer = torch.zeros(anchor + num_pages * layout.page_bytes, dtype=torch.uint8)
    pool = pm_ops.PagePool(layout, num_pages, buffer=buffer, base=anchor)
    assert layout.page_bytes == spec.page_bytes(shape["page_size"])
    for part, kind in (("k", "key"), ("v", "value")):
        theirs = token_major.build_dense_views(
            buffer, layout=spec.layout(), part_name=part, num_slots=num_slots, anchor_bytes=anchor
        )
        for layer in range(shape["layers"]):
            ours = pool.view(layer, kind)
            assert_same_bytes(ours, theirs[layer].unflatten(0, (num_pages, shape["page_size"])))


@pytest.mark.parametrize("order", ["BLNHC", "BLHNC", "BHLNC"])
@pytest.mark.parametrize("seed", range(8))
def test_vllm_formats_are_vllms_stride_orders(seed: int, order: str, kv_cache_layout: ModuleType) -> None:
    """vllm(order)'s views are K and V of a [L, B, H, N, K|V] tensor laid out by vLLM 0.32's stride order."""
    shape = geometry(seed, dims=(8, 64, 80, 128))
    shape["value_dim"] = shape["head_dim"]  # vLLM: C = 2D
    layout = pm_ops.vllm(**shape, order=order)
    num_pages, dim = 3, shape["head_dim"]
    pool = pm_ops.PagePool(layout, num_pages)
    peer = kv_cache_layout.KVCacheLayout[order]
    logical = (shape["layers"], num_pages, shape["kv_heads"], shape["page_size"], 2 * dim)
    physical = pool.buffer.view(shape["dtype"]).view([logical[axis] for axis in peer.stride_order])
    cache = physical.permute([peer.stride_order.index(axis) for axis in range(5)])
    assert tuple(cache.shape) == logical
    for layer in range(shape["layers"]):
        token_first = cache[layer].transpose(1, 2)
        assert_same_bytes(pool.view(layer, "key"), token_first[..., :dim])
        assert_same_bytes(pool.view(layer, "value"), token_first[..., dim:])


def test_every_block_outermost_order_of_vllm_is_supported(kv_cache_layout: ModuleType) -> None:
    theirs = {member.name for member in kv_cache_layout.KVCacheLayout if member.is_block_outermost}
    assert theirs == set(pm_ops.formats.VLLM_ORDERS)


@pytest.mark.parametrize("order", ["page_first_direct", "page_first", "page_head", "layer_first"])
@pytest.mark.parametrize("seed", range(6))
def test_hicache_pages_are_those_of_sglangs_host_pool(seed: int, order: str, host_pool: Any) -> None:
    """A flat page that SGLang 0.5.17's own host pool takes and gives; and where K and V lie in the pool itself."""
    shape = geometry(seed, dims=(8, 64, 96))
    del shape["value_dim"]
    layers, heads, dim, page_size, dtype = shape.values()
    device_pool = type("DevicePool", (), {
        "store_dtype": dtype, "head_num": heads, "head_dim": dim, "layer_num": layers, "size": 4 * page_size,
        "start_layer": 0, "end_layer": layers, "device": "cpu", "layer_shard_enabled": False,
    })()  # fmt: skip
    theirs = host_pool(device_pool, 2.0, 0, page_size, order, pin_memory=False)
    layout = pm_ops.hicache(**shape, order=order)
    ours = pm_ops.PagePool(layout, theirs.page_num)
    assert layout.page_bytes == page_size * theirs.get_size_per_token()

    fill_random(ours.buffer, seed)
    for page in range(ours.num_pages):
        theirs.set_from_flat_data_page(page * page_size, ours.pages[page].view(dtype))
        assert torch.equal(theirs.get_data_page(page * page_size).view(torch.uint8), ours.pages[page])

    # token, head and element of a layer, by SGLang's axes; those of ours lie on the same bytes of SGLang's tensor
    axes = {"page_first": (2, 0, 1, 3, 4), "page_first_direct": (1, 0, 2, 3, 4), "page_head": (3, 0, 2, 1, 4)}
    buffer = theirs.kv_buffer.view(torch.uint8).flatten()
    for half, (kind, cache) in enumerate((("key", theirs.k_buffer), ("value", theirs.v_buffer))):
        if order == "layer_first":  # layer-major: a pool a layer
            part, base = pm_ops.page_major(1, *list(shape.values())[1:]).part(kind), half * buffer.numel() // 2
            bases = [base + layer * buffer.numel() // 2 // layers for layer in range(layers)]
            pools = [pm_ops.PagePool(part, ours.num_pages, buffer=buffer, base=at) for at in bases]
            views = [pool.view(0, kind) for pool in pools]
            by_layer = cache.unflatten(1, (ours.num_pages, page_size))
        else:
            part = layout.part(kind)
            pool = pm_ops.PagePool(part, ours.num_pages, buffer=buffer, base=half * buffer.numel() // 2)
            views = [pool.view(layer, kind) for layer in range(layers)]
            by_page = cache.unflatten(0, (ours.num_pages, page_size)) if order == "page_first" else cache
            by_layer = by_page.permute(axes[order])
        for layer in range(layers):
            assert_same_bytes(views[layer], by_layer[layer])
            assert torch.equal(bits(views[layer]), bits(ours.view(layer, kind)))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("seed", range(6))
def test_store_kv_writes_what_sglangs_store_writes(
    seed: int, index_dtype: torch.dtype, page_major: ModuleType, cache_move: ModuleType
) -> None:
    """store_kv leaves the very pool that SGLang 0.5.17's store_cache_4d_kernel leaves, every byte of it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"  # without one, the kernel runs in Triton's interpreter
    shape = geometry(seed, dims=(8, 33, 64, 128))
    shape["dtype"] = (torch.float32, torch.float16, torch.bfloat16)[seed % 3]
    layout = pm_ops.page_major(**shape)
    num_pages, rows = 3, 5
    noise = torch.randint(0, 256, (num_pages * layout.page_bytes,), dtype=torch.uint8, device=device)
    ours = pm_ops.PagePool(layout, num_pages, device, buffer=noise.clone())
    theirs = pm_ops.PagePool(layout, num_pages, device, buffer=noise.clone())
    slots = torch.randperm(ours.num_slots)[:rows].to(device, index_dtype)
    for layer in range(shape["layers"]):
        key = torch.randn(len(slots), shape["kv_heads"], shape["head_dim"], device=device).to(shape["dtype"])
        value = torch.randn(len(slots), shape["kv_heads"], shape["value_dim"], device=device).to(shape["dtype"])
        pm_ops.store_kv(ours, layer, key, value, slots)
        key_row, value_row = key[0].numel(), value[0].numel()
        keys, values = theirs.view(layer, "key"), theirs.view(layer, "value")
        grid = (len(slots), -(-max(key_row, value_row) // 128), 2)
        cache_move.store_cache_4d_kernel[grid](
            keys, values, key, value, slots,
            keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), key.stride(0), value.stride(0),
            K_ROW_DIM=key_row, V_ROW_DIM=value_row, PAGE_SIZE=shape["page_size"], BLOCK=128,
        )  # fmt: skip
    assert torch.equal(ours.buffer, theirs.buffer)
    assert not torch.equal(ours.buffer, noise)


@pytest.mark.parametrize("seed", range(12))
def test_state_page_is_sglangs_page_major_mamba_views(seed: int, page_major: ModuleType) -> None:
    """One to three convolution states, dtypes that differ, an anchor before the first page."""
    rng = random.Random(seed)
    conv_dtype, dtype = rng.choice(DTYPES), rng.choice((torch.float32, torch.bfloat16))
    convs = [(rng.choice((8, 24)), rng.randint(1, 4)) for _ in range(rng.randint(1, 3))]
    shape, layers, slots, anchor = (rng.choice((2, 4)), 4, rng.choice((2, 6))), rng.randint(1, 5), 6, 64
    states: dict[str, Any] = {f"conv{i}": (conv, conv_dtype) for i, conv in enumerate(convs)}
    layout = pm_ops.state_page(layers, states | {"ssm": (shape, dtype)})
    arguments = dict(
        layer_num=layers,
        conv_state_shapes=convs,
        conv_dtype=conv_dtype,
        temporal_state_shape=shape,
        temporal_dtype=dtype,
    )
    assert layout.page_bytes == page_major.mamba_entry_bytes(**arguments)
    buffer = torch.zeros(anchor + slots * layout.page_bytes, dtype=torch.uint8)
    pool = pm_ops.PagePool(layout, slots, buffer=buffer, base=anchor)
    conv_views, ssm_view = page_major.build_page_major_mamba_views(
        buffer, **arguments, max_slots=slots, anchor_bytes=anchor
    )
    for layer in range(layers):
        for i, view in enumerate(conv_views):
            assert_same_bytes(pool.view(layer, f"conv{i}"), view[layer])
        assert_same_bytes(pool.view(layer, "ssm"), ssm_view[layer])


def test_a_state_that_does_not_fall_on_its_dtypes_bytes_is_refused_as_sglang_does(page_major: ModuleType) -> None:
    states = {"conv": ((3, 3), torch.bfloat16), "ssm": ((2, 2), torch.float32)}
    with pytest.raises(ValueError, match="must be multiples of float32's 4 bytes; pad the page or pass align="):
        pm_ops.state_page(1, states)
    assert pm_ops.state_page(1, states, align=4).plane(0, "ssm").offset == 20
    arguments = dict(layer_num=1, conv_state_shapes=[(3, 3)], conv_dtype=torch.bfloat16, max_slots=2)
    with pytest.raises(AssertionError, match="misaligned mamba spec"):
        page_major.build_page_major_mamba_views(
            torch.zeros(400, dtype=torch.uint8), **arguments, temporal_state_shape=(2, 2), temporal_dtype=torch.float32
        )
