"""What the choice of a kernel follows from in a device."""

from __future__ import annotations

import functools

import torch


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU."""
    if device.type != "cuda":
        return 4  # the interpreter: few, so that small tests cover calls with and without splits
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether it is a GPU of compute capability 9.x."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
