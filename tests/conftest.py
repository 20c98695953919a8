"""Set-up that every test needs: the Triton interpreter where there is no GPU, and a fixed seed."""

import os
from typing import Any

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


@pytest.fixture(params=[1, 1 << 20], ids=["turns of a page", "one turn"])
def log(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a ``delayed`` pool issues: ("copy", "out" or "in") and ("wait", what is waited for, of another direction).

    A step is a page, and a turn of a stream as many as the parameter says.
    """
    from delayed import PAGE

    from pm_ops import transfer_plan, transfer_queue
    from pm_ops.copy_engine import copy_runs

    found: list[Any] = []

    def later(*args: Any) -> None:
        *what, stream = args
        found.append(("copy", stream.name))
        stream.work.append(lambda: copy_runs(*what, None))

    monkeypatch.setattr(transfer_queue, "copy_runs", later)
    monkeypatch.setattr(transfer_queue, "TURN", request.param * PAGE)
    monkeypatch.setattr(transfer_plan, "STEP_LEAST", PAGE)
    monkeypatch.setattr(transfer_plan, "STEP_MOST", PAGE)
    return found
