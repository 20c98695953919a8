"""The gated delta rule in the suite of states: what is right passes in both layouts, what is subtly wrong does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bench.fakes import CPU, write_files

from pm_ops.bench.case import Case
from pm_ops.bench.gated_delta_cases import CPU as SHAPES
from pm_ops.bench.gated_delta_cases import GPU, GatedDeltaShape
from pm_ops.bench.implementation import GATED_DELTA, Bound
from pm_ops.bench.memory import LAYER_MAJOR, LAYOUTS, PAGE_MAJOR
from pm_ops.bench.ours import PmOps

SMALL: dict[str, Any] = dict(key_heads=2, heads=4, key_dim=8, value_dim=12, dtype=torch.float32, layers=3)
CASES = [GatedDeltaShape("update", 3, **SMALL).case("state"), GatedDeltaShape("prefill", 2, 5, **SMALL).case("state")]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ours_passes_twice(case: Case, layout: str) -> None:
    """Twice, for a check must leave the states as it found them."""
    work = case.build(CPU, True)
    bound = case.bind(PmOps(), work, layout)
    assert all(case.check(bound, work, layout).within(case.tolerance) for _ in range(2))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_state_that_was_not_written_or_another_ones_that_was_is_wrong(case: Case, layout: str) -> None:
    work = case.build(CPU, True)
    right = case.bind(PmOps(), work, layout)
    states, pages = work.states(layout), work.calls[layout].state_indices.long()
    free = next(page for page in range(len(states)) if page not in pages)

    def passes_after(change: Any) -> bool:
        def run() -> Any:
            out = right.run()
            change()
            return out

        return case.check(Bound(run), work, layout).within(case.tolerance)

    def another() -> None:
        states[free, 0, 0, 0] = 3.0

    assert passes_after(lambda: None)
    assert not passes_after(lambda: states[pages[1]].copy_(work.initial[1]))
    assert not passes_after(another)


def test_what_a_shape_counts_and_which_kinds_there_are() -> None:
    update = GatedDeltaShape("", 3, key_heads=2, heads=4, key_dim=8, value_dim=16)
    assert update.nbytes == 3 * (2 * 4 * 8 * 16 * 4 + 2 * (2 * 2 * 8 + 2 * 4 * 16))
    assert GatedDeltaShape("", 2, 10, heads=4, key_dim=8, value_dim=16).flops == 6 * 2 * 10 * 4 * 8 * 16
    for shapes in (SHAPES, GPU):
        assert {shape.case("state").kind for shape in shapes} == GATED_DELTA


RULE = """
import torch

def rule(q, k, v, g, beta, scale, state):
    group, out = v.shape[2] // q.shape[2], torch.zeros(v.shape, dtype=torch.float64)
    q, k = (x.double().repeat_interleave(group, 2) for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    state = state.double()
    for t in range(v.shape[1]):
        state = state * g[:, t].double().exp()[..., None, None]
        change = beta[:, t, :, None] * (v[:, t].double() - (state @ k[:, t, :, :, None])[..., 0])
        state = state + change[..., None] * k[:, t, :, None]
        out[:, t] = scale * (state @ q[:, t, :, :, None])[..., 0]
    return out.to(v.dtype), state.float()
"""
FILES = {
    "fla/ops/rule.py": RULE,
    "fla/ops/gated_delta_rule/chunk.py": """
from fla import __version__
from fla.ops.rule import rule
from packaging.version import Version
assert Version(__version__) >= Version("0")

def chunk_gated_delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
                           state_v_first):
    assert output_final_state and use_qk_l2norm_in_kernel and state_v_first and initial_state.is_contiguous()
    return rule(q, k, v, g, beta, scale, initial_state)
""",
    "vllm/third_party/flash_linear_attention/ops/rule.py": RULE,
    "vllm/third_party/flash_linear_attention/ops/chunk.py": """
from vllm.third_party.flash_linear_attention.ops.rule import rule
from vllm.triton_utils import tl, tldevice, triton
assert tldevice.exp is not None

def chunk_gated_delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel):
    assert output_final_state and use_qk_l2norm_in_kernel and initial_state.is_contiguous()
    return rule(q, k, v, g, beta, scale, initial_state)
""",
    "vllm/third_party/flash_linear_attention/ops/fused_recurrent.py": """
from vllm.third_party.flash_linear_attention.ops.rule import rule

def fused_recurrent_gated_delta_rule(q, k, v, g, beta, scale, initial_state, ssm_state_indices,
                                     use_qk_l2norm_in_kernel):
    assert use_qk_l2norm_in_kernel and (ssm_state_indices > 0).all()  # 0 means: skip
    pages = ssm_state_indices.long()
    out, initial_state[pages] = rule(q, k, v, g, beta, scale, initial_state[pages])
    return out, initial_state
""",
    "sglang/kernels/ops/attention/fla/rule.py": RULE,
    "sglang/kernels/ops/attention/fla/chunk.py": """
from sglang.kernels.ops.attention.fla.rule import rule
from sglang.srt.utils.common import torch_release
assert torch_release >= (2, 4)

def chunk_gated_delta_rule(q, k, v, g, beta, scale, initial_state, initial_state_indices, use_qk_l2norm_in_kernel):
    pages = initial_state_indices.long()
    out, initial_state[pages] = rule(q, k, v, g, beta, scale, initial_state[pages])
    return out, None, None
""",
    "sglang/kernels/ops/attention/fla/fused_recurrent.py": """
from sglang.kernels.ops.attention.fla.rule import rule

def fused_recurrent_gated_delta_rule_update(q, k, v, g, beta, scale, initial_state_source, initial_state_indices,
                                            use_qk_l2norm_in_kernel):
    pages = initial_state_indices.long()
    out, initial_state_source[pages] = rule(q, k, v, g, beta, scale, initial_state_source[pages])
    return out
""",
}
FILES["fla/ops/gated_delta_rule/fused_recurrent.py"] = FILES["fla/ops/gated_delta_rule/chunk.py"].replace(
    "def chunk_gated", "def fused_recurrent_gated"
)
"""Stand-ins for the peers' kernels: the same names and parameters, plain float64 torch behind them."""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["FLA", "VLLMGatedDelta", "SGLangGatedDelta"])
def test_peers_are_given_the_same_states(name: str, layout: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from pm_ops.bench import peer_gated_delta

    peer = getattr(peer_gated_delta, name)(write_files(tmp_path, FILES))
    assert peer.kinds == GATED_DELTA and "sha256" in peer.version()
    for case in CASES:
        work = case.build(CPU, True)
        work.states(layout).mul_(2.0)  # as if another kernel had run
        bound = case.bind(peer, work, layout)
        for _ in range(2):
            assert case.check(bound, work, layout).within(case.tolerance), case.name
        assert case.bind(PmOps(), work, PAGE_MAJOR).run().shape == bound.run().shape


def test_states_that_a_kernel_returns_are_scattered_in_its_time_on_pages_alone(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from pm_ops.bench.peer_gated_delta import FLA

    work = CASES[1].build(CPU, True)
    for layout in LAYOUTS:
        bound = FLA(write_files(tmp_path, FILES)).state(work, layout)
        bound.run()
        found = work.states(layout)[work.calls[layout].state_indices.long()]
        assert torch.equal(found, work.initial) == (layout == LAYER_MAJOR) == (bound.finish is not None)
