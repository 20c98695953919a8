"""Hybrid models of transformers, compiled as they are: attention caches and recurrent states bound to one pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hybrid_models import ATTENTION, BATCH, FAMILIES, STATES, falcon_h1, greedy, make_cache, make_pool
from torch import Tensor

import pm_ops
from pm_ops.compile_passes import bind, page_major_backend
from pm_ops.testing import page_bytes, slot_bytes, writes_only

transformers = pytest.importorskip("transformers")

PROMPT = 9


class Run:
    """A model's tokens on its own caches, and the same model compiled on pages of a pool of random bytes.

    ``options`` are the backend's, ``decode`` those of another one for single tokens.
    """

    def __init__(
        self,
        family: str,
        types: list[str],
        tokens: int,
        device: str = "cpu",
        decode: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = FAMILIES[family](transformers, types).to(device)
        self.prompt = torch.randint(1, 96, (BATCH, PROMPT)).to(device)
        self.stock = make_cache(transformers, self.model)
        self.want = greedy(self.model, self.stock, self.prompt, tokens)
        self.pool = make_pool(self.stock, 24)
        self.cache = make_cache(transformers, self.model)
        self.binding = bind(self.pool, self.cache)
        assert self.binding.page_table is not None
        self.table: Tensor = self.binding.page_table
        backend = page_major_backend(self.binding, **{"inner": "eager", **options})
        self.compiled = self.prefill = torch.compile(self.model, backend=backend, fullgraph=True)
        if decode is not None:
            backend = page_major_backend(self.binding, **decode)
            self.compiled = torch.compile(self.model, backend=backend, fullgraph=True)

    def go_on(self, step: Tensor, tokens: int) -> Tensor:
        return greedy(self.compiled if step.shape[1] == 1 else self.prefill, self.cache, step, tokens)

    def pages(self, row: int) -> list[int]:
        """All that a sequence has: pages of keys and values, and behind them its page of states."""
        return self.table[row].tolist()

    def owned(self, row: int, tokens: range) -> list[int]:
        """The bytes that a sequence writes with these tokens."""
        (*pages, state), size = self.pages(row), self.pool["attention"].page_size
        slots = [pages[t // size] * size + t % size for t in tokens]
        planes = self.pool["attention"].layout.planes
        states = self.pool["state"].layout.planes
        return [
            *(byte for p in planes for byte in slot_bytes(self.pool["attention"], p.layer, p.kind, slots)),
            *(byte for p in states for byte in _state_bytes(self.pool["state"], p, state)),
        ]

    def check_states(self) -> None:
        """What lies in the pages is what the model's own caches hold."""
        for i, layer in enumerate(self.stock.layers):
            for kind, name in (("conv", "conv_states"), ("ssm", "recurrent_states")):
                if hasattr(layer, name):
                    own = self.pool["state"].view(i, kind)[self.table[:, -1].long()]
                    torch.testing.assert_close(own, getattr(layer, name)[0], rtol=1e-4, atol=1e-4)


def _state_bytes(pool: pm_ops.PagePool, plane: Any, page: int) -> range:
    start = pool.base + page * pool.page_stride + plane.offset
    return range(start, start + plane.shape[0] * plane.head_stride)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hybrid_model_says_on_one_pool_what_it_says_on_its_own_caches(family: str) -> None:
    """Prefill and decode, a sequence moved in between and one copied, and every byte that is not theirs stays."""
    run = Run(family, [STATES, ATTENTION, STATES], 12)
    assert (run.want[:, 1:] != run.want[:, :-1]).any() and run.binding.cache_bytes() == 0
    buffer = run.pool.whole.buffer
    with writes_only(buffer, [b for row in range(BATCH) for b in run.owned(row, range(PROMPT))]):
        first = run.go_on(run.prompt, 1)
    with writes_only(buffer, [b for row in range(BATCH) for b in run.owned(row, range(PROMPT, PROMPT + 4))]):
        got = torch.cat([first, run.go_on(first, 4)], 1)
    report = run.binding.report()
    assert report.materialized == 0 and not report.untouched("write") and not report.untouched("read")

    old, new = run.pages(1), run.pool.allocator.alloc(len(run.pages(1)))
    with writes_only(buffer, page_bytes(run.pool.whole, new)):
        assert run.binding.move(1, new) == new == run.pages(1)
    run.pool.whole.zero(old)
    got = torch.cat([got, run.go_on(got[:, -1:], 4)], 1)
    assert torch.equal(got, run.want[:, :9])

    with writes_only(buffer, page_bytes(run.pool.whole, run.pages(1))):
        run.pool.whole.copy(run.table[0], run.table[1])
    fork = run.go_on(got[:1, -1:].expand(BATCH, 1), 3)
    assert torch.equal(fork[0], run.want[0, 9:]) and torch.equal(fork[1], fork[0])


