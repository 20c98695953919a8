"""The backend as torch.compile runs it: dynamic shapes, several graphs, Inductor, warm caches."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import ReinplaceCounters
from torch._inductor.utils import run_and_get_code

from pm_ops.compile_passes import bind, page_major_backend

BATCH, HEADS, DIM, SEQ, SLOTS = 2, 2, 8, 14, 20
ROOT = Path(__file__).parents[2]


class Decoder(torch.nn.Module):
    """A small decoder with weights, a batched layer-major cache and grouped heads."""

    def __init__(self, layers: int = 2, seq: int = SEQ, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.proj = torch.nn.ModuleList(torch.nn.Linear(32, 32 + 2 * HEADS * DIM, dtype=dtype) for _ in range(layers))
        shape = (BATCH, HEADS, seq, DIM)
        self.k = [torch.randn(shape, dtype=dtype) for _ in range(layers)]
        self.v = [torch.randn(shape, dtype=dtype) for _ in range(layers)]

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        mask = torch.arange(self.k[0].shape[2], device=x.device) <= pos[:, None]
        for proj, k, v in zip(self.proj, self.k, self.v, strict=True):
            q, key, value = proj(x).split([32, HEADS * DIM, HEADS * DIM], -1)
            k[:, :, pos] = key.view(batch, tokens, HEADS, DIM).transpose(1, 2)
            v[:, :, pos] = value.view(batch, tokens, HEADS, DIM).transpose(1, 2)
            q = q.view(batch, tokens, 4, DIM).transpose(1, 2)
            wide = (c.repeat_interleave(2, dim=1) for c in (k, v))
            x = x + F.scaled_dot_product_attention(q, *wide, attn_mask=mask).transpose(1, 2).flatten(2)
        return x


def step(tokens: int, start: int) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, tokens, 32), torch.arange(start, start + tokens)


@pytest.mark.parametrize("marked", [False, True], ids=["automatic", "mark_dynamic"])
def test_one_recompile_at_most_two_over_token_counts(paged: Any, marked: bool) -> None:
    twins = paged(Decoder(seq=40), pages=20)
    counter = CompileCounterWithBackend("eager")
    twins.backend.inner = counter
    for tokens in (1, 2, 3, 7, 8, 16):
        x, pos = step(tokens, 5)
        if marked and tokens > 1:
            torch._dynamo.mark_dynamic(x, 1)
            torch._dynamo.mark_dynamic(pos, 0)
        twins.check(x, pos)
    twins.check_pages()
    assert counter.frame_count <= 3
    assert twins.binding.report().graphs == counter.frame_count
    assert twins.binding.report().writes_rewritten == 4


@pytest.mark.parametrize("dynamic", [False, True], ids=["automatic", "dynamic=True"])
def test_slices_at_symbolic_positions_are_eagers(paged: Any, dynamic: bool) -> None:
    class Sliding(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k, self.v = [torch.randn(BATCH, HEADS, SEQ, DIM)], [torch.randn(BATCH, HEADS, SEQ, DIM)]

        def forward(self, q: Tensor, x: Tensor, at: int) -> Tensor:
            self.k[0][:, :, at : at + x.shape[2]] = x
            self.v[0][:, :, at : at + x.shape[2]].copy_(x * 2)
            self.k[0][:, :, at - 1 : at] = x[:, :, :1]
            k, v = self.k[0][:, :, : at + x.shape[2]], self.v[0][:, :, : at + x.shape[2]]
            mask = (torch.arange(SEQ) % 3 != 1)[None, : at + x.shape[2]]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    twins = paged(Sliding(), form="BHSD")
    twins.compiled = torch.compile(twins.model, backend=twins.backend, fullgraph=True, dynamic=dynamic or None)
    for at, tokens in ((3, 2), (5, 3), (6, 4), (9, 2), (4, 5)):
        twins.check(torch.randn(BATCH, HEADS, 5, DIM), torch.randn(BATCH, HEADS, tokens, DIM), at)
    twins.check_pages()
    assert twins.binding.report().graphs <= 3


def test_several_graphs_of_one_model_see_one_cache(paged: Any) -> None:
    class Broken(Decoder):
        def forward(self, x: Tensor, pos: Tensor) -> Tensor:
            x = x * 2
            torch._dynamo.graph_break()  # before any cache is touched
            self.k[0].index_copy_(2, pos, x.view(BATCH, -1, 4, DIM)[:, :, :HEADS].transpose(1, 2))
            torch._dynamo.graph_break()  # between a write and its read
            x = x + self.k[0][:, :, pos].sum()
            torch._dynamo.graph_break()
            return super().forward(x, pos).relu()

    twins = paged(Broken(), form="BHSD")
    twins.compiled = torch.compile(twins.model, backend=twins.backend)
    for start in (3, 9):
        twins.check(*step(3, start))
    twins.check_pages()
    report = twins.binding.report()
    assert (report.writes_rewritten, report.reads_rewritten) == (4, 3)
    assert len(twins.backend.graphs) == 3


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_constants_of_the_graph_stay_constants(paged: Any, inner: str) -> None:
    class Scaled(Decoder):
        def forward(self, x: Tensor, pos: Tensor) -> Tensor:
            return super().forward(x * torch.tensor([0.5]) + torch.tensor(3.0), pos)

    twins = paged(Scaled(layers=1), pages=11, inner=inner)
    twins.check(*step(3, 2))
    twins.check(*step(4, 5))
    twins.check_pages()


def test_inference_mode_autocast_constants_and_data_dependent_sizes(paged: Any) -> None:
    class Odd(Decoder):
        def forward(self, x: Tensor, pos: Tensor) -> Tensor:
            x = x * torch.tensor([0.5]) + torch.tensor(3.0)
            chosen = pos[pos > 4]
            self.k[0][0, :, chosen] = x[0, : chosen.shape[0], None, :DIM].transpose(0, 1).expand(HEADS, -1, -1)
            return super().forward(x, pos)

    twins = paged(Odd(), form="BHSD")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.inference_mode():
        twins.check(*step(3, 3))
        twins.check(*step(3, 4))
    twins.check_pages()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        twins = paged(Decoder(dtype=torch.bfloat16), form="BHSD", dtype=torch.bfloat16)
        x, pos = step(3, 3)
        torch.testing.assert_close(twins.compiled(x, pos), twins.stock(x, pos), rtol=2e-2, atol=2e-2)


def test_keys_and_values_of_two_layers_are_reported_as_such(paged: Any) -> None:
    class Crossed(Decoder):
        def forward(self, x: Tensor, pos: Tensor) -> Tensor:
            q = x.view(BATCH, -1, 4, DIM).transpose(1, 2)
            x = F.scaled_dot_product_attention(q, self.k[0], self.v[1], enable_gqa=True)
            return x + F.scaled_dot_product_attention(q, self.k[1], self.v[1], enable_gqa=True)

    twins = paged(Crossed(), form="BHSD")
    twins.check(*step(3, 3))
    report = twins.binding.report()
    assert [e.planes for e in report.entries] == [((0, "key"), (1, "value")), ((1, "key"), (1, "value"))]
    assert report.reads_rewritten == 2
    assert report.untouched("read") == [(0, "value")]
    assert "key+value of L1 " in str(report)
    assert "key+value  " in str(report)


def test_attention_beside_the_caches_is_put_back(paged: Any) -> None:
    class Encoder(Decoder):
        def forward(self, x: Tensor, pos: Tensor) -> Tensor:
            q = x.view(BATCH, -1, 4, DIM).transpose(1, 2)
            x = x + F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
            return super().forward(x, pos)

    twins = paged(Encoder(), form="BHSD")
    twins.check(*step(3, 3))
    assert twins.backend.graphs[0].count("scaled_dot_product_attention(") == 1
    assert "pm_ops_trace" not in twins.backend.graphs[0]


def test_pages_may_be_moved_between_calls(paged: Any) -> None:
    twins = paged(Decoder(), form="BHSD")
    twins.check(*step(3, 2))
    old = twins.binding.page_table.flatten().tolist()
    free = min(set(range(11)) - set(old))
    twins.pool.copy([old[2]], [free])
    twins.pool.buffer.view(11, -1)[old[2]] = 0xFF
    twins.binding.page_table.view(-1)[2] = free
    twins.check(*step(4, 7))
    twins.check_pages()


def test_a_cache_that_was_not_bound_is_recompiled_for_not_written_into_the_wrong_plane(paged: Any) -> None:
    def model(k: Tensor, x: Tensor, at: Tensor) -> Tensor:
        k[at] = x
        return k[at] * 2

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k, self.v = [torch.randn(SLOTS, HEADS, DIM)], [torch.randn(SLOTS, HEADS, DIM)]

    twins = paged(Two(), pages=5)
    twins.backend.strict = False
    compiled = torch.compile(model, backend=twins.backend, fullgraph=True)
    plain, at = torch.zeros(SLOTS, HEADS, DIM), torch.tensor([3, 4])
    with torch.no_grad():
        for cache, stock in ((twins.model.k[0], twins.stock.k[0]), (twins.model.v[0], twins.stock.v[0]), (plain, None)):
            x = torch.randn(2, HEADS, DIM)
            torch.testing.assert_close(compiled(cache, x, at), x * 2)
            if stock is not None:
                stock[at] = x
    assert torch.equal(plain[at], x)
    twins.check_pages()


def test_the_compiled_graph_checks_its_caches_by_identity(paged: Any) -> None:
    twins = paged(Decoder(), form="BHSD")
    taken: list[Any] = []

    def inner(gm: Any, inputs: Any) -> Any:
        taken.append(inputs)
        return gm.forward

    backend = page_major_backend(twins.binding, inner=inner)
    seen: list[Any] = []

    def spy(gm: Any, inputs: Any) -> Any:
        compiled = backend(gm, inputs)
        seen.append((compiled, list(inputs)))
        return compiled

    with torch.no_grad():
        torch.compile(twins.model, backend=spy)(*step(3, 2))
        compiled, inputs = seen[0]
        caches = [i for i, x in enumerate(inputs) if type(x).__name__ == "Facade"]
        inputs[caches[0]], inputs[caches[1]] = inputs[caches[1]], inputs[caches[0]]
        with pytest.raises(RuntimeError, match="was called with another tensor"):
            compiled(*inputs)
    assert any(x is twins.pool.buffer for x in taken[0])
    assert not any(type(x).__name__ == "Facade" for x in taken[0])


def test_parameters_keep_their_static_marks_and_the_pool_gets_one(paged: Any) -> None:
    static: list[int] = []
    sizes: list[int] = []

    def inner(gm: Any, inputs: Any) -> Any:
        placeholders = gm.graph.find_nodes(op="placeholder")
        sizes.append(len(placeholders))
        static.append(sum("_dynamo_static_input_type" in n.meta.get("tensor_dict", {}) for n in placeholders))
        assert all(hasattr(n, "_dynamo_source") for n in placeholders)
        assert "dynamo_compile_id" in gm.meta
        assert hasattr(gm, "_param_name_to_source")
        return gm.forward

    twins = paged(Decoder(), form="BHSD", inner=inner)
    twins.check(*step(3, 2))
    assert (sizes, static) == ([4 + 2 + 2], [4 + 2])  # weights and biases, x and pos, the buffer and its page table


@pytest.mark.parametrize("form", ["slots", "batched", "dynamic"])
def test_inductor_neither_clones_the_pool_nor_misses_a_reinplacing(paged: Any, form: str) -> None:
    if form == "slots":

        def write(k: Tensor, v: Tensor, x: Tensor, y: Tensor, at: Tensor) -> None:
            k[at], v[at] = x, y

        def read(k: Tensor, v: Tensor, out: Tensor, at: Tensor) -> Tensor:
            return k[at] + v.index_select(0, at)

        twins = paged(form="SHD", write=write, read=read, inner="inductor")
        calls = [(torch.randn(3, HEADS, DIM), torch.tensor(at)) for at in ([1, 19, 7], [0, 1, 2])]
    else:
        twins = paged(Decoder(), form="BHSD", inner="inductor")
        calls = [step(3, 2), step(3, 9)] if form == "batched" else [step(1, 2), step(4, 3), step(5, 9)]
    ReinplaceCounters.clear()
    with torch._inductor.config.patch(force_disable_caches=True), torch.no_grad():
        for call in calls:
            got, code = run_and_get_code(twins.compiled, *call)
            torch.testing.assert_close(got, twins.stock(*call), rtol=2e-5, atol=2e-5)
            for source in code:
                assert_pool_is_passed_through(source, twins.pool.buffer)
    assert ReinplaceCounters.get_total_missed() == 0
    twins.check_pages()


def assert_pool_is_passed_through(source: str, buffer: Tensor) -> None:
    """Every store and every attention gets the graph input itself; nothing of the pool's size is allocated."""
    taken = set(re.findall(r"torch\.ops\.pm_ops\.\w+\.default\((\w+),", source))
    assert len(taken) == 1, taken
    assert taken.pop().startswith("arg")
    assert f"(({buffer.numel()}, )" in source  # static: the size is a constant of the code
    assert f"empty_strided_cpu(({buffer.numel()}," not in source


