"""A real language model, written for a layer-major cache, generates the same text on page-major pages. `make demo`.

Three prompts, greedy: once with the stock transformers model and its StaticCache, once with the same model compiled by
pm_ops, its StaticCache bound to a page pool. A prompt goes in as one call, through a graph whose operations run one by
one; its answer comes token by token, through a graph that Inductor compiled. Halfway through each answer every page of
the sequence is copied to host memory, one copy a page, wiped, and copied back; then generation goes on. Everything
printed is measured in this run.

    python examples/quickstart.py [--model NAME] [--tokens N] [--device cuda] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# Threads that spin while they wait cost dearly on a busy machine. OpenMP reads this when it starts.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from _measure import Offload, Progress, copies_per_page_layer_major, output_code, pool_clones, telling
from _smollm2 import load
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StaticCache

import pm_ops
from pm_ops.compile_passes import Binding, bind, page_major_backend
from pm_ops.layout import counted

PROMPTS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper.",
    "What is a page table in an operating system?",
)
PAGE_SIZE = 16


@dataclass
class Answer:
    """A prompt's greedy continuation, the logits that each token was the largest of, and the seconds a token took."""

    tokens: list[int]
    logits: list[Tensor]
    seconds: list[float] = field(default_factory=list)


@torch.no_grad()
def generate(
    model: Callable[..., Any],
    cache: StaticCache,
    prompt: list[int],
    count: int,
    halfway: Callable[[], None] | None = None,
) -> Answer:
    """``count`` greedy tokens behind a prompt; ``halfway`` is called in the middle."""
    cache.reset()
    answer, given = Answer([], []), prompt
    for i in range(count):
        if i == count // 2 and halfway is not None:
            halfway()
        start = time.perf_counter()
        logits = model(tokens(given, cache), past_key_values=cache).logits[0, -1]
        answer.logits.append(logits.float().cpu())
        answer.tokens.append(int(answer.logits[-1].argmax()))
        answer.seconds.append(time.perf_counter() - start)
        given = answer.tokens[-1:]
    return answer


def tokens(given: list[int], cache: StaticCache) -> Tensor:
    """A batch of one. Prompts differ in length, and one graph shall serve them all."""
    ids = torch.tensor([given], device=cache.layers[0].device)
    if len(given) > 1:
        torch._dynamo.maybe_mark_dynamic(ids, 1)
    return ids


def static_cache(model: PreTrainedModel, length: int) -> StaticCache:
    """transformers' own preallocated cache: two tensors a layer, ``[1, heads, length, head_dim]``."""
    config = model.config.get_text_config(decoder=True)
    heads, dim = kv_shape(model)
    cache = StaticCache(config=config, max_cache_len=length)
    cache.early_initialization(1, heads, dim, model.dtype, model.device)
    return cache


def kv_shape(model: PreTrainedModel) -> tuple[int, int]:
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return heads, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


@dataclass
class Run:
    """Everything the demo measured."""

    stock: list[Answer]
    paged: list[Answer]
    binding: Binding
    offload: Offload
    copies_layer_major: int
    clones: int

    def partings(self) -> list[dict[str, Any]]:
        """Where answers differ: the first token, and by how much each model preferred its own choice."""
        found = []
        for prompt, stock, paged in zip(PROMPTS, self.stock, self.paged, strict=True):
            where = [i for i, (a, b) in enumerate(zip(stock.tokens, paged.tokens, strict=True)) if a != b]
            if where:
                i = where[0]
                a, b = stock.tokens[i], paged.tokens[i]
                gaps = {
                    "stock": stock.logits[i][a] - stock.logits[i][b],
                    "paged": paged.logits[i][b] - paged.logits[i][a],
                }
                found.append({"prompt": prompt, "token": i, "logit_gap": {k: float(v) for k, v in gaps.items()}})
        return found

    def largest_logit_error(self) -> float:
        """Over the tokens up to the first that differs."""
        worst = 0.0
        for stock, paged in zip(self.stock, self.paged, strict=True):
            for a, b, x, y in zip(stock.tokens, paged.tokens, stock.logits, paged.logits, strict=True):
                worst = max(worst, float((x - y).abs().max()))
                if a != b:
                    break
        return worst

    def milliseconds(self, answers: list[Answer]) -> str:
        """What a prompt, and a token behind it, typically took."""
        prompt = statistics.median(answer.seconds[0] for answer in answers)
        token = statistics.median(seconds for answer in answers for seconds in answer.seconds[1:])
        return f"{1e3 * prompt:.0f} ms a prompt, {1e3 * token:.0f} ms a token"

    def summary(self) -> dict[str, Any]:
        report, layout = self.binding.report(), self.binding.pool.layout
        return {
            "tokens_equal": not self.partings(),
            "tokens_compared": sum(len(answer.tokens) for answer in self.stock),
            "partings": self.partings(),
            "largest_logit_error": self.largest_logit_error(),
            "writes_rewritten": report.writes_rewritten,
            "reads_rewritten": report.reads_rewritten,
            "materialized": report.materialized,
            "pool_clones": self.clones,
            "cache_bytes_layer_major_before_bind": report.bytes_released,
            "cache_bytes_layer_major_after_bind": self.binding.cache_bytes(),
            "page_bytes": layout.page_bytes,
            "pages_offloaded": len(self.offload.copies),
            "copies_per_page_layer_major": self.copies_layer_major,
            "copies_per_page_page_major": max(self.offload.copies),
            "offload_restore_equal": all(self.offload.equal) and len(self.offload.equal) == len(PROMPTS),
        }


