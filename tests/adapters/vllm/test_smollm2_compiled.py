"""As test_smollm2.py, compiled by the engine as it does by default. A file of its own: each layout compiles anew."""

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engines

from vllm_engine import PROMPTS, engine, generate, smollm2, tokens


@pytest.fixture(scope="module")
def stock() -> list[list[int]]:
    with engine(smollm2()) as llm:
        return tokens(generate(llm, PROMPTS))


@pytest.mark.parametrize("layout", ["page_major", "BLNHC", "BLHNC", "BHLNC"])
def test_tokens_of_the_compiled_model_equal_stock(stock: list[list[int]], layout: str) -> None:
    with engine(smollm2(), {"layout": layout}, block_size=16, enforce_eager=False) as llm:
        assert tokens(generate(llm, PROMPTS)) == stock
