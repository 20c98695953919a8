"""Padding rows become zeros, and no other byte changes."""

from __future__ import annotations

import pytest
import torch
from kernels.cases import on_each_device

from pm_ops.kernels.padding import zero_padding


@on_each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("end", [0, 5, 699, 700])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_rows_from_the_last_start_on_are_zeroed(device, dtype, end, index):
    memory = torch.randn(702, 3, 100).to(dtype).to(device)
    expected = memory.clone()
    expected[1 + end : 701] = 0
    zero_padding(memory[1:701], torch.tensor([0, min(end, 2), end], dtype=index, device=device))
    assert torch.equal(memory, expected)
