"""The README's Python runs as printed, and gives what a layer-major model gives."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import pm_ops

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def block(name: str) -> str:
    """The Python block that the README marks with this name."""
    found = re.findall(rf"<!-- runs in tests/test_readme.py: {name} -->\n```python\n(.*?)```", README, re.DOTALL)
    assert len(found) == 1
    return found[0]


def test_every_python_block_is_run_here() -> None:
    assert README.count("```python") == README.count("<!-- runs in tests/") == 9
    assert README.count("<!-- runs in tests/test_readme.py: ") == 8


class Layer(torch.nn.Module):
    """Attention over a layer-major cache, as the README describes it: slots written by index, read by index."""

    def __init__(self, slots: int, heads: int, dim: int) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(heads * dim, 3 * heads * dim)
        self.register_buffer("k_cache", torch.zeros(slots, heads, dim))
        self.register_buffer("v_cache", torch.zeros(slots, heads, dim))

    def forward(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(1, (3, *self.k_cache.shape[1:])).unbind(1)
        self.k_cache[slots] = k
        self.v_cache[slots] = v
        keys, values = self.k_cache[slots], self.v_cache[slots]
        scores = torch.einsum("qhd,khd->hqk", q, keys) / math.sqrt(q.shape[-1])
        return x + torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(100, 128)
        self.layers = torch.nn.ModuleList(Layer(1024, 2, 64) for _ in range(2))

    def forward(self, tokens: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, slots)
        return x


def test_in_your_own_model() -> None:
    """The ten lines compile a model they know nothing of: same output, every cache access on pages, no cache left."""
    model = Model()
    tokens, slots = torch.randint(100, (7,)), torch.tensor([3, 20, 17, 0, 31, 8, 9])
    with torch.no_grad():
        expected = model(tokens, slots)
    caches = {(i, kind): getattr(layer, f"{kind[0]}_cache").clone()
              for i, layer in enumerate(model.layers) for kind in ("key", "value")}  # fmt: skip
    for layer in model.layers:
        layer.k_cache.zero_()
        layer.v_cache.zero_()
    names: dict[str, Any] = {"model": model, "tokens": tokens, "slots": slots}
    exec(block("compile"), names)
    torch.testing.assert_close(names["out"], expected)
    report = names["binding"].report()
    assert (report.writes_rewritten, report.materialized, report.refused) == (4, 0, [])
    assert report.bytes_released == 2 * 2 * 1024 * 2 * 64 * 4
    pool = names["pool"]
    for (layer, kind), dense in caches.items():
        torch.testing.assert_close(pool.view(layer, kind).flatten(0, 1)[slots], dense[slots])
    assert torch.equal(names["rows"], pool.pages[:2])


def test_by_hand() -> None:
    """The eager block's attention is causal attention over the keys it stored."""
    names: dict[str, Any] = {}
    exec(block("eager"), names)
    query, key, value = (names[n].transpose(0, 1) for n in ("query", "key", "value"))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    expected = sdpa(query[None], key[None], value[None], is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    torch.testing.assert_close(names["out"], expected)
    assert torch.equal(pm_ops.load_kv(names["pool"], 0, names["slots"]), names["key"])


def test_pages_in_files_and_on_the_wire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block's pages come back as they were, its descriptors name them, and its header describes them."""
    monkeypatch.chdir(tmp_path)
    pool = pm_ops.PagePool(pm_ops.page_major(2, 2, 64, 16, torch.bfloat16), num_pages=8)
    pool.buffer.random_()
    before = pool.gather([3, 0])
    pool.allocator.alloc(4)  # pages 0 to 3 are in use
    names: dict[str, Any] = {"pm_ops": pm_ops, "pool": pool}
    exec(block("pages"), names)
    assert names["pages"] == [4, 5] and torch.equal(pool.gather([4, 5]), before)
    address = pool.buffer.data_ptr() + 4 * pool.layout.page_bytes
    assert names["runs"] == [(address, 2 * pool.layout.page_bytes)]
    header = pm_ops.PageHeader.from_bytes(names["header"])
    header.check(pool.layout, "SmolLM2-135M", 2)
    header.verify(before)


def test_pages_in_host_memory() -> None:
    """Pages 1 and 2 become what 3 and 0 were, by way of host pages that are free again."""
    pool = pm_ops.PagePool(pm_ops.page_major(2, 2, 64, 16, torch.bfloat16), num_pages=8)
    pool.buffer.random_()
    before = pool.gather([3, 0])
    names: dict[str, Any] = {"pm_ops": pm_ops, "pool": pool}
    exec(block("host"), names)
    assert torch.equal(pool.gather([1, 2]), before)
    assert names["host"].pool.allocator.num_free == 4096


def test_between_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    """70 tokens of heads 4 to 7, and the plan says of itself what the comment beside it says."""
    names: dict[str, Any] = {"pm_ops": pm_ops, "torch": torch}
    code = block("repack")
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
    names["layers"] = [None, Layer(512, 8, 64).bfloat16()]
    cache = names["layers"][1].k_cache.normal_()
    before = names["sglang"].buffer.clone()
    exec(block("layer-major"), names)
    sglang = names["sglang"].view(1, "key")
    assert torch.equal(sglang[7], cache[48:64]) and torch.equal(sglang[2], cache[:16])
    assert 0 < (before != names["sglang"].buffer).sum() <= 2 * cache[:16].nbytes


@torch.no_grad()
def test_a_hybrid_models_pages() -> None:
    """The state holds the last three inputs, in the page and in its copy, between pages of keys and values."""
    names: dict[str, Any] = {"torch": torch, "pm_ops": pm_ops}
    exec(block("hybrid"), names)
    view = names["pool"]["state"].view(1, "conv")
    copy = names["pool"].allocator.alloc()[0] - 1  # the last page that was taken before
    assert torch.equal(view[names["state"]], names["x"][37:].T.bfloat16()) and torch.equal(
        view[copy], view[names["state"]]
    )
    assert names["y"].shape == (40, 96)


def test_with_transformers() -> None:
    """generate over a PageMajorCache gives the tokens of the stock cache, for a ragged batch."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.5, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.tensor([[0, 0, 5, 9, 7], [4, 8, 15, 16, 23]])
    inputs = {"input_ids": ids, "attention_mask": ids.ne(0).long()}
    expected = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    names: dict[str, Any] = {"model": model, "inputs": inputs}
    exec(block("transformers"), names)
    assert torch.equal(names["tokens"], expected)
