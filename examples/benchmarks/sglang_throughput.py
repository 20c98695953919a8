"""SGLang's throughput with its own KV caches and with pm_ops' pages, and whether greedy tokens agree.

    python examples/benchmarks/sglang_throughput.py      # where SGLang and pm_ops are installed, on a GPU of 120 GB
    python examples/benchmarks/sglang_throughput.py --apart --workloads "48 x 16384=1" "prefill 16384"

The model has the shape of Llama-3.1-8B, or with --model deepseek latent attention of DeepSeek's dims and a dense MLP,
with --model gemma Gemma-2's windows, of 512 keys in every second layer, and capped logits; and random weights: norms
are 1 and the rest is N(0, 0.02), so that tokens depend on the whole context. That is checked, by prompts that end
alike. Every engine is a process of its own. All are started at once and take turns, so that what disturbs the machine
disturbs all of them; with --apart, for workloads that fill the GPU's memory, one after the other has the GPU. CUDA
graphs of prefills are of SGLang's default kind, captured for five sizes only, which starts sooner. Engines are called

    stock                           SGLang, one tensor a layer
    in-tree                         with its own --enable-page-major-kv-layout (0.5.15 to 0.5.18)
    token_major, page_major         with pm_ops and this layout
    ...:pm_ops, ...:pm_ops:fa3      and this attention backend, of pm_ops with impl fa3 (default: triton, of page_major
                                    pm_ops)
    ...+eager  +lazy-prefill        without CUDA graphs, without those of prefills
    ...+fp8  +half                  with an fp8 cache, with weights of float16
    ...+compile  +fuse              with --enable-torch-compile, and with fuse_rope, strict
    ...+chain  +tree  +ngram        with drafts: of the model itself, as a chain or a tree, or of n-grams
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from _engines import GATE, Process, agreement, each, model_folder, prompts_of, sglang_scheduler, workload_of

LAYOUTS = ("token_major", "page_major")
"""Engines that are pm_ops'."""
LINE = "pm_ops: the KV cache is "
"""What the log of one of them says."""
PAGE = 16


class Workload(NamedTuple):
    """Sequences, tokens of each prompt, tokens to generate, and the figure that is taken."""

    count: int
    length: int
    new_tokens: int
    figure: str


TOKENS, RATE, STEP, PREFILL = "which tokens", "output tokens/s", "ms a decode step", "prompt tokens/s"
WORKLOADS = {
    "tokens": Workload(64, 1024, 128, TOKENS),
    "64 x 1024": Workload(64, 1024, 128, RATE),
    "48 x 16384": Workload(48, 16384, 65, STEP),
    "prefill 1024": Workload(64, 1024, 1, PREFILL),
    "prefill 16384": Workload(4, 16384, 1, PREFILL),
    "few": Workload(8, 1024, 64, TOKENS),
    "8 x 1024": Workload(8, 1024, 128, RATE),
    "small": Workload(3, 40, 9, TOKENS),
    "small step": Workload(3, 40, 17, STEP),
}

