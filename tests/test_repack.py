"""A plan's arithmetic: what moves, in how many pieces, what is refused and why."""

import contextlib
import dataclasses

import pytest
import torch

import pm_ops

BF16 = torch.bfloat16


def page_major(layers=4, heads=8, dim=16, page_size=16, dtype=BF16, **kwargs):
    return pm_ops.page_major(layers, heads, dim, page_size, dtype, **kwargs)


def test_rows_are_merged_where_they_are_contiguous_in_both_pages() -> None:
    """The whole token's K of a layer is one run between SGLang's formats; vLLM's interleave cuts it head by head."""
    paged, entry = page_major(), pm_ops.token_major(4, 8, 16, 16, BF16)
    interleaved, by_head = (pm_ops.vllm(4, 8, 16, 16, BF16, order) for order in ("BLNHC", "BLHNC"))
    pairs = {
        (paged, paged): 8, (paged, entry): 8, (entry, entry): 1, (paged, interleaved): 64,
        (interleaved, interleaved): 4, (interleaved, by_head): 32, (by_head, paged): 64,
    }  # fmt: skip
    for (ours, theirs), fragments in pairs.items():
        plan = pm_ops.RepackPlan(ours, theirs)
        assert (plan.fragments_per_token, plan.bytes_per_token) == (fragments, 4 * 2 * 8 * 16 * 2)
        assert sum(run.nbytes for run in plan.runs) == plan.bytes_per_token and plan.bytes_per_page == 0


def test_a_run_is_the_byte_formula_of_one_head_on_both_sides() -> None:
    plan = pm_ops.RepackPlan(page_major(2, 2), pm_ops.vllm(2, 2, 16, 8, BF16, "BLNHC"))
    layer, token, head = 1, 3, 1
    ours = layer * 2 * 16 * 64 + 16 * 64 + token * 64 + head * 32  # a value: behind the layer's 16 keys
    theirs = ((layer * 8 + token) * 2 + head) * 64 + 32  # a value: behind its key
    at = [(r.source_offset + token * r.source_stride, r.target_offset + token * r.target_stride) for r in plan.runs]
    assert (ours, theirs) in at and {r.nbytes for r in plan.runs} == {32} and len(at) == 8


def test_pages_of_one_token_are_one_run() -> None:
    """A stride to the next token, which is not there, must not keep rows apart, nor K and V of unequal dims."""
    sides = [make(3, 2, 16, 1, BF16, value_dim=8) for make in (pm_ops.page_major, pm_ops.token_major)]
    plan = pm_ops.RepackPlan(*sides)
    assert plan.runs == ((0, 0, 0, 0, 3 * 2 * 24 * 2, 3 * 2 * 24 * 2),)


def test_head_slices_move_their_share() -> None:
    whole, rank = page_major(heads=8), page_major(heads=2)
    for r in range(4):
        split = pm_ops.RepackPlan(whole, rank, heads=(2 * r, 0, 2))
        merge = pm_ops.RepackPlan(rank, whole, heads=(0, 2 * r, 2))
        assert split.bytes_per_token == merge.bytes_per_token == whole.token_bytes // 4
        there = [(run.source_offset, run.target_offset) for run in split.runs]
        assert there == [(run.target_offset, run.source_offset) for run in sorted(merge.runs)]


def test_layers_move_to_where_the_mapping_says() -> None:
    whole, stage = page_major(4), page_major(2)
    plan = pm_ops.RepackPlan(whole, stage, layers={2: 0, 3: 1})
    assert plan.layer_pairs == ((2, 0), (3, 1))
    assert {r.source_offset - r.target_offset for r in plan.runs} == {whole.plane(2, "key").offset}


