"""Speculative decoding by the backend ``pm_ops``: drafts as SGLang makes and describes them, results by the oracle.

The pool is full of NaN but for the rows that were stored.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_engine

pytestmark = pytest.mark.engines
RELEASE = sglang_engine.require()

import oracle
import torch
from sglang.kernels.ops.speculative import spec_tree
from sglang.kernels.ops.speculative.cache_locs import generate_draft_decode_kv_indices
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative import eagle_utils, eagle_worker_common
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import select_top_k_tokens
from sglang_runner import CONTEXT, DIM, PAGE, Batch, Runner, close, expected, fill, layer, page_table, rows
from torch import Tensor

from pm_ops.adapters.sglang import backend as backend_module
from pm_ops.adapters.sglang.backend import PageMajorAttnBackend
from pm_ops.adapters.sglang.draft import PageMajorMultiStepDraft
from pm_ops.adapters.sglang.pool import FORMATS
from pm_ops.adapters.sglang.tree import pages_of, visible_of

TOPK, STEPS, DRAFTS = 3, 3, 6
PREFIX = [1, 7, 20]
VERIFY = Batch([n + DRAFTS for n in PREFIX], [DRAFTS] * len(PREFIX))
EAGLE, NGRAM = SpeculativeAlgorithm.EAGLE, SpeculativeAlgorithm.NGRAM
CASES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"heads": 2},
    "cap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "window": {"window": 2 * DRAFTS},
}


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of a process; trees come from SGLang's Triton kernel, which it has for XPUs."""
    monkeypatch.setenv("PM_OPS", "1")
    options = SimpleNamespace(speculative_num_draft_tokens=DRAFTS, speculative_eagle_topk=TOPK)
    monkeypatch.setattr(backend_module, "get_spec", lambda: options)
    builder = next(module for module in (eagle_utils, spec_tree) if hasattr(module, "sgl_build_tree_kernel_triton"))
    monkeypatch.setattr(builder, "_is_xpu", True)


def drafted(topk: int) -> tuple[Tensor, Tensor, Tensor]:
    """What SGLang's draft steps find, with random scores: parents, chosen tokens and their ids."""
    scores, found = None, []
    with torch.compiler.set_stance("force_eager"):
        for step in range(STEPS):
            width = 1 if step == 0 else topk
            chances = torch.rand(len(PREFIX) * width, topk)
            tokens = torch.randint(100, chances.shape)
            hidden = torch.zeros(len(PREFIX) * width, 1)
            *_, scores, tree = select_top_k_tokens(step, chances, tokens, hidden, scores, topk)
            found.append(tree)
    drafts = DRAFTS if topk > 1 else STEPS + 1
    return eagle_utils.organize_draft_results(*map(list, zip(*found, strict=True)), drafts)


def eagle(backend: PageMajorAttnBackend, topk: int = TOPK) -> EagleVerifyInput:
    """What SGLang's worker makes for the verify step, in the mask that the backend hands out."""
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE, seq_lens=torch.tensor(PREFIX), seq_lens_sum=None,
        req_to_token_pool=SimpleNamespace(req_to_token=backend.req_to_token), multimodal_inputs=[],
    )  # fmt: skip
    target = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=backend))
    draft = SimpleNamespace(bonus_tokens=torch.zeros(len(PREFIX), dtype=torch.int64))
    return eagle_worker_common.build_eagle_verify_input(
        batch, draft, *drafted(topk), None, target_worker=target, topk=topk, num_steps=STEPS,
        num_draft_tokens=DRAFTS if topk > 1 else STEPS + 1, tree_mask_mode=eagle_utils.default_tree_mask_mode(),
        device="cpu",
    )  # fmt: skip


def ngram(backend: PageMajorAttnBackend) -> NgramVerifyInput:
    """A random tree of any shape; its mask covers the prefix where SGLang's worker makes it so, as on a GPU."""
    masks, whole = [], has_prefix()
    for length in PREFIX:
        tree = torch.eye(DRAFTS, dtype=torch.bool)
        for node in range(1, DRAFTS):
            tree[node] |= tree[torch.randint(node, ())]
        prefix = torch.ones(DRAFTS, length if whole else 0, dtype=torch.bool)
        masks.append(torch.cat((prefix, tree), dim=1).flatten())
    return NgramVerifyInput(custom_mask=torch.cat(masks), draft_token_num=DRAFTS)


def has_prefix() -> bool:
    return backend_module.default_tree_mask_mode() == TreeMaskMode.FULL_MASK


