"""The real engine for tests: vLLM started in this process, one engine after another, and tiny models to load."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

# Read by vLLM when it is imported: the engine in this process, no network, no usage statistics.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several test processes would all be bound to the same cores
}
os.environ.update(ENVIRONMENT)
TOKENS = 48
PROMPTS = (
    "Why is the sky blue?",
    "Once upon a time",
    "def fibonacci(n):",
    "The capital of France is",
    "1, 2, 3, 4,",
    "A hash table is a data structure that maps keys to values. " * 12,  # long enough for the prefix cache
    "Roses are red, violets are",
    "To whom it may concern: I am writing to you about the lighthouse, whose keeper found a letter in a bottle.",
)
SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
"""Of tiny models."""
Prompts = Sequence[str] | Sequence[list[int]]


@contextmanager
def engine(model: Path, pm_ops: Any = None, **options: Any) -> Iterator[Any]:
    """A ``vllm.LLM``; ``pm_ops`` is that entry of its additional_config, None: a stock engine."""
    from vllm import LLM

    defaults = {
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 1 << 27,
        "enforce_eager": True,
        "disable_log_stats": True,
        "additional_config": {} if pm_ops is None else {"pm_ops": pm_ops},
    }
    llm = LLM(str(model), **{**defaults, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def generate(llm: Any, prompts: Prompts) -> list[Any]:
    """Greedy continuations of ``TOKENS`` tokens."""
    from vllm import SamplingParams

    how = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=isinstance(prompts[0], str))
    inputs = [p if isinstance(p, str) else {"prompt_token_ids": p} for p in prompts]
    return llm.generate(inputs, how, use_tqdm=False)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct's checkpoint."""
    from examples._smollm2 import smollm2_folder

    return smollm2_folder()


def pools(llm: Any) -> list[Any]:
    """The engine's cache as pm_ops pools, one a cache group."""
    return llm.collective_rpc("page_pools")[0]


def metric(llm: Any, name: str, **labels: str) -> int:
    """What vLLM has counted so far under ``vllm:name``."""
    found: int
    (found,) = (m.value for m in llm.get_metrics() if m.name == f"vllm:{name}" and labels.items() <= m.labels.items())
    return found


def random_prompts(vocabulary: int, lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def save_tiny(model: Any, folder: Path) -> Path:
    """Give a transformers model random weights, large enough that its tokens depend on the context, and save it."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:  # small embeddings, or a model that ties them to its head repeats its last token
                std = 0.02 if "embed" in name else 0.2
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    model.save_pretrained(folder)
    return folder


def assert_depends_on_context(llm: Any, prompt: list[int]) -> None:
    """Another prefix before the same last token gives other tokens: only then does a comparison tell anything."""
    other = [(token + 1) % 256 + 3 for token in prompt[:-1]] + prompt[-1:]
    first, second = tokens(generate(llm, [prompt, other]))
    assert first != second and len(set(first)) > 3


def host_tier(size: dict[str, Any] | None = None, **options: Any) -> Any:
    """The setting of an engine that keeps prefixes in host memory: 200 pages of it, or the size that is given."""
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector="PageHostConnector",
        kv_connector_module_path="pm_ops.adapters.vllm.host_connector",
        kv_connector_extra_config={"max_pages": 200} if size is None else size,
        **{"kv_role": "kv_both", **options},
    )


def tiny_llama(folder: Path) -> Path:
    """Four layers, a vocabulary of 512, 2 KV heads of 32: 32 KiB for a block of 16 tokens."""
    import transformers

    return save_tiny(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), folder)


_SHARED, *_ENDS = random_prompts(512, (48, 50, 50))
PREFIXES = [*random_prompts(512, (5, 16, 33, 100, 150)), _SHARED + _ENDS[0], _SHARED + _ENDS[1]]
"""Prompts of tokens below 512; the last two begin with the same 48."""
FULL = [0, 0, 32, 96, 144, 96, 96]
"""Tokens of each in full blocks of 16, but for a last one that ends the prompt: what can be found."""
FRESH = [0, 0, 0, 0, 0, 0, 48]
"""What a first run finds: the last prompt's beginning, in the engine's own cache."""


def tiny_qwen3(folder: Path, layers: int) -> Path:
    """With a norm of queries and keys; a vocabulary of 512, 2 KV heads of 32."""
    import transformers

    config = transformers.Qwen3Config(**{**SIZES, "num_hidden_layers": layers})
    return save_tiny(transformers.Qwen3ForCausalLM(config), folder)


def tiny_gemma3(folder: Path) -> Path:
    """Windows of 32 tokens in two of three layers, and norms of queries and keys."""
    import transformers

    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    changes = {"num_hidden_layers": 6, "layer_types": kinds, "sliding_window": 32, "query_pre_attn_scalar": 32}
    config = transformers.Gemma3TextConfig(**{**SIZES, **changes})
    return save_tiny(transformers.Gemma3ForCausalLM(config), folder)
