"""The tiny model that connectors are tested on, and what a stock engine makes of the prefixes."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_engine import PREFIXES, assert_depends_on_context, engine, generate, tiny_llama, tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def stock(model: Path) -> list[list[int]]:
    with engine(model, skip_tokenizer_init=True) as llm:
        assert_depends_on_context(llm, PREFIXES[3])
        return tokens(generate(llm, PREFIXES))
