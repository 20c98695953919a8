"""The kernel that moves pages between two buffers, in the interpreter, against a byte oracle."""

import pytest
import torch

from pm_ops.transfer_queue import MovePages

kernel = pytest.importorskip("pm_ops.kernels.transfer")


@pytest.mark.parametrize("out", [True, False])
@pytest.mark.parametrize(
    ("starts", "strides", "nbytes"),
    [
        ((0, 0), (64, 64), 64),
        ((0, 32), (80, 48), 48),
        ((8, 0), (72, 40), 40),
        ((4, 12), (44, 20), 20),
        ((3, 5), (23, 31), 17),
        ((16, 0), (160, 128), 128),
    ],
    ids=["packed", "sixteen", "eight", "four", "one", "many blocks"],
)
def test_these_bytes_of_these_pages_and_no_other(out, starts, strides, nbytes, monkeypatch) -> None:
    monkeypatch.setattr(kernel, "_BLOCK", 4)
    monkeypatch.setattr(kernel, "_PROGRAMS", 3)
    buffers = [
        torch.randint(0, 256, (start + 8 * stride,), dtype=torch.uint8)
        for start, stride in zip(starts, strides, strict=True)
    ]
    pairs = torch.tensor([[5, 0], [0, 7], [2, 2], [7, 1], [1, 4]])
    expected = [buffer.clone() for buffer in buffers]
    for near, far in pairs.tolist():
        here = slice(starts[0] + near * strides[0], starts[0] + near * strides[0] + nbytes)
        there = slice(starts[1] + far * strides[1], starts[1] + far * strides[1] + nbytes)
        if out:
            expected[1][there] = buffers[0][here]
        else:
            expected[0][here] = buffers[1][there]
    kernel.move_pages(MovePages(*buffers, pairs, starts, strides, nbytes, out))
    assert torch.equal(buffers[0], expected[0]) and torch.equal(buffers[1], expected[1])