def seen(spec: Any) -> Tensor:
    """Who sees whom as a bias over all keys ``[sequences, 1, drafts, keys]``, read off SGLang's mask row by row."""
    bias, at = torch.zeros(len(PREFIX), 1, DRAFTS, CONTEXT, dtype=torch.bool), 0
    whole = isinstance(spec, NgramVerifyInput) and has_prefix()
    for b, length in enumerate(PREFIX):
        for draft in range(DRAFTS):
            bias[b, 0, draft, :length] = True
            at += length if whole else 0
            bias[b, 0, draft, length : length + DRAFTS] = spec.custom_mask[at : at + DRAFTS]
            at += DRAFTS
    return bias


def verify_batch(runner: Runner, spec: Any, **more: Any) -> Any:
    """SGLang counts the drafts in no length."""
    lengths = torch.tensor(PREFIX)
    return runner.forward_batch(
        ForwardMode.TARGET_VERIFY,
        **{"seq_lens": lengths, "seq_lens_cpu": lengths, "spec_info": spec, "extend_seq_lens": None, **more},
    )


MAKERS: dict[str, tuple[SpeculativeAlgorithm, Callable[..., Any]]] = {"eagle": (EAGLE, eagle), "ngram": (NGRAM, ngram)}


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("made", "mode"), [("eagle", "FULL_MASK"), ("ngram", "FULL_MASK"), ("ngram", "QLEN_ONLY")])
def test_a_tree_is_verified(made: str, mode: str, case: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the mask that SGLang makes; where its mode is QLEN_ONLY, as on a CPU, NGRAM's has drafts alone, too."""
    monkeypatch.setattr(backend_module, "default_tree_mask_mode", lambda: TreeMaskMode[mode])
    dtype = torch.float16 if case == "mha" else torch.float32
    options = {"heads": 4, "softcap": 0.0, "window": 0, "sinks": False, **CASES[case]}
    algorithm, make = MAKERS[made]
    runner = Runner(layout, dtype, VERIFY, spec=algorithm)
    backend = PageMajorAttnBackend(runner)
    fill(runner, 1, dtype)
    spec = make(backend)
    bias = seen(spec)
    assert 0 < bias[0, 0, :, 1 : 1 + DRAFTS].logical_not().triu(1).sum() < bias[0, 0, :, 1 : 1 + DRAFTS].numel()
    forward = verify_batch(runner, spec)
    backend.init_forward_metadata(forward)
    query, key, value = rows(len(PREFIX) * DRAFTS, options["heads"], dtype)
    sinks = torch.randn(options["heads"]) if options.pop("sinks") else None
    its = layer(1, options.pop("heads"), **options)
    out = backend.forward(query.flatten(1), key, value, its, forward, **({} if sinks is None else {"sinks": sinks}))
    wanted = expected(
        runner.pools[0], 1, page_table(runner), VERIFY, query, causal=False, bias=bias, sinks=sinks, **options
    )
    close(out, wanted, dtype)


@pytest.mark.parametrize("made", MAKERS)
def test_a_tree_is_verified_in_layers_of_sliding_windows(made: str) -> None:
    """Which have a pool of their own, and forget what no window reaches."""
    algorithm, make = MAKERS[made]
    runner = Runner("token_major", torch.float32, VERIFY, windowed=True, spec=algorithm)
    backend, window = PageMajorAttnBackend(runner), 2 * DRAFTS
    mapping = runner.token_to_kv_pool.full_to_swa_index_mapping
    fill(runner, 1, torch.float32)
    longest = runner.slots[-1][: (PREFIX[-1] - window + 1) // PAGE * PAGE]
    runner.pools[1].page_pool.pages[mapping[longest] // PAGE] = 0xFF  # NaN
    mapping[longest] = 0
    spec = make(backend)
    forward = verify_batch(runner, spec)
    backend.init_forward_metadata(forward)
    query, key, value = rows(len(PREFIX) * DRAFTS, 4, torch.float32)
    out = backend.forward(query, key, value, layer(1, 4, window=window), forward)
    wanted = expected(
        runner.pools[1], 0, page_table(runner, mapping), VERIFY, query, causal=False, bias=seen(spec), window=window
    )
    close(out, wanted, torch.float32)
    before = runner.pools[1].page_pool.buffer.clone()
    with pytest.raises(ValueError, match="trees of 6 drafts are verified in windows of 12 keys or more, .* has 11; "):
        backend.forward(query, key + 1, value, layer(1, 4, window=11), forward)
    assert torch.equal(runner.pools[1].page_pool.buffer, before)


def test_a_chain_is_verified_as_the_causal_extension_that_it_is() -> None:
    drafts = STEPS + 1
    batch = Batch([n + drafts for n in PREFIX], [drafts] * len(PREFIX))
    runner = Runner("page_major", torch.float32, batch, spec=EAGLE)
    backend = PageMajorAttnBackend(runner)
    fill(runner, 1, torch.float32)
    forward = verify_batch(runner, eagle(backend, topk=1))
    backend.init_forward_metadata(forward)
    assert backend.forward_metadata.tree is None
    query, key, value = rows(len(PREFIX) * drafts, 4, torch.float32)
    out = backend.forward(query, key, value, layer(1, 4), forward)
    close(out, expected(runner.pools[0], 1, page_table(runner), batch, query), torch.float32)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("made", MAKERS)
@pytest.mark.parametrize("windowed", [False, True])
def test_graphs_verify_the_tree_of_their_replay(windowed: bool, made: str, late: bool) -> None:
    """Captured with SGLang's own mask of ones; the tree may also come after the replay was prepared."""
    algorithm, make = MAKERS[made]
    runner = Runner("page_major", torch.float32, VERIFY, windowed=windowed, spec=algorithm)
    backend = PageMajorAttnBackend(runner)
    backend.init_cuda_graph_state(max_bs=8, max_num_tokens=8 * DRAFTS)
    ones = torch.ones((8 + 8 * DRAFTS) * DRAFTS, dtype=torch.bool)
    blank = make(backend)
    blank.custom_mask = ones
    slots, zeros = torch.zeros(3 * DRAFTS, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    empty = verify_batch(runner, blank, out_cache_loc=slots, seq_lens=zeros + 1, req_pool_indices=zeros)
    empty.seq_lens_cpu = zeros + 1
    backend.init_forward_metadata_out_graph(empty, in_capture=True)
    captured = backend.forward_metadata
    spec = make(backend)
    forward, tree = verify_batch(runner, spec, seq_lens_cpu=None), spec.custom_mask
    if late:
        spec.custom_mask = torch.zeros_like(tree)
    backend.init_forward_metadata_out_graph(forward)
    spec.custom_mask = tree
    backend.update_verify_buffers_to_fill_after_draft(spec, cuda_graph_bs=3 if late else None)
    backend.forward_metadata = captured  # a graph knows these tensors, whatever the backend holds
    index, window = int(windowed), 2 * DRAFTS if windowed else 0
    fill(runner, index, torch.float32)
    query, key, value = rows(3 * DRAFTS, 4, torch.float32)
    out = backend.forward(query, key, value, layer(index, 4, window=window), forward)
    its = runner.token_to_kv_pool.full_to_swa_index_mapping if windowed else None
    wanted = expected(
        runner.pools[-1], 0, page_table(runner, its), VERIFY, query, causal=False, bias=seen(spec), window=window
    )
    close(out, wanted, torch.float32)


@pytest.mark.parametrize("made", MAKERS)
def test_a_padded_replay_verifies_the_real_sequences(made: str) -> None:
    """SGLang pads lengths and rows of the table, and neither the mask nor the slots."""
    algorithm, make = MAKERS[made]
    runner = Runner("page_major", torch.float32, VERIFY, windowed=True, spec=algorithm)
    backend = PageMajorAttnBackend(runner)
    backend.init_cuda_graph_state(max_bs=8, max_num_tokens=8 * DRAFTS)
    for layer_index in (0, 1):
        fill(runner, layer_index, torch.float32)
    spec = make(backend)
    lengths, free = torch.tensor([*PREFIX, 1, 1]), next(row for row in range(5) if row not in runner.rows)
    requests = torch.cat((runner.rows, torch.tensor([free, free])))  # a row of zeros
    padded = verify_batch(runner, spec, batch_size=5, seq_lens=lengths, seq_lens_cpu=lengths, req_pool_indices=requests)
    backend.graph.slots_window.fill_(PAGE)  # where an earlier step of more sequences wrote
    backend.init_forward_metadata_out_graph(padded)
    windows = runner.pools[1].page_pool
    before = windows.pages.clone()
    assert backend.forward_metadata.slots_window[3 * DRAFTS :].tolist() == [0] * (2 * DRAFTS)
    padded.out_cache_loc = torch.cat((padded.out_cache_loc, torch.zeros(2 * DRAFTS, dtype=torch.int64)))
    query, key, value = rows(5 * DRAFTS, 4, torch.float32)
    out = backend.forward(query, key, value, layer(1, 4, window=2 * DRAFTS), padded)
    its = runner.token_to_kv_pool.full_to_swa_index_mapping
    table = page_table(runner, its)
    wanted = expected(
        runner.pools[1], 0, table, VERIFY, query[: 3 * DRAFTS], causal=False, bias=seen(spec), window=2 * DRAFTS
    )
    close(out[: 3 * DRAFTS], wanted, torch.float32)
    changed = set((windows.pages != before).any(1).nonzero().flatten().tolist()) - {0}
    written = {int(its[s]) // PAGE for slots in runner.slots for s in slots[-DRAFTS:]}
    assert changed <= written


def test_the_mask_that_eagle_writes_is_small() -> None:
    """Without one SGLang would fill cells for every key that a sequence may have, in each step."""
    runner = Runner("page_major", torch.float32, VERIFY, spec=EAGLE)
    mask = PageMajorAttnBackend(runner).verify_mask
    assert mask.mode == eagle_utils.TreeMaskMode.QLEN_ONLY and mask.fits(runner.req_to_token_pool.size)
    assert mask.buffer.numel() == runner.req_to_token_pool.size * DRAFTS**2
    runner.is_draft_worker = True
    assert PageMajorAttnBackend(runner).verify_mask is None


@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
def test_a_mask_covers_the_pages_of_its_drafts(page_size: int) -> None:
    for drafts in (1, 2, 5, 17):
        prefix, pages = torch.arange(1, 40), pages_of(drafts, page_size)
        last = (prefix + drafts - 1) // page_size - prefix // page_size
        assert int(last.max()) == pages - 1, "no page too many"
        tree = torch.rand(len(prefix), drafts, drafts) < 0.5
        found = visible_of(tree.flatten(), prefix, drafts, page_size, whole=False)[:, 0]
        for b, n in enumerate((prefix % page_size).tolist()):
            assert torch.equal(found[b, :, n : n + drafts], tree[b]) and found[b].sum() == tree[b].sum()


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("captured", [False, True])
def test_rows_of_accepted_drafts_are_an_extension(captured: bool, windowed: bool) -> None:
    """Of the draft model, as many for each sequence as the tree had, from one past the prefix on; graphs pad them."""
    runner = Runner("page_major", torch.float32, VERIFY, windowed=windowed, spec=EAGLE)
    runner.is_draft_worker = True
    backend = PageMajorAttnBackend(runner)
    fill(runner, 1, torch.float32)
    forward = runner.forward_batch(ForwardMode.DRAFT_EXTEND_V2)
    query, key, value = rows(len(PREFIX) * DRAFTS, 4, torch.float32)
    if captured:
        backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4 * DRAFTS)
        for name, idle in (("seq_lens", 1), ("req_pool_indices", 0)):  # SGLang gives the whole buffers of a graph
            setattr(forward, name, torch.cat((getattr(forward, name), torch.tensor([idle, idle + 50]))))
        forward.batch_size, forward.seq_lens_cpu = 4, None
        backend.init_forward_metadata_out_graph(forward)
        query, key, value = (torch.cat((x, x[:DRAFTS])) for x in (query, key, value))
        forward.out_cache_loc = torch.cat((forward.out_cache_loc, torch.zeros(DRAFTS, dtype=torch.int64)))
    else:
        backend.init_forward_metadata(forward)
    window = 5 if windowed else 0
    out = backend.forward(query, key, value, layer(1, 4, window=window), forward)[: len(PREFIX) * DRAFTS]
    table = page_table(runner, runner.token_to_kv_pool.full_to_swa_index_mapping if windowed else None)
    index, query = 0 if windowed else 1, query[: len(PREFIX) * DRAFTS]
    close(out, expected(runner.pools[-1], index, table, VERIFY, query, window=window), torch.float32)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("page_size", "topk"), [(4, 1), (4, 3), (1, 3), (2, 2)])
def test_branches_of_a_draft_model_read_what_sglangs_kernel_lists(page_size: int, topk: int, captured: bool) -> None:
    """Every step of every branch against the slots that SGLang's Triton backend would read for it."""
    prefix, room = [1, 6, 16], topk * -(-(page_size + STEPS) // page_size) * page_size
    batch = Batch([min(n + room, 40) for n in prefix], [1] * 3)
    runner = Runner("page_major", torch.float32, batch, page_size=page_size, spec=EAGLE, context=40)
    runner.is_draft_worker = True
    pool, table = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token
    fill_prefix(runner, prefix)
    drafts = PageMajorMultiStepDraft(runner, topk, STEPS)
    lengths = torch.tensor(prefix)
    forward = runner.forward_batch(ForwardMode.DECODE, seq_lens=lengths, seq_lens_cpu=None if captured else lengths)
    if captured:
        drafts.init_cuda_graph_state(max_bs=4, max_num_tokens=4 * topk)
        drafts.init_forward_metadata_out_graph(forward, in_capture=True)
        kept = [backend.forward_metadata for backend in drafts.attn_backends]
        forward.seq_lens, forward.req_pool_indices = lengths.flip(0), runner.rows.flip(0)  # another batch was before
        drafts.init_forward_metadata_out_graph(forward)
        forward.seq_lens, forward.req_pool_indices = lengths, runner.rows
        drafts.init_forward_metadata_out_graph(forward)
        for backend, step in zip(drafts.attn_backends, kept, strict=True):
            backend.forward_metadata = step
    else:
        drafts.init_forward_metadata(forward)
    if page_size > 1:
        tail = lengths % page_size
        eagle_worker_common.duplicate_prefix_tail_to_draft_branches(
            pool, table[runner.rows].long(), lengths - tail, tail, (tail + STEPS + page_size - 1) // page_size, topk,
            page_size,
        )  # fmt: skip
    listed, pointers = listed_slots(runner, lengths, topk, page_size)
    for step, backend in enumerate(drafts.attn_backends):
        slots = [listed[step][a:b] for a, b in zip(pointers[step], pointers[step][1:], strict=False)]
        assert [len(s) for s in slots] == [n + step + 1 for n in prefix for _ in range(topk)]
        forward.out_cache_loc = torch.stack([s[-1] for s in slots])
        query, key, value = rows(len(slots), 4, torch.float32)
        out = backend.forward(query, key, value, layer(1, 4), forward).view(len(slots), 4, DIM)
        planes = [pool.page_pool.plane(1, kind) for kind in ("key", "value")]
        for b, its in enumerate(slots):
            keys, values = (
                torch.from_numpy(
                    oracle.load(pool.page_pool.buffer, p.geometry, page_size, p.dtype, its.tolist(), 2, DIM)
                ).repeat_interleave(2, 1)
                for p in planes
            )
            weights = (torch.einsum("hd,nhd->hn", query[b].double(), keys) * DIM**-0.5).softmax(-1)
            close(out[b], torch.einsum("hn,nhd->hd", weights, values), torch.float32)


def fill_prefix(runner: Runner, prefix: list[int]) -> None:
    for slots, length in zip(runner.slots, prefix, strict=True):
        _, key, value = rows(length, 2, torch.float32)
        runner.token_to_kv_pool.set_kv_buffer(None, slots[:length], key, value, layer_id_override=1)


def listed_slots(runner: Runner, lengths: Tensor, topk: int, page_size: int) -> tuple[Tensor, Tensor]:
    """What each branch reads in each step by SGLang's kernel: slots, and where those of a branch begin."""
    table, branches = runner.req_to_token_pool.req_to_token, len(lengths) * topk
    indices = torch.zeros(STEPS, 1024, dtype=torch.int64)
    pointers = torch.zeros(STEPS, branches + 1, dtype=torch.int32)
    generate_draft_decode_kv_indices[(STEPS, len(lengths), topk)](
        runner.rows, table, lengths, indices, pointers, lengths.repeat_interleave(topk), table.shape[1],
        indices.shape[1], pointers.shape[1], 4, 4, 16, page_size,
    )  # fmt: skip
    return indices, pointers


def test_trees_are_not_given_to_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no masks. A chain needs none, and no draft model."""
    monkeypatch.setenv("PM_OPS", '{"impl": "fa3"}')
    for algorithm in (EAGLE, NGRAM):
        with pytest.raises(ValueError, match="3 has no masks, which trees of drafts need; .* without impl"):
            PageMajorAttnBackend(Runner("token_major", torch.float32, VERIFY, spec=algorithm))
    drafting = Runner("token_major", torch.float32, VERIFY, spec=EAGLE)
    drafting.is_draft_worker = True
    assert PageMajorAttnBackend(drafting).impl == "fa3"
    chain = SimpleNamespace(speculative_num_draft_tokens=STEPS + 1, speculative_eagle_topk=1)
    monkeypatch.setattr(backend_module, "get_spec", lambda: chain)
    assert PageMajorAttnBackend(Runner("token_major", torch.float32, VERIFY, spec=EAGLE)).impl == "fa3"


def test_draft_models_with_pools_of_windows_are_refused_in_more_than_one_step() -> None:
    runner = Runner("token_major", torch.float32, VERIFY, windowed=True, spec=EAGLE)
    runner.is_draft_worker = True
    with pytest.raises(ValueError, match="of full attention alone in more than one step; choose --speculative-num"):
        PageMajorMultiStepDraft(runner, TOPK, STEPS)
