"""How calls are cut into programs, on an H200: what was measured there, and nothing of the batch where that must be."""

import pytest
import torch

from pm_ops.kernels.attention_plan import SPLIT_KEYS, Shape, plan_of

MULTIPROCESSORS = 132


def decode(batch: int, keys: int, dtype: torch.dtype = torch.bfloat16, dim: int = 128, split_keys: int = 0) -> Shape:
    return Shape(
        tokens=batch, q_heads=32, kv_heads=8, dim=dim, value_dim=dim, batch=batch, queries=4 if split_keys else 1,
        ragged=False, keys=keys, max_seq_len=0, window=0, causal=True, bias=False, packed=dtype.itemsize == 1,
        value_scaled=False, split_keys=split_keys, latent=False, query_dtype=torch.bfloat16, key_dtype=dtype,
        value_dtype=dtype, multiprocessors=MULTIPROCESSORS,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "keys", "warps", "splits"),
    [(48, 16384, 4, 1), (40, 4096, 4, 1), (24, 4096, 4, 2), (64, 4096, 2, 1), (12, 16384, 2, 5), (1, 512, 2, 4)],
)
def test_decodes_of_three_programs_a_multiprocessor_have_four_warps(
    batch: int, keys: int, warps: int, splits: int
) -> None:
    plan = plan_of(decode(batch, keys))
    assert (plan.warps, plan.splits) == (warps, splits)
    assert 2 * MULTIPROCESSORS < batch * 8 * splits <= 3 * MULTIPROCESSORS or warps == 2


@pytest.mark.parametrize(
    "shape",
    [
        decode(48, 16384, torch.float8_e4m3fn),
        decode(48, 16384, torch.float8_e4m3fn)._replace(packed=False),
        decode(48, 16384)._replace(value_dtype=torch.float8_e4m3fn),
        decode(48, 16384, dim=256),
    ],
)
def test_rows_that_were_not_measured_keep_their_warps(shape: Shape) -> None:
    assert plan_of(shape).warps == plan_of(shape._replace(batch=64, tokens=64)).warps == 2


def test_batch_invariant_plans_do_not_follow_the_batch() -> None:
    plans = [plan_of(decode(batch, 16384, split_keys=SPLIT_KEYS)) for batch in (1, 6, 12, 24, 40, 48, 64, 256)]
    fixed = {(p.block_m, p.block_n, p.splits, p.warps, p.stages) for p in plans}
    assert len(fixed) == 1 and fixed.pop()[3] == 2