def test_a_store_after_a_read_of_the_same_slots_stays_after_it(paged: Any) -> None:
    class Swap(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k, self.v = [torch.randn(SLOTS, HEADS, DIM)], [torch.randn(SLOTS, HEADS, DIM)]

        def forward(self, x: Tensor, at: Tensor) -> tuple[Tensor, ...]:
            k, v = self.k[0], self.v[0]
            k[at] = x
            first = k[at] + v[at]
            k[at] = x * 2
            second = k[at] - 1
            v[at] = first
            k[at] = second
            return first, second, k[at] * v[at]

    for inner in ("eager", "inductor"):
        twins = paged(Swap(), pages=5, inner=inner)
        ReinplaceCounters.clear()
        with torch._inductor.config.patch(force_disable_caches=True):
            twins.check(torch.randn(3, HEADS, DIM), torch.tensor([4, 0, 19]))
            twins.check(torch.randn(3, HEADS, DIM), torch.tensor([0, 4, 18]))
        assert ReinplaceCounters.get_total_missed() == 0
        twins.check_pages()


def test_the_registered_name_takes_the_binding_as_an_option(paged: Any) -> None:
    twins = paged(Decoder(), form="BHSD")
    twins.compiled = torch.compile(twins.model, backend="pm_ops", options={"binding": twins.binding, "inner": "eager"})
    twins.check(*step(3, 2))
    assert twins.binding.report().writes_rewritten == 4
    with pytest.raises(Exception, match='needs options={"binding": binding}'):
        torch.compile(lambda x: x + 1, backend="pm_ops")(torch.ones(2))


WARM = """
import sys, torch
from torch._dynamo.utils import counters
from pm_ops import PagePool, page_major
from pm_ops.compile_passes import bind, page_major_backend

page_size, layers_before = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
k, v = torch.randn(24, 2, 8), torch.randn(24, 2, 8)
want_k, want_v = k.clone(), v.clone()
pad = [torch.zeros(24, 2, 8) for _ in range(2 * layers_before)]
pool = PagePool(page_major(1 + layers_before, 2, 8, page_size, torch.float32), 24 // page_size)
binding = bind(pool, keys=[*pad[::2], k], values=[*pad[1::2], v])

def model(x, at):
    k[at], v[at] = x, x * 2
    return k[at] + v[at]

x, at = torch.randn(3, 2, 8), torch.tensor([1, 23, 6])
with torch.no_grad():
    got = torch.compile(model, backend=page_major_backend(binding), fullgraph=True)(x, at)
torch.testing.assert_close(got, x * 3)
binding.release()
want_k[at], want_v[at] = x, x * 2
assert torch.equal(k, want_k) and torch.equal(v, want_v)
print("hits", counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"])
"""


def test_two_geometries_share_a_warm_cache_directory(tmp_path: Path) -> None:
    """The geometry is part of the compiled graph, and so of every cache key: each layout gets its own code."""

    def run(page_size: int, layers_before: int) -> str:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", WARM, str(page_size), str(layers_before)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert run(4, 0) == "hits 0 0"
    assert run(8, 0) == "hits 0 0"
    assert run(4, 1) == "hits 0 0"
    assert run(4, 0) != "hits 0 0"


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3])
def test_cuda_graphs_replay_on_pages(tokens: int) -> None:
    from torch._dynamo.utils import counters

    from pm_ops import PagePool, page_major

    torch.manual_seed(0)
    stock = Decoder(seq=40, dtype=torch.bfloat16).cuda()
    model = Decoder(seq=40, dtype=torch.bfloat16).cuda()
    model.load_state_dict(stock.state_dict())
    for ours, theirs in zip([*model.k, *model.v], [*stock.k, *stock.v], strict=True):
        ours.copy_(theirs)
    model.k, model.v = [k.cuda() for k in model.k], [v.cuda() for v in model.v]
    stock.k, stock.v = [k.cuda() for k in stock.k], [v.cuda() for v in stock.v]
    pool = PagePool(page_major(2, HEADS, DIM, 4, torch.bfloat16), 24, device="cuda")
    binding = bind(pool, keys=model.k, values=model.v)
    compiled = torch.compile(model, backend=page_major_backend(binding), mode="reduce-overhead", fullgraph=True)
    counters.clear()
    with torch.no_grad():
        for start in range(2, 2 + 5 * tokens, tokens):
            x = torch.randn(BATCH, tokens, 32, device="cuda", dtype=torch.bfloat16)
            pos = torch.arange(start, start + tokens, device="cuda")
            torch.testing.assert_close(compiled(x, pos).clone(), stock(x, pos), rtol=2e-2, atol=2e-2)
    assert counters["inductor"]["cudagraph_skips"] == 0
    binding.release()
    for ours, theirs in zip([*model.k, *model.v], [*stock.k, *stock.v], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
