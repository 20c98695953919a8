"""The README's Python about vLLM runs as printed."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engines

import vllm
from vllm_engine import smollm2

README = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")


def test_the_block_about_vllm_gives_whole_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    marked = r"<!-- runs in tests/adapters/vllm/test_readme.py -->\n```python\n(.*?)```"
    (block,) = re.findall(marked, README, re.DOTALL)

    def quick(name: str, **options: Any) -> Any:
        assert name == "HuggingFaceTB/SmolLM2-135M-Instruct"
        return llm(str(smollm2()), max_model_len=256, kv_cache_memory_bytes=1 << 27, enforce_eager=True, **options)

    llm = vllm.LLM
    monkeypatch.setattr(vllm, "LLM", quick)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # as the block does, and undone after it
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["rows"].shape == (2, names["pool"].layout.page_bytes)
    names["llm"].llm_engine.engine_core.shutdown()
