"""The documents' Python runs as printed, and gives what a layer-major model gives. Their links lead somewhere."""

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import pm_ops
from pm_ops import compile_passes

ROOT = Path(__file__).parents[1]
FOLDERS = ".", "pm_ops", "compile_passes", "adapters/vllm", "adapters/sglang", "examples", "examples/benchmarks"
DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for folder in FOLDERS
    for path in (ROOT / folder).glob("*.md")
}
MARK = re.compile(r"<!-- runs in (\S+?)(?:: (\S+))? -->\n```python\n(.*?)```", re.DOTALL)
BLOCKS = [found for text in DOCUMENTS.values() for found in MARK.findall(text)]
HERE = {name: code for file, name, code in BLOCKS if file == "tests/test_readme.py"}


def test_every_python_block_is_run() -> None:
    """Here, by its name, or in the environment of vLLM."""
    for path, text in DOCUMENTS.items():
        assert text.count("```python") == len(MARK.findall(text)) == text.count("<!-- runs in"), path
    assert len(BLOCKS) == len(HERE) + 1 == 11
    source = Path(__file__).read_text(encoding="utf-8")
    assert not [name for name in HERE if f'"{name}"' not in source]


@pytest.mark.parametrize("path", DOCUMENTS)
def test_links_lead_to_files_and_headings(path: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", DOCUMENTS[path]):
        if "://" in target:
            continue
        file, _, heading = target.partition("#")
        found = ((ROOT / path).parent / file).resolve() if file else ROOT / path
        assert found.exists(), target
        if heading:
            text = DOCUMENTS[found.relative_to(ROOT).as_posix()]
            headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in headings}
            assert heading in anchors, target