def test_a_second_prompt_and_a_reset_go_on_from_the_states_in_pages() -> None:
    """A prefill on states reads each state several times and loads it once; reset() zeroes keys, values and states."""
    run = Run("qwen3_next", [STATES, ATTENTION], 1)
    more = torch.randint(1, 96, (BATCH, 5))
    want = torch.cat([run.want, greedy(run.model, run.stock, more, 3)], 1)
    got = torch.cat([run.go_on(run.prompt, 1), run.go_on(more, 3)], 1)
    assert torch.equal(got, want)
    run.check_states()
    assert run.binding.report().materialized == 0
    run.cache.reset()
    view = run.pool["state"].view(0, "ssm")[run.table[:, -1].long()]
    assert not view.any() and torch.equal(run.go_on(run.prompt, 1), run.want)


def test_layers_that_keep_keys_and_states_are_bound_after_a_prefill() -> None:
    model, prompt = falcon_h1(transformers, 2), torch.randint(1, 96, (BATCH, PROMPT))
    stock, cache = (transformers.StaticCache(config=model.config, max_cache_len=30) for _ in range(2))
    with pytest.raises(ValueError, match=r"layer 0 has no tensors yet; call .* or run a prefill before bind"):
        bind(pm_ops.PagePool(pm_ops.page_major(2, 1, 16, 4, torch.float32), 4), cache)
    want, first = greedy(model, stock, prompt, 5), greedy(model, cache, prompt, 1)
    binding = bind(make_pool(cache, 24), cache)
    compiled = torch.compile(model, backend=page_major_backend(binding, "eager"), fullgraph=True)
    assert torch.equal(torch.cat([first, greedy(compiled, cache, first, 4)], 1), want)
    assert binding.report().materialized == 0 and not binding.report().untouched("write")


