"""The operators over states and latent rows against vLLM's and SGLang's kernels, on contiguous copies of equal states.

Each case runs by our Triton kernel, by our CPU kernel and by theirs, Triton's in the interpreter. None had to be left
out; on a GPU, compiled, `pm-ops bench` compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_kernels import Load, load
from gated_delta_cases import prefill_case, update_case
from gated_delta_cases import states_of as delta_states_of
from kernels.mla_cases import mla_case
from state_cases import F16, F32, conv_prefill, conv_update, copied, ssm_prefill, ssm_update, states_of
from torch import Tensor

from pm_ops.kernels.conv import conv1d_prefill, conv1d_update
from pm_ops.kernels.gated_delta import gated_delta_update
from pm_ops.kernels.gated_delta_prefill import gated_delta_prefill
from pm_ops.kernels.mla import mla_attention
from pm_ops.kernels.selective_scan import selective_scan_prefill
from pm_ops.kernels.selective_update import selective_state_update
from pm_ops.ops.attention_reference import attention_reference

__all__ = ["load"]
pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs where there is no GPU"),
]
VLLM_MAMBA, SGLANG_MAMBA = "vllm.model_executor.layers.mamba.ops", "sglang.kernels.ops.mamba"
VLLM_DELTA, SGLANG_DELTA = "vllm.third_party.flash_linear_attention.ops", "sglang.kernels.ops.attention.fla"
LENS = [1, 3, 65, 2, 33]
CHUNK = 32  # of their scans

Kernel = Callable[[Load, Any, Tensor, Tensor], Tensor]
"""One of theirs: called with a case of ours, contiguous states and the pages' numbers among them; the results."""


def check(load: Load, case: Any, kernel: Callable[[Any], Tensor], theirs: Kernel, tolerance: float) -> None:
    """Results of all rows but skipped ones and padding, and states: ours by both kernels are as theirs.

    In front of the states are two more, which no page is: vLLM's page 0 is what a negative index is for us.
    """
    of = delta_states_of if hasattr(case, "value") else states_of
    pages = case.state_indices.long()
    before = of(case).nan_to_num()
    states = torch.cat((before[:2], before)).contiguous()
    negative = 0 if theirs.__name__.startswith("vllm") else -1
    out = theirs(load, case, states, torch.where(pages < 0, negative, pages + 2).int())
    live, written = rows_of(case), pages[first_pages(case) >= 0].flatten()
    written = written[written >= 0]
    assert torch.equal(states[:2], before[:2]) and not torch.equal(states[2:][written], before[written])
    for run in (kernel, on_cpu):
        ours = copied(case)
        close(run(ours)[live], out[live], tolerance)
        close(of(ours)[written], states[2:][written], tolerance)


def rows_of(case: Any) -> Tensor:
    """Which sequences of an update, or rows of a prefill, are not skipped."""
    live = first_pages(case) >= 0
    if not hasattr(case, "query_start"):
        return live
    total = (case.x if hasattr(case, "x") else case.value).shape[0]
    lens = case.query_start.diff()
    return torch.cat((live.repeat_interleave(lens), torch.zeros(total - int(lens.sum()), dtype=torch.bool)))


def first_pages(case: Any) -> Tensor:
    """The page that each sequence's state is read from."""
    pages: Tensor = case.state_indices
    if pages.dim() == 1:
        return pages
    return pages.gather(1, (case.num_accepted.long() - 1).clamp(min=0)[:, None])[:, 0]


def on_cpu(case: Any) -> Tensor:
    name = "".join(f"_{c.lower()}" if c.isupper() else c for c in type(case).__name__)[1:]
    result: Tensor = getattr(torch.ops.pm_ops, name).default(*(getattr(case, field.name) for field in fields(case)))
    return result


def close(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    assert ours.shape == theirs.shape and ours.numel()
    scale = max(float(theirs.abs().max()), 1.0)
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=tolerance * scale)


# Convolutions


def vllm_conv_update(load: Load, case: Any, states: Tensor, pages: Tensor) -> Tensor:
    return _conv_update(load(f"{VLLM_MAMBA}.causal_conv1d"), case, states, pages)


def sglang_conv_update(load: Load, case: Any, states: Tensor, pages: Tensor) -> Tensor:
    return _conv_update(load(f"{SGLANG_MAMBA}.causal_conv1d_triton"), case, states, pages)


