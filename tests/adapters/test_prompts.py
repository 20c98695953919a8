"""Which steps read prompts, to the adapters of engines."""

import pytest

from pm_ops.adapters.prompts import CHUNK, reads_prompts


@pytest.mark.parametrize(
    ("queries", "keys", "prompt"),
    [
        (16, 16, False),
        (17, 17, True),
        (512, 1023, True),
        (512, 1024, False),
        (512, 8192, False),
        (CHUNK - 1, 8192, False),
        (CHUNK, 8192, True),
        (8192, 32768, True),
    ],
)
def test_a_prompt_is_mostly_new_or_a_long_chunk(queries: int, keys: int, prompt: bool) -> None:
    assert reads_prompts(queries, keys) is prompt
