"""Our pool against SGLang's own: the same bytes after the same work; every method that its page-major pool refused."""

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_engine

pytestmark = pytest.mark.engines
RELEASE = sglang_engine.require()

import torch
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, KVWriteLoc, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch.utils._python_dispatch import TorchDispatchMode

from pm_ops import PagePool
from pm_ops.adapters.sglang import pages
from pm_ops.adapters.sglang.pool import FORMATS, pool_class
from pm_ops.ops._common import bits
from pm_ops.testing import fill_random

LAYOUTS = tuple(FORMATS)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def shapes(seed: int) -> dict[str, Any]:
    """What SGLang makes a pool with."""
    rng = random.Random(seed)
    page_size = rng.choice((1, 2, 4, 16))
    return {
        "size": page_size * rng.randint(6, 12),
        "page_size": page_size,
        "dtype": rng.choice((torch.float32, torch.float16, torch.bfloat16)),
        "head_num": rng.choice((1, 2, 3)),
        "head_dim": rng.choice((8, 16, 24)),
        "v_head_dim": rng.choice((None, 8, 32)),
        "layer_num": rng.randint(1, 4),
        "device": "cpu",
        "enable_memory_saver": False,
        "start_layer": rng.choice((None, 5)),
    }


def ours(layout: str, shape: dict[str, Any], **more: Any) -> Any:
    """A pool of ours, every byte of it random."""
    pool = pool_class(MHATokenToKVPool, layout)(**{**shape, **more})
    fill_random(pool.page_pool.buffer, 1)
    return pool


