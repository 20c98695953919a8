"""Prefixes in host memory: vLLM with pm_ops' PageHostConnector against vLLM with its own OffloadingConnector.

    python examples/benchmarks/vllm_offload.py                      # where vLLM, pm_ops and a GPU of 80 GB or more are
    python examples/benchmarks/vllm_offload.py --shape 1b --block-size 64
    python examples/benchmarks/vllm_offload.py --shape tiny --engines pm_ops --eager --prompt 400 --batch 4 \\
        --cache-gib 0.1 --host-gib 0.1 --repetitions 2          # a rehearsal on a CPU, which says nothing about speed

The model has the shape of Llama-3.1-8B (or another) and random weights: norms are 1 and the rest is N(0, 0.02), so that
tokens depend on the whole context. Each engine is a process; all are started together, and take turns. ``+v1`` takes
vLLM's model runner V1, where vLLM 0.26 lays its cache out block by block for its own connector.

- ``recompute`` and ``host hit``: time to the first token of one long prompt, when nothing of it is cached, and when the
  engine's own cache was emptied and its blocks are on the host. The tokens of both have to be equal.
- ``hit GB/s``: the prompt's bytes through all of that time, the last block's computation included.
- of pm_ops, ``offload`` and ``restore``: all blocks of such a prompt, scattered, on the idle device, as a share of one
  pinned copy of as many bytes in that direction.
- of pm_ops, ``slow-down``: what the engine takes for a batch of prompts, whose blocks are all offloaded, over what it
  takes when none is; and the same of one decode step of them, while pages are offloaded without a pause.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from _engines import Process, model_folder, real_weights

SHAPES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4},
}
HEAD_DIM = {"8b": 128, "1b": 64, "tiny": 64}
CONNECTORS = {
    "pm_ops": {
        "kv_connector": "PageHostConnector",
        "kv_connector_module_path": "pm_ops.adapters.vllm.host_connector",
    },
    "stock": {"kv_connector": "OffloadingConnector"},
}
SIZE = {"pm_ops": "max_bytes", "stock": "cpu_bytes_to_use"}


class Engine:
    """An engine in this process, with a host tier."""

    def __init__(self, kind: str, options: argparse.Namespace) -> None:
        kind, _, runner = kind.partition("+")
        if runner == "v1":
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        from vllm import LLM
        from vllm.config import KVTransferConfig

        real_weights()
        tier = KVTransferConfig(
            kv_role="kv_both",
            kv_connector_extra_config={SIZE[kind]: int(options.host_gib * 2**30)},
            **CONNECTORS[kind],
        )
        self.options, self.requests = options, 0
        shape = SHAPES[options.shape]
        folder = model_folder(
            f"llama-{options.shape}",
            **shape,
            num_key_value_heads=min(shape["num_attention_heads"], 8),
            head_dim=HEAD_DIM[options.shape],
        )
        self.llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            seed=0,
            block_size=options.block_size,
            max_model_len=options.prompt + 256,
            max_num_seqs=max(options.batch, 16),
            kv_cache_memory_bytes=int(options.cache_gib * 2**30),
            gpu_memory_utilization=0.05,  # of what is free at the start; the line above says how large the cache is
            enforce_eager=options.eager,
            compilation_config={} if options.eager else {"cudagraph_capture_sizes": [1, 8, options.batch]},
            kv_transfer_config=tier,
            additional_config={"pm_ops": True} if kind == "pm_ops" else {},
        )
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler

    def run(self, prompts: list[list[int]], new_tokens: int, each_step: Any = lambda: None) -> dict[str, Any]:
        """Tokens of each prompt, seconds to the first token and in all, and the median second of a decode step."""
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        core, names, first, steps = self.llm.llm_engine, [], 0.0, []
        tokens: dict[str, list[int]] = {}
        cached: dict[str, int] = {}
        begin = time.perf_counter()
        for prompt in prompts:
            self.requests += 1
            names.append(f"r{self.requests}")
            core.add_request(names[-1], {"prompt_token_ids": prompt}, greedy)
        while core.has_unfinished_requests():
            before, decoding = time.perf_counter(), len(tokens) == len(prompts)
            each_step()
            for output in core.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
                cached[output.request_id] = output.num_cached_tokens or 0
                first = first or time.perf_counter() - begin
            if decoding:
                steps.append(time.perf_counter() - before)
        seconds = time.perf_counter() - begin
        middle = steps[2:-2] or steps
        return {
            "tokens": [tokens[name] for name in names],
            "cached": sum(cached.values()),
            "first": first,
            "seconds": seconds,
            "step": statistics.median(middle) if middle else float("nan"),
        }

    def empty(self) -> None:
        """Let everything arrive on the host, and empty the engine's own cache."""
        for seed in range(50):  # another step is what begins, and notices, some of the transfers
            self.run([prompt_of(4, -1 - seed)], 2)
            time.sleep(0.1)
            if not self.scheduler.connector.has_pending_push_work() and self.llm.reset_prefix_cache():
                return
        raise RuntimeError("blocks are still in use after five seconds")

    def hits(self, seed: int) -> dict[str, Any]:
        """A long prompt, computed, then found on the host."""
        prompt = prompt_of(self.options.prompt, seed)
        cold = self.run([prompt], 8)
        self.empty()
        warm = self.run([prompt], 8)
        self.empty()
        if cold["cached"] or warm["cached"] < self.options.prompt - 2 * self.options.block_size:
            raise RuntimeError(f"{cold['cached']} tokens were found at first, {warm['cached']} on the host")
        return {"recompute": cold["first"], "host hit": warm["first"], "equal": cold["tokens"] == warm["tokens"]}

    def moves(self) -> dict[str, float]:
        """Seconds of one pinned copy and of all blocks of a prompt, out and back in."""
        import torch
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        import pm_ops

        transfers = get_kv_transfer_group().transfers
        pool = transfers.host._out.source
        count = self.options.prompt // self.options.block_size
        blocks = random.Random(1).sample(range(1, pool.num_pages), count)
        host = pm_ops.HostPool(pool, count)
        near, far = pool.buffer[: count * pool.layout.page_bytes], host.pool.buffer
        pages: list[int] = []

        def offload() -> None:
            host.free(pages)
            pages[:] = host.offload(blocks).pages

        calls = {
            "pinned out": lambda: far.copy_(near, non_blocking=True),
            "pinned in": lambda: near.copy_(far, non_blocking=True),
            "offload": offload,
            "restore": lambda: host.restore(pages, blocks).wait(),
        }
        contents, found = near.clone(), {}
        for name in ("pinned out", "offload", "restore", "pinned in"):
            times = []
            for _ in range(5):
                wait(pool.device)
                begin = time.perf_counter()
                calls[name]()
                wait(pool.device)
                times.append(time.perf_counter() - begin)
            found[name] = statistics.median(times[1:])
        near.copy_(contents)
        host.close()
        del contents
        torch.cuda.empty_cache()
        return {"bytes": count * pool.layout.page_bytes, **found}

    def slow_down(self, seed: int) -> dict[str, float]:
        """Seconds of a batch with and without offloads, and of its decode steps with offloads all the time."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        import pm_ops

        connector, pool = self.scheduler.connector, get_kv_transfer_group().transfers.host._out.source
        count = min(512, pool.num_pages - 1)
        spare = pm_ops.HostPool(pool, 2 * count)  # every page of the connector's has an owner by now
        scattered = random.Random(1).sample(range(1, pool.num_pages), count)
        batch = [prompt_of(min(1024, self.options.prompt), seed * 1000 + i) for i in range(self.options.batch)]
        kinds = ["without", "with", "busy"]
        found = {}
        for name in kinds[seed % 3 :] + kinds[: seed % 3]:
            connector.reset_cache()
            self.empty()
            moving: list[Any] = []

            def keep_busy(moving: list[Any] = moving) -> None:
                while moving and moving[0].done():
                    spare.free(moving.pop(0).pages)
                while len(moving) < 2:
                    moving.append(spare.offload(scattered))

            ask = connector.get_num_new_matched_tokens
            if name != "with":
                connector.get_num_new_matched_tokens = lambda *args: (0, False)  # nothing is looked after
            run = self.run(batch, 64, keep_busy if name == "busy" else lambda: None)
            connector.get_num_new_matched_tokens = ask
            for transfer in moving:
                transfer.synchronize()
                spare.free(transfer.pages)
            found[name], found[f"{name}, a step"] = run["seconds"], run["step"]
        spare.close()
        connector.reset_cache()
        return found


def prompt_of(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, 128000) for _ in range(length)]


def wait(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def serve(kind: str, options: argparse.Namespace, connection: Connection) -> None:
    """The process of one engine: start, say so, and do what is asked for."""
    begin = time.perf_counter()
    engine = Engine(kind, options)
    connection.send(time.perf_counter() - begin)
    while True:
        name, *arguments = connection.recv()
        connection.send(getattr(engine, name)(*arguments))


def report(options: argparse.Namespace, hits: dict[str, list[Any]], moves: dict[str, float], slow: list[Any]) -> str:
    """Medians, as a table."""
    lines = [f"{'engine':<10} {'recompute':>10} {'host hit':>10} {'ratio':>7} {'hit GB/s':>9} {'equal':>6}"]
    shape = SHAPES[options.shape]
    heads = min(shape["num_attention_heads"], 8)
    size = options.prompt * shape["num_hidden_layers"] * heads * HEAD_DIM[options.shape] * 4
    for kind, mine in hits.items():
        cold, warm = (statistics.median(run[name] for run in mine) for name in ("recompute", "host hit"))
        equal = f"{sum(run['equal'] for run in mine)}/{len(mine)}"
        lines.append(f"{kind:<10} {cold:>9.4f}s {warm:>9.4f}s {cold / warm:>7.2f} {size / warm / 1e9:>9.2f} {equal:>6}")
    if moves:
        for name, limit in (("offload", "pinned out"), ("restore", "pinned in")):
            rate, most = (moves["bytes"] / moves[which] / 1e9 for which in (name, limit))
            lines.append(f"{name}: {rate:.2f} GB/s, {rate / most:.3f} of a pinned copy's {most:.2f}")
    if slow:
        for name, of in (("with", ""), ("busy", ", a step")):
            ratios = [run[f"{name}{of}"] / run[f"without{of}"] for run in slow]
            what = (
                "a decode step while pages are offloaded all the time" if of else "a batch whose blocks are offloaded"
            )
            lines.append(f"slow-down of {what}: {statistics.median(ratios):.4f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = [kind + runner for kind in CONNECTORS for runner in ("", "+v1")]
    parser.add_argument("--engines", nargs="+", default=["pm_ops", "stock"], choices=kinds)
    parser.add_argument("--shape", default="8b", choices=SHAPES, help="of the model (default: %(default)s)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=32768, help="tokens of the long prompt (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="prompts of 1024 tokens (default: %(default)s)")
    parser.add_argument("--cache-gib", type=float, default=12, help="of each engine's cache (default: %(default)s)")
    parser.add_argument("--host-gib", type=float, default=16, help="of each host tier (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=5, help="of each measurement (default: %(default)s)")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs and compilation")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "vllm_offload")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    engines = [Process(serve, kind, options) for kind in options.engines]
    try:
        run(engines, options)
    finally:
        for engine in engines:
            engine.process.kill()


def run(engines: list[Process], options: argparse.Namespace) -> None:
    """Everything, as a table."""
    for engine in engines:
        print(f"{engine.name}: started in {engine.answer():.1f} s", flush=True)
    hits: dict[str, list[Any]] = {engine.name: [] for engine in engines}
    for engine in engines:
        engine.ask("hits", 0)  # compiles, and locks memory
    for repetition in range(options.repetitions):
        for engine in engines if repetition % 2 == 0 else engines[::-1]:
            hits[engine.name].append(engine.ask("hits", 1 + repetition))
    ours = next((engine for engine in engines if engine.name.startswith("pm_ops")), None)
    moves = ours.ask("moves") if ours else {}
    slow = [ours.ask("slow_down", repetition) for repetition in range(options.repetitions)] if ours else []
    (options.out / "results.json").write_text(json.dumps({"hits": hits, "moves": moves, "slow": slow}, indent=1))
    print(report(options, hits, moves, slow))


if __name__ == "__main__":
    main()
