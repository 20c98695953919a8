"""vLLM's throughput with its own attention and with pm_ops on page-major pages, and whether greedy tokens agree.

    python examples/benchmarks/vllm_throughput.py        # where vLLM and pm_ops are installed, on a GPU of 120 GB
    python examples/benchmarks/vllm_throughput.py --engines pm_ops --kv-gib 97 --workloads "48 x 16384=1"

The model has the shape of Llama-3.1-8B, or with `--model qwen3 --layers 36` of Qwen3-8B, and random weights: norms are
1 and the rest is N(0, 0.02), so that tokens depend on the whole context. That is checked, by prompts that end alike.
Every engine is a process of its own. All are started at once and take turns, so that what disturbs the machine disturbs
all of them. Engines are called

    stock, FLASH_ATTN, TRITON_ATTN, ...      vLLM, with the attention of its own choice, or with this one
    pm_ops, pm_ops:triton, pm_ops:fa3        pm_ops with impl auto or this one
    pm_ops:auto:BLNHC                        and on this layout
    ...+v1  +eager  +full  +fp8              with model runner V1, without graphs and compilation, with graphs of all
                                             batches instead of decodes alone, with an fp8 cache
    ...+nosplit  +partition  +rope           with splitting_ops empty, with Inductor's graph partition, and in one of
                                             these two with pm_ops' fuse_rope
    ...+prefix  +chunks                      with the prefix cache, which finds all prompts of `tokens` when they are
                                             run again, and in steps of 256 tokens, of which `+full` has graphs

An engine whose cache is too small for all of a workload's sequences at a time sits it out; one that fails is left out
from then on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from _engines import Process, agreement, each, model_folder, prompts_of, real_weights, workload_of

WORKLOADS = {
    "tokens": (64, 1024, 128),
    "64 x 1024": (64, 1024, 128),
    "16 x 16384": (16, 16384, 128),
    "48 x 16384": (48, 16384, 64),
    "batch 1": (1, 1024, 128),
    "batch 16": (16, 1024, 128),
    "batch 256": (256, 512, 64),
}
"""Sequences, tokens of each prompt, and tokens to generate."""

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
}
"""What their configurations say besides sizes; the second has QK-norm."""

GRAPHS = [1, 2, 4, 8, 16, 32, 48, 64, 128, 256]
"""Batches that CUDA graphs are captured for."""

COMPILATION: dict[str, dict[str, Any]] = {
    "full": {"cudagraph_mode": "FULL"},
    "nosplit": {"splitting_ops": []},
    "partition": {"use_inductor_graph_partition": True},
}
"""Features that are vLLM's compilation settings."""


def start(engine: str, options: argparse.Namespace) -> Any:
    """The engine of this name, in this process."""
    name, *features = engine.split("+")
    if "v1" in features:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    from vllm import LLM

    real_weights()
    kind, *rest = name.split(":")
    entry: dict[str, Any] | None = dict(zip(("impl", "layout"), rest, strict=False)) if kind == "pm_ops" else None
    if "rope" in features:
        if entry is None:
            raise ValueError(f"{engine}: fuse_rope is pm_ops'; ask for pm_ops+partition+rope")
        entry["fuse_rope"] = True
    longest = max(prompt + more for _, prompt, more in (WORKLOADS[w] for w, _ in options.workloads))
    graphs: dict[str, Any] = {"cudagraph_capture_sizes": GRAPHS}
    for feature, setting in COMPILATION.items():
        graphs |= setting if feature in features else {}
    heads = options.hidden // 128
    folder = model_folder(
        f"{options.model}-{options.layers}-{options.hidden}",
        **MODELS[options.model],
        hidden_size=options.hidden,
        intermediate_size=options.hidden * (7 if options.model == "llama" else 6) // 2,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1),
        head_dim=128,
    )
    return LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        seed=0,
        max_model_len=longest + 16,
        max_num_seqs=256,
        enable_prefix_caching="prefix" in features,
        kv_cache_memory_bytes=int(kv_gib(engine, options) * 2**30),
        gpu_memory_utilization=0.05,  # of what is free at the start; the line above says how large the cache is
        enforce_eager="eager" in features,
        compilation_config={} if "eager" in features else graphs,
        attention_config={} if kind in ("pm_ops", "stock") else {"backend": kind},
        additional_config={"pm_ops": entry} if kind == "pm_ops" else {},
        **({"kv_cache_dtype": "fp8"} if "fp8" in features else {}),
        **({"max_num_batched_tokens": max(GRAPHS)} if "chunks" in features else {}),
    )


