"""SmolLM2-135M-Instruct in fp32, real weights and the real engine: whatever the layout, stock's tokens."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pm_ops

pytest.importorskip("vllm")
pytestmark = pytest.mark.engines

from vllm_engine import PROMPTS, engine, generate, host_tier, pools, smollm2, tokens

LAYOUTS = ("page_major", "BLNHC", "BLHNC", "BHLNC")
PAGE = 16


@pytest.fixture(scope="module")
def stock() -> list[list[int]]:
    with engine(smollm2()) as llm:
        return tokens(generate(llm, PROMPTS))


@pytest.fixture(scope="module")
def stored() -> Iterator[dict[str, Any]]:
    """What the first layout's engine left in its pages: layout and bytes."""
    kept: dict[str, Any] = {}
    yield kept
    kept.clear()


def named(layout: str) -> pm_ops.PageLayout:
    """The format of this name for SmolLM2."""
    if layout == "page_major":
        return pm_ops.page_major(30, 3, 64, PAGE, torch.float32)
    return pm_ops.vllm(30, 3, 64, PAGE, torch.float32, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_eager_tokens_equal_stock_and_every_page_is_byte_exact(
    stock: list[list[int]], stored: dict[str, Any], layout: str
) -> None:
    with engine(smollm2(), {"layout": layout}, block_size=PAGE) as llm:
        (pool,) = pools(llm)
        assert pool.layout == named(layout), "the pages are those of the format of this name"
        assert pool.buffer.numel() == pool.num_pages * pool.layout.page_bytes, "one buffer, nothing but pages"
        assert pool.allocator.num_free == 0, "the engine alone hands pages out"
        assert tokens(generate(llm, PROMPTS)) == stock

        # Same prompts, same kernels, same blocks: the same K and V to the bit, in another order.
        pages = list(range(1, pool.num_pages))
        if not stored:
            stored.update(layout=pool.layout, buffer=pool.buffer.clone())
        source = pm_ops.PagePool(stored["layout"], pool.num_pages, buffer=stored["buffer"])
        expected = pm_ops.PagePool(pool.layout, pool.num_pages)
        pm_ops.RepackPlan(source.layout, pool.layout).run(source, expected, pages, pages)
        assert torch.equal(expected.pages[1:], pool.pages[1:]) and bool(pool.pages[1:].any())

        again = generate(llm, PROMPTS)
        assert tokens(again) == stock, "with the prefix's pages found in the cache"
        assert again[5].num_cached_tokens >= 128


def test_prefixes_that_come_back_from_host_memory_give_stocks_tokens(stock: list[list[int]]) -> None:
    with engine(smollm2(), True, block_size=PAGE, kv_transfer_config=host_tier({"max_bytes": 1 << 28})) as llm:
        assert tokens(generate(llm, PROMPTS)) == stock
        assert llm.reset_prefix_cache()
        again = generate(llm, PROMPTS)
        assert tokens(again) == stock
        assert [o.num_cached_tokens for o in again] == [(len(o.prompt_token_ids) - 1) // PAGE * PAGE for o in again]
        assert again[5].num_cached_tokens >= 128
