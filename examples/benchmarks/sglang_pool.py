"""What SGLang's KV pools do besides attention, and those of pm_ops: moving tokens, copying them to the host and back.

    python examples/benchmarks/sglang_pool.py            # where SGLang and pm_ops are installed; on a CPU --device cpu

Pools of the shape of Llama-3.1-8B, in this process, without an engine. Tokens that move are scattered over pages, those
that are copied fill pages, as those of a sequence do. All are compared with what was there before.
Medians of the calls as an engine makes them, in milliseconds, with the device idle before and waited for after each.
Two calls before are not counted, so that torch has pinned memory from them: an engine's first copy waits for it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

try:
    from sglang.srt.mem_cache.memory_pool import PageMajorMHATokenToKVPool
except ImportError:  # before 0.5.15, and from 0.5.19 on
    PageMajorMHATokenToKVPool = None

from pm_ops.adapters.sglang.pool import FORMATS, pool_class


def milliseconds(call: Callable[[], Any], repetitions: int) -> float:
    """The median of several calls, after two that are not counted."""
    found = []
    for _ in range(repetitions + 2):
        wait()
        begin = time.perf_counter()
        call()
        wait()
        found.append(1000 * (time.perf_counter() - begin))
    return round(statistics.median(found[2:]), 3)


def wait() -> None:
    """For the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rows(pool: Any, slots: torch.Tensor) -> list[torch.Tensor]:
    """K and V of these slots, all layers; by strides, whatever the layout."""
    found = []
    for buffer in pool.k_buffer + pool.v_buffer:
        paged = buffer.dim() == 4
        found.append(buffer[slots // pool.page_size, slots % pool.page_size] if paged else buffer[slots])
    return found


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, found, expected))


def measure(kind: type, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of a pool of this class, and whether what it did is right."""
    pool = kind(
        size=options.slots, page_size=16, dtype=torch.bfloat16, head_num=8, head_dim=128, layer_num=options.layers,
        device=options.device, enable_memory_saver=False, enable_kv_cache_copy=options.device == "cuda",
    )  # fmt: skip
    for buffer in pool.k_buffer + pool.v_buffer:
        buffer.normal_()
    generator = torch.Generator().manual_seed(0)
    order = 16 + torch.randperm(options.slots, generator=generator)[: 2 * options.tokens]
    source, target = order.to(options.device).chunk(2)
    pages = 1 + torch.randperm(options.slots // 16, generator=generator)[: 2 * options.tokens // 16]
    whole, other = (pages[:, None] * 16 + torch.arange(16)).flatten().to(options.device).chunk(2)
    if options.device == "cpu":
        pool.use_native_move_kv_cache = True
    figures: dict[str, Any] = {}
    expected = rows(pool, source)
    figures["move"] = milliseconds(lambda: pool.move_kv_cache(target, source), options.repetitions)
    right = {"move": same(rows(pool, target), expected)}
    try:
        expected = rows(pool, whole)
        figures["to the host"] = milliseconds(lambda: pool.get_cpu_copy(whole), options.repetitions)
        saved = pool.get_cpu_copy(whole)
        figures["from the host"] = milliseconds(lambda: pool.load_cpu_copy(saved, other), options.repetitions)
        right["to the host and back"] = same(rows(pool, other), expected)
    except NotImplementedError as error:
        figures["copies"] = f"refused: {error}"
    return figures | {"right": right}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help="of a move or copy (default: %(default)s)")
    parser.add_argument("--slots", type=int, default=65536, help="of a pool (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=20, help="(default: %(default)s)")
    parser.add_argument("--device", default="cuda", help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, help="a file for the results, as JSON")
    options = parser.parse_args()

    pools = {"stock": MHATokenToKVPool, "in-tree": PageMajorMHATokenToKVPool}
    pools |= {layout: pool_class(MHATokenToKVPool, layout) for layout in FORMATS}
    results = {}
    for name, kind in pools.items():
        if kind is not None:
            results[name] = measure(kind, options)
            print(f"{name:<12} {json.dumps(results[name])}", flush=True)
    if options.out:
        options.out.write_text(
            json.dumps({"tokens": options.tokens, "layers": options.layers, "ms": results}, indent=1)
        )
    if not all(all(found["right"].values()) for found in results.values()):
        raise SystemExit("a pool has lost rows")


if __name__ == "__main__":
    main()