def rows(shape: dict[str, Any], n: int, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Random K and V of ``n`` tokens."""
    key = torch.randn(n, shape["head_num"], shape["head_dim"]).to(dtype or shape["dtype"])
    value = torch.randn(n, shape["head_num"], shape["v_head_dim"] or shape["head_dim"]).to(dtype or shape["dtype"])
    return key, value


def some_slots(shape: dict[str, Any], n: int) -> torch.Tensor:
    """``n`` different slots, none of them of the sink page."""
    return shape["page_size"] + torch.randperm(shape["size"])[:n]


def at(pool: Any, layer: int, kind: str, slots: torch.Tensor) -> torch.Tensor:
    """Rows of a pool, by strides alone."""
    view = pool.get_key_buffer(layer) if kind == "key" else pool.get_value_buffer(layer)
    view = bits(view)
    ps = pool.page_size
    return view[slots] if view.dim() == 3 else view[slots // ps, slots % ps]


def work(pools: list[Any], shape: dict[str, Any], seed: int) -> None:
    """The same stores and moves on each of them."""
    torch.manual_seed(seed)
    for step in range(4):
        slots = some_slots(shape, 5).to(torch.int32 if step % 2 else torch.int64)
        for layer in range(shape["layer_num"]):
            key, value = rows(shape, len(slots))
            for pool in pools:
                pool.set_kv_buffer(None, KVWriteLoc(slots), key, value, layer_id_override=pool.start_layer + layer)
        both = some_slots(shape, 6)
        for pool in pools:
            pool.move_kv_cache(both[:3], both[3:])


@pytest.mark.skipif(RELEASE != "0.5.17", reason="later releases have no such pool")
@pytest.mark.parametrize("seed", range(8))
def test_page_major_is_sglangs_own_pool_byte_for_byte(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the same stores, by SGLang's kernel in the interpreter, and the same moves."""
    monkeypatch.setattr(memory_pool, "store_cache_4d", store_cache_4d)
    shape = shapes(seed)
    theirs, mine = memory_pool.PageMajorMHATokenToKVPool(**shape), ours("page_major", shape)
    buffer = mine.page_pool.buffer
    theirs._raw.copy_(buffer)
    before = buffer.clone()
    work([theirs, mine], shape, seed)
    assert torch.equal(theirs._raw, buffer) and not torch.equal(buffer, before)
    for layer in range(shape["layer_num"]):
        mine_k, their_k = mine.k_buffer[layer], theirs.k_buffer[layer]
        assert mine_k.data_ptr() - buffer.data_ptr() == their_k.data_ptr() - theirs._raw.data_ptr()
        if mine_k.dim() == 4:
            assert mine_k.stride() == their_k.stride()


def store_cache_4d(keys: Any, values: Any, key: Any, value: Any, slots: Any, page_size: int) -> None:
    """SGLang's launch of its kernel, less the demand for CUDA tensors."""
    from sglang.kernels.ops.kvcache.cache_move import store_cache_4d_kernel

    key_row, value_row = key[0].numel(), value[0].numel()
    grid = (len(slots), -(-max(key_row, value_row) // 128), 2)
    store_cache_4d_kernel[grid](
        keys, values, key, value, slots,
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), key.stride(0), value.stride(0),
        K_ROW_DIM=key_row, V_ROW_DIM=value_row, PAGE_SIZE=page_size, BLOCK=128,
    )  # fmt: skip


@pytest.mark.skipif(RELEASE != "0.5.23", reason="earlier releases have no token entries")
@pytest.mark.parametrize("seed", range(8))
def test_token_major_is_sglangs_unified_pool_byte_for_byte(seed: int) -> None:
    """After the same stores and moves of whole pages, through a pool of SGLang's own over its UnifiedKVPool."""
    from sglang.srt.mem_cache import unified_memory_pool as unified

    shape = shapes(seed)
    mine = ours("token_major", shape)
    buffer, ps = mine.page_pool.buffer, shape["page_size"]
    cells = torch.zeros_like(buffer)
    for layer, kind in itertools.product(range(shape["layer_num"]), ("key", "value")):
        view = PagePool(mine.page_pool.layout, mine.page_pool.num_pages, buffer=cells).view(layer, kind)
        view.view(torch.uint8).fill_(255)
    buffer &= cells  # entries end in padding, which SGLang moves along: both begin with zeros there
    entry = {key: shape[key] for key in ("layer_num", "head_num", "head_dim", "v_head_dim")}
    specs = [
        unified.MHASubPoolSpec(name=name, grow_direction=way, store_dtype=shape["dtype"], **entry)
        for name, way in (("full", "up"), ("swa", "down"))
    ]
    whole = unified.UnifiedKVPool(
        total_bytes=buffer.numel(), sub_pool_specs=specs, device="cpu", enable_memory_saver=False, page_size=ps
    )
    start = shape["start_layer"]
    theirs = unified.UnifiedMHATokenToKVPool(
        unified_buffer=whole, sub_pool_name="full", page_size=ps, start_layer=start
    )
    whole._raw.copy_(buffer)
    before = buffer.clone()
    torch.manual_seed(seed)
    for _ in range(3):
        slots = some_slots(shape, 5)
        for layer in range(mine.start_layer, mine.start_layer + shape["layer_num"]):
            key, value = rows(shape, len(slots))
            for pool in (theirs, mine):
                location = KVWriteLoc(slots, physical=True)
                pool.set_kv_buffer(None, location, key, value, layer_id_override=layer)
        pages = 1 + torch.randperm(shape["size"] // ps)[:4]
        tokens = (pages[:, None] * ps + torch.arange(ps)).view(2, -1)
        for pool in (theirs, mine):
            pool.move_kv_cache(tokens[0], tokens[1])
    assert torch.equal(whole._raw, buffer) and not torch.equal(buffer, before)
    for views, own in ((theirs.k_buffer, mine.k_buffer), (theirs.v_buffer, mine.v_buffer)):
        for their_view, view in zip(views, own, strict=True):
            assert view.stride() == their_view.stride() and view.shape == their_view.shape
            assert view.data_ptr() - buffer.data_ptr() == their_view.data_ptr() - whole._raw.data_ptr()
    assert theirs.get_contiguous_buf_infos()[1:] == mine.get_contiguous_buf_infos()[1:]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(6))
def test_it_holds_what_sglangs_layer_major_pool_holds(seed: int, layout: str) -> None:
    """The same stores and moves leave the same rows in every slot; nothing outside the slots written changes."""
    shape = shapes(seed)
    stock, mine = MHATokenToKVPool(**shape), ours(layout, shape)
    stock.use_native_move_kv_cache = True  # its other move is for GPUs
    every = torch.arange(shape["size"] + shape["page_size"])
    for layer in range(shape["layer_num"]):
        for kind, buffer in (("key", stock.k_buffer), ("value", stock.v_buffer)):
            bits(buffer[layer]).copy_(at(mine, mine.start_layer + layer, kind, every))
    work([stock, mine], shape, seed)
    for layer in range(mine.start_layer, mine.start_layer + shape["layer_num"]):
        for kind in ("key", "value"):
            assert torch.equal(at(stock, layer, kind, every), at(mine, layer, kind, every))
    assert sum(mine.get_kv_size_bytes()) == mine.page_pool.buffer.numel()
    assert mine.get_kv_buffer_shape()[0][-2:] == (shape["head_num"], shape["head_dim"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FP8)
def test_fp8_rows_are_scaled_saturated_and_left_as_they_are(layout: str, dtype: torch.dtype) -> None:
    shape = {**shapes(3), "dtype": dtype, "page_size": 4, "size": 32}
    mine = ours(layout, shape)
    slots = some_slots(shape, 7)
    key, value = rows(shape, 7, torch.bfloat16)
    key[0, 0, 0] = 1e6
    saved = key.clone(), value.clone()
    mine.set_kv_buffer(None, slots, key, value, 0.5, torch.tensor(2.0), layer_id_override=mine.start_layer)
    assert torch.equal(key, saved[0]) and torch.equal(value, saved[1])
    largest = torch.finfo(dtype).max
    assert mine.k_buffer[0].dtype == torch.uint8 and mine.get_key_buffer(mine.start_layer).dtype == dtype
    expected = (key.float() / 0.5).clamp(-largest, largest).to(dtype)
    assert torch.equal(at(mine, mine.start_layer, "key", slots), bits(expected))
    assert torch.equal(at(mine, mine.start_layer, "value", slots), bits((value.float() / 2).to(dtype)))
    stored = at(mine, mine.start_layer, "key", slots).view(dtype)
    mine.set_kv_buffer(None, slots.flip(0), stored, value, 0.5, 2.0, layer_id_override=mine.start_layer)
    assert torch.equal(at(mine, mine.start_layer, "key", slots.flip(0)), bits(stored)), "rows of the cache's dtype"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_may_be_slices_of_one_projection_and_must_have_the_pools_heads(layout: str) -> None:
    shape = {**shapes(0), "v_head_dim": None}
    mine, same = ours(layout, shape), ours(layout, shape)
    slots = some_slots(shape, 4)
    width = shape["head_num"] * shape["head_dim"]
    key, value = torch.randn(4, 3 * width).to(shape["dtype"])[:, width:].split(width, 1)
    mine.set_kv_buffer(None, slots, key, value, layer_id_override=mine.start_layer)
    form = (shape["head_num"], shape["head_dim"])
    whole = [rows.contiguous().unflatten(1, form) for rows in (key, value)]
    same.set_kv_buffer(None, slots, *whole, layer_id_override=mine.start_layer)
    assert torch.equal(mine.page_pool.buffer, same.page_pool.buffer)
    wrong = torch.randn(4, 2 * shape["head_num"], shape["head_dim"]).to(shape["dtype"])
    with pytest.raises(ValueError, match="key rows are .*holds"):
        mine.set_kv_buffer(None, slots, wrong, wrong, layer_id_override=mine.start_layer)
    assert torch.equal(mine.page_pool.buffer, same.page_pool.buffer)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(4))
def test_copies_to_the_cpu_come_back_to_other_slots(seed: int, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the form of SGLang's pool of its own; chunks may be cut otherwise on the way, as its SWA pool does."""
    shape = shapes(seed)
    monkeypatch.setattr(pages, "STAGED", (pages.STAGED, 1, 300, 1000)[seed])
    if seed == 3:
        shape["dtype"] = torch.float8_e4m3fn
    stock, mine = MHATokenToKVPool(**shape), ours(layout, shape)
    if seed == 3:
        mine.page_pool.buffer.fill_(0x3A)  # a number in every dtype: NaNs have several encodings
    source, target = some_slots(shape, 6).chunk(2)
    every = torch.arange(shape["size"] + shape["page_size"])
    layers = range(mine.start_layer, mine.start_layer + shape["layer_num"])
    before = {(layer, kind): at(mine, layer, kind, every) for layer in layers for kind in ("key", "value")}
    saved = mine.get_cpu_copy(source)
    assert [[len(chunk) for chunk in layer] for layer in saved] == [[2]] * shape["layer_num"]
    assert saved[0][0][0].dtype == mine.store_dtype
    cut = [[[part[i:j] for part in chunks[0]] for i, j in ((0, 1), (1, 1), (1, 3))] for chunks in saved]
    mine.load_cpu_copy(cut, target)
    for (layer, kind), old in before.items():
        expected = old.clone()
        expected[target] = old[source]
        assert torch.equal(at(mine, layer, kind, every), expected)
    stock.load_cpu_copy(saved, target)
    assert torch.equal(at(stock, layers[0], "value", target), at(mine, layers[0], "value", source))
    mine.cpu_offloading_chunk_size = stock.cpu_offloading_chunk_size = 2
    runs = mine.get_cpu_copy(source)
    assert [[len(chunk[0]) for chunk in layer] for layer in runs] == [[2, 1]] * shape["layer_num"]
    for parts, whole in zip(runs, saved, strict=True):
        assert all(torch.equal(bits(torch.cat([p[i] for p in parts])), bits(whole[0][i])) for i in range(2))
    mine.page_pool.buffer.fill_(0x3A)
    mine.load_cpu_copy(saved, target)
    stock.load_cpu_copy(runs, target)
    assert torch.equal(at(stock, layers[-1], "key", target), at(mine, layers[-1], "key", target))
    with pytest.raises(ValueError, match=r"key rows of layer 0 are in chunks of \[1\] for 3 slots"):
        mine.load_cpu_copy([chunks[:1] for chunks in cut], target)
    assert mine.get_cpu_copy(source[:0]) == [[]] * shape["layer_num"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [3, 8])
def test_copies_are_the_callers_and_one_launch_gathers_or_spreads_a_kind(layout: str, head_dim: int) -> None:
    """Contiguous, apart from the pool and from one another; rows of 6 bytes too, which have no wider elements."""
    shape = {**shapes(0), "dtype": torch.float16, "head_num": 1, "head_dim": head_dim, "v_head_dim": 8, "layer_num": 4}
    mine = ours(layout, {**shape, "page_size": 4, "size": 24})
    source, target = torch.tensor([5, 20, 6, 23]), torch.tensor([9, 8, 27, 14], dtype=torch.int32)
    with Calls() as reads:
        saved = mine.get_cpu_copy(source)
    assert reads.seen.count("index") == 2, reads.seen
    kept = [[part.clone() for part in chunks[0]] for chunks in saved]
    again = mine.get_cpu_copy(source)
    with Calls() as writes:
        mine.load_cpu_copy(saved, target)
    assert writes.seen.count("index_put_") == 2, writes.seen
    fill_random(mine.page_pool.buffer, 2)
    for part in (part for chunks in again for part in chunks[0]):
        part.fill_(7)
    for chunks, expected in zip(saved, kept, strict=True):
        assert all(part.is_contiguous() for part in chunks[0])
        assert all(torch.equal(bits(part), bits(old)) for part, old in zip(chunks[0], expected, strict=True))


class Calls(TorchDispatchMode):
    """Notes the names of torch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_that_do_not_fit_are_refused_before_a_byte_is_written(layout: str) -> None:
    shape = {**shapes(1), "dtype": torch.float16, "v_head_dim": None, "layer_num": 2}
    mine = ours(layout, shape)
    slots = some_slots(shape, 4)
    saved, before = mine.get_cpu_copy(slots), mine.page_pool.buffer.clone()
    (first,), (last,) = saved
    halves = [[part[:2] for part in last], [part[2:] for part in last]]
    wide = torch.zeros(4, shape["head_num"], shape["head_dim"] + 1, dtype=torch.float16)
    for rows, problem in (
        (saved[:1], "rows of 1 layers for a pool of 2"),
        ([[first], halves], r"key rows of layer 1 are in chunks of \[2, 2\] for 4 slots; .* \[4\]"),
        ([[first], [[last[0], last[1][:3]]]], r"value rows of layer 1 are in chunks of \[3\]"),
        ([[first], [[last[0], wide]]], "value rows of layer 1 are .* can load its like alone"),
        ([[first], [[last[0].bfloat16(), last[1]]]], "key rows of layer 1 are .* of torch.bfloat16, but"),
    ):
        with pytest.raises(ValueError, match=problem):
            mine.load_cpu_copy(rows, slots)
    limit = shape["size"] + shape["page_size"]
    for call in (mine.get_cpu_copy, lambda slots: mine.load_cpu_copy(saved, slots)):
        with pytest.raises(ValueError, match=rf"slots \[{limit}, -1\] of a pool of {limit}"):
            call(torch.tensor([1, limit, -1, 2]))
    assert torch.equal(mine.page_pool.buffer, before)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_commit_writes_each_sequences_first_rows_alone(layout: str) -> None:
    shape = {**shapes(2), "v_head_dim": 32}
    mine, same = ours(layout, shape), ours(layout, shape)
    slots = some_slots(shape, 6).view(2, 3)
    key, value = rows(shape, 6)
    mine.set_kv_buffer_prefix_valid(None, slots, torch.tensor([2, 0]), key, value, layer_id_override=mine.start_layer)
    same.set_kv_buffer(None, slots[0, :2], key[:2], value[:2], layer_id_override=mine.start_layer)
    assert torch.equal(mine.page_pool.buffer, same.page_pool.buffer)
    mine.set_kv_buffer(
        None, slots.flatten(), key, value, layer_id_override=mine.start_layer, dcp_kv_mask=torch.arange(6) < 2
    )
    assert torch.equal(mine.page_pool.buffer, same.page_pool.buffer), "a mask of rows"
    with pytest.raises(ValueError, match=r"\[2, 3\], \[3\] and 6 rows"):
        mine.set_kv_buffer_prefix_valid(None, slots, torch.ones(3), key, value, layer_id_override=mine.start_layer)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_transfers_see_one_region_of_pages(layout: str) -> None:
    shape = shapes(1)
    mine = ours(layout, shape)
    pages = mine.page_pool.num_pages
    assert pages == shape["size"] // shape["page_size"] + 1
    addresses, sizes, items = mine.get_contiguous_buf_infos()
    assert (addresses, sizes) == ([mine.page_pool.buffer.data_ptr()], [mine.page_pool.buffer.numel()])
    assert items == [sizes[0] // pages]
    assert MHATokenToKVPool.get_contiguous_buf_infos(mine) == (addresses, sizes, items), "by its descriptors"
    assert mine.data_ptrs.tolist() == [b.data_ptr() for b in mine.k_buffer + mine.v_buffer]
    assert mine.page_pool.allocator.num_free == 0, "the engine hands pages out"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_goes_to_the_sink_page(layout: str) -> None:
    """Many rows at once for slot 0 are no error, and change no other page."""
    shape = {**shapes(4), "page_size": 4, "size": 24}
    mine = ours(layout, shape)
    before = mine.page_pool.pages.clone()
    key, value = rows(shape, 3)
    mine.set_kv_buffer(None, torch.zeros(3, dtype=torch.int64), key, value, layer_id_override=mine.start_layer)
    mine.move_kv_cache(torch.tensor([0, 0]), torch.tensor([5, 6]))
    assert torch.equal(mine.page_pool.pages[1:], before[1:])


def test_reading_a_layer_waits_for_its_transfer() -> None:
    mine = ours("token_major", {**shapes(0), "start_layer": 5, "layer_num": 2})
    waited = []
    mine.register_layer_transfer_counter(type("Counter", (), {"wait_until": lambda _, layer: waited.append(layer)})())
    mine.get_kv_buffer(6)
    assert waited == [1, 1]


def test_sliding_windows_have_a_pool_of_their_own_and_copies_cross_both() -> None:
    left = ("layer_num", "start_layer", "size", "enable_memory_saver")
    shape = {key: value for key, value in shapes(2).items() if key not in left}
    both = SWAKVPool(
        size=16,
        size_swa=16,
        swa_attention_layer_ids=[0, 2],
        full_attention_layer_ids=[1],
        token_to_kv_pool_class=pool_class(MHATokenToKVPool, "token_major"),
        **shape,
    )
    both.register_mapping(torch.tensor([0, *range(16, 0, -1)]))
    slots, other = torch.tensor([8, 9, 10]), torch.tensor([1, 2, 3])
    saved = []
    for layer in range(3):
        key, value = rows(shape, 3)
        location = KVWriteLoc(slots, both.translate_loc_from_full_to_swa(slots))
        both.set_kv_buffer(type("Layer", (), {"layer_id": layer})(), location, key, value)
        saved.append((key, value))
    both.load_cpu_copy(both.get_cpu_copy(slots), other)
    for layer, (key, value) in enumerate(saved):
        where = other if layer == 1 else both.translate_loc_from_full_to_swa(other)
        pool, index = (both.full_kv_pool, 0) if layer == 1 else (both.swa_kv_pool, layer // 2)
        assert torch.equal(at(pool, index, "key", where), bits(key))
        assert torch.equal(at(pool, index, "value", where), bits(value))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_models_with_state_layers_have_it_for_their_attention(layout: str) -> None:
    """Through SGLang's own pool of both, whose layers are numbered by the model."""
    states = SimpleNamespace(
        mem_usage=0, size=4, layer_transfer_counter=None, mamba_cache=SimpleNamespace(mem_usage_bytes=lambda: 0)
    )
    hybrid = HybridLinearKVPool(
        size=32, dtype=torch.bfloat16, page_size=4, head_num=2, head_dim=16, full_attention_layer_ids=[3, 7],
        device="cpu", mamba_pool=states, enable_memory_saver=False, enable_kv_cache_copy=True,
        full_kv_pool_class=pool_class(MHATokenToKVPool, layout),
    )  # fmt: skip
    assert len(hybrid.full_kv_pool.k_buffer) == 2 and hybrid.full_kv_pool.page_pool.layout.name == layout
    key, value = (torch.randn(3, 2, 16).bfloat16() for _ in range(2))
    slots, other = torch.tensor([5, 6, 9]), torch.tensor([13, 21, 22])
    hybrid.set_kv_buffer(SimpleNamespace(layer_id=7), slots, key, value)
    hybrid.move_kv_cache(other, slots)
    for where in (slots, other):
        for wanted, view in zip((key, value), (hybrid.get_key_buffer(7), hybrid.get_value_buffer(7)), strict=True):
            assert torch.equal(view[where] if view.dim() == 3 else view[where // 4, where % 4], wanted)


def test_a_pool_of_whole_pages_alone() -> None:
    with pytest.raises(ValueError, match="a pool of 30 slots has no whole pages of 4; choose --max-total-tokens"):
        pool_class(MHATokenToKVPool, "token_major")(**{**shapes(0), "size": 30, "page_size": 4})


def test_a_pool_without_layers_and_a_quantised_one() -> None:
    empty = pool_class(MHATokenToKVPool, "token_major")(**{**shapes(0), "layer_num": 0, "start_layer": 0})
    empty.move_kv_cache(torch.tensor([1]), torch.tensor([2]))
    assert empty.get_contiguous_buf_infos() == ([], [], []) and empty.get_kv_size_bytes() == (0, 0)
    assert empty.get_cpu_copy(torch.tensor([1])) == []
    with pytest.raises(ValueError, match="a cache quantised by Fp4 is not supported; choose --kv-cache-dtype"):
        pool_class(MHATokenToKVPool, "token_major")(**shapes(0), quant_method=type("Fp4", (), {})())
