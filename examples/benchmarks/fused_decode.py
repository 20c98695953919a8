"""A decode step of a whole model, with rotation, QK-norm and cache write in one launch a layer and without.

    python examples/benchmarks/fused_decode.py --out DIR      # on a GPU of 140 GB; two minutes on 16 cores
    python examples/benchmarks/fused_decode.py --layers 2 --hidden 256 --context 64 --batches 1,4 --inner eager

Models have the shapes of Llama-3-8B and Qwen3-8B (with QK-norm) and random weights, a rotation in bf16 as transformers
has it, and layer-major caches; `page_major_backend` compiles them onto one pool of pages, once with and once without
`fuse_rope`. Each model and batch is a process of its own. They compile at the same time, and measure one after another
when all are ready, or `--seconds` have passed: what is not ready then is left out, and said to be. Layers take turns
with four sets of weights, so that all processes fit; they are 1.7 GB, 35 times what an H200's L2 cache holds.

Both steps are captured as CUDA graphs and replayed in turns: times are medians, the ratio is that of the medians.
Launches are the kernels of one call in torch's profiler; those of a layer are the ones that come once for each layer.
Hidden states of both are compared, and the keys and values that they stored in the first layer, whose inputs are the
same; the exit status is 1 where they differ too much or a model failed. Compile times are of processes that compete for
cores. `DIR/fused_decode.json` is written anew after each result.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from _engines import Process
from torch import Tensor, nn

import pm_ops
from pm_ops.compile_passes import Attend, Store, bind, page_major_backend, register_attention_op, register_store_op

DIM, PAGE = 128, 16
SCALE = 0.25  # of fp8 caches
SETS = 4  # of weights
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


class Weights(nn.Module):
    """What a layer computes with."""

    def __init__(self, shape: Shape, hidden: int) -> None:
        super().__init__()
        heads, wide = hidden // DIM, int(hidden * shape.intermediate)
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads(hidden)) * DIM, bias=False)
        self.out, self.down = nn.Linear(hidden, hidden, bias=False), nn.Linear(wide, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * wide, bias=False)
        self.norms = nn.ParameterList(torch.ones(hidden) for _ in range(2))
        self.qk_norms = nn.ParameterList(torch.ones(DIM) for _ in range(2 if shape.norm else 0))


class Layer(nn.Module):
    """One layer, as transformers writes them; caches are ``[slots, heads, dim]``."""

    def __init__(self, weights: Weights, cache: torch.dtype, hidden: int, slots: int) -> None:
        super().__init__()
        self.w, self.heads, self.kv_heads = weights, hidden // DIM, kv_heads(hidden)
        self.k_cache, self.v_cache = (torch.zeros(slots, self.kv_heads, DIM, dtype=cache) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        w = self.w
        qkv = w.qkv(rms_norm(x, w.norms[0])).unflatten(-1, (-1, DIM))
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
        if len(w.qk_norms):
            q, k = rms_norm(q, w.qk_norms[0]), rms_norm(k, w.qk_norms[1])
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        torch.ops.fused_decode.store(k, v, self.k_cache, self.v_cache, slots)
        out = torch.ops.fused_decode.attend(q, self.k_cache, self.v_cache, table, lens)
        x = x + w.out(out.flatten(1))
        gate, up = w.gate_up(rms_norm(x, w.norms[1])).chunk(2, -1)
        return x + w.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, shape: Shape, layers: int, hidden: int, slots: int) -> None:
        super().__init__()
        sets = [Weights(shape, hidden) for _ in range(min(SETS, layers))]
        self.layers = nn.ModuleList(Layer(sets[i % SETS], shape.cache, hidden, slots) for i in range(layers))
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


def kv_heads(hidden: int) -> int:
    return max(1, hidden // DIM // 4)


def make(shape: Shape, batch: int, args: argparse.Namespace) -> tuple[Model, Any]:
    """A model whose caches are bound to a pool, which holds random numbers as if a context had been read."""
    slots, layers = batch * args.context, args.layers or shape.layers
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
    pool = pm_ops.PagePool(
        pm_ops.page_major(layers, kv_heads(args.hidden), DIM, PAGE, shape.cache), slots // PAGE, device=args.device
    )
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
    table = torch.randperm(batch * pages).view(batch, pages).int()
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
        self.kernels: Counter[str] = Counter()
        self.replay = lambda: self.run(*given)
        if hidden.is_cuda:
            self.kernels = self._kernels()
            self.replay = self._captured().replay

    def _kernels(self) -> Counter[str]:
        """How often each kernel runs in a call."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            self.run(*self.given)
            torch.cuda.synchronize()
        device = torch.autograd.DeviceType.CUDA
        return Counter(event.name for event in profile.events() or () if event.device_type == device)

    def facts(self, name: str, layers: int) -> dict[str, Any]:
        """What is known before it is timed."""
        return {
            f"{name}_compile_s": round(self.compile_seconds, 2),
            f"{name}_launches": self.kernels.total(),
            f"{name}_launches_a_layer": sum(round(count / layers) for count in self.kernels.values()),
            f"{name}_kernels": {kernel[:80]: count for kernel, count in self.kernels.most_common()},
        }

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

    Keys of the first layer have the same inputs: they are an ulp apart, or two behind a norm that also rounds. Its
    values are the same, or an ulp apart where Inductor has tuned the norm before the projection to another order of its
    sum. Behind all layers such differences have grown.
    """
    error = float((one.hidden - other.hidden).norm() / one.hidden.norm())
    key, value = (float((a - b).abs().max() / a.abs().max()) for a, b in zip(one.rows, other.rows, strict=True))
    ulp, coarse = (2.0**-3, 2.0**-3) if one.pool.layout.planes[0].dtype.itemsize == 1 else (2.0**-7, 2.0**-6)
    right = (one.fused, other.fused) == (0, layers) and error < 0.1 and key <= coarse and value <= ulp
    return {"right": right, "fused_layers": other.fused, "hidden_error": error, "key_error": key, "value_error": value}


@torch.no_grad()
def serve(name: str, args: argparse.Namespace, connection: Connection) -> None:
    """The process of one model and batch: compile both steps and say so, then time them when asked to."""
    model_name, batch = name.rsplit(" batch ", 1)
    shape, scales = SHAPES[model_name], (1.0, 1.0)
    if shape.cache.itemsize == 1:
        scales = (SCALE, SCALE)
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
    torch.zeros(1, device=args.device)  # all processes make their CUDA contexts at once
    with args.turn:  # caches are there twice until they are bound
        model, binding = make(shape, int(batch), args)
    given, layers = inputs(int(batch), args), len(model.layers)
    torch.compile(lambda x: x * 2 + 1, backend=args.inner)(given[0])  # what a process imports at its first compilation
    steps = {label: Step(model, binding, given, label == "fused", args.inner) for label in ("plain", "fused")}
    row = {"model": model_name, "batch": int(batch), "context": args.context, "layers": layers}
    row |= compared(steps["plain"], steps["fused"], layers)
    for label, step in steps.items():
        row |= step.facts(label, layers)
    connection.send(row)
    connection.recv()
    for step in steps.values():
        step.milliseconds(3)
    taken = [[step.milliseconds(args.replays) for step in steps.values()] for _ in range(args.samples)]
    plain, fused = (statistics.median(column) for column in zip(*taken, strict=True))
    connection.send(row | {"plain_ms": plain, "fused_ms": fused, "ratio": plain / fused})


def run(args: argparse.Namespace, names: list[str]) -> list[dict[str, Any]]:
    """All models and batches. Each result is printed and written as soon as it is known."""
    workers = [Process(serve, f"{name} batch {batch}", args) for batch in args.batches for name in names]
    deadline = time.monotonic() + args.seconds
    rows: dict[str, dict[str, Any]] = {}

    def keep(worker: Process, row: dict[str, Any]) -> None:
        rows[worker.name] = row
        print(line(worker.name, row), flush=True)
        device = torch.cuda.get_device_name() if args.device == "cuda" else args.device
        text = json.dumps({"device": device, "torch": torch.__version__, "rows": [*rows.values()]}, indent=1)
        (args.out / "fused_decode.json").write_text(text + "\n")

    try:
        for worker in workers:
            if worker.connection.poll(max(0.0, deadline - time.monotonic())):
                keep(worker, answer(worker))
            else:
                keep(worker, {"failed": f"not compiled within {args.seconds} s"})
        ready = [worker for worker in workers if "failed" not in rows[worker.name]]
        for worker in set(workers) - set(ready):
            worker.process.kill()
        for worker in ready:
            with contextlib.suppress(OSError):  # its answer says why
                worker.connection.send("measure")
            keep(worker, answer(worker))
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.join()
    return list(rows.values())


def answer(worker: Process) -> dict[str, Any]:
    try:
        row: dict[str, Any] = worker.answer()
    except RuntimeError as error:
        return {"failed": str(error)}
    return row


def line(name: str, row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"{name:30} failed: {row['failed']}"
    text = f"{name:30} launches {row['plain_launches']}, fused {row['fused_launches']}; of a layer "
    text += f"{row['plain_launches_a_layer']}, {row['fused_launches_a_layer']}; "
    if "ratio" in row:
        text += f"{row['plain_ms']:8.3f} ms, fused {row['fused_ms']:8.3f} ms, {row['ratio']:.3f} x"
    else:
        text += f"compiled in {row['plain_compile_s']} s, fused {row['fused_compile_s']} s"
    if not row["right"]:
        wrong = {key: row[key] for key in ("fused_layers", "hidden_error", "key_error", "value_error")}
        text += f"; WRONG: {wrong}"
    return text


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=";".join(SHAPES), help="separated by semicolons")
    parser.add_argument("--batches", default="1,16,64,256", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--context", type=int, default=512, help="tokens of each sequence")
    parser.add_argument("--layers", type=int, default=0, help="instead of the models' own")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--inner", default="inductor", help="what compiles the rewritten graphs")
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--replays", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1e6, help="leave out what is not compiled after these")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "fused_decode", help="a folder")
    args = parser.parse_args(arguments)
    names = args.models.split(";")
    unknown = set(names) - set(SHAPES)
    if unknown or args.hidden % DIM or args.context % PAGE:
        parser.error(f"models are {'; '.join(SHAPES)}; hidden is a multiple of {DIM}, the context one of {PAGE}")
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # of each process
    args.turn = multiprocessing.get_context("spawn").Lock()
    return run(args, names)


if __name__ == "__main__":
    raise SystemExit(not all(row.get("right") for row in main()))