def run(name: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run the block of this name; returns its variables."""
    exec(HERE[name], names)
    return names


def test_your_own_model() -> None:
    """A compiled model gives eager's output, every cache access on pages, no cache left; and its pages can be moved."""
    torch.manual_seed(0)
    names = run("own-model", {})
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(names["Attention"]() for _ in range(2))
    with torch.no_grad():
        expected = names["model"](layers, names["x"], names["slots"])
    torch.testing.assert_close(names["out"], expected)
    report = names["binding"].report()
    assert (report.writes_rewritten, report.materialized, report.refused) == (4, 0, [])
    assert report.bytes_released == 2 * 2 * 1024 * 2 * 64 * 4
    pool = names["pool"]
    moved = torch.cat([torch.arange(112, 128), torch.arange(48, 52)])
    for layer, dense in enumerate(layers):
        for kind, cache in (("key", dense.k_cache), ("value", dense.v_cache)):
            for slots in (names["slots"], moved):
                torch.testing.assert_close(pool.view(layer, kind).flatten(0, 1)[slots], cache[:20])
    assert torch.equal(names["rows"], pool.pages[:2])


def test_your_own_engine() -> None:
    """The last rows of both sequences are those of causal attention over the whole of each; no page is left in use."""
    names = run("engine", {})

    def dense(tokens: list[int]) -> torch.Tensor:
        x = names["embedding"][tokens]
        for weight in names["weights"]:
            rows = (x @ weight).unflatten(1, (-1, 64)).transpose(0, 1)
            q, k, v = (t[None] for t in rows.split([8, 2, 2]))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + out[0].transpose(0, 1).flatten(1)
        return x

    prefix = names["prefix"]
    expected = torch.cat([dense([*prefix, 7])[-1:], dense([*prefix, 5, 9, 11])[-3:]])
    torch.testing.assert_close(names["out"], expected, rtol=1e-3, atol=1e-3)
    assert names["pool"].allocator.num_free == 64


def test_operators() -> None:
    """The block's attention is causal attention over the keys it stored."""
    names = run("operators", {})
    query, key, value = (names[n].transpose(0, 1) for n in ("query", "key", "value"))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    expected = sdpa(query[None], key[None], value[None], is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    torch.testing.assert_close(names["out"], expected)
    assert torch.equal(pm_ops.load_kv(names["pool"], 0, names["slots"]), names["key"])


def test_pages_in_host_memory_and_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages 1 and 2 become what 3 and 0 were, by way of host pages that are free again; then two more, by a file."""
    monkeypatch.chdir(tmp_path)
    make, move = HERE["host"].split("host = ")
    names: dict[str, Any] = {"torch": torch, "pm_ops": pm_ops}
    exec(make, names)
    pool = names["pool"]
    pool.buffer.random_()
    before = pool.gather([3, 0])
    exec(f"host = {move}", names)
    assert torch.equal(pool.gather([1, 2]), before)
    assert names["host"].pool.allocator.num_free == 4096
    run("files", names)
    assert names["pages"] == [4, 5] and torch.equal(pool.gather([4, 5]), before)
    address = pool.buffer.data_ptr() + 4 * pool.layout.page_bytes
    assert names["runs"] == [(address, 2 * pool.layout.page_bytes)]
    header = pm_ops.PageHeader.from_bytes(names["header"])
    header.check(pool.layout, "SmolLM2-135M", 2)
    header.verify(before)


def test_between_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    """70 tokens of heads 4 to 7, and the plan says of itself what the comment beside it says."""
    names: dict[str, Any] = {"pm_ops": pm_ops, "torch": torch}
    code = HERE["repack"]
    fill, move = code.rsplit("\n", 2)[:2]
    exec(fill, names)
    names["sglang"].buffer.random_(0, 256)
    exec(move, names)
    (said,) = re.findall(r"print\(plan\)  # …: (.*)", code)
    assert capsys.readouterr().out.strip().endswith(said)
    for layer, kind in ((0, "key"), (1, "value")):
        ours = names["sglang"].view(layer, kind)[[7, 2, 9, 31, 4]].flatten(0, 1)[:70, 4:]
        theirs = names["vllm"].view(layer, kind)[[5, 0]].flatten(0, 1)
        assert torch.equal(theirs[:70].view(torch.int16), ours.view(torch.int16))
        assert not theirs[70:].any()
    before = names["sglang"].buffer.clone()
    cache = run("layer-major", names)["k_cache"]
    sglang = names["sglang"].view(1, "key")
    assert torch.equal(sglang[7], cache[48:64]) and torch.equal(sglang[2], cache[:16])
    assert 0 < (before != names["sglang"].buffer).sum() <= 2 * cache[:16].nbytes


@torch.no_grad()
def test_a_hybrid_models_pages() -> None:
    """The state holds the last three inputs, in the page and in its copy, between pages of keys and values."""
    names = run("hybrid", {"torch": torch, "pm_ops": pm_ops})
    view = names["hybrid"]["state"].view(1, "conv")
    copy = names["hybrid"].allocator.alloc()[0] - 1  # the last page that was taken before
    assert torch.equal(view[names["state"]], names["x"][37:].T.bfloat16()) and torch.equal(
        view[copy], view[names["state"]]
    )
    assert names["y"].shape == (40, 96)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A small Llama with random weights, which transformers gives for any name, and a tokenizer of two texts."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.5, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()

    class Tokenizer:
        eos_token = "."

        def __call__(self, texts: list[str], **options: Any) -> Any:
            ids = torch.tensor([[4, 8, 15, 16, 23], [0, 0, 5, 9, 7]])[: len(texts)]
            return transformers.BatchEncoding({"input_ids": ids, "attention_mask": ids.ne(0).long()})

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda name: model)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name, **options: Tokenizer())
    model.tokenizer = Tokenizer()
    return model


def test_transformers_eager(tiny: Any) -> None:
    """generate over a PageMajorCache gives the tokens of the stock cache, for a ragged batch."""
    expected = tiny.generate(**tiny.tokenizer(["", ""]), max_new_tokens=32)
    assert torch.equal(run("transformers", {})["tokens"], expected)


def test_transformers_compiled(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """generate over a bound StaticCache gives the tokens of the stock cache, and the sequence is moved whole.

    Operations run one by one, where the block as it is printed compiles them with Inductor, which takes a minute.
    """
    expected = tiny.generate(**tiny.tokenizer([""]), max_new_tokens=32)
    eager = functools.partial(compile_passes.page_major_backend, inner="eager")
    monkeypatch.setattr(compile_passes, "page_major_backend", eager)
    names = run("static-cache", {})
    assert torch.equal(names["tokens"], expected)
    pool, pages = names["pool"], names["pages"]
    assert pages == names["binding"].page_table[0].tolist() == list(range(16, 32))
    assert pool.gather(pages).any() and torch.equal(pool.gather(pages), pool.gather(range(16)))
