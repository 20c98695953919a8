"""Prefixes in files: another engine finds them, and what cannot be read is computed. Tokens are always stock's."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engines

import transformers
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm_engine import assert_depends_on_context, engine, generate, random_prompts, save_tiny, tokens

from pm_ops import PageStore

SIZES = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
PROMPTS = random_prompts(512, (5, 16, 33, 100, 150))
FULL = [0, 0, 32, 96, 144]
"""Tokens of each prompt in full blocks, but for a last one that ends the prompt."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.LlamaConfig(
        **SIZES, intermediate_size=256, num_key_value_heads=2, max_position_embeddings=512
    )
    return save_tiny(transformers.LlamaForCausalLM(config), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def stock(model: Path) -> list[list[int]]:
    with engine(model, skip_tokenizer_init=True) as llm:
        assert_depends_on_context(llm, PROMPTS[3])
        return tokens(generate(llm, PROMPTS))


def storing(model: Path, folder: Path, pm_ops: Any = True, options: dict[str, Any] | None = None, **more: Any) -> Any:
    transfer = KVTransferConfig(
        kv_connector="PageStoreConnector",
        kv_connector_module_path="pm_ops.adapters.vllm.store_connector",
        kv_role="kv_both",
        kv_connector_extra_config={"folder": str(folder)} if options is None else options,
    )
    return engine(model, pm_ops, skip_tokenizer_init=True, block_size=16, kv_transfer_config=transfer, **more)


def run(model: Path, folder: Path, **options: Any) -> tuple[list[list[int]], list[int]]:
    """(tokens, how many tokens of each prompt a new engine found)."""
    with storing(model, folder, **options) as llm:
        outputs = generate(llm, PROMPTS)
    return tokens(outputs), [output.num_cached_tokens for output in outputs]


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.safetensors"))


def test_another_engine_finds_every_full_block_of_a_prompt(model: Path, stock: list[list[int]], tmp_path: Path) -> None:
    assert run(model, tmp_path) == (stock, [0] * 5)
    kept = len(entries(tmp_path))
    assert kept == sum((len(prompt) + 47) // 16 for prompt in PROMPTS), "every block that was filled, answers too"
    assert run(model, tmp_path) == (stock, FULL)
    assert len(entries(tmp_path)) == kept
    assert run(model, tmp_path, pm_ops={"layout": "BLHNC"}) == (stock, [0] * 5), "another layout has its own folder"
    assert len({path.parent for path in entries(tmp_path)}) == 2


def test_what_cannot_be_read_is_computed_and_not_trusted_again(
    model: Path, stock: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(model, tmp_path)
    for path in entries(tmp_path)[::3]:
        content = bytearray(path.read_bytes())
        content[-1000] ^= 1
        path.write_bytes(content)
    assert run(model, tmp_path)[0] == stock, "damaged entries"
    assert run(model, tmp_path)[0] == stock, "and what the engine has made of them since"
    for path in entries(tmp_path):
        path.write_bytes(path.read_bytes()[:20])
    assert run(model, tmp_path)[0] == stock, "entries without a header, those that are only written to, too"
    assert run(model, tmp_path)[0] == stock

    with monkeypatch.context() as patch:
        patch.setattr(PageStore, "__contains__", lambda store, key: True)
        assert run(model, tmp_path / "empty")[0] == stock, "found, but evicted before it is read"


def test_a_cache_that_is_too_small_for_all_reads_its_own_blocks_back(
    model: Path, stock: list[list[int]], tmp_path: Path
) -> None:
    with storing(
        model,
        tmp_path,
        num_gpu_blocks_override=16,
        max_model_len=240,
        max_num_batched_tokens=32,
        disable_log_stats=False,
    ) as llm:
        assert tokens(generate(llm, PROMPTS)) == stock
        (preempted,) = (m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
        assert preempted > 0
        outputs = generate(llm, PROMPTS)
        assert tokens(outputs) == stock
        assert [output.num_cached_tokens for output in outputs] == FULL


def test_requests_that_are_aborted_leave_nothing_behind_and_whole_blocks_only(
    model: Path, stock: list[list[int]], tmp_path: Path
) -> None:
    with storing(model, tmp_path, max_num_batched_tokens=32) as llm:
        core = llm.llm_engine
        for name, prompt in zip("abcde", PROMPTS, strict=True):
            core.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=48))
        for _ in range(4):  # the longest prompts are half read, or waiting
            core.step()
        core.abort_request(list("abcde"))
        assert tokens(generate(llm, PROMPTS)) == stock
        core.step()
        assert core.engine_core.engine_core.scheduler.connector.tracked == {}
    assert run(model, tmp_path) == (stock, FULL)


@pytest.mark.parametrize(
    ("pm_ops", "options", "message"),
    [
        (None, {"folder": "pages"}, "pm_ops was not asked for"),
        (True, {}, "it needs a folder, and may have max_bytes, model"),
        (True, {"folder": "pages", "size": 1}, "it needs a folder, and may have max_bytes, model"),
        (True, {"folder": "pages", "max_bytes": 20000}, "one block of 16 tokens is 32768 bytes; raise max_bytes"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pm_ops: Any, options: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message), storing(model, tmp_path, pm_ops, options):
        pass