def kv_gib(engine: str, options: argparse.Namespace) -> float:
    """Of this engine's cache."""
    given = options.kv_gib
    return float(given[min(options.engines.index(engine), len(given) - 1)])


def fits(engine: str, workload: str, options: argparse.Namespace) -> bool:
    """Whether the engine's cache has room for all of a workload's sequences."""
    count, prompt, more = WORKLOADS[workload]
    token = options.layers * max(options.hidden // 128 // 4, 1) * 128 * 2 * (1 if "fp8" in engine.split("+") else 2)
    return count * (prompt + more) * token <= kv_gib(engine, options) * 2**30


def generate(llm: Any, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Run the prompts; the tokens of each, how many of all prompts' were cached, seconds in all, and the median second
    of a step in which all decode."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    greedy = SamplingParams(
        temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    cached: dict[str, int] = {}
    steps, begin = [], time.perf_counter()
    for i, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, greedy)
    while llm.llm_engine.has_unfinished_requests():
        before = time.perf_counter()
        outputs = llm.llm_engine.step()
        decoding = len(outputs) == len(prompts) and all(tokens[output.request_id] for output in outputs)
        for output in outputs:
            tokens[output.request_id] += output.outputs[0].token_ids
            cached[output.request_id] = output.num_cached_tokens or 0
        if decoding:
            steps.append(time.perf_counter() - before)
    seconds = time.perf_counter() - begin
    middle = steps[len(steps) // 4 : -2] or steps  # the first of them may wait for prefills, the last for nothing
    return {
        "tokens": [tokens[str(i)] for i in range(len(prompts))],
        "cached": sum(cached.values()),
        "seconds": seconds,
        "step": statistics.median(middle) if middle else float("nan"),
    }


def serve(engine: str, options: argparse.Namespace, connection: Connection) -> None:
    """The process of one engine: start, say so, and run what comes."""
    os.environ["VLLM_CACHE_ROOT"] = str(Path(tempfile.gettempdir()) / "vllm_throughput_cache" / engine)
    begin = time.perf_counter()
    llm = start(engine, options)
    facts: dict[str, Any] = {"start": round(time.perf_counter() - begin, 1)}
    if engine.startswith("pm_ops"):
        (pool,) = llm.collective_rpc("page_pools")[0]
        facts["cache"] = f"{pool.layout.name}, {pool.num_pages} pages of {pool.layout.page_bytes} bytes"
    if "+rope" in engine:
        passes = llm.llm_engine.vllm_config.compilation_config.inductor_compile_config
        facts["fuse_rope"] = str(passes["post_grad_custom_pre_pass"].report)
    connection.send(facts)
    while True:
        count, length, new_tokens, prefix = connection.recv()
        connection.send(generate(llm, prompts_of(count, length, prefix), new_tokens))


class Engine(Process):
    """One engine's process, seen from here."""

    def run(self, count: int, length: int, new_tokens: int, prefix: int = 0) -> Any:
        """What :func:`generate` has found."""
        return self.ask(count, length, new_tokens, prefix)


def compare_tokens(engines: list[Engine], shape: tuple[int, int, int], report: dict[str, Any]) -> Any:
    """:func:`agreement` of these engines on prompts of this shape; eight with another prefix. All run at once."""
    runs = []
    for count, prefix in ((shape[0], 0), (shape[0], 0), (8, 1)):
        each(engines, report, lambda engine: engine.connection.send((count, *shape[1:], prefix)))  # noqa: B023
        runs.append(each(engines, report, lambda engine: engine.answer()))
    tokens, again, others = ({engine.name: run[engine.name]["tokens"] for engine in engines} for run in runs)
    found = {engine.name: runs[1][engine.name]["cached"] for engine in engines}
    return {**agreement(tokens, again, others), "tokens of prompts that were cached when run again": found}


def measure(
    engines: list[Engine], shape: tuple[int, int, int], repetitions: int, report: dict[str, Any]
) -> dict[str, Any]:
    """Output tokens a second and milliseconds of a decode step, of every run; the engines take turns."""
    count, _, new_tokens = shape
    runs: dict[str, list[Any]] = {engine.name: [] for engine in engines}
    for prefix in range(repetitions):
        for name, run in each(engines, report, lambda engine: engine.run(*shape, prefix)).items():  # noqa: B023
            runs[name].append(run)
        engines.reverse()
    return {
        name: {
            "tokens a second": [round(count * new_tokens / run["seconds"], 1) for run in mine],
            "ms a step": [round(1000 * run["step"], 3) for run in mine],
        }
        for name, mine in runs.items()
        if mine
    }


def table(results: dict[str, Any]) -> str:
    """Medians, and their ratios to the first engine of a workload that did not fail, which is named above them."""
    lines = []
    for workload, engines in results.items():
        medians = {n: [statistics.median(e[k]) for k in ("tokens a second", "ms a step")] for n, e in engines.items()}
        base, (rate, step) = next(iter(medians.items()), ("none", (1.0, 1.0)))
        columns = f"{'workload':<12} {'engine':<22} {'tokens/s':>9} {'ratio':>6} {'ms/step':>8} {'ratio':>6}"
        lines.append(f"{columns}  (ratios to {base})")
        for name, (r, s) in medians.items():
            lines.append(f"{workload:<12} {name:<22} {r:>9.1f} {r / rate:>6.3f} {s:>8.3f} {s / step:>6.3f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["FLASH_ATTN", "pm_ops"], help="(default: %(default)s)")
    parser.add_argument(
        "--workloads",
        nargs="+",
        type=workload_of(WORKLOADS),
        default=[("tokens", 0), ("64 x 1024", 0)],
        help=f"any of {', '.join(WORKLOADS)}; NAME=3: with 3 repetitions (default: tokens, 64 x 1024)",
    )
    parser.add_argument("--repetitions", type=int, default=5, help="of each workload (default: %(default)s)")
    parser.add_argument(
        "--kv-gib",
        type=float,
        nargs="+",
        default=[38],
        help="of each engine's cache, the last one of all others (default: 38)",
    )
    parser.add_argument("--model", choices=MODELS, default="llama", help="whose layers (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=32, help="of the model (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=4096, help="hidden size, of heads of 128 (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "vllm_throughput")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    engines = [Engine(serve, name, options) for name in options.engines]
    try:
        run(engines, options)
    finally:
        for engine in engines:
            engine.process.kill()


def run(engines: list[Engine], options: argparse.Namespace) -> None:
    """All workloads. What is known is printed and written after each of them."""
    sizes = {"model": options.model, "layers": options.layers, "hidden": options.hidden}
    report: dict[str, Any] = {**sizes, "engines": {}, "workloads": {}}
    report["engines"] |= each(engines, report, lambda engine: engine.answer())
    print(json.dumps(report["engines"], indent=1), flush=True)
    for workload, repetitions in options.workloads:
        shape = WORKLOADS[workload]
        if workload == "tokens":
            report["tokens"] = compare_tokens(engines, shape, report)
            print(json.dumps(report["tokens"], indent=1), flush=True)
        else:
            able = [engine for engine in engines if fits(engine.name, workload, options)]
            if left_out := [engine.name for engine in engines if engine not in able]:
                print(f"{workload}: the caches of {', '.join(left_out)} are too small", flush=True)
            if not able:
                continue
            few = (min(shape[0], 2), shape[1], 4, 99)
            each(able, report, lambda engine: engine.run(*few))  # noqa: B023  # what is compiled at the first call
            results = measure(able, shape, repetitions or options.repetitions, report)
            report["workloads"][workload] = results
            engines[:] = [engine for engine in engines if "failed" not in report["engines"][engine.name]]
            print(table({workload: results}), flush=True)
        (options.out / "vllm_throughput.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