MODELS: dict[str, Callable[[int, argparse.Namespace], dict[str, Any]]] = {
    "llama": lambda heads, options: {"num_key_value_heads": max(heads // 4, 1), "head_dim": options.head_dim},
    "gemma": lambda heads, options: {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "num_key_value_heads": max(heads // 4, 1),
        "head_dim": options.head_dim,
        "sliding_window": 512,
        "query_pre_attn_scalar": options.head_dim,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "deepseek": lambda heads, options: {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": heads,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
        "moe_intermediate_size": options.hidden,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": options.layers,
        "moe_layer_freq": 1,
    },
}
"""What their configurations have beside sizes; DeepSeek's as V2-Lite's, less its experts."""

GRAPHS = [1, 2, 4, 8, 16, 32, 48, 64]
"""Batches that CUDA graphs of decode steps are captured for."""
PREFILLS = [512, 1024, 2048, 4096, 8192]
"""Tokens that those of prefills are captured for."""


def arguments_of(features: Collection[str], folder: str, most: int) -> dict[str, Any]:
    """SGLang's arguments for what follows an engine's name. A draft model is the model itself: drafts are accepted.

    Args:
        folder: of the model.
        most: sequences of the largest batch.
    """
    draft = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": folder, "speculative_num_steps": 3}
    compiled = {"enable_torch_compile": True, "torch_compile_max_bs": most, "cuda_graph_bs_decode": [1, most]}
    known: dict[str, dict[str, Any]] = {
        "eager": {"disable_cuda_graph": True},
        "lazy-prefill": {"disable_prefill_cuda_graph": True},
        "fp8": {"kv_cache_dtype": "fp8_e4m3"},
        "half": {"dtype": "float16"},
        "compile": compiled,
        "fuse": compiled,
        "chain": draft | {"speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4},
        "tree": draft | {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6},
        "ngram": {
            "speculative_algorithm": "NGRAM",
            "speculative_num_draft_tokens": 8,
            "speculative_ngram_max_bfs_breadth": 1,
        },
    }
    found = {}
    for feature in features:
        if feature not in known:
            raise ValueError(f"{feature!r} is none of {', '.join(known)}")
        found |= known[feature]
    return found


def gate(engine: str, options: argparse.Namespace) -> Path:
    """The file without which this engine does not begin to use the GPU."""
    found: Path = options.out / f"{engine}.gate"
    return found


def start(engine: str, options: argparse.Namespace) -> Any:
    """The engine of this name. It needs this process for itself."""
    name, *features = engine.split("+")
    kind, *rest = name.split(":")
    attention = rest[0] if rest else "pm_ops" if kind == "page_major" else "triton"
    os.environ.pop("PM_OPS", None)
    if kind in LAYOUTS:
        more = ({"impl": rest[1]} if rest[1:] else {}) | ({"fuse_rope": "strict"} if "fuse" in features else {})
        os.environ["PM_OPS"] = json.dumps({"layout": kind} | more)
    os.environ["SGLANG_TORCH_COMPILE_MODE"] = "default"  # its max-autotune takes minutes
    if options.apart:
        os.environ[GATE] = str(gate(engine, options))
    from sglang.srt.entrypoints.engine import Engine

    class WithRealWeights(Engine):  # type: ignore[misc]
        run_scheduler_process_func = staticmethod(sglang_scheduler)

    shapes = [WORKLOADS[name] for name, _ in options.workloads]
    # Each sequence ends in a page of its own, and SGLang keeps some tokens free for the next step, or steps of drafts.
    spare = 12 if {"chain", "tree", "ngram"} & set(features) else 4
    slots = max(shape.count * (shape.length + shape.new_tokens + spare * PAGE) for shape in shapes)
    slots = -(-slots // PAGE) * PAGE
    most = max(shape.count for shape in shapes)
    heads = options.hidden // options.head_dim
    folder = model_folder(
        f"{options.model}-{options.layers}-{options.hidden}",
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 7 // 2,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        **MODELS[options.model](heads, options),
    )
    given = {
        "model_path": folder,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "device": options.device,
        "random_seed": 0,
        "attention_backend": attention,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "page_size": PAGE,
        "context_length": max(shape.length + shape.new_tokens for shape in shapes) + 16,
        "max_total_tokens": slots,
        # One more, or SGLang thinks itself full while the last but one has half of its prompt.
        "max_running_requests": most + 1,
        "mem_fraction_static": options.memory,
        "disable_radix_cache": True,
        "cuda_graph_bs_decode": [batch for batch in GRAPHS if batch < most] + [most],
        "cuda_graph_bs_prefill": PREFILLS,
        "log_level": "info",
    }
    if kind == "in-tree":
        given["enable_page_major_kv_layout"] = True
    found = WithRealWeights(**given | arguments_of(features, folder, most))
    fits = found.get_server_info()["max_total_num_tokens"]
    if fits < slots:
        found.shutdown()
        raise RuntimeError(f"the cache has {fits} slots, and the workloads need {slots}; raise --memory, or --apart")
    return found


def generate(engine: Any, shape: Workload, prefix: int) -> dict[str, Any]:
    """Run the workload; the tokens of each sequence, seconds in all, and those of a step in which all decode."""
    greedy = {"temperature": 0.0, "max_new_tokens": shape.new_tokens, "ignore_eos": True}
    prompts = prompts_of(shape.count, shape.length, prefix)
    begin = time.perf_counter()
    if shape.figure != STEP:
        answers = engine.generate(input_ids=prompts, sampling_params=greedy)
        seconds = time.perf_counter() - begin
        found = {"tokens": [answer["output_ids"] for answer in answers], "seconds": seconds}
        accepted = [answer["meta_info"].get("spec_accept_length") for answer in answers]
        return found | ({"accepted": statistics.mean(accepted)} if accepted[0] else {})
    seen = []  # tokens of the sequence that has fewest, of the one that has most, and when
    has = [0] * shape.count
    for part in engine.generate(input_ids=prompts, sampling_params=greedy, stream=True):
        has[part["index"]] = part["meta_info"]["completion_tokens"]
        seen.append((min(has), max(has), time.perf_counter()))
    first = next(when for fewest, _, when in seen if fewest)
    return {"seconds": time.perf_counter() - begin, "step": step_of(seen, shape.new_tokens), "first": first - begin}


def step_of(seen: Sequence[tuple[int, int, float]], new_tokens: int) -> float:
    """Seconds of a step in which all sequences decode.

    Args:
        seen: in time's order, the tokens of the sequence that has fewest and of the one that has most, and when.
        new_tokens: of each sequence. The first quarter is left out: those steps may wait for prefills.

    Raises:
        RuntimeError: hardly ever do all of them decode at once, as where the engine does not take them all.
    """
    reached: dict[int, float] = {}  # when every sequence had so many tokens, and none all of its own
    for fewest, most, when in seen:
        if new_tokens // 4 <= fewest and most < new_tokens:
            reached.setdefault(fewest, when)
    if len(reached) < max(2, new_tokens // 4):
        raise RuntimeError(
            f"all sequences decode in {len(reached)} steps of {new_tokens} alone: does the engine take all of them at "
            "once? Its log says #running-req"
        )
    (few, early), *_, (many, late) = reached.items()
    return (late - early) / (many - few)


def serve(name: str, options: argparse.Namespace, connection: Connection) -> None:
    """The process of one engine: start, say so, and run what comes, until nothing does."""
    import importlib.metadata

    begin = time.perf_counter()
    engine = start(name, options)
    versions = {part: importlib.metadata.version(part) for part in ("sglang", "torch", "triton")}
    connection.send({"start": round(time.perf_counter() - begin, 1), "versions": versions})
    while (what := connection.recv()) is not None:
        connection.send(generate(engine, *what))
    engine.shutdown()


class Engine(Process):
    """One engine's process, seen from here."""

    def facts(self) -> Any:
        """Of its start. Raises RuntimeError where it runs without pm_ops, and was to run with it."""
        found = self.answer()
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if LINE in line]
        if (self.name.split(":")[0].split("+")[0] in LAYOUTS) != bool(lines):
            raise RuntimeError(f"{self.name}: {self.log} says {len(lines)} times {LINE!r}")
        return found | ({"cache": lines[0].partition(LINE)[2]} if lines else {})

    def run(self, shape: Workload, prefix: int = 0) -> Any:
        """What :func:`generate` has found."""
        return self.ask(shape, prefix)

    def end(self) -> None:
        """Let it stop its own processes, and see that it is gone."""
        if self.process.is_alive():
            self.connection.send(None)
            self.process.join(30)
        self.process.kill()


def end(engines: list[Engine]) -> None:
    """All at once: each takes seconds."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda engine: engine.end(), engines))


def figure(shape: Workload, run: dict[str, Any]) -> float:
    """The workload's figure of one run."""
    if shape.figure == STEP:
        return round(1000 * run["step"], 3)
    return round(shape.count * (shape.new_tokens if shape.figure == RATE else shape.length) / run["seconds"], 1)


def measure(engines: list[Engine], shape: Workload, repetitions: int, report: dict[str, Any]) -> dict[str, Any]:
    """The workload's figure of every run; the engines take turns."""
    each(engines, report, lambda engine: engine.run(shape._replace(count=2, new_tokens=min(shape.new_tokens, 9)), 99))
    runs: dict[str, list[float]] = {}
    for prefix in range(repetitions):
        for name, run in each(engines, report, lambda engine: engine.run(shape, prefix)).items():  # noqa: B023
            runs.setdefault(name, []).append(figure(shape, run))
            if "first" in run:
                line = f"prompts, then {shape.new_tokens} steps, of {shape.count} x {shape.length}: prompt tokens/s"
                rate = round(shape.count * shape.length / run["first"], 1)
                report["engines"].setdefault(name, {}).setdefault(line, []).append(rate)
                print(name, line, rate, flush=True)
        engines.reverse()
    return {name: runs[name] for name in report["engines"] if name in runs}


def table(workload: str, shape: Workload, runs: dict[str, list[float]]) -> str:
    """Medians, and how many times as fast as the first engine each is."""
    medians = {name: statistics.median(values) for name, values in runs.items()}
    first = next(iter(medians.values()), 1.0)
    lines = [f"{workload}: {shape.figure}"]
    for name, median in medians.items():
        lines.append(
            f"  {name:<24} {median:>10.2f}  x {first / median if shape.figure == STEP else median / first:.3f}"
        )
    return "\n".join(lines)


def device() -> str:
    """The GPU's name and driver, asked for without using it."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "no NVIDIA GPU"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ["stock", "in-tree", "token_major", "page_major"]
    parser.add_argument("--engines", nargs="+", default=default, help="(default: %(default)s)")
    parser.add_argument(
        "--workloads",
        nargs="+",
        type=workload_of(WORKLOADS),
        default=[("tokens", 0), ("64 x 1024", 0)],
        help=f"any of {', '.join(WORKLOADS)}; NAME=3: with 3 repetitions (default: tokens, 64 x 1024)",
    )
    parser.add_argument("--repetitions", type=int, default=5, help="of each workload (default: %(default)s)")
    parser.add_argument("--apart", action="store_true", help="one engine after the other, each with all the memory")
    parser.add_argument("--memory", type=float, default=0.9, help="share of the GPU, mem_fraction_static")
    parser.add_argument("--patience", type=float, default=300, help="seconds for a start or a run of a workload")
    parser.add_argument("--model", choices=MODELS, default="llama", help="(default: %(default)s)")
    parser.add_argument("--layers", type=int, default=32, help="of the model (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=4096, help="hidden size (default: %(default)s)")
    parser.add_argument("--head-dim", type=int, default=128, help="of its heads (default: %(default)s)")
    parser.add_argument("--device", default="cuda", help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "sglang_throughput")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    Engine.patience = options.patience

    report: dict[str, Any] = {
        "model": options.model,
        "layers": options.layers,
        "hidden": options.hidden,
        "device": device(),
    }
    report |= {"engines": {}, "workloads": {}}
    tokens: dict[str, list[Any]] = {}
    for name in options.engines:
        gate(name, options).unlink(missing_ok=True)
    started = [Engine(serve, name, options) for name in options.engines]
    try:
        for engines in [[engine] for engine in started] if options.apart else [list(started)]:
            for engine in engines:
                gate(engine.name, options).touch()
            run(list(engines), options, report, tokens)
            end(engines)
    finally:
        end(started)
    for name, _ in options.workloads:
        if name in report["workloads"]:
            print(table(name, WORKLOADS[name], report["workloads"][name]))
    if any("failed" in facts for facts in report["engines"].values()):
        raise SystemExit("not every engine ran")


def run(engines: list[Engine], options: argparse.Namespace, report: dict[str, Any], tokens: dict[str, Any]) -> None:
    """All workloads. What is known is printed and written after each of them."""
    report["engines"] |= each(engines, report, lambda engine: engine.facts())
    (options.out / "sglang_throughput.json").write_text(json.dumps(report, indent=1))
    for engine in engines:
        print(engine.name, report["engines"][engine.name], flush=True)
    for workload, repetitions in options.workloads if engines else ():
        shape = WORKLOADS[workload]
        if shape.figure == TOKENS:
            few = shape._replace(count=min(shape.count, 8))
            for turn in ((shape, 0), (shape, 0), (few, 1)):
                for name, found in each(engines, report, lambda engine: engine.run(*turn)).items():  # noqa: B023
                    tokens.setdefault(name, []).append(found["tokens"])
                    if "accepted" in found:
                        report["engines"][name]["tokens a verified step"] = round(found["accepted"], 2)
                        print(name, report["engines"][name]["tokens a verified step"], "tokens a verified step")
            whole = {name: found for name, found in tokens.items() if len(found) == 3}
            report["tokens"] = agreement(*({name: found[i] for name, found in whole.items()} for i in range(3)))
            print(json.dumps(report["tokens"], indent=1), flush=True)
        else:
            found = measure(engines, shape, repetitions or options.repetitions, report)
            report["workloads"].setdefault(workload, {}).update(found)
            print(table(workload, shape, report["workloads"][workload]), flush=True)
        (options.out / "sglang_throughput.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
