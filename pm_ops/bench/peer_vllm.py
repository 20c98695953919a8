"""vLLM's Triton kernels: unified attention, and reshape_and_cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .implementation import ATTENTION, STORE, Bound, Implementation, Unsupported
from .loading import import_module, version
from .memory import Memory
from .work import AttentionWork, StoreWork

_OPS = "vllm.v1.attention.ops"
_SEGMENTS = 16  # parts of the KV axis, and the grid up to which it is split, as its backend allocates for
_GRID = 128


class VLLM(Implementation):
    """One kernel for every batch; it splits the KV axis where a decode batch is small."""

    name = "vllm"
    kinds = ATTENTION | STORE
    scope = "its page copies and its rotation are C++ and not among its Triton kernels"

    def __init__(self, folder: Path | None) -> None:
        module = import_module(folder, f"{_OPS}.triton_unified_attention")
        unequal = import_module(folder, f"{_OPS}.triton_unified_attention_diffkv")
        store = import_module(folder, f"{_OPS}.triton_reshape_and_cache_flash")
        self._attend = module.unified_attention
        self._attend_unequal = unequal.unified_attention_diffkv
        self._store = store.triton_reshape_and_cache_flash
        self._modes = import_module(folder, "vllm.v1.kv_cache_interface").KVQuantMode
        self._version = version(folder, "vllm", module, unequal, store)

    def version(self) -> str:
        """Release or digest."""
        return self._version

    def attention(self, work: AttentionWork, memory: Memory) -> Bound:
        """``unified_attention``, with the workspaces that vLLM's backend gives it."""
        s, query = work.shape, work.query
        if s.head_dim != s.value_dim and s.kv_dtype != s.dtype:
            raise Unsupported("its kernel for unequal K and V dims takes no quantised cache")
        out = query.new_empty(s.tokens, s.q_heads, s.value_dim)
        window = (s.window - 1, 0) if s.window else (-1, -1)
        split = self._workspaces(s.q_heads, s.kv_heads, s.value_dim, query.device)
        options: dict[str, Any] = dict(
            cu_seqlens_q=work.query_start,
            seqused_k=work.seq_lens,
            max_seqlen_q=max(s.query_lens),
            softmax_scale=s.head_dim**-0.5,
            causal=True,
            window_size=window,
            block_table=work.page_table,
            softcap=0.0,
            sinks=work.sinks,
        )
        kernel = self._attend_unequal if s.head_dim != s.value_dim else self._attend
        if s.head_dim == s.value_dim:
            options |= self._for_equal_dims(work)

        def run() -> Tensor:
            kernel(query, memory.key, memory.value, out, **options, **split)
            return out

        return Bound(run, out)

    def _for_equal_dims(self, work: AttentionWork) -> dict[str, Any]:
        """What only the kernel for equal K and V dims takes."""
        s = work.shape
        quantised = s.kv_dtype != s.dtype
        scales = [torch.tensor([scale], device=work.query.device) if quantised else None for scale in s.scales]
        mode = self._modes.FP8_PER_TENSOR if quantised else self._modes.NONE
        lens = dict(max_seqlen_k=max(s.seq_lens))
        return dict(q_descale=None, k_descale=scales[0], v_descale=scales[1], kv_quant_mode=mode) | lens

    @staticmethod
    def _workspaces(q_heads: int, kv_heads: int, dim: int, device: torch.device) -> dict[str, Any]:
        most = max(_GRID // kv_heads, 1)
        padded = 1 << (dim - 1).bit_length()
        parts = (most, q_heads, _SEGMENTS)
        return dict(
            seq_threshold_3D=most,
            num_par_softmax_segments=_SEGMENTS,
            softmax_segm_output=torch.empty(*parts, padded, device=device),
            softmax_segm_max=torch.empty(parts, device=device),
            softmax_segm_expsum=torch.empty(parts, device=device),
        )

    def store(self, work: StoreWork, memory: Memory) -> Bound:
        """``triton_reshape_and_cache_flash``."""
        one = torch.ones((), device=work.key.device)
        args = (work.key, work.value, memory.key, memory.value, work.slots, "auto", one, one)
        return Bound(lambda: self._store(*args))
