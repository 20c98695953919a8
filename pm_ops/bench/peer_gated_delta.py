"""Other kernels for the gated delta rule: flash-linear-attention's, and those that vLLM and SGLang have made of them.

Where a kernel takes states as one contiguous tensor, a state a sequence, and returns new ones, it is given just that on
layer-major memory. On page-major memory, as in an engine that calls it, states are gathered before and scattered after
it, in the time measured.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..ops.gated_delta import GatedDeltaPrefill
from .gated_delta_cases import GatedDeltaWork
from .implementation import GATED_DELTA, Bound, Implementation
from .loading import import_module, version
from .memory import LAYER_MAJOR

_SCOPE = "these are its kernels for the gated delta rule"


class FLA(Implementation):
    """``chunk_gated_delta_rule`` and ``fused_recurrent_gated_delta_rule``, on contiguous states [value, key]."""

    name = "fla"
    kinds = GATED_DELTA
    scope = _SCOPE

    def __init__(self, folder: Path | None) -> None:
        chunk, recurrent = (
            import_module(folder, f"fla.ops.gated_delta_rule.{module}") for module in ("chunk", "fused_recurrent")
        )
        self._chunk, self._recurrent = chunk.chunk_gated_delta_rule, recurrent.fused_recurrent_gated_delta_rule
        self._version = version(folder, "fla", chunk, recurrent)

    def version(self) -> str:
        """Release or digest."""
        return self._version

    def state(self, work: GatedDeltaWork, layout: str) -> Bound:  # type: ignore[override]
        """All sequences as a batch of equally long ones, which spares it lists of chunks."""
        kernel = self._chunk if isinstance(work.call(layout), GatedDeltaPrefill) else self._recurrent
        options = _options(work, layout) | dict(state_v_first=True, output_final_state=True)
        return _on_contiguous(work, layout, lambda initial: kernel(initial_state=initial, **options))


class VLLMGatedDelta(Implementation):
    """Its update takes pages by index and stride; its prefill is given contiguous states, as its layer does it."""

    name = "vllm_gated_delta"
    kinds = GATED_DELTA
    scope = _SCOPE

    def __init__(self, folder: Path | None) -> None:
        ops = "vllm.third_party.flash_linear_attention.ops"
        chunk, recurrent = (import_module(folder, f"{ops}.{module}") for module in ("chunk", "fused_recurrent"))
        self._chunk, self._recurrent = chunk.chunk_gated_delta_rule, recurrent.fused_recurrent_gated_delta_rule
        self._version = version(folder, "vllm", chunk, recurrent)

    def version(self) -> str:
        """Release or digest."""
        return self._version

    def state(self, work: GatedDeltaWork, layout: str) -> Bound:  # type: ignore[override]
        """The prefill as a batch of equally long sequences."""
        call, options = work.call(layout), _options(work, layout)
        if isinstance(call, GatedDeltaPrefill):
            options |= dict(output_final_state=True)
            return _on_contiguous(work, layout, lambda initial: self._chunk(initial_state=initial, **options))
        options |= dict(initial_state=work.states(layout), ssm_state_indices=call.state_indices)
        return Bound(lambda: self._recurrent(**options)[0].flatten(0, 1))


class SGLangGatedDelta(Implementation):
    """Both write new states into the tensor they are given, at an index; of one that is not contiguous their wrappers
    make a copy first, in which what they write is lost."""

    name = "sglang_gated_delta"
    kinds = GATED_DELTA
    scope = _SCOPE

    def __init__(self, folder: Path | None) -> None:
        ops = "sglang.kernels.ops.attention.fla"
        chunk, recurrent = (import_module(folder, f"{ops}.{module}") for module in ("chunk", "fused_recurrent"))
        self._chunk, self._recurrent = chunk.chunk_gated_delta_rule, recurrent.fused_recurrent_gated_delta_rule_update
        self._version = version(folder, "sglang", chunk, recurrent)

    def version(self) -> str:
        """Release or digest."""
        return self._version

    def state(self, work: GatedDeltaWork, layout: str) -> Bound:  # type: ignore[override]
        """The prefill as a batch of equally long sequences."""
        call, options = work.call(layout), _options(work, layout)
        states, pages = work.states(layout), call.state_indices
        prefills = isinstance(call, GatedDeltaPrefill)

        def run(states: Tensor, pages: Tensor) -> Tensor:
            if prefills:
                out = self._chunk(initial_state=states, initial_state_indices=pages, **options)[0]
            else:
                out = self._recurrent(initial_state_source=states, initial_state_indices=pages, **options)
            return out.flatten(0, 1)

        if layout == LAYER_MAJOR:
            return Bound(lambda: run(states, pages))
        rows, numbers = pages.long(), torch.arange(len(pages), dtype=pages.dtype, device=pages.device)

        def gathered() -> Tensor:
            contiguous = states[rows]
            out = run(contiguous, numbers)
            states[rows] = contiguous
            return out

        return Bound(gathered)


def _options(work: GatedDeltaWork, layout: str) -> dict[str, Any]:
    """Rows ``[batch, tokens, heads, dim]`` and what all of these take by the same names.

    Some read rows as if they were contiguous: they are made so here, not in the time measured.
    """
    call = work.call(layout)
    rows = {"q": call.query, "k": call.key, "v": call.value, "g": call.g, "beta": call.beta}
    batched = {name: x.unflatten(0, (len(call.state_indices), -1)).contiguous() for name, x in rows.items()}
    return batched | {"scale": call.scale, "use_qk_l2norm_in_kernel": True}


def _on_contiguous(work: GatedDeltaWork, layout: str, kernel: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Bound:
    """A kernel that takes initial states and returns the last ones.

    Contiguous ones are the case's own: those of the pool are as the calls before, of other kernels, left them.
    """
    states, pages = work.states(layout), work.call(layout).state_indices.long()
    if layout != LAYER_MAJOR:

        def gathered() -> Tensor:
            out, last = kernel(states[pages])
            states[pages] = last.to(states.dtype)
            return out.flatten(0, 1)

        return Bound(gathered)
    initial, found = work.initial.clone(), [work.initial]

    def run() -> Tensor:
        out, found[0] = kernel(initial)
        return out.flatten(0, 1)

    def finish() -> None:
        states[pages] = found[0].to(states.dtype)

    return Bound(run, finish=finish)