def test_scales_are_runs_like_any_other() -> None:
    """Head by head out of SGLang's page, where one head's scales of a page lie side by side."""
    ours = page_major(2, 2, 16, 4, torch.int8, value_dim=3, scales=True)
    plan = pm_ops.RepackPlan(ours, pm_ops.token_major(2, 2, 16, 8, torch.int8, value_dim=3, scales=True))
    scales = [run for run in plan.runs if run.nbytes == 4]
    assert len(scales) == 2 * 2 * 2 and {run.source_stride for run in scales} == {4}
    assert plan.bytes_per_token == ours.token_bytes
    assert [run.target_offset for run in plan.runs] == sorted(run.target_offset for run in plan.runs)


def test_a_plan_says_what_it_does() -> None:
    vllm = pm_ops.vllm(4, 4, 16, 64, BF16, "BLNHC")
    text = str(pm_ops.RepackPlan(page_major(), vllm, heads=(4, 0, 4)))
    assert text == (
        "page_major (16 tokens a page) -> vllm BLNHC (64 tokens a page): 4 layers, "
        "source heads 4 to 7 as heads 0 to 3, 1024 B a token in 32 fragments of 32 B"
    )
    text = str(pm_ops.RepackPlan(page_major(4), page_major(3), layers={1: 0, 2: 1, 3: 2}))
    assert "3 layers 1 to 3 as 0 to 2, 1536 B a token in 6 fragments of 256 B" in text
    assert "4 layers, source head 5 as head 0, " in str(pm_ops.RepackPlan(page_major(), vllm, heads=(5, 0, 1)))

    assert str(pm_ops.RepackPlan(page_major(), page_major(), kinds=["key"])).endswith(
        "4 layers, key, 1024 B a token in 4 fragments of 256 B"
    )
    assert str(pm_ops.RepackPlan(page_major(), page_major(dtype="float32"))).endswith(
        "4 layers, bfloat16 as float32, 2048 B a token in 8 fragments of 256 B"
    )


def test_kinds_move_alone() -> None:
    whole = page_major()
    plan = pm_ops.RepackPlan(whole, whole.part("value"), kinds=["value"])
    assert {r.source_offset - r.target_offset for r in plan.runs} == {whole.plane(0, "value").offset}
    assert plan.bytes_per_token == whole.token_bytes // 2


def test_a_wider_run_is_merged_with_others_that_get_wider_and_with_no_others() -> None:
    """Entries whose K doubles and whose fp32 V stays: side by side on both sides, and yet two runs."""
    key = [pm_ops.Plane(0, "key", 0, 64, 8, (2, 4), BF16), pm_ops.Plane(0, "key", 0, 64, 16, (2, 4), torch.float32)]
    value = [pm_ops.Plane(0, "value", at, 64, 8, (2, 2), torch.float32) for at in (16, 32)]
    sides = [pm_ops.PageLayout(3, 192, planes) for planes in zip(key, value, strict=True)]
    plan = pm_ops.RepackPlan(*sides)
    assert plan.runs == ((0, 64, 0, 64, 16, 32), (16, 64, 32, 64, 16, 16))
    assert plan.widening == (BF16, torch.float32) and plan.bytes_per_token == 32


def state(page_size: int, heads: int = 2) -> pm_ops.PageLayout:
    return pm_ops.PageLayout(page_size, 64, (pm_ops.Plane(0, "ssm", 0, None, 16, (heads, 4), torch.float32),))


def test_states_alone_are_bytes_of_the_page() -> None:
    plan = pm_ops.RepackPlan(state(4), state(4))
    assert (plan.bytes_per_token, plan.fragments_per_token, plan.bytes_per_page) == (0, 0, 32)
    assert str(plan).endswith("1 layer, 32 B of states a page")


