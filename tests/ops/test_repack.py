"""repack_pages on the CPU: every byte of the target's buffer against the formats' formulas."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from repack_cases import (
    FORMATS,
    ROTATED,
    UNIFORM,
    WIDENINGS,
    Side,
    check_wider,
    expected,
    heads_of,
    models_of,
    numbers,
    same_numbers,
    side,
    wider_pools,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode

import pm_ops
from pm_ops.testing import fill_random, writes_only

PAIRS = list(itertools.product(FORMATS, FORMATS))
PAGE_SIZES = (1, 8, 16, 48, 64)


def check(source: Side, target: Side, tokens: int, layers=None, heads=None) -> None:
    """The whole target is as the oracle says, and the source as it was."""
    plan = pm_ops.RepackPlan(source.pool.layout, target.pool.layout, layers=layers, heads=heads)
    wanted = expected(source, target, tokens, layers, heads)
    with writes_only(source.pool.buffer, []):
        plan.run(source.pool, target.pool, source.pages, target.pages, tokens)
    assert torch.equal(target.pool.buffer, wanted)


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_every_pair_of_formats_moves_every_byte_to_its_place_and_no_other(a, b):
    for seed, model in enumerate(models_of(a, b)):
        for sizes in ((8, 8), (16, 8), (3, 16)):
            check(side(a, model, sizes[0], 37, seed), side(b, model, sizes[1], 37, seed + 50), 37)


@pytest.mark.parametrize(("ours", "theirs"), list(itertools.product(PAGE_SIZES, PAGE_SIZES)))
def test_every_pair_of_page_sizes_moves_whole_and_partly_filled_pages(ours, theirs):
    for tokens in (1, 64, 97):
        check(side("page_major", UNIFORM, ours, tokens, 1), side("BLNHC", UNIFORM, theirs, tokens, 2), tokens)


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_there_and_back_through_every_pair_of_page_sizes_is_the_sequence_as_it_was(a, b):
    tokens = 70
    for model, (ours, theirs) in itertools.product(models_of(a, b), itertools.product(PAGE_SIZES, PAGE_SIZES)):
        source, target, back = (
            side(n, model, ps, tokens, i) for i, (n, ps) in enumerate(((a, ours), (b, theirs), (a, ours)))
        )
        check(source, target, tokens)
        check(target, back, tokens)
        assert torch.equal(content(source, tokens), content(back, tokens))


def content(s: Side, tokens: int) -> torch.Tensor:
    """Every row of every token, as bytes, in one order for all formats."""
    found = []
    for layer, la in enumerate(s.model):
        for kind, head in itertools.product(la.kinds, range(la.heads)):
            at = s.starts(layer, kind, head, tokens)
            found.append(s.pool.buffer[at[:, None] + torch.arange(la.row(kind))].flatten())
    return torch.cat(found)


@pytest.mark.parametrize(("a", "b"), ROTATED)
@pytest.mark.parametrize(("ours", "theirs"), list(itertools.permutations((1, 2, 4, 8), 2)))
def test_heads_are_split_and_merged_between_any_two_degrees_of_tensor_parallelism(a, b, ours, theirs):
    """8 heads over ``ours`` ranks, resharded to ``theirs``: each target rank gets its heads where they are."""
    model, tokens = heads_of(UNIFORM, 8), 21
    sources = [side(a, heads_of(model, 8 // ours), 4, tokens, r) for r in range(ours)]
    targets = [side(b, heads_of(model, 8 // theirs), 8, tokens, 20 + r) for r in range(theirs)]
    for i, j in itertools.product(range(ours), range(theirs)):
        first, end = max(i * 8 // ours, j * 8 // theirs), min((i + 1) * 8 // ours, (j + 1) * 8 // theirs)
        if first < end:
            check(sources[i], targets[j], tokens, heads=(first - i * 8 // ours, first - j * 8 // theirs, end - first))
    for la, kind, h in itertools.product(range(3), ("key", "value"), range(8)):
        rows = []
        for ranks in (sources, targets):
            rank, byte = ranks[h * len(ranks) // 8], torch.arange(16)
            at = rank.starts(la, kind, h % (8 // len(ranks)), tokens)
            rows.append(rank.pool.buffer[at[:, None] + byte])
        assert torch.equal(*rows)


def test_a_pipeline_stage_of_every_format_moves_out_and_in():
    for (a, b), kept in itertools.product(ROTATED, ((1, 3), (0, 2), (2, 3))):
        layers, part = {la: la - kept[0] for la in range(*kept)}, UNIFORM[kept[0] : kept[1]]
        whole, stage = side(a, UNIFORM, 8, 30, 1), side(b, part, 16, 30, 2)
        check(whole, stage, 30, layers)
        check(stage, side(a, UNIFORM, 8, 30, 3), 30, {v: k for k, v in layers.items()})


@pytest.mark.parametrize(("a", "b"), [("page_major", "token_major"), ("token_major", "page_major")])
def test_layers_of_a_pipeline_stage_move_out_and_in(a, b):
    for model in models_of(a, b):
        for kept in ((1, len(model)), (0, len(model) - 1)):
            layers = {la: la - kept[0] for la in range(*kept)}
            part = model[kept[0] : kept[1]]
            if any(la.scaled for la in model) and not any(la.scaled for la in part):
                continue  # such a stage has another format: no scales at all
            whole, stage = side(a, model, 8, 30, 1), side(b, part, 16, 30, 2)
            check(whole, stage, 30, layers)
            check(stage, side(a, model, 8, 30, 3), 30, {v: k for k, v in layers.items()})


def test_scales_go_with_the_heads_they_belong_to():
    model = tuple(la for la in models_of("page_major")[3][1:])
    source, target = side("page_major", model, 8, 20, 1), side("token_major", heads_of(model, 2), 16, 20, 2)
    check(source, target, 20, heads=(2, 0, 2))


def test_skipped_pages_on_either_side_move_nothing():
    source, target = side("page_major", UNIFORM, 8, 48, 1), side("BLNHC", UNIFORM, 16, 48, 2)
    source.pages[1], target.pages[2] = -1, -7
    check(source, target, 48)
    source.pages[:] = [-1] * len(source.pages)
    with writes_only(target.pool.buffer, []):
        check(source, target, 48)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_ids_may_be_32_or_64_bits_and_the_lists_longer_than_needed(index):
    source, target = side("page_major", UNIFORM, 8, 20, 1), side("BLNHC", UNIFORM, 8, 20, 2)
    wanted = expected(source, target, 20)
    plan = pm_ops.RepackPlan(source.pool.layout, target.pool.layout)
    lists = (torch.tensor([*s.pages, 10**6], dtype=index) for s in (source, target))  # the last one is not looked at
    plan.run(source.pool, target.pool, *lists, tokens=20)
    assert torch.equal(target.pool.buffer, wanted)


def test_no_tokens_are_no_work():
    source, target = side("page_major", UNIFORM, 8, 20, 1), side("BLNHC", UNIFORM, 8, 20, 2)
    with writes_only(target.pool.buffer, []):
        plan = pm_ops.RepackPlan(source.pool.layout, target.pool.layout)
        plan.run(source.pool, target.pool, [], [])
        plan.run(source.pool, target.pool, source.pages, target.pages, 0)


def states(page_size: int, order: int) -> pm_ops.PageLayout:
    """Key rows, a convolution state and a recurrent one, in one of two orders."""
    starts = {0: (0, 16 * page_size, 16 * page_size + 24), 1: (56, 32, 0)}[order]
    planes = (
        pm_ops.Plane(0, "key", starts[0], 16, 8, (2, 4), torch.bfloat16),
        pm_ops.Plane(1, "conv", starts[1], None, 6, (4, 3), torch.bfloat16),
        pm_ops.Plane(1, "ssm", starts[2], None, 16, (2, 2, 2), torch.float32),
    )
    return pm_ops.PageLayout(page_size, 16 * page_size + 56, planes)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_states_go_with_every_page_that_has_a_token(page_size):
    pools = [pm_ops.PagePool(states(page_size, order), 5) for order in (0, 1)]
    for i, pool in enumerate(pools):
        fill_random(pool.buffer, i)
    src, dst, tokens = [4, 0, -1, 2], [1, 3, 0, 2], 3 * page_size + 1
    after = pools[1].pages.clone()
    for t in range(tokens):
        a, b = src[t // page_size], dst[t // page_size]
        if a >= 0:
            row = pools[0].pages[a, t % page_size * 16 :][:16]
            after[b, 56 + t % page_size * 16 :][:16] = row
            after[b, 32:56] = pools[0].pages[a, 16 * page_size :][:24]
            after[b, 0:32] = pools[0].pages[a, 16 * page_size + 24 :][:32]
    plan = pm_ops.RepackPlan(pools[0].layout, pools[1].layout)
    plan.run(*pools, src, dst, tokens)
    assert torch.equal(pools[1].pages, after)
    assert (plan.bytes_per_token, plan.bytes_per_page) == (16, 56)


@pytest.mark.parametrize(("ours", "theirs"), WIDENINGS)
@pytest.mark.parametrize(("dims", "sizes"), [((64, 48), (16, 8)), ((3, 70), (4, 3))])
def test_every_number_gets_wider_and_stays_what_it_is(ours, theirs, dims, sizes):
    """Subnormals, both zeros and infinities included; beside a layer that moves bit for bit."""
    *pools, src, dst, tokens = wider_pools(ours, theirs, dims, sizes)
    before = pools[1].buffer.clone()
    with writes_only(pools[0].buffer, []):
        pm_ops.RepackPlan(pools[0].layout, pools[1].layout).run(*pools, src, dst, tokens)
    check_wider(pools, (src, dst), tokens, before)


def test_a_slice_of_heads_and_a_state_get_wider():
    heads = [pm_ops.page_major(1, h, 8, 4, d) for h, d in ((4, torch.float16), (2, torch.float32))]
    states = [pm_ops.PageLayout(4, 40, (pm_ops.Plane(0, "ssm", 0, None, 5 * d.itemsize, (2, 5), d),))
              for d in (torch.bfloat16, torch.float32)]  # fmt: skip
    for layouts, chosen, at in ((heads, {"heads": (1, 0, 2)}, slice(1, 3)), (states, {}, slice(None))):
        pools = [pm_ops.PagePool(layout, 3) for layout in layouts]
        fill_random(pools[0].buffer)
        pm_ops.RepackPlan(*layouts, **chosen).run(*pools, [2, 0], [1, 2], tokens=8)
        kind = layouts[0].kinds(0)[0]
        a, b = pools[0].view(0, kind)[[2, 0]][..., at, :], pools[1].view(0, kind)[[1, 2]]
        bits = [x.contiguous().view(torch.uint8).flatten() for x in (a, b)]
        assert same_numbers(numbers(bits[0], a.dtype), numbers(bits[1], b.dtype))


def test_kinds_in_pools_of_their_own_are_put_together_and_taken_apart():
    """K and V of each layer as tensors of their own, ``[slots, heads, dim]``, as most engines keep them."""
    layers, heads, dim, size, slots = 3, 2, 8, 4, 24
    caches = {(la, kind): torch.randn(slots, heads, dim) for la in range(layers) for kind in ("key", "value")}
    one, pool = (
        pm_ops.page_major(1, heads, dim, size, torch.float32),
        pm_ops.PagePool(pm_ops.page_major(layers, heads, dim, 8, torch.float32), 4),
    )
    src, dst, back = [5, 0, 3], [2, 1], [1, 4, 2]
    before = {key: cache.clone() for key, cache in caches.items()}
    for step in ("in", "out"):
        for (layer, kind), cache in caches.items():
            tensor = pm_ops.PagePool(one.part(kind), slots // size, buffer=cache.view(torch.uint8).flatten())
            if step == "in":
                plan = pm_ops.RepackPlan(tensor.layout, pool.layout, layers={0: layer}, kinds=[kind])
                plan.run(tensor, pool, src, dst, tokens=11)
            else:
                plan = pm_ops.RepackPlan(pool.layout, tensor.layout, layers={layer: 0}, kinds=[kind])
                plan.run(pool, tensor, dst, back, tokens=11)
    slot = lambda pages, size: torch.tensor([pages[t // size] * size + t % size for t in range(11)])  # noqa: E731
    for (layer, kind), cache in caches.items():
        moved = before[layer, kind][slot(src, 4)]
        assert torch.equal(pool.view(layer, kind).flatten(0, 1)[slot(dst, 8)], moved)
        wanted = before[layer, kind]
        wanted[slot(back, 4)] = moved
        assert torch.equal(cache, wanted)


def arguments(**changes):
    """Valid arguments of the operator, by name."""
    source, target = side("page_major", UNIFORM, 8, 20, 1), side("BLNHC", UNIFORM, 16, 20, 2)
    plan = pm_ops.RepackPlan(source.pool.layout, target.pool.layout)
    values = {
        "source": source.pool.buffer, "target": target.pool.buffer, "src_pages": torch.tensor(source.pages),
        "dst_pages": torch.tensor(target.pages), "runs": plan.table(torch.device("cpu")), "tokens": 20,
        "src_page_size": 8, "dst_page_size": 16, "src_region": source.pool.region, "dst_region": target.pool.region,
    }  # fmt: skip
    return {**values, **changes}


WIDE = {"src_dtype": torch.bfloat16, "dst_dtype": torch.float32}
REFUSED = {
    "source must be a 1-D contiguous uint8": {"source": torch.zeros(4, 4, dtype=torch.uint8)},
    "target must be a 1-D contiguous uint8": {"target": torch.zeros(4096)},
    "src_region must be": {"src_region": [0, 1, 1]},
    "dst_region .* does not lie in a buffer": {"dst_region": [0, 4000, 4000, 9999]},
    "src_pages must be a 1-D int32 or int64": {"src_pages": torch.zeros(3)},
    "dst_pages must be a 1-D int32 or int64": {"dst_pages": torch.zeros(3, 1, dtype=torch.int64)},
    r"runs must be int64 \[R, 6\]": {"runs": torch.zeros(3, 5, dtype=torch.int64)},
    "runs is empty": {"runs": torch.zeros(0, 6, dtype=torch.int64)},
    "tokens=-1 must not be negative": {"tokens": -1},
    "page size 0 must be at least 1": {"src_page_size": 0},
    "src_pages names 1 pages of 8 tokens, too few for 20": {"src_pages": torch.tensor([0])},
    "dst_pages names 1 pages of 16 tokens, too few for 20": {"dst_pages": torch.tensor([0])},
    "src_pages has 99, but there are 5 pages in the source": {"src_pages": torch.tensor([0, 99, 1])},
    "dst_pages has 99, but there are 4 pages in the target": {"dst_pages": torch.tensor([0, 99])},
    "dst_pages names 1 twice": {"dst_pages": torch.tensor([1, 1])},
    "runs leave the pages": {"runs": torch.tensor([[0, 16, 0, 16, 16, 16], [0, 1 << 20, 0, 16, 16, 16]])},
    "runs leave the pages of": {"runs": torch.tensor([[0, 16, 0, 16, 16, 16], [0, 2**61, 0, 16, 16, 16]])},
    "runs leave .* tokens overlap": {"runs": torch.tensor([[0, 16, 0, 8, 16, 16]])},
    "runs .* tokens overlap": {"runs": torch.tensor([[0, 0, 0, 0, 16, 16]])},  # a state, between unequal pages
    "not those of None and None": {"runs": torch.tensor([[0, 16, 0, 32, 16, 32]])},
    "not those of torch.bfloat16": {"runs": torch.tensor([[0, 16, 0, 32, 16, 24]]), **WIDE},
    "not those of torch.bfloat16 and": {"runs": torch.tensor([[0, 16, 2, 32, 16, 32]]), **WIDE},
    "runs leave .* of torch.bfloat16": {"runs": torch.tensor([[0, 16, 0, 16, 16, 32]]), **WIDE},
    "src_dtype torch.bfloat16 and dst_dtype None": {"src_dtype": torch.bfloat16},
    "src_dtype None and dst_dtype torch.float32": {"dst_dtype": torch.float32},
    "src_dtype torch.float32 and dst_dtype torch.bfloat16": {"src_dtype": torch.float32, "dst_dtype": torch.bfloat16},
    "src_region .* multiples of 2 bytes": {"src_region": [1, 600, 500, 2], **WIDE},
    "dst_region .* multiples of 4 bytes": {"dst_region": [0, 1202, 500, 2], **WIDE},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused_before_a_byte_is_written(message):
    values = arguments(**REFUSED[message])
    target = values["target"]
    before = target.clone()
    with pytest.raises(ValueError, match=message):
        torch.ops.pm_ops.repack_pages(**values)
    assert torch.equal(target, before)


def test_source_and_target_must_not_share_memory():
    source = side("page_major", UNIFORM, 8, 20, 1).pool
    runs = pm_ops.RepackPlan(source.layout, source.layout).table(source.device)
    values = arguments(source=source.buffer, target=source.buffer, runs=runs, dst_page_size=8, dst_region=source.region)
    values["dst_pages"] = values["src_pages"]
    with writes_only(source.buffer, []):
        with pytest.raises(ValueError, match="source and target are one buffer"):
            torch.ops.pm_ops.repack_pages(**values)
        with pytest.raises(ValueError, match="share memory"):
            torch.ops.pm_ops.repack_pages(**{**values, "target": source.buffer.view(-1)})


def test_pages_go_between_two_gpus_but_no_other_two_devices():
    values = arguments()
    for here, there in (("cuda:0", "cuda:1"), ("cuda:0", "cpu"), ("cpu", "cuda:1")):
        with FakeTensorMode():
            fakes = {
                name: torch.empty(x.shape, dtype=x.dtype, device=there if name == "target" else here)
                for name, x in values.items()
                if isinstance(x, torch.Tensor)
            }
            refused = pytest.raises(ValueError, match=f"target is on {there}, the buffer on {here}")
            with refused if "cpu" in (here, there) else nullcontext():
                torch.ops.pm_ops.repack_pages(**{**values, **fakes})


def test_it_compiles_with_tokens_and_page_counts_as_symbols():
    """At most two graphs for five lengths."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    source, target = side("page_major", UNIFORM, 8, 64, 1), side("BLNHC", UNIFORM, 16, 64, 2)
    plan = pm_ops.RepackPlan(source.pool.layout, target.pool.layout)
    table, regions = plan.table(torch.device("cpu")), (source.pool.region, target.pool.region)

    def step(src_pages, dst_pages, tokens):
        buffers = source.pool.buffer, target.pool.buffer
        torch.ops.pm_ops.repack_pages(*buffers, src_pages, dst_pages, table, tokens, 8, 16, *regions)

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for tokens in (9, 17, 33, 48, 64):
        wanted = expected(source, target, tokens)
        lists = [torch.tensor(s.pages[: -(-tokens // s.page_size)]) for s in (source, target)]
        compiled(*lists, tokens)
        assert torch.equal(target.pool.buffer, wanted)
        fill_random(target.pool.buffer, tokens)
    assert counter.frame_count <= 2


def test_inductor_runs_a_plan_of_its_first_call_without_a_clone_of_either_pool():
    """And the plan is as good as before: the table that was made in the graph is a tensor like any other.

    Its layouts may be equal to the pools', and not the same.
    """
    torch._dynamo.reset()
    source, target = (side(n, UNIFORM, 8, 64, i) for i, n in enumerate(("page_major", "BLNHC")))
    plan = pm_ops.RepackPlan(*(pm_ops.PageLayout.from_json(s.pool.layout.to_json()) for s in (source, target)))
    wanted, lists = expected(source, target, 64), [torch.tensor(s.pages) for s in (source, target)]
    step = torch.compile(lambda a, b: plan.run(source.pool, target.pool, a, b), fullgraph=True)
    _, (code,) = run_and_get_code(step, *lists)
    assert torch.equal(target.pool.buffer, wanted)
    call = code.split("def call", 1)[1]
    assert call.count("pm_ops.repack_pages.default") == 1 and "clone" not in call
    assert all(f"empty_strided_cpu(({s.pool.buffer.numel()}" not in call for s in (source, target))
    fill_random(target.pool.buffer)
    wanted = expected(source, target, 64)
    plan.run(source.pool, target.pool, *lists)
    assert torch.equal(target.pool.buffer, wanted)