def test_release_gives_states_and_caches_back() -> None:
    run = Run("qwen3_next", [STATES, ATTENTION], 3)
    run.go_on(run.prompt, 3)
    run.binding.release()
    assert run.pool.allocator.num_free == run.pool.whole.num_pages
    for ours, theirs in zip(run.cache.layers, run.stock.layers, strict=True):
        for name in ("keys", "values"):
            if hasattr(ours, name):
                torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-4, atol=1e-4)
        for name in ("conv_states", "recurrent_states"):
            if hasattr(ours, name):
                torch.testing.assert_close(getattr(ours, name)[0], getattr(theirs, name)[0], rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()
    last = run.want[:, -1:]
    assert torch.equal(greedy(run.model, run.cache, last, 2), greedy(run.model, run.stock, last, 2))


def test_inductor_clones_neither_pool_nor_states() -> None:
    from torch._dynamo.utils import ReinplaceCounters
    from torch._inductor.utils import run_and_get_code

    run = Run("qwen3_next", [STATES, ATTENTION], 4, decode={"inner": "inductor"})
    first = run.go_on(run.prompt, 1)
    ReinplaceCounters.clear()
    with torch._inductor.config.patch(force_disable_caches=True):
        got, (code,) = run_and_get_code(run.go_on, first, 3)
    assert torch.equal(torch.cat([first, got], 1), run.want)
    assert ReinplaceCounters.get_total_missed() == 0
    assert code.count("torch.ops.pm_ops.store_kv.default(arg") == 3
    assert code.count("torch.ops.pm_ops.load_kv.default(arg") == 2
    assert f"empty_strided_cpu(({run.pool.whole.buffer.numel()}," not in code


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("family", FAMILIES)
def test_eight_layers_of_states_and_two_of_attention_on_a_gpu(family: str, mode: str | None) -> None:
    """Compiled by Inductor; or decode alone with CUDA graphs, and a sequence moves and is copied between replays."""
    from torch._dynamo.utils import counters

    options = {"inner": "inductor"} if mode is None else {"decode": {"inner": "inductor", "mode": mode}}
    run = Run(family, [*[STATES] * 4, ATTENTION] * 2, 24, "cuda", **options)
    first = run.go_on(run.prompt, 1)
    counters.clear()
    got = torch.cat([first, run.go_on(first, 11)], 1)
    old, new = run.pages(1), run.pool.allocator.alloc(len(run.pages(1)))
    with writes_only(run.pool.whole.buffer, page_bytes(run.pool.whole, new)):
        run.binding.move(1, new)
    run.pool.whole.zero(old)
    with writes_only(
        run.pool.whole.buffer,
        [b for row in range(BATCH) for b in run.owned(row, range(PROMPT + 11, PROMPT + 19))],
    ):
        got = torch.cat([got, run.go_on(got[:, -1:], 8)], 1)
    assert torch.equal(got, run.want[:, :20])
    run.pool.whole.copy(run.table[0], run.table[1])
    fork = run.go_on(got[:1, -1:].expand(BATCH, 1), 4)
    assert torch.equal(fork[0], run.want[0, 20:]) and torch.equal(fork[1], fork[0])
    assert mode is None or counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_eight_layers_of_states_and_two_of_attention_eagerly_on_a_gpu(family: str) -> None:
    """The rewritten graphs, run operator by operator."""
    run = Run(family, [*[STATES] * 4, ATTENTION] * 2, 12, "cuda")
    assert torch.equal(run.go_on(run.prompt, 12), run.want)
    run.check_states()


def states_of(cache: Any) -> dict[str, list[Tensor]]:
    layers = [layer for layer in cache.layers if hasattr(layer, "conv_states")]
    return {"conv": [x.conv_states[0] for x in layers], "ssm": [x.recurrent_states[0] for x in layers]}


def test_what_does_not_fit_is_refused_and_nothing_is_written() -> None:
    model = FAMILIES["qwen3_next"](transformers, [STATES, ATTENTION])
    seen = make_cache(transformers, model)
    greedy(model, seen, torch.randint(1, 96, (BATCH, 3)), 1)
    pool, fresh, recording = make_pool(seen, 24), *(make_cache(transformers, model) for _ in range(2))
    recording.layers[0].activate_past_recording()
    attention, state = pool["attention"].layout, pool["state"].layout
    keys, values, states = [seen.layers[1].keys], [seen.layers[1].values], states_of(seen)
    small = pm_ops.HybridPool({"attention": attention, "state": state}, 7)
    swapped = pm_ops.HybridPool({"attention": attention.numbered([0]), "state": state.numbered([1])}, 24)
    stateless = pm_ops.HybridPool({"attention": attention}, 24)
    slots = 24 * attention.page_size
    rows = [torch.zeros(slots, 1, 16)]
    every = {kind: [torch.zeros(24, *t.shape[1:]) for t in given] for kind, given in states.items()}
    refused = [
        (pool, dict(cache=fresh, states=states), "takes a cache object, or keys=, values= and states=, not both"),
        (pool, dict(cache=recording), r"layer 0 records past states \(activate_past_recording.*bind a cache that"),
        (small, dict(cache=fresh), "caches of 2 x 40 tokens and states of 2 sequences need 8 pages, the pool has 7"),
        (swapped, dict(cache=fresh), "plane 'conv' of layer 1, but that layer is a StaticLayer without states; number"),
        (stateless, dict(cache=seen), "layer 0 keeps conv states, and the pool has no plane 'conv' of that layer"),
        (pool, dict(keys=keys, values=values, states={**states, "conv": [states["conv"][0][:1].clone()]}),
         "beside others of 2 sequences it must be"),
        (pool, dict(keys=keys, values=values, states={"conv": [t.half() for t in states["conv"]]}), "they must agree"),
        (pool, dict(keys=rows, states=states), r"it must be \[24, 64, 4\], a state for each of the pool's 24 pages$"),
        (pool, dict(keys=rows, values=[rows[0].clone()], states=every),
         r"kinds \['attention', 'state'\] would lie in the same bytes"),
        (pool, dict(keys=keys, values=values), "2 planes of the pool, 'conv', 'ssm' from layer 0 on: .*a HybridPool"),
        (stateless, dict(keys=[keys[0][:1].clone()], values=values), "one batch and length for all"),
        (pm_ops.TwoEndedPool(attention, state, 1 << 16), dict(cache=fresh), "a pm_ops.HybridPool, got TwoEndedPool"),
    ]  # fmt: skip
    before = pool.whole.buffer.clone()
    for where, given, message in refused:
        with pytest.raises(ValueError, match=message):
            bind(where, **given)
    assert torch.equal(pool.whole.buffer, before) and pool.allocator.num_free == 24
    assert all(type(t) is Tensor for t in (*keys, *values, *states["conv"], *states["ssm"]))


def test_states_of_a_cache_without_attention_are_bound_by_sequence() -> None:
    """Mamba-2's own cache after a prefill; also of as many sequences as the pool has pages."""
    config = transformers.Mamba2Config(
        vocab_size=64, hidden_size=48, num_heads=6, head_dim=16, expand=2, state_size=12, n_groups=2, conv_kernel=4,
        chunk_size=16, num_hidden_layers=2, initializer_range=0.3,
    )  # fmt: skip
    model, prompt = transformers.Mamba2ForCausalLM(config).eval(), torch.randint(0, 64, (3, 9))
    with torch.no_grad():
        caches = [model(prompt, use_cache=True).cache_params for _ in range(2)]
        kept = caches[0].layers[0]
        states = {"conv": kept.conv_states[0], "ssm": kept.recurrent_states[0]}
        layout = pm_ops.state_page(2, {kind: (tuple(s.shape[1:]), s.dtype) for kind, s in states.items()}, align=16)
        binding = bind(pm_ops.PagePool(layout, 3), caches[0])
        assert binding.page_table is not None and binding.page_table.shape == (3, 1)
        compiled, token = torch.compile(model, backend=page_major_backend(binding, "eager")), prompt[:, -1:]
        for _ in range(3):
            want = model(token, use_cache=True, cache_params=caches[1]).logits
            torch.testing.assert_close(compiled(token, use_cache=True, cache_params=caches[0]).logits, want)
            token = want[:, -1:].argmax(-1)
    assert binding.report().materialized == 0
    lazy = SimpleNamespace(layers=[type(kept)(), type(kept)()])
    with pytest.raises(ValueError, match="layer 0 has no conv states yet, nor tells a layer of how many sequences"):
        bind(pm_ops.PagePool(layout, 7), lazy)


def test_a_kernel_that_updates_states_outside_of_the_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("qwen3_next", [STATES, ATTENTION], 1)
    first = run.go_on(run.prompt, 1)
    modeling = transformers.models.qwen3_next.modeling_qwen3_next
    kernel = torch.compiler.disable(modeling.causal_conv1d_update)
    monkeypatch.setattr(modeling, "causal_conv1d_update", kernel)
    run.compiled = torch.compile(run.model, backend=page_major_backend(run.binding, "eager"))
    before = run.pool.whole.buffer.clone()
    with pytest.raises(RuntimeError, match="layer 0 conv, which lives in pages and has no data of its own"):
        run.go_on(first, 1)
    assert torch.equal(run.pool.whole.buffer, before)