def _conv_update(module: Any, case: Any, states: Tensor, pages: Tensor) -> Tensor:
    x = case.x.transpose(1, 2) if case.x.dim() == 3 else case.x
    silu = "silu" if case.silu else None
    out: Tensor = module.causal_conv1d_update(
        x.contiguous(), states, case.weight, case.bias, silu, conv_state_indices=pages
    )
    return out.transpose(1, 2) if case.x.dim() == 3 else out


@pytest.mark.parametrize("theirs", [vllm_conv_update, sglang_conv_update])
@pytest.mark.parametrize("options", [{}, {"width": 3, "bias": False}, {"width": 2, "silu": False}, {"dim": 24}])
def test_conv_update(load: Load, theirs: Kernel, options: dict[str, Any]) -> None:
    for tokens in (None, 3):
        check(load, conv_update(3, tokens, **options), conv1d_update, theirs, 1e-6)


def vllm_conv_prefill(load: Load, case: Any, states: Tensor, pages: Tensor) -> Tensor:
    block = 8  # tokens of a program
    lens = case.query_start.diff().tolist()
    which = torch.tensor([b for b, n in enumerate(lens) for _ in range(0, n, block)], dtype=torch.int32)
    offset = torch.tensor([i for n in lens for i in range(-(-n // block))], dtype=torch.int32)
    lists = dict(batch_ptr=which, token_chunk_offset_ptr=offset)
    numbers = dict(tot=len(which), mlist=which, mlist_len=len(which), offsetlist=offset, **lists)
    fn = load(f"{VLLM_MAMBA}.causal_conv1d").causal_conv1d_fn
    metadata = SimpleNamespace(nums_dict={block: numbers}, **lists)
    out: Tensor = fn(*_conv_prefill(case, states), case.query_start, pages, _initial(case), "silu", metadata=metadata)
    return out.t()


def sglang_conv_prefill(load: Load, case: Any, states: Tensor, pages: Tensor) -> Tensor:
    fn = load(f"{SGLANG_MAMBA}.causal_conv1d_triton").causal_conv1d_fn
    lens = case.query_start.diff().tolist()
    out: Tensor = fn(*_conv_prefill(case, states), case.query_start, lens, pages, _initial(case), "silu")
    return out.t()


def _conv_prefill(case: Any, states: Tensor) -> tuple[Any, ...]:
    return case.x.contiguous().t(), case.weight, case.bias, states


def _initial(case: Any) -> Tensor:
    known: Tensor = case.has_initial_state
    return torch.zeros(len(case.state_indices), dtype=torch.bool) if known is None else known


@pytest.mark.parametrize("theirs", [vllm_conv_prefill, sglang_conv_prefill])
@pytest.mark.parametrize("options", [{}, {"width": 3, "bias": False}, {"width": 2, "initial": False}])
def test_conv_prefill(load: Load, theirs: Kernel, options: dict[str, Any]) -> None:
    check(load, conv_prefill(LENS, **options), conv1d_prefill, theirs, 1e-6)


# Mamba-2


def vllm_selective_update(load: Load, case: Any, states: Tensor, pages: Tensor) -> Tensor:
    return _selective_update(load(f"{VLLM_MAMBA}.mamba_ssm"), case, states, pages)


def sglang_selective_update(load: Load, case: Any, states: Tensor, pages: Tensor) -> Tensor:
    return _selective_update(load(f"{SGLANG_MAMBA}.triton_ops.mamba_ssm"), case, states, pages)


def _selective_update(module: Any, case: Any, states: Tensor, pages: Tensor, **options: Tensor) -> Tensor:
    heads, dim, size = states.shape[1:]
    out = torch.empty_like(case.x, memory_format=torch.contiguous_format)
    each = (param[:, None].expand(heads, dim) for param in (case.D, case.dt_bias))
    module.selective_state_update(
        states, case.x, case.dt[..., None].expand(-1, -1, dim), case.A[:, None, None].expand(heads, dim, size), case.B,
        case.C, **dict(zip(("D", "dt_bias"), each, strict=True)), z=case.z, dt_softplus=True,
        state_batch_indices=pages, out=out, **options,
    )  # fmt: skip
    return out


def vllm_speculative_update(load: Load, case: Any, states: Tensor, pages: Tensor) -> Tensor:
    """Tokens one behind the other; the state after each one goes to the page of its own."""
    rows = {name: getattr(case, name).flatten(0, 1) for name in ("x", "dt", "B", "C", "z")}
    options = dict(num_accepted_tokens=case.num_accepted, cu_seqlens=_starts(pages), dst_state_batch_indices=pages)
    out = _selective_update(load(f"{VLLM_MAMBA}.mamba_ssm"), replace(case, **rows), states, pages, **options)
    return out.view(case.x.shape)


def _starts(pages: Tensor) -> Tensor:
    sequences, tokens = pages.shape
    return torch.arange(sequences + 1, dtype=torch.int32) * tokens


WITHOUT_LIMITS: dict[str, Any] = dict(dt_min=0.0, dt_max=None)


@pytest.mark.parametrize("theirs", [vllm_selective_update, sglang_selective_update])
@pytest.mark.parametrize("options", [{}, {"gate": False, "heads": (3, 1), "dims": (64, 16)}])
def test_selective_update(load: Load, theirs: Kernel, options: dict[str, Any]) -> None:
    check(load, ssm_update(3, **options, **WITHOUT_LIMITS), selective_state_update, theirs, 2e-6)


def test_speculative_selective_update(load: Load) -> None:
    case = ssm_update(3, 3, per_token=True, **WITHOUT_LIMITS)
    check(load, case, selective_state_update, vllm_speculative_update, 2e-6)


def vllm_selective_prefill(load: Load, case: Any, states: Tensor, pages: Tensor) -> Tensor:
    total, lens = int(case.query_start[-1]), case.query_start.diff().tolist()
    chunks = [(b, min(CHUNK, n - i)) for b, n in enumerate(lens) for i in range(0, n, CHUNK)]
    ends = torch.tensor([0, *(n for _, n in chunks)]).cumsum(0).int()
    which = torch.tensor([b for b, _ in chunks], dtype=torch.int32)
    last = torch.tensor([max(i for i, (other, _) in enumerate(chunks) if other == b) for b in range(len(lens))])
    rows = (case.x[:total], case.dt[:total], case.A, case.B[:total], case.C[:total])
    z = None if case.z is None else case.z[:total].contiguous()
    out = torch.zeros(case.x.shape, dtype=case.x.dtype)
    new = load(f"{VLLM_MAMBA}.ssd_combined").mamba_chunk_scan_combined_varlen(
        *(x.contiguous() for x in rows), CHUNK, case.query_start, ends, last.int(), which, out[:total], D=case.D, z=z,
        dt_bias=case.dt_bias, initial_states=_first_states(case, states, pages), dt_softplus=True,
        dt_limit=(case.dt_min, case.dt_max), state_dtype=states.dtype,
    )  # fmt: skip
    _put(new, states, pages)
    return out


def sglang_selective_prefill(load: Load, case: Any, states: Tensor, pages: Tensor) -> Tensor:
    """Each sequence a call of its own, as a batch of one: of several it cannot begin each with a state of its own."""
    out, first, new = torch.zeros(case.x.shape, dtype=case.x.dtype), _first_states(case, states, pages), []
    scan = load(f"{SGLANG_MAMBA}.triton_ops.ssd_combined").mamba_chunk_scan_combined
    for b, (start, stop) in enumerate(pairwise(case.query_start.tolist())):
        x, dt, B, C = (rows[None, start:stop].contiguous() for rows in (case.x, case.dt, case.B, case.C))
        z = None if case.z is None else case.z[None, start:stop].contiguous()
        chunks = torch.arange(-(-(stop - start) // CHUNK), dtype=torch.int32)
        state = scan(
            x, dt, case.A, B, C, CHUNK, D=case.D, z=z, dt_bias=case.dt_bias, initial_states=first[b : b + 1],
            seq_idx=torch.zeros(1, stop - start, dtype=torch.int32), chunk_indices=chunks,
            chunk_offsets=torch.zeros_like(chunks), dt_softplus=True, dt_limit=(case.dt_min, case.dt_max),
            out=(part := torch.empty_like(x)), return_final_states=True, state_dtype=states.dtype,
        )  # fmt: skip
        out[start:stop] = part[0]
        new.append(state)
    _put(torch.cat(new), states, pages)
    return out


def _first_states(case: Any, states: Tensor, pages: Tensor) -> Tensor:
    known = _initial(case) & (case.state_indices >= 0)
    return torch.where(known.view(-1, 1, 1, 1), states[pages.long().clamp(min=0)], 0.0).contiguous()


def _put(new: Tensor, states: Tensor, pages: Tensor) -> None:
    """As an engine does with states that a kernel returns."""
    states[pages[pages > 0].long()] = new[pages > 0].to(states.dtype)


@pytest.mark.parametrize("theirs", [vllm_selective_prefill, sglang_selective_prefill])
@pytest.mark.parametrize("options", [{}, {"gate": False, "initial": False, "heads": (2, 2), "dims": (32, 16)}])
def test_selective_prefill(load: Load, theirs: Kernel, options: dict[str, Any]) -> None:
    check(load, ssm_prefill(LENS, **{"heads": (2, 1)} | options), selective_scan_prefill, theirs, 1e-4)


# The gated delta rule


def vllm_delta_update(load: Load, case: Any, states: Tensor, pages: Tensor) -> Tensor:
    kernel = load(f"{VLLM_DELTA}.fused_recurrent").fused_recurrent_gated_delta_rule
    options = dict(initial_state=states, ssm_state_indices=pages, use_qk_l2norm_in_kernel=case.l2_norm)
    rows = _delta(case)
    if pages.dim() == 2:
        rows = {name: x.flatten(0, 1)[None] for name, x in rows.items()}
        options |= dict(num_accepted_tokens=case.num_accepted, cu_seqlens=_starts(pages))
    return _by_token(case, kernel(**rows, scale=case.scale, **options)[0])


def sglang_delta_update(load: Load, case: Any, states: Tensor, pages: Tensor) -> Tensor:
    kernel = load(f"{SGLANG_DELTA}.fused_recurrent").fused_recurrent_gated_delta_rule_update
    options = dict(initial_state_source=states, initial_state_indices=pages, use_qk_l2norm_in_kernel=case.l2_norm)
    return _by_token(case, kernel(**_delta(case), scale=case.scale, **options))


def vllm_raw_delta_update(load: Load, case: Any, states: Tensor, pages: Tensor) -> Tensor:
    kernel = load(f"{VLLM_DELTA}.fused_sigmoid_gating").fused_sigmoid_gating_delta_rule_update
    options = dict(initial_state=states, ssm_state_indices=pages, use_qk_l2norm_in_kernel=case.l2_norm)
    return _by_token(case, kernel(**_raw_delta(case), scale=case.scale, **options)[0])


def sglang_raw_delta_update(load: Load, case: Any, states: Tensor, pages: Tensor) -> Tensor:
    kernel = load(f"{SGLANG_DELTA}.fused_sigmoid_gating_recurrent").fused_sigmoid_gating_delta_rule_update
    options = dict(initial_state_source=states, initial_state_indices=pages, use_qk_l2norm_in_kernel=case.l2_norm)
    return _by_token(
        case, kernel(**_raw_delta(case), softplus_beta=1.0, softplus_threshold=20.0, scale=case.scale, **options)
    )


def _delta(case: Any) -> dict[str, Tensor]:
    """Rows ``[N, T, heads, dim]``."""
    rows = {"q": case.query, "k": case.key, "v": case.value, "g": case.g, "beta": case.beta}
    return {name: (x if case.query.dim() == 4 else x[:, None]).nan_to_num().contiguous() for name, x in rows.items()}


def _raw_delta(case: Any) -> dict[str, Tensor]:
    rows = _delta(case)
    return rows | {"a": rows.pop("g"), "b": rows.pop("beta"), "A_log": case.a_log, "dt_bias": case.dt_bias}


def _by_token(case: Any, out: Tensor) -> Tensor:
    return out.view(case.value.shape)


@pytest.mark.parametrize("theirs", [vllm_delta_update, sglang_delta_update])
@pytest.mark.parametrize("options", [{}, {"l2_norm": False, "heads": (3, 1), "dims": (40, 16)}])
def test_gated_delta_update(load: Load, theirs: Kernel, options: dict[str, Any]) -> None:
    check(load, update_case(3, **options), gated_delta_update, theirs, 2e-6)


def test_speculative_gated_delta_update(load: Load) -> None:
    check(load, update_case(3, 3, each=True), gated_delta_update, vllm_delta_update, 2e-6)


@pytest.mark.parametrize("theirs", [vllm_raw_delta_update, sglang_raw_delta_update])
def test_gated_delta_update_with_the_models_own_gates(load: Load, theirs: Kernel) -> None:
    check(load, update_case(3, raw=True), gated_delta_update, theirs, 2e-6)


def vllm_delta_prefill(load: Load, case: Any, states: Tensor, pages: Tensor) -> Tensor:
    kernel = load(f"{VLLM_DELTA}.chunk").chunk_gated_delta_rule
    rows, first = _delta_prefill(case), _first_states(case, states, pages)
    out, new = kernel(**rows, initial_state=first, output_final_state=True, cu_seqlens=case.query_start)
    _put(new, states, pages)
    return _padded(case, out)


def sglang_delta_prefill(load: Load, case: Any, states: Tensor, pages: Tensor) -> Tensor:
    """It reads and writes states by their index, and has no flag for those that begin with zeros: these are zeroed."""
    states[pages[~_initial(case) & (pages > 0)].long()] = 0
    kernel = load(f"{SGLANG_DELTA}.chunk").chunk_gated_delta_rule
    options = dict(initial_state=states, initial_state_indices=pages, cu_seqlens=case.query_start)
    return _padded(case, kernel(**_delta_prefill(case), **options)[0])


def _delta_prefill(case: Any) -> dict[str, Any]:
    rows = {"q": case.query, "k": case.key, "v": case.value, "g": case.g, "beta": case.beta}
    total = int(case.query_start[-1])
    batched = {name: x[None, :total].nan_to_num().contiguous() for name, x in rows.items()}
    return batched | {"scale": case.scale, "use_qk_l2norm_in_kernel": case.l2_norm}


def _padded(case: Any, out: Tensor) -> Tensor:
    return torch.cat((out[0], torch.zeros(len(case.value) - out.shape[1], *out.shape[2:], dtype=out.dtype)))


@pytest.mark.parametrize("theirs", [vllm_delta_prefill, sglang_delta_prefill])
@pytest.mark.parametrize("options", [{}, {"l2_norm": False, "initial": False, "heads": (2, 2), "dims": (32, 16)}])
def test_gated_delta_prefill(load: Load, theirs: Kernel, options: dict[str, Any]) -> None:
    """Of 16-bit rows, which theirs ask for. All round factors of products to these, though not the same factors."""
    case = prefill_case(LENS, dtypes=(F16, F16, F16, F32, F16), **{"dims": (16, 16)} | options)
    check(load, case, gated_delta_prefill, theirs, 4e-3)


# Latent attention


def vllm_mla(load: Load, case: Any, cache: Tensor) -> Tensor:
    (batch, heads, _), splits = case.query.shape, 3
    out = torch.empty(batch, heads, case.value_dim)
    logits = torch.empty(batch, heads, splits, case.value_dim + 1)
    load("vllm.v1.attention.ops.triton_decode_attention").decode_attention_fwd(
        case.query, cache, cache[..., : case.value_dim], out, torch.empty(batch, heads), case.page_table,
        case.seq_lens, logits, splits, case.softmax_scale, case.page_size, is_mla=True,
    )  # fmt: skip
    return out


def sglang_mla(load: Load, case: Any, cache: Tensor) -> Tensor:
    """By slots of tokens, one list for all sequences."""
    (batch, heads, _), splits, lens = case.query.shape, 3, case.seq_lens.tolist()
    slots = [int(case.page_table[b, j // case.page_size]) * case.page_size + j % case.page_size
             for b, n in enumerate(lens) for j in range(n)]  # fmt: skip
    starts = torch.tensor([sum(lens[:b]) for b in range(batch + 1)], dtype=torch.int32)
    out, rows = torch.empty(batch, heads, case.value_dim), cache.flatten(0, 1)
    logits = torch.empty(batch, heads, splits, case.value_dim)
    load("sglang.kernels.ops.attention.decode_attention").decode_attention_fwd(
        case.query, rows, rows[..., : case.value_dim], out, starts, torch.tensor(slots, dtype=torch.int32), logits,
        torch.empty(batch, heads, splits), torch.full((batch,), splits, dtype=torch.int32), splits,
        case.softmax_scale, 1.0, 1.0, has_mla=True,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("theirs", [vllm_mla, sglang_mla])
@pytest.mark.parametrize("dims", [(256, 32), (512, 64)])
def test_latent_decode(load: Load, theirs: Callable[[Load, Any, Tensor], Tensor], dims: tuple[int, int]) -> None:
    case = mla_case("cpu", [13, 1, 70], 1, dims=dims, page_size=16, heads=3)
    out = theirs(load, case, case.latent_view().nan_to_num().contiguous())
    close(mla_attention(case)[0], out, 2e-6)
    close(attention_reference(replace(case, impl="reference").attention())[0], out, 2e-6)
