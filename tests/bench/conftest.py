"""Modules that a test imports under a peer's name are gone after it."""

import sys
from collections.abc import Iterator

import pytest

PEERS = ("vllm", "sglang", "flashinfer", "fla")


@pytest.fixture(autouse=True)
def no_peers_left() -> Iterator[None]:
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in PEERS}
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in PEERS]:
        del sys.modules[name]
    sys.modules.update(before)
