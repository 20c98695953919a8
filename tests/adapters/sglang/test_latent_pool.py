"""Our pool of latents against SGLang's own: the same bytes after the same work, in its unified pools' pages too."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_engine

pytestmark = pytest.mark.engines
RELEASE = sglang_engine.require()

import oracle
import torch
import triton_interpreter  # noqa: F401
from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from pm_ops import PagePool
from pm_ops.adapters.sglang.latent_pool import latent_pool_class
from pm_ops.adapters.sglang.pool import pools_of
from pm_ops.ops._common import bits
from pm_ops.testing import fill_random

LAYOUTS = ("token_major", "page_major")


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of process groups of one."""
    alone = SimpleNamespace(dcp_enabled=False, attn_dcp_size=1, attn_dcp_rank=0)
    monkeypatch.setattr(memory_pool, "get_parallel", lambda: alone)


def shapes(seed: int) -> dict[str, Any]:
    """What SGLang makes a pool with."""
    rng = random.Random(seed)
    page_size = rng.choice((1, 2, 4, 16))
    return {
        "size": page_size * rng.randint(6, 12),
        "page_size": page_size,
        "dtype": rng.choice((torch.float32, torch.float16, torch.bfloat16)),
        "kv_lora_rank": rng.choice((16, 32)),
        "qk_rope_head_dim": rng.choice((8, 16)),
        "layer_num": rng.randint(1, 4),
        "device": "cpu",
        "enable_memory_saver": False,
        "start_layer": rng.choice((None, 5)),
    }


def ours(layout: str, shape: dict[str, Any]) -> Any:
    """A pool of ours, every byte of it random."""
    pool = latent_pool_class(MLATokenToKVPool, layout)(**shape)
    fill_random(pool.page_pool.buffer, 1)
    return pool


def stock_like(mine: Any, shape: dict[str, Any]) -> Any:
    """SGLang's own pool with the same rows in it."""
    stock = MLATokenToKVPool(**shape)
    for layer, buffer in enumerate(stock.kv_buffer):
        bits(buffer).copy_(rows_of(mine, layer))
    return stock


