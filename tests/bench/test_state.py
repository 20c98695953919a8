"""The suite of states: ours passes its checks, what is subtly wrong does not, and vLLM's kernels get what they ask."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.fakes import CPU, write_files

from pm_ops.bench.implementation import STATE, Bound
from pm_ops.bench.memory import LAYOUTS, PAGE_MAJOR
from pm_ops.bench.ours import PmOps, snake
from pm_ops.bench.state_cases import CPU as SHAPES
from pm_ops.bench.state_cases import GPU, ConvShape, MambaShape
from pm_ops.bench.suites import cases

CASES = list(cases("state", CPU, False))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ours_passes_every_check_twice(case: Any, layout: str) -> None:
    """Twice, for a check must leave the data as it found it."""
    work = case.build(CPU, True)
    bound = case.bind(PmOps(), work, layout)
    for _ in range(2):
        assert case.check(bound, work, layout).within(case.tolerance)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_wrong_output_a_wrong_state_and_another_byte_are_found(case: Any, layout: str) -> None:
    def passes(change: Callable[[Any, torch.Tensor], object]) -> bool:
        work = case.build(CPU, True)
        right = case.bind(PmOps(), work, layout)

        def run() -> torch.Tensor:
            out = right.run()
            change(work, out)
            return out

        return case.check(Bound(run), work, layout).within(case.tolerance)

    def unused(work: Any) -> int:
        return next(i for i in range(100) if i not in work.calls[layout].state_indices.tolist())

    assert passes(lambda work, out: None)
    assert not passes(lambda work, out: out.flatten().narrow(0, 0, 1).add_(1))
    assert not passes(
        lambda work, out: work.states(layout)[int(work.calls[layout].state_indices[-1])].flatten()[0].add_(1)
    )
    assert not passes(lambda work, out: work.states(layout)[unused(work)].view(torch.int32).bitwise_not_())


def test_every_operator_has_a_case_on_both_devices_and_its_cost_is_counted() -> None:
    for shapes in (GPU, SHAPES):
        assert {shape.case("state").kind for shape in shapes} == STATE
    update = MambaShape("", 3, heads=4, groups=2, head_dim=8, state_dim=16, dtype=torch.float16)
    assert update.nbytes == 3 * (2 * 4 * 8 * 16 * 4 + 2 * (2 * 4 * 8 + 4 + 2 * 2 * 16))
    assert MambaShape("", 2, 10, heads=4, head_dim=8, state_dim=16).flops == 4 * 2 * 10 * 4 * 8 * 16
    assert ConvShape("", 3, dim=5).nbytes == 3 * 5 * (1 + 1 + 3 + 3) * 2
    assert ConvShape("", 3, 7, dim=5).nbytes == 3 * 5 * (7 + 7 + 3) * 2
    assert snake("SelectiveScanPrefill") == "selective_scan_prefill" and snake("Conv1dUpdate") == "conv1d_update"


FILES = {
    "mamba_ssm.py": """
def selective_state_update(state, x, dt, A, B, C, D, dt_bias, z=None, dt_softplus=False, state_batch_indices=None,
                           null_block_id=0, out=None):
    assert dt_softplus and not (state_batch_indices == null_block_id).any()
    assert dt.shape == x.shape and A.shape == state.shape[1:] and dt.stride(-1) == A.stride(-1) == 0
    each = x.shape[1] // B.shape[1]
    B, C = (rows.double().repeat_interleave(each, 1) for rows in (B, C))
    step = torch.nn.functional.softplus(dt.double() + dt_bias.double())[..., None]
    new = state[state_batch_indices.long()].double() * torch.exp(step * A.double()) + step * x.double()[..., None] * B[
        :, :, None]
    state[state_batch_indices.long()] = new.to(state.dtype)
    out.copy_((new * C[:, :, None]).sum(-1) + D.double() * x.double())
""",
    "causal_conv1d.py": """
def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None, conv_state_indices=None, out=None):
    window = torch.cat((conv_state[conv_state_indices.long()], x[:, :, None]), 2)
    conv_state[conv_state_indices.long()] = window[:, :, 1:]
    out.copy_(torch.nn.functional.silu((window * weight).sum(2) + bias))
    return out


def causal_conv1d_fn(x, weight, bias, conv_states, query_start_loc, cache_indices=None, has_initial_state=None,
                     activation="silu", metadata=None):
    assert x.stride(0) == 1 and not has_initial_state.any() and activation == "silu"
    numbers, sizes = metadata.nums_dict[8], [-(-n // 8) for n in query_start_loc.diff().tolist()]
    assert numbers["tot"] == sum(sizes) and numbers["batch_ptr"].tolist() == [b for b, n in enumerate(sizes)
                                                                            for _ in range(n)]
    assert metadata.token_chunk_offset_ptr.tolist() == [i for n in sizes for i in range(n)]
    out = torch.empty_like(x)
    for b, page in enumerate(cache_indices.tolist()):
        rows = slice(*query_start_loc[b : b + 2].tolist())
        window = torch.nn.functional.pad(x[:, rows], (weight.shape[1] - 1, 0))
        out[:, rows] = torch.nn.functional.silu((window.unfold(1, weight.shape[1], 1) * weight[:, None]).sum(2)
                                                + bias[:, None])
        conv_states[page] = window[:, 1 - weight.shape[1] :]
    return out
""",
    "ssd_combined.py": """
def mamba_chunk_scan_combined_varlen(x, dt, A, B, C, chunk_size, cu_seqlens, cu_chunk_seqlens, last_chunk_indices,
                                     seq_idx, out, D=None, dt_bias=None, dt_softplus=False, state_dtype=None):
    assert dt_softplus and cu_chunk_seqlens[-1] == len(x) and len(seq_idx) == len(cu_chunk_seqlens) - 1
    assert (cu_chunk_seqlens.diff() <= chunk_size).all()
    assert torch.equal(cu_chunk_seqlens[last_chunk_indices.long() + 1], cu_seqlens[1:])
    each, states = x.shape[1] // B.shape[1], []
    B, C = (rows.double().repeat_interleave(each, 1) for rows in (B, C))
    step = torch.nn.functional.softplus(dt.double() + dt_bias.double())
    for b in range(len(cu_seqlens) - 1):
        state = torch.zeros(*x.shape[1:], B.shape[2], dtype=torch.float64)
        for t in range(cu_seqlens[b], cu_seqlens[b + 1]):
            state = state * torch.exp(step[t] * A.double())[:, None, None]
            state = state + (step[t][:, None] * x[t].double())[..., None] * B[t][:, None]
            out[t] = (state * C[t][:, None]).sum(-1) + D.double()[:, None] * x[t]
        states.append(state.to(state_dtype))
    return torch.stack(states)
""",
}
"""Stand-ins for vLLM's kernels: the same names and parameters, plain float64 torch behind them."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_vllms_kernels_are_given_the_same_states(layout: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from pm_ops.bench.peer_vllm_mamba import VLLMMamba

    ops = "vllm/model_executor/layers/mamba/ops/"
    peer = VLLMMamba(write_files(tmp_path, {ops + name: f"import torch\n{text}" for name, text in FILES.items()}))
    assert peer.kinds == STATE and "sha256" in peer.version()
    for case in (case for case in CASES if case.kind in STATE):
        work = case.build(CPU, True)
        bound = case.bind(peer, work, layout)
        for _ in range(2):
            assert case.check(bound, work, layout).within(case.tolerance), case.name
        assert case.bind(PmOps(), work, PAGE_MAJOR).run().shape == bound.run().shape
