"""Layouts of every kind and pools of random bytes, for the tests of what carries whole pages."""

from dataclasses import replace

import torch

import pm_ops
from pm_ops import PageLayout, PagePool, Plane
from pm_ops.testing import fill_random

MIXED = PageLayout(
    page_size=3,
    page_bytes=416,
    planes=(
        Plane(0, "key", 0, 16, 8, (2, 4), torch.float16),
        Plane(0, "value", 48, 24, 8, (3, 2), torch.float32),
        Plane(0, "key_scale", 120, 8, 4, (2, 1), torch.float32),
        Plane(1, "latent", 144, 32, 32, (1, 24), torch.float8_e4m3fn),
        Plane(1, "conv", 240, None, 8, (3, 4), torch.bfloat16),
        Plane(1, "ssm", 272, None, 32, (2, 4, 2), torch.float32),
        Plane(2, "state", 344, None, 1, (5,), torch.uint8),
    ),
    name="mixed",
)
STATES = replace(
    MIXED,
    page_bytes=424,
    planes=(*MIXED.planes, Plane(0, "state", 352, None, 64, (1, 16), torch.float32)),
    name="states",
)
LAYOUTS = {
    "page_major": pm_ops.page_major(3, 2, 4, 3, torch.bfloat16, value_dim=6),
    "page_major aligned": pm_ops.page_major(3, 1, 3, 3, torch.float16, align=32),
    "one token a page": pm_ops.page_major(3, 2, 4, 1, torch.float32),
    "token_major": pm_ops.token_major(3, 1, 3, 4, torch.float16),
    "vllm BLNHC": pm_ops.vllm(3, 2, 4, 2, torch.float32, "BLNHC"),
    "vllm BLHNC": pm_ops.vllm(3, 2, 4, 2, torch.float32, "BLHNC"),
    "vllm BHLNC": pm_ops.vllm(3, 3, 4, 2, torch.float32, "BHLNC"),
    "int8 with scales": pm_ops.page_major(3, 3, 4, 3, torch.int8, scales=True),
    "fp8 with scales by token": pm_ops.token_major(3, 3, 4, 3, torch.float8_e4m3fn, scales=True),
    "layers of their own": pm_ops.page_major(3, [1, 2, 1], [4, 2, 6], 2, [torch.float32, torch.float8_e5m2, "int8"]),
    "states": STATES,
}


def packed_pool(layout: PageLayout, num_pages: int, seed: int = 0) -> PagePool:
    """Pages of random bytes, back to back."""
    pool = PagePool(layout, num_pages)
    fill_random(pool.buffer, seed)
    return pool


def spaced_pool(layout: PageLayout, num_pages: int, seed: int = 0) -> PagePool:
    """Pages of random bytes with gaps of random bytes between them, inside a larger buffer."""
    stride = layout.page_bytes + 48
    buffer = torch.zeros(96 + num_pages * stride + 40, dtype=torch.uint8)
    fill_random(buffer, seed)
    return PagePool(layout, num_pages, buffer=buffer, base=96, page_stride=stride)