REFUSED = {
    "source has layers 0 to 3, the target 0, 1; pass layers=": ((page_major(), page_major(2)), {}),
    "source layer 9 does not exist": ((page_major(), page_major()), {"layers": {9: 0}}),
    "target layer 4 does not exist": ((page_major(), page_major()), {"layers": {0: 4}}),
    "names a target layer twice": ((page_major(), page_major()), {"layers": {0: 1, 1: 1}}),
    "it is empty": ((page_major(), page_major()), {"layers": {}}),
    "8 heads against 4; pass heads=": ((page_major(), page_major(heads=4)), {}),
    r"heads=\(6, 0, 4\) is .* but there are 8 and 4 heads": ((page_major(), page_major(heads=4)), {"heads": (6, 0, 4)}),
    r"heads=\(0, 2, 4\) is .* but there are 8 and 4 heads": ((page_major(), page_major(heads=4)), {"heads": (0, 2, 4)}),
    r"heads=\(0, 0, 0\): give": ((page_major(), page_major()), {"heads": (0, 0, 0)}),
    r"heads=\(-1, 0, 1\): give": ((page_major(), page_major()), {"heads": (-1, 0, 1)}),
    r"heads=4: give \(first source head, first target head, count\)": ((page_major(), page_major()), {"heads": 4}),
    r"heads=\(0, 4\): give": ((page_major(), page_major()), {"heads": (0, 4)}),
    r"heads=\(2.5, 0, 2\): give .* integers": ((page_major(), page_major()), {"heads": (2.5, 0, 2)}),
    r"layers=\[0, 1\]: give {source layer: target layer}": ((page_major(), page_major()), {"layers": [0, 1]}),
    r"layers={0: 1.5}: give .* integers": ((page_major(), page_major()), {"layers": {0: 1.5}}),
    "source must be a PageLayout, such as PagePool.layout, got PagePool": (
        (pm_ops.PagePool(page_major(), 2), page_major()), {}),
    "target must be a PageLayout, such as PagePool.layout, got dict": ((page_major(), {}), {}),
    "8 x 16 bfloat16 against rows of 8 x 32 bfloat16": ((page_major(), page_major(dim=32)), {}),
    "float32 against rows of 8 x 16 bfloat16; not every float32 is a bfloat16, nothing else would do": (
        (page_major(dtype="float32"), page_major()), {}),
    "not every bfloat16 is a float16, float32 would do": ((page_major(), page_major(dtype="float16")), {}),
    "not every float16 is a bfloat16, float32 would do": ((page_major(dtype="float16"), page_major()), {}),
    "not every float8_e4m3fn is a float8_e5m2, float16 or bfloat16 or float32 would do": (
        (page_major(dtype="float8_e4m3fn"), page_major(dtype="float8_e5m2")), {}),
    "int8 against rows of 8 x 16 float16; int8 means numbers by its scales alone": (
        (page_major(dtype="int8"), page_major(dtype="float16")), {}),
    "'key' of layer 0 bfloat16 to float32, 'key' of layer 1 float16 to float32: give each pair of dtypes a plan": (
        (page_major(2, dtype=["bfloat16", "float16"]), page_major(2, dtype="float32")), {}),
    "layer 0 of the source has key, value, key_scale, value_scale, layer 0 of the target key, value": (
        (page_major(dtype="int8", scales=True), page_major(dtype="int8")), {}),
    "target value; both must hold the same kinds, or pass kinds=": ((page_major(), page_major().part("value")), {}),
    r"target value; kinds=\['key'\] must name one": ((page_major(), page_major().part("value")), {"kinds": ["key"]}),
    r"kinds=\['key', 'key'\] must name .* each once": ((page_major(), page_major()), {"kinds": ["key", "key"]}),
    r"kinds=\[\] must name one or more that both have": ((page_major(), page_major()), {"kinds": []}),
    "a state belongs to a whole page; .* 4 and 8 tokens": ((state(4), state(8)), {}),
    "a state belongs to a whole page; .* without heads=": ((state(4), state(4)), {"heads": (0, 0, 1)}),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused_with_the_reason(message: str) -> None:
    layouts, chosen = REFUSED[message]
    with pytest.raises(ValueError, match=message):
        pm_ops.RepackPlan(*layouts, **chosen)


def test_rows_and_a_state_of_one_kind_are_refused() -> None:
    rows = pm_ops.PageLayout(4, 64, (pm_ops.Plane(0, "ssm", 0, 16, 8, (2, 2), torch.float32),))
    with pytest.raises(ValueError, match="rows of 2 x 2 float32 against a state of 2 x 4 float32"):
        pm_ops.RepackPlan(rows, state(4))


def test_pools_of_other_layouts_are_refused() -> None:
    plan = pm_ops.RepackPlan(page_major(), page_major(page_size=8))
    pools = {size: pm_ops.PagePool(page_major(page_size=size), 2) for size in (8, 16)}
    with pytest.raises(ValueError, match="source pool's pages are not the plan's"):
        plan.run(pools[8], pools[8], [0], [0])
    with pytest.raises(ValueError, match="target pool's pages are not the plan's"):
        plan.run(pools[16], pools[16], [0], [0])


def test_lists_of_different_lengths_need_a_token_count() -> None:
    plan = pm_ops.RepackPlan(page_major(), page_major(page_size=8))
    pools = pm_ops.PagePool(plan.source, 4), pm_ops.PagePool(plan.target, 4)
    pools[0].buffer.fill_(7)
    with pytest.raises(ValueError, match="2 pages of 16 tokens against 2 pages of 8: not the same sequence"):
        plan.run(*pools, [0, 1], [0, 1])
    plan.run(*pools, [1], [2, 0])
    plan.run(*pools, [0, 1], [1, 3], tokens=9)
    written = [int((page == 7).sum()) for page in pools[1].pages]
    assert written == [page_major(page_size=8).page_bytes] * 3 + [page_major().token_bytes]


def test_a_plan_is_frozen_and_its_table_is_made_once() -> None:
    plan = pm_ops.RepackPlan(page_major(), page_major())
    assert plan.table(torch.device("cpu")) is plan.table(torch.device("cpu"))
    assert plan.table(torch.device("cpu")).tolist() == [list(run) for run in plan.runs]
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.heads = (0, 0, 1)  # type: ignore[misc]


def test_a_plan_is_a_key_and_keeps_what_it_was_made_of() -> None:
    """Whatever becomes of the dict and the lists that it was given."""
    layers, heads, kinds = {2: 0, 0: 2}, [1, 0, 2], ["key"]
    chosen = {"layers": layers, "heads": heads, "kinds": kinds}
    plan = pm_ops.RepackPlan(page_major(), page_major(), **chosen)  # type: ignore[arg-type]
    same = pm_ops.RepackPlan(page_major(), page_major(), {0: 2, 2: 0}, (1, 0, 2), ("key",))
    assert plan == same and hash(plan) == hash(same) and dataclasses.replace(plan) == plan
    said = str(plan)
    layers[1], heads[2] = 1, 8
    kinds.append("value")
    assert plan == same and str(plan) == said and plan._kinds(0, 2) == ("key",)


class Elsewhere(pm_ops.PagePool):
    """A pool on the CPU that takes itself for one on a GPU."""

    device = torch.device("cuda:0")  # type: ignore[assignment]


def elsewhere() -> Elsewhere:
    pool = pm_ops.PagePool(page_major(), 2)
    pool.__class__ = Elsewhere
    return pool  # type: ignore[return-value]


def test_a_first_run_in_a_cuda_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, pages = pm_ops.RepackPlan(page_major(), page_major()), torch.tensor([0])
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r'being captured, .* call plan.table\(torch.device\("cuda:0"\)\)$'):
        plan.run(elsewhere(), elsewhere(), pages, pages)
    assert plan._tables == {}


def test_the_table_outlives_the_plan_until_the_stream_of_the_run_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, pages = pm_ops.RepackPlan(page_major(), page_major()), torch.tensor([0])
    table = plan._tables[Elsewhere.device] = plan.table(torch.device("cpu"))
    told = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: told.append((tensor, stream)))
    plan.run(elsewhere(), elsewhere(), pages, pages)
    assert len(told) == 1 and told[0][0] is table and told[0][1] == "stream of cuda:0"
