"""What bounds long decodes and long prompts on a GPU: the rate of a kernel that only reads, and the power cap.

    python examples/benchmarks/long_decode.py --out DIR    # a Hopper GPU of 30 GB; FlashAttention 3 where installed

Decode: bf16, 32 query and 8 KV heads of 128, pages of 16 of four layers in shuffled order. Each kernel's four layers
are a CUDA graph; the graphs take turns, and the median replay counts. The kernel that only reads goes once through as
many bytes, one after the other. Prompts: the largest matrix product of a chunk of 8192 tokens in Llama-3.1-8B, in turns
with something else for two seconds, and what nvidia-smi says meanwhile.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

import pm_ops
from pm_ops.kernels import fa3

LAYERS, PAGE, KV_HEADS, DIM = 4, 16, 8, 128
CASES = {"48 x 16384": (48, 16384), "24 x 16384": (24, 16384), "16 x 16384": (16, 16384), "64 x 4096": (64, 4096)}
BLOCK, BLOCKS = 4096, 8
"""Words of a load of the kernel that reads, and loads of a program; 2048 to 8192 and 8 to 32 give the same."""
QUERY = "clocks.sm,power.draw,clocks_event_reasons.sw_power_cap"


@triton.jit
def read(words, out, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """A sum of all words, so that none of the loads is left out."""
    first = tl.program_id(0).to(tl.int64) * BLOCKS * BLOCK
    found = tl.zeros([BLOCK], tl.int32)
    for i in tl.range(BLOCKS, num_stages=3):
        found ^= tl.load(words + first + i * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.sum(found))


def graph_of(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of the call, which has run before."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def median_us(graphs: dict[str, torch.cuda.CUDAGraph], rounds: int) -> dict[str, float]:
    """Of a layer; the graphs run in turns."""
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(rounds):
        for name in graphs if turn % 2 else reversed(list(graphs)):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            found[name].append(1000 * begin.elapsed_time(end) / LAYERS)
    return {name: round(statistics.median(values), 1) for name, values in found.items()}


def decode(pools: dict[str, pm_ops.PagePool], impls: dict[str, str], rounds: int) -> list[dict[str, Any]]:
    """Rows of every case: us a layer, GB/s of keys and values, and the largest difference from the first kernel."""
    first = next(iter(pools.values()))
    words, device = first.buffer.view(-1).view(torch.int32), first.device
    found = []
    for case, (batch, keys) in CASES.items():
        table = torch.randperm(first.num_pages, device=device)[: batch * keys // PAGE].view(batch, -1).int()
        lens = torch.full((batch,), keys, dtype=torch.int32, device=device)
        query = torch.randn(batch, 4 * KV_HEADS, DIM, dtype=torch.bfloat16, device=device)
        size, outs, graphs = batch * keys * KV_HEADS * DIM * 4, {}, {}
        for layout, pool in pools.items():
            for name, impl in impls.items():
                out = outs[f"{name}, {layout}"] = torch.empty(LAYERS, *query.shape, dtype=query.dtype, device=device)

                def run(pool: pm_ops.PagePool = pool, impl: str = impl, out: torch.Tensor = out) -> None:
                    for layer in range(LAYERS):
                        pm_ops.attention(pool, layer, query, table, lens, max_seq_len=keys, impl=impl, out=out[layer])  # noqa: B023

                graphs[f"{name}, {layout}"] = graph_of(run)
        sink = torch.empty(size // 4 // (BLOCK * BLOCKS), dtype=torch.int32, device=device)

        def read_all() -> None:
            for layer in range(LAYERS):
                read[(len(sink),)](words[layer * size // 4 :], sink, BLOCK, BLOCKS, num_warps=8)  # noqa: B023

        graphs["reads alone"] = graph_of(read_all)
        reference = next(iter(outs.values()))
        for name, us in median_us(graphs, rounds).items():
            row: dict[str, Any] = {"case": case, "what": name, "us": us, "gb_s": round(size / us / 1000, 1)}
            if name in outs:
                row["difference"] = (outs[name].float() - reference.float()).abs().max().item()
            found.append(row)
            print(row, flush=True)
    return found


def clock(pool: pm_ops.PagePool, impls: dict[str, str], seconds: float) -> list[dict[str, Any]]:
    """The product's us beside nothing, beside a wait, and beside attention of 8192 new tokens on 8192."""
    device, new = pool.device, 8192
    x, weights = (torch.randn(n, m, dtype=torch.bfloat16, device=device) for n, m in ((new, 4096), (4096, 28672)))
    query = torch.randn(new, 4 * KV_HEADS, DIM, dtype=torch.bfloat16, device=device)
    table = torch.randperm(pool.num_pages, device=device)[: 2 * new // PAGE].view(1, -1).int()
    lens, start = (torch.tensor(n, dtype=torch.int32, device=device) for n in ([2 * new], [0, new]))

    def attend(impl: str) -> None:
        lengths = {"max_query_len": new, "max_seq_len": 2 * new}
        pm_ops.attention(pool, 0, query, table, lens, query_start=start, impl=impl, **lengths)

    cycles = int(3e-3 * 1.7e9)
    others: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "a wait of 3 ms": lambda: torch.cuda._sleep(cycles),
    }
    others |= {f"attention, {name}": lambda impl=impl: attend(impl) for name, impl in impls.items()}  # type: ignore[misc]
    found = []
    for name, other in others.items():
        other()
        command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits", "-lms", "100"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as says:
            events, begin = [], time.monotonic()
            while time.monotonic() - begin < seconds:
                for _ in range(20):
                    events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
                    events[-1][0].record()
                    x @ weights
                    events[-1][1].record()
                    other()
                torch.cuda.synchronize()
            says.terminate()
            assert says.stdout is not None
            lines = [line.split(", ") for line in says.stdout.read().splitlines() if line.count(", ") == 2]
        us = 1000 * statistics.median(a.elapsed_time(b) for a, b in events[len(events) // 2 :])
        row: dict[str, Any] = {
            "beside": name,
            "us": round(us, 1),
            "tflop_s": round(2 * new * 4096 * 28672 / us / 1e6, 1),
        }
        late = lines[len(lines) // 2 :] or [["nan", "nan", "?"]]
        row |= {
            "mhz": statistics.median(float(n[0]) for n in late),
            "watts": statistics.median(float(n[1]) for n in late),
        }
        found.append(row | {"power cap": late[-1][2]})
        print(found[-1], flush=True)
    return found


def main() -> None:
    """Measure, print, and write ``long_decode.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each product and what is beside it")
    options = parser.parse_args()
    absent = fa3.library()
    impls = {"pm_ops": "triton"} | ({} if isinstance(absent, str) else {"fa3": "fa3"})
    pages = max(batch * keys for batch, keys in CASES.values()) // PAGE
    sizes = (LAYERS, KV_HEADS, DIM, PAGE, torch.bfloat16)
    layouts = {"page-major": pm_ops.page_major(*sizes), "BLHNC": pm_ops.vllm(*sizes, "BLHNC")}
    pools = {name: pm_ops.PagePool(layout, num_pages=pages, device="cuda") for name, layout in layouts.items()}
    pools["page-major"].buffer.view(torch.bfloat16).normal_()
    everything = torch.arange(pages, device="cuda")
    repack = pm_ops.RepackPlan(layouts["page-major"], layouts["BLHNC"])
    repack.run(pools["page-major"], pools["BLHNC"], everything, everything)
    report = {
        "device": torch.cuda.get_device_name(),
        "versions": {"pm_ops": pm_ops.__version__, "torch": torch.__version__, "triton": triton.__version__}
        | {"python": platform.python_version()},
        "notes": [f"fa3: not measured: {absent}"] if isinstance(absent, str) else [],
        "decode": decode(pools, impls, options.rounds),
        "clock": clock(pools["page-major"], impls, options.seconds),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "long_decode.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
