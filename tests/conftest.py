"""Set-up that every test needs: the Triton interpreter where there is no GPU, and a fixed seed."""

import os

import pytest
import torch

# Triton reads this when it is first imported. With a GPU the kernels are compiled, so it must stay unset there.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)