def rows_of(pool: Any, layer: int, slots: torch.Tensor | None = None) -> torch.Tensor:
    """Rows ``[N, 1, D]`` of a pool's layer, by strides alone, as bits."""
    view = bits(pool.kv_buffer[layer])
    slots = torch.arange(pool.size + pool.page_size) if slots is None else slots
    return view[slots] if view.dim() == 3 else view[slots // pool.page_size, slots % pool.page_size]


def rows(shape: dict[str, Any], n: int, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Random latents and rotated keys of ``n`` tokens, as a model makes them: both slices of one projection."""
    parts = shape["kv_lora_rank"], shape["qk_rope_head_dim"]
    return torch.randn(n, 1, sum(parts)).to(dtype or shape["dtype"]).split(parts, -1)


def some_slots(shape: dict[str, Any], n: int) -> torch.Tensor:
    """``n`` different slots, none of them of the sink page."""
    return shape["page_size"] + torch.randperm(shape["size"])[:n]


def work(pools: list[Any], shape: dict[str, Any], seed: int) -> None:
    """The same stores, of whole rows, and moves on each of them."""
    torch.manual_seed(seed)
    for step in range(4):
        slots = some_slots(shape, 5).to(torch.int32 if step % 2 else torch.int64)
        for layer in range(shape["layer_num"]):
            row = torch.cat(rows(shape, len(slots)), -1)
            for pool in pools:
                pool.set_kv_buffer(SimpleNamespace(layer_id=pool.start_layer + layer), slots, row, None)
        both = some_slots(shape, 6)
        for pool in pools:
            pool.move_kv_cache(both[:3], both[3:])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(6))
def test_it_holds_what_sglangs_own_pool_holds(seed: int, layout: str) -> None:
    """The same stores and moves leave the same rows in every slot; nothing outside the slots written changes."""
    shape = shapes(seed)
    mine = ours(layout, shape)
    stock = stock_like(mine, shape)
    before = mine.page_pool.buffer.clone()
    work([stock, mine], shape, seed)
    assert not torch.equal(mine.page_pool.buffer, before)
    for layer in range(shape["layer_num"]):
        assert torch.equal(rows_of(stock, layer), rows_of(mine, layer))
        both = (pool.get_kv_buffer(mine.start_layer + layer) for pool in (stock, mine))
        for theirs, found in zip(*both, strict=True):
            assert torch.equal(bits(theirs), bits(found).reshape(theirs.shape))
    assert mine.get_kv_size_bytes() == mine.page_pool.buffer.numel()
    rewritten = mine.page_pool.buffer != before
    cells = PagePool(mine.page_pool.layout, mine.page_pool.num_pages, buffer=torch.zeros_like(before))
    for layer in range(shape["layer_num"]):
        cells.view(layer, "latent").view(torch.uint8).fill_(255)
    assert not (rewritten & (cells.buffer == 0)).any(), "padding of an entry"


@pytest.mark.skipif(RELEASE != "0.5.17", reason="later releases have other pages")
@pytest.mark.parametrize("seed", range(6))
def test_page_major_is_sglangs_unified_pool_byte_for_byte(seed: int) -> None:
    """0.5.17's views of one buffer, written by its own pool's methods at its own numbers of rows."""
    from sglang.srt.mem_cache.layout.page_major import build_dense_mla_views

    shape = shapes(seed)
    mine = ours("page_major", shape)
    buffer, layers, ps = mine.page_pool.buffer, shape["layer_num"], shape["page_size"]
    raw = torch.cat([buffer, torch.zeros(mine.page_pool.layout.page_bytes, dtype=torch.uint8)])
    theirs = MLATokenToKVPool(**shape)
    theirs.kv_buffer = build_dense_mla_views(
        raw, layer_num=layers, kv_cache_dim=mine.kv_cache_dim, store_dtype=shape["dtype"], page_size=ps,
        num_pages=mine.page_pool.num_pages,
    )  # fmt: skip
    torch.manual_seed(seed)
    for _ in range(3):
        slots, both = some_slots(shape, 5), some_slots(shape, 6)

        def dense(slots: torch.Tensor) -> torch.Tensor:
            return slots // ps * (ps * layers) + slots % ps

        for layer in range(layers):
            row = torch.cat(rows(shape, len(slots)), -1)
            at = SimpleNamespace(layer_id=mine.start_layer + layer)
            mine.set_kv_buffer(at, slots, row, None)
            theirs.kv_buffer[layer][dense(slots)] = row
        mine.move_kv_cache(both[:3], both[3:])
        for view in theirs.kv_buffer:
            view[dense(both[:3])] = view[dense(both[3:])]
    assert torch.equal(raw[: buffer.numel()], buffer)


@pytest.mark.skipif(RELEASE != "0.5.23", reason="earlier releases have other pages")
@pytest.mark.parametrize("seed", range(6))
def test_token_major_is_sglangs_unified_pool_byte_for_byte(seed: int) -> None:
    """After the same stores and moves of whole pages, through a pool of SGLang's own over its UnifiedKVPool."""
    from sglang.srt.mem_cache import unified_memory_pool as unified

    shape = {**shapes(seed), "start_layer": None}
    mine = ours("token_major", shape)
    buffer, ps = mine.page_pool.buffer, shape["page_size"]
    cells = PagePool(mine.page_pool.layout, mine.page_pool.num_pages, buffer=torch.zeros_like(buffer))
    for layer in range(shape["layer_num"]):
        cells.view(layer, "latent").view(torch.uint8).fill_(255)
    buffer &= cells.buffer  # entries end in padding, which SGLang moves along: both begin with zeros there
    entry = {key: shape[key] for key in ("layer_num", "kv_lora_rank", "qk_rope_head_dim")}
    specs = [
        unified.MLASubPoolSpec(name=name, grow_direction=way, store_dtype=shape["dtype"], **entry)
        for name, way in (("full", "up"), ("swa", "down"))
    ]
    whole = unified.UnifiedKVPool(
        total_bytes=buffer.numel(), sub_pool_specs=specs, device="cpu", enable_memory_saver=False, page_size=ps
    )
    theirs = unified.UnifiedMLATokenToKVPool(
        unified_buffer=whole, sub_pool_name="full", kv_cache_dtype=shape["dtype"], page_size=ps
    )
    whole._raw.copy_(buffer)
    before = buffer.clone()
    torch.manual_seed(seed)
    for _ in range(3):
        slots = some_slots(shape, 5)
        for layer in range(shape["layer_num"]):
            row = torch.cat(rows(shape, len(slots)), -1)
            for pool in (theirs, mine):
                location = KVWriteLoc(slots, physical=True)
                pool.set_kv_buffer(SimpleNamespace(layer_id=layer), location, row, None)
        pages = 1 + torch.randperm(shape["size"] // ps)[:4]
        tokens = (pages[:, None] * ps + torch.arange(ps)).view(2, -1)
        for pool in (theirs, mine):
            pool.move_kv_cache(tokens[0], tokens[1])
    assert torch.equal(whole._raw, buffer) and not torch.equal(buffer, before)
    for their_view, view in zip(theirs.kv_buffer, mine.kv_buffer, strict=True):
        assert view.stride() == their_view.stride() and view.shape == their_view.shape
    assert theirs.get_contiguous_buf_infos()[1:] == mine.get_contiguous_buf_infos()[1:]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [None, torch.float8_e4m3fn])
def test_rows_in_two_parts_are_written_and_read_as_such(layout: str, dtype: torch.dtype | None) -> None:
    """Rows of other dtypes are cast, fp8 saturates, and what is given is left as it is."""
    shape = {**shapes(2), "page_size": 4, "size": 32, "layer_num": 2, "start_layer": 5}
    shape["dtype"] = dtype or shape["dtype"]
    mine = ours(layout, shape)
    stock = stock_like(mine, shape)
    slots, at = some_slots(shape, 7), SimpleNamespace(layer_id=6)
    latent, rope = rows(shape, 7, torch.float32)
    saved = latent.clone(), rope.clone()
    mine.set_mla_kv_buffer(at, KVWriteLoc(slots), latent, rope)
    assert torch.equal(latent, saved[0]) and torch.equal(rope, saved[1])
    stock.set_kv_buffer(at, slots, torch.cat([latent, rope], -1), None)
    for layer in range(2):
        assert torch.equal(rows_of(stock, layer), rows_of(mine, layer))
    found = mine.get_mla_kv_buffer(at, slots)
    whole = rows_of(stock, 1, slots).view(shape["dtype"])
    parts = whole.split((shape["kv_lora_rank"], shape["qk_rope_head_dim"]), -1)
    for part, expected in zip(found, parts, strict=True):
        assert part.is_contiguous() and torch.equal(bits(part), bits(expected))
    wide = mine.get_mla_kv_buffer(at, slots, torch.float32)
    assert all(torch.equal(part, narrow.float()) for part, narrow in zip(wide, found, strict=True))
    if dtype is not None:
        latent[0, 0, 0] = 1e6
        mine.set_mla_kv_buffer(at, slots, latent, rope)
        assert mine.get_mla_kv_buffer(at, slots, torch.float32)[0][0, 0, 0] == torch.finfo(dtype).max


@pytest.mark.skipif(RELEASE != "0.5.23", reason="earlier releases have no latents in sliding windows")
@pytest.mark.parametrize("windows", [[1], [0, 1]])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_of_sliding_windows_are_told_their_number_in_a_pool_of_their_own(
    layout: str, windows: list[int]
) -> None:
    """By SGLang's pool of two, the other of which has no layers where all have windows."""
    shape = {**shapes(3), "page_size": 4, "size": 32}
    common = {key: shape[key] for key in ("page_size", "device", "enable_memory_saver")}
    common |= {key: shape[key] for key in ("kv_lora_rank", "qk_rope_head_dim")}
    both = [
        SWAKVPool(
            size=32,
            size_swa=24,
            page_size=4,
            dtype=shape["dtype"],
            head_num=0,
            head_dim=0,
            device="cpu",
            swa_attention_layer_ids=windows,
            full_attention_layer_ids=[i for i in (0, 1) if i not in windows],
            full_kv_pool_class=kind,
            swa_kv_pool_class=kind,
            full_kv_pool_kwargs=common,
            swa_kv_pool_kwargs=common,
        )
        for kind in (MLATokenToKVPool, latent_pool_class(MLATokenToKVPool, layout))
    ]
    torch.manual_seed(3)
    for index in (1, 0):
        location = KVWriteLoc(torch.tensor([9, 22, 31]), torch.tensor([5, 18, 27]))
        latent, rope = rows(shape, 3)
        for pool in both:
            pool.set_kv_buffer(SimpleNamespace(layer_id=index), location, torch.cat([latent, rope], -1), None)
        location = KVWriteLoc(torch.tensor([10, 11]), torch.tensor([6, 7]))
        latent, rope = rows(shape, 2)
        both[0].set_kv_buffer(SimpleNamespace(layer_id=index), location, torch.cat([latent, rope], -1), None)
        both[1].set_mla_kv_buffer(SimpleNamespace(layer_id=index), location, latent, rope)
    for stock, mine in zip(*map(pools_of, both), strict=True):
        assert (mine.page_pool is None) == (stock.layer_num == 0) and stock.layer_num == len(mine.kv_buffer)
        assert mine.page_pool is not None or mine.get_kv_size_bytes() == stock.get_kv_size_bytes() == 0
        for layer in range(stock.layer_num):
            assert torch.equal(rows_of(stock, layer), rows_of(mine, layer))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_wrong_rows_are_refused_and_padding_goes_nowhere(layout: str) -> None:
    shape = {**shapes(1), "page_size": 4, "size": 24}
    mine, at = ours(layout, shape), SimpleNamespace(layer_id=shape["start_layer"] or 0)
    before = mine.page_pool.buffer.clone()
    latent, rope = rows(shape, 3)
    with pytest.raises(ValueError, match="latent rows are .*holds rows of"):
        mine.set_mla_kv_buffer(at, some_slots(shape, 3), latent, rope[..., :4])
    with pytest.raises(ValueError, match="latent rows are .*holds rows of"):
        mine.set_mla_kv_buffer(at, some_slots(shape, 3), latent, None)
    mine.set_mla_kv_buffer(at, torch.zeros(3, dtype=torch.int64), latent, rope)
    mine.move_kv_cache(torch.tensor([0, 0]), torch.tensor([5, 6]))
    mine.move_kv_cache(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))
    assert torch.equal(mine.page_pool.buffer, before)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_copies_to_the_cpu_come_back_to_other_slots(seed: int, layout: str) -> None:
    """In the form of SGLang's own pool, which reads them."""
    shape = shapes(seed)
    if seed == 2:
        shape["dtype"] = torch.float8_e4m3fn
    mine = ours(layout, shape)
    mine.page_pool.buffer.fill_(0x3A)  # a number in every dtype: fp8 has several NaNs
    work([mine], {**shape, "dtype": torch.float32}, seed)
    stock = stock_like(mine, shape)
    source, target = some_slots(shape, 6).chunk(2)
    mine.cpu_offloading_chunk_size = stock.cpu_offloading_chunk_size = 2
    saved, theirs = mine.get_cpu_copy(source), stock.get_cpu_copy(source)
    for chunks, expected in zip(saved, theirs, strict=True):
        assert [len(chunk) for chunk in chunks] == [2, 1]
        assert all(torch.equal(bits(a), bits(b)) and a.dtype == b.dtype for a, b in zip(chunks, expected, strict=True))
    mine.load_cpu_copy(theirs, target)
    stock.load_cpu_copy(saved, target)
    for layer in range(shape["layer_num"]):
        assert torch.equal(rows_of(stock, layer), rows_of(mine, layer))
    with pytest.raises(ValueError, match=r"\[2\] for 3 slots"):
        mine.load_cpu_copy([chunks[:1] for chunks in saved], target)
    assert mine.get_cpu_copy(source[:0]) == [[]] * shape["layer_num"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_transfers_see_one_region_of_pages_and_reads_wait_for_their_layer(layout: str) -> None:
    shape = {**shapes(0), "start_layer": 5, "layer_num": 2}
    mine = ours(layout, shape)
    addresses, sizes, items = mine.get_contiguous_buf_infos()
    buffer = mine.page_pool.buffer
    assert (addresses, sizes) == ([buffer.data_ptr()], [buffer.numel()])
    assert items == [sizes[0] // (shape["size"] // shape["page_size"] + 1)]
    assert mine.data_ptrs.tolist() == [view.data_ptr() for view in mine.kv_buffer]
    assert mine.page_pool.allocator.num_free == 0, "the engine hands pages out"
    waited: list[int] = []
    mine.register_layer_transfer_counter(SimpleNamespace(wait_until=waited.append))
    mine.get_kv_buffer(6)
    mine.get_mla_kv_buffer(SimpleNamespace(layer_id=6), torch.tensor([1]))
    assert waited == [1, 1, 1]


def test_what_is_no_plain_latent_is_refused() -> None:
    kind = latent_pool_class(MLATokenToKVPool, "token_major")
    with pytest.raises(ValueError, match=r"an indexer \(DSA\) is not supported"):
        kind(**shapes(0), use_dsa=True)
    with pytest.raises(ValueError, match="a cache of torch.int8 is not supported; choose --kv-cache-dtype"):
        kind(**{**shapes(0), "dtype": torch.int8})
    with pytest.raises(ValueError, match="a pool of 30 slots has no whole pages of 4; choose --max-total-tokens"):
        kind(**{**shapes(0), "size": 30, "page_size": 4})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("new", [[1, 1, 1], [5, 4, 1]], ids=["decode", "extend"])
def test_sglangs_triton_kernels_read_token_major(new: list[int], dtype: torch.dtype) -> None:
    """The stock backend's kernels on the very views that the pool gives them, as DeepSeek-V3 has them: 512 + 64."""
    torch.manual_seed(0)
    shape = {**shapes(0), "size": 32, "page_size": 4, "dtype": dtype, "layer_num": 2, "start_layer": None}
    shape |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    mine, at, lengths, heads = ours("token_major", shape), SimpleNamespace(layer_id=1), [5, 12, 9], 16
    mine.page_pool.buffer.fill_(255)  # NaN in every dtype
    table = (1 + torch.randperm(8)).split([2, 3, 3])
    slots = [((pages * 4)[:, None] + torch.arange(4)).flatten()[:n] for pages, n in zip(table, lengths, strict=True)]
    latents = []
    for place in slots:
        latents.append(torch.cat(rows(shape, len(place)), -1))
        mine.set_kv_buffer(at, place, latents[-1], None)
    query, scale = torch.randn(sum(new), heads, 576).to(dtype), 192**-0.5
    out = torch.full((len(query), heads, 512), torch.nan, dtype=dtype)
    views, starts = mine.get_kv_buffer(1), torch.tensor([0, *new]).cumsum(0)
    assert views[0].dim() == 3 and not views[0].is_contiguous()
    decode = max(new) == 1
    read = [place if decode else place[: len(place) - n] for place, n in zip(slots, new, strict=True)]
    pointers = torch.tensor([0, *map(len, read)]).cumsum(0).int()
    if decode:
        logits = torch.zeros(len(query), heads, 2, 512)
        decode_attention_fwd(
            query, *views, out, pointers, torch.cat(read), logits, torch.zeros(len(query), heads, 2),
            torch.full((len(query),), 2, dtype=torch.int32), 2, scale, 1.0, 1.0, has_mla=True, page_size=4,
        )  # fmt: skip
    else:
        key = torch.cat([latent[len(latent) - n :] for latent, n in zip(latents, new, strict=True)])
        extend_attention_fwd(
            query, key, key[..., :512], out, *views, starts, pointers, torch.cat(read), None, True, None, max(new),
            1.0, 1.0, scale, page_size=4,
        )  # fmt: skip
    latent, pages = mine.page_pool.plane(1, "latent"), torch.zeros(3, 3, dtype=torch.int64)
    for row, found in zip(pages, table, strict=True):
        row[: len(found)] = found
    wanted = oracle.attention(
        mine.page_pool.buffer, query, pages, torch.tensor(lengths), starts, latent.geometry, latent.geometry,
        4, 1, 512, dtype, dtype, softmax_scale=scale,
    )[0]  # fmt: skip
    tolerance = 3e-3 if dtype == torch.float16 else 5e-5
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=tolerance)
