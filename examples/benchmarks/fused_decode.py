"""A decode step of a whole model, with rotation, QK-norm and cache write in one launch a layer and without.

    python examples/benchmarks/fused_decode.py --out fused_decode.json      # on a GPU of 140 GB
    python examples/benchmarks/fused_decode.py --layers 2 --hidden 256 --context 64 --batches 1,4 --inner eager

Models have the shapes of Llama-3-8B and Qwen3-8B (with QK-norm) and random weights, a rotation in bf16 as transformers
has it, and layer-major caches; `page_major_backend` compiles them onto one pool of pages, once with and once without
`fuse_rope`. Each is a process of its own; they compile at the same time and measure one after another. For each batch
both steps are captured as CUDA graphs and replayed in turns: times are medians, the ratio is that of the medians.
Launches are kernels of one call in torch's profiler. Hidden states of both are compared, and the keys and values that
they stored in the first layer, whose inputs are the same; the exit status is 1 where they differ too much.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pm_ops
from pm_ops.compile_passes import Attend, Store, bind, page_major_backend, register_attention_op, register_store_op

DIM, PAGE = 128, 16
SCALE = 0.25  # of fp8 caches
LIBRARY = torch.library.Library("fused_decode", "DEF")
LIBRARY.define("store(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots) -> ()")
LIBRARY.define("attend(Tensor query, Tensor k_cache, Tensor v_cache, Tensor table, Tensor lens) -> Tensor")
torch.library.register_fake("fused_decode::store", lambda *a: None, lib=LIBRARY)
torch.library.register_fake("fused_decode::attend", lambda query, *a: torch.empty_like(query), lib=LIBRARY)


class Shape(NamedTuple):
    """A model: hidden sizes are multiples of the narrowest, so that a rehearsal can shrink it."""

    layers: int
    intermediate: float
    norm: bool
    cache: torch.dtype


SHAPES = {
    "llama-8b": Shape(32, 3.5, False, torch.bfloat16),
    "qwen3-8b": Shape(36, 3.0, True, torch.bfloat16),
    "llama-8b, fp8 cache": Shape(32, 3.5, False, torch.float8_e4m3fn),
}


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    y = x.float()
    return weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., DIM // 2 :], x[..., : DIM // 2]), -1)


class Layer(nn.Module):
    """One layer, as transformers writes them; caches are ``[slots, heads, dim]``."""

    def __init__(self, shape: Shape, hidden: int, slots: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = hidden // DIM, max(1, hidden // DIM // 4)
        wide = int(hidden * shape.intermediate)
        self.qkv = nn.Linear(hidden, (self.heads + 2 * self.kv_heads) * DIM, bias=False)
        self.out, self.down = nn.Linear(hidden, hidden, bias=False), nn.Linear(wide, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * wide, bias=False)
        self.norms = nn.ParameterList(torch.ones(hidden) for _ in range(2))
        self.qk_norms = nn.ParameterList(torch.ones(DIM) for _ in range(2 if shape.norm else 0))
        self.k_cache, self.v_cache = (torch.zeros(slots, self.kv_heads, DIM, dtype=shape.cache) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        qkv = self.qkv(rms_norm(x, self.norms[0])).unflatten(-1, (-1, DIM))
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
        if len(self.qk_norms):
            q, k = rms_norm(q, self.qk_norms[0]), rms_norm(k, self.qk_norms[1])
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        torch.ops.fused_decode.store(k, v, self.k_cache, self.v_cache, slots)
        out = torch.ops.fused_decode.attend(q, self.k_cache, self.v_cache, table, lens)
        x = x + self.out(out.flatten(1))
        gate, up = self.gate_up(rms_norm(x, self.norms[1])).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, shape: Shape, layers: int, hidden: int, slots: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(shape, hidden, slots) for _ in range(layers))
        self.register_buffer(
            "inv_freq", 500000.0 ** -(torch.arange(0, DIM, 2, dtype=torch.float32) / DIM), persistent=False
        )

    def forward(self, x: Tensor, positions: Tensor, slots: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        angles = positions[:, None].float() * self.inv_freq
        angles = torch.cat((angles, angles), -1)[:, None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, slots, table, lens)
        return x


def make(shape: Shape, args: argparse.Namespace) -> tuple[Model, Any]:
    """A model whose caches are bound to a pool, which holds random numbers as if a context had been read."""
    slots = max(args.batches) * args.context
    layers = args.layers or shape.layers
    with torch.device(args.device):
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        model = Model(shape, layers, args.hidden, slots).requires_grad_(False)
        torch.set_default_dtype(torch.float32)
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.02)
            else:
                weight.uniform_(0.5, 1.5)
    layout = pm_ops.page_major(layers, model.layers[0].kv_heads, DIM, PAGE, shape.cache)
    pool = pm_ops.PagePool(layout, slots // PAGE, device=args.device)
    binding = bind(
        pool, keys=[layer.k_cache for layer in model.layers], values=[layer.v_cache for layer in model.layers]
    )
    for start in range(0, pool.num_pages, 64):
        part = pool.pages[start : start + 64]
        random = torch.randn(part.shape[0], part.shape[1] // shape.cache.itemsize, device=args.device)
        part.copy_(random.to(shape.cache).view(torch.uint8))
    if args.device == "cuda":
        torch.cuda.empty_cache()  # other models need what the layer-major caches took
    return model, binding


def inputs(batch: int, args: argparse.Namespace) -> list[Tensor]:
    """One token for each sequence, behind a full context in shuffled pages."""
    torch.manual_seed(batch)
    pages = args.context // PAGE
    table = torch.randperm(max(args.batches) * pages)[: batch * pages].view(batch, pages).int()
    last = args.context - 1
    slots = table[:, last // PAGE].long() * PAGE + last % PAGE
    given = [
        torch.randn(batch, args.hidden).bfloat16(),
        torch.full((batch,), last),
        slots,
        table,
        torch.full((batch,), args.context, dtype=torch.int32),
    ]
    return [t.to(args.device) for t in given]


class Step:
    """One compiled step: its launches, what it computes and stores, and how long it takes."""

    def __init__(self, model: Model, binding: Any, given: list[Tensor], fuse: bool, inner: str) -> None:
        self.given, self.pool, start = given, binding.pool, time.perf_counter()
        backend = page_major_backend(binding, inner=inner, fuse_rope=fuse)
        self.run = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
        hidden = self.run(*given)
        self.compile_seconds = time.perf_counter() - start
        self.fused = sum("pm_ops.rope_store_kv" in line for line in backend.graphs[-1].splitlines())
        self.hidden = hidden.float()
        self.rows = [pm_ops.load_kv(self.pool, 0, given[2], kind).float() for kind in ("key", "value")]
        self.launches, self.replay = 0, lambda: self.run(*given)
        if hidden.is_cuda:
            self.launches = self._launches()
            self.replay = self._captured().replay

    def _launches(self) -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            self.run(*self.given)
            torch.cuda.synchronize()
        device = torch.autograd.DeviceType.CUDA
        return sum(event.device_type == device for event in profile.events() or ())

    def _captured(self) -> Any:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(*self.given)
        return graph

    def milliseconds(self, times: int) -> float:
        """Of one replay, the mean of several in a row."""
        if not self.given[0].is_cuda:
            start = time.perf_counter()
            self.replay()
            return 1e3 * (time.perf_counter() - start)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            self.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / times


def compared(one: Step, other: Step, layers: int) -> dict[str, Any]:
    """How far two steps differ, and whether one rounding in place of several explains that.

    Keys of the first layer have the same inputs: they are an ulp apart. Behind all layers such differences have grown.
    """
    error = float((one.hidden - other.hidden).norm() / one.hidden.norm())
    key, value = (float((a - b).abs().max() / a.abs().max()) for a, b in zip(one.rows, other.rows, strict=True))
    coarse = 2.0**-3 if one.pool.layout.planes[0].dtype.itemsize == 1 else 2.0**-7
    right = (one.fused, other.fused) == (0, layers) and error < 0.1 and key <= coarse and value == 0
    return {"right": right, "fused_layers": other.fused, "hidden_error": error, "key_error": key, "value_error": value}


@torch.no_grad()
def measure(name: str, args: argparse.Namespace, turn: Any, ready: Any, results: Any) -> None:
    """Compile all batches of one model, wait for the other models, and measure in turn."""
    torch._dynamo.config.recompile_limit = 64
    start, steps = time.perf_counter(), {}
    register_store_op(
        torch.ops.fused_decode.store,
        lambda k, v, k_cache, v_cache, slots: Store(slots, k, k_cache, v, v_cache, *scales),
    )
    register_attention_op(
        torch.ops.fused_decode.attend,
        lambda q, k_cache, v_cache, table, lens: Attend(
            q, k_cache, v_cache, table, lens, key_scale=scales[0], value_scale=scales[1], max_query_len=1
        ),
    )
    shape = SHAPES[name]
    scales = (SCALE, SCALE) if shape.cache.itemsize == 1 else (1.0, 1.0)
    with turn:  # caches are there twice until they are bound
        model, binding = make(shape, args)
    for batch in args.batches:
        if time.perf_counter() - start < args.seconds:
            given = inputs(batch, args)
            steps[batch] = [Step(model, binding, given, fuse, args.inner) for fuse in (False, True)]
    ready.wait()
    with turn:
        for batch, (plain, fused) in steps.items():
            row = {"model": name, "batch": batch, "context": args.context, "layers": len(model.layers)}
            row |= compared(plain, fused, len(model.layers))
            for step in (plain, fused):
                step.milliseconds(3)
            taken = [[step.milliseconds(args.replays) for step in (plain, fused)] for _ in range(args.samples)]
            plain_ms, fused_ms = (statistics.median(column) for column in zip(*taken, strict=True))
            row |= {"plain_ms": plain_ms, "fused_ms": fused_ms, "ratio": plain_ms / fused_ms}
            row |= {"plain_launches": plain.launches, "fused_launches": fused.launches}
            row |= {"plain_compile_s": plain.compile_seconds, "fused_compile_s": fused.compile_seconds}
            results.put(row)
    results.put(None)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=";".join(SHAPES), help="separated by semicolons")
    parser.add_argument("--batches", default="1,16,256,64", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--context", type=int, default=512, help="tokens of each sequence")
    parser.add_argument("--layers", type=int, default=0, help="instead of the models' own")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--inner", default="inductor", help="what compiles the rewritten graphs")
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--replays", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1e9, help="compile no further batch after these")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    args = parser.parse_args(arguments)
    names = args.models.split(";")
    unknown = set(names) - set(SHAPES)
    if unknown or args.hidden % DIM or args.context % PAGE:
        parser.error(f"models are {'; '.join(SHAPES)}; hidden is a multiple of {DIM}, the context one of {PAGE}")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")  # of each model
    context = multiprocessing.get_context("spawn")
    turn, ready, results = context.Lock(), context.Barrier(len(names)), context.Queue()
    workers = [context.Process(target=measure, args=(name, args, turn, ready, results)) for name in names]
    for worker in workers:
        worker.start()
    rows: list[dict[str, Any]] = []
    running = len(workers)
    while running:
        if any(worker.exitcode not in (None, 0) for worker in workers):
            for worker in workers:
                worker.kill()
            raise RuntimeError("a model failed; its traceback is above")
        try:
            row = results.get(timeout=1)
        except queue.Empty:
            continue
        running -= row is None
        if row is not None:
            rows.append(row)
            print(line(row), flush=True)
    for worker in workers:
        worker.join()
    if args.out:
        device = torch.cuda.get_device_name() if args.device == "cuda" else args.device
        args.out.write_text(json.dumps({"device": device, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    return rows


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['model']:20} batch {row['batch']:4}: {row['plain_ms']:8.3f} ms, fused {row['fused_ms']:8.3f} ms, "
        f"{row['ratio']:.3f} x; launches {row['plain_launches']} and {row['fused_launches']}"
        f"{'' if row['right'] else '; WRONG: ' + str(row)}"
    )


if __name__ == "__main__":
    raise SystemExit(not all(row["right"] for row in main()))