def demo(model: PreTrainedModel, prompts: list[list[int]], count: int, say: Callable[[str], None]) -> Run:
    """Both models on all prompts."""
    length = max(map(len, prompts)) + count
    length = -(-length // PAGE_SIZE) * PAGE_SIZE
    stock_cache = static_cache(model, length)
    say(f"the stock model, eager, StaticCache of {counted(length, 'token')}")
    stock = []
    for prompt in prompts:
        stock.append(generate(model, stock_cache, prompt, count))
        say(f"  {counted(count, 'token')} behind a prompt of {len(prompt)}")
    copies = copies_per_page_layer_major(stock_cache, PAGE_SIZE)

    cache = static_cache(model, length)
    heads, dim = kv_shape(model)
    layout = pm_ops.page_major(len(cache.layers), heads, dim, PAGE_SIZE, model.dtype)
    pool = pm_ops.PagePool(layout, num_pages=length // PAGE_SIZE, device=model.device)
    binding = bind(pool, cache)
    mode = "reduce-overhead" if model.device.type == "cuda" else None
    # Inductor would take most of a minute for the prompts' graph, which is called three times.
    prefill = torch.compile(model, backend=telling(page_major_backend(binding, "eager"), say))
    decode = torch.compile(model, backend=telling(page_major_backend(binding, mode=mode), say))

    def compiled(ids: Tensor, **options: Any) -> Any:
        return (prefill if ids.shape[1] > 1 else decode)(ids, **options)

    offload = Offload(binding)
    say(f"the same model on pages, {pool}")
    with output_code() as code, torch.no_grad():
        say("  the graph for prompts, whose operations run one by one")
        compiled(tokens(prompts[0], cache), past_key_values=cache)
        say("  the graph for a single token, for Inductor: the first time this takes up to a minute")
        compiled(tokens(prompts[0][:1], cache), past_key_values=cache)
        paged = []
        for prompt in prompts:
            paged.append(generate(compiled, cache, prompt, count, halfway=offload))
            travelled = f"halfway {counted(pool.num_pages, 'page')} out and in"
            say(f"  {counted(count, 'token')} behind a prompt of {len(prompt)}, {travelled}")
    return Run(stock, paged, binding, offload, copies, pool_clones(code, pool))


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the demo, print it, and return the summary."""
    arguments = parse(argv)
    say = Progress()
    say("loading the model (the first time it is converted, which takes a minute)")
    dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
    model, tokenizer = load(arguments.model, dtype, arguments.device)
    prompts = [encode(tokenizer, prompt) for prompt in PROMPTS]
    run = demo(model, prompts, arguments.tokens, say)
    summary = {"model": arguments.model or "SmolLM2-135M-Instruct", "seconds": round(say.elapsed(), 1), **run.summary()}
    show_answers(run, tokenizer)
    print("\n" + "\n".join(f"{name:40} {value}" for name, value in summary.items()))
    show_pages(run)
    if arguments.json:
        print(json.dumps(summary))
    return summary


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a local folder or hub name (default: SmolLM2-135M-Instruct from its wheel)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate for each prompt (default: 64)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true", help="end with the summary as one line of JSON")
    arguments = parser.parse_args(argv)
    if arguments.tokens < 2:
        parser.error("--tokens must be at least 2: the pages travel halfway")
    return arguments


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    if tokenizer.chat_template is None:
        return tokenizer(prompt)["input_ids"]
    chat = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]


def show_answers(run: Run, tokenizer: PreTrainedTokenizerBase) -> None:
    for prompt, stock, paged in zip(PROMPTS, run.stock, run.paged, strict=True):
        print(f"\n> {prompt}")
        for name, answer in (("layer-major", stock), ("page-major", paged)):
            text = tokenizer.decode(answer.tokens)
            print(textwrap.indent(textwrap.fill(text, 100), f"  {name:11} | "))
    partings, compared = run.partings(), counted(sum(len(answer.tokens) for answer in run.stock), "token")
    print(
        f"\nThe texts {'part' if partings else 'are equal'}: {compared} compared, logits differ by "
        f"{run.largest_logit_error():.1e} at most" + "".join(f"\n  {parting}" for parting in partings)
    )
    print(f"Stock, eager, layer-major:  {run.milliseconds(run.stock)}")
    print(f"On pages, page-major:       {run.milliseconds(run.paged)}", end="")
    print(
        "" if run.binding.pool.device.type == "cuda" else " (on the CPU the operators are plain torch: right, not fast)"
    )


def show_pages(run: Run) -> None:
    print(f"\nWhat the backend made of the model:\n{run.binding.report()}")
    print(f"\nOne page, {run.binding.pool.layout}")
    moved = counted(len(run.offload.copies), "page") + " to host memory: " + counted(sum(run.offload.copies), "copy")
    print(f"\n{moved}; from the layer-major cache it would be {run.copies_layer_major} a page\n")


if __name__ == "__main__":
    main()
