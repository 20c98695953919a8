"""SGLang answers from a page-major cache: one environment variable.

    pip install .                            # in the project's folder, next to SGLang
    python examples/sglang_offline.py        # --layout page_major --attention pm_ops; --model NAME

Needs a GPU. Generates with a stock engine and triton first, then with pm_ops, each in processes of its own, and
compares the texts. With --attention triton both run the same kernels, and other texts are a fault: exit status 1.
Other kernels round otherwise, and texts may part. This script has not run on a GPU; these engines have, by
benchmarks/sglang_throughput.py.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from _smollm2 import smollm2_folder

PROMPTS = (
    "Why is the sky blue?",
    "Once upon a time there was a lighthouse keeper who",
    "A page table maps",
)


def texts(model: str, attention: str, tokens: int) -> list[str]:
    """Greedy continuations, by an engine that is started for them and stopped after."""
    import sglang

    options: dict[str, Any] = {"attention_backend": attention, "page_size": 16, "mem_fraction_static": 0.5}
    engine = sglang.Engine(model_path=model, dtype="bfloat16", **options)
    try:
        greedy = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        return [answer["text"] for answer in engine.generate(list(PROMPTS), greedy)]
    finally:
        engine.shutdown()


def apart(*arguments: Any) -> list[str]:
    """The texts from a process of its own, with the environment as it is now: SGLang loads plugins once a process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        return processes.submit(texts, *arguments).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a local folder or a hub name (default: SmolLM2-135M from its wheel)")
    parser.add_argument("--layout", default="token_major", help="of the cache (default: %(default)s)")
    parser.add_argument("--attention", default="triton", help="pm_ops, or one of SGLang's (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=32, help="to generate for each prompt (default: %(default)s)")
    options = parser.parse_args()
    model = options.model or str(smollm2_folder())

    os.environ.pop("PM_OPS", None)
    expected = apart(model, "triton", options.tokens)
    os.environ["PM_OPS"] = json.dumps({"layout": options.layout})
    found = apart(model, options.attention, options.tokens)
    for prompt, text in zip(PROMPTS, found, strict=True):
        print(f"{prompt!r} -> {text!r}")
    print(f"the same text as a stock engine with triton: {found == expected}")
    if options.attention == "triton" and found != expected:
        raise SystemExit("the same kernels gave other texts than on a stock cache")


if __name__ == "__main__":
    main()
