"""Latent attention of the peers: FlashMLA out of vLLM's wheel, vLLM's Triton kernels, and FlashInfer's wrapper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .implementation import LATENT, Bound, Implementation, Missing, Unsupported
from .loading import import_module, version, vllm_library
from .memory import Memory
from .peer_flashinfer import FlashInferPeer
from .work import AttentionWork

_LIBRARY = "_flashmla_C.abi3.so"
_SCOPE = "only its latent attention is measured under this name"


class FlashMLA(Implementation):
    """``dense_decode_fwd``; it plans its splits in its first call, as vLLM lets it once a step."""

    name = "flashmla"
    kinds = LATENT
    scope = "it is a kernel for latent attention"
    compiles = False

    def __init__(self, folder: Path | None) -> None:
        library, self._version = vllm_library(folder, _LIBRARY)
        if torch.cuda.get_device_capability()[0] != 9:
            raise Missing("its dense kernel is for compute capability 9.x")
        try:
            torch.ops.load_library(str(library))
        except (OSError, RuntimeError) as error:
            raise Missing(f"{_LIBRARY} does not load with torch {torch.__version__}: {error}") from error

    def version(self) -> str:
        """vLLM's release, or the library's digest."""
        return self._version

    def latent(self, work: AttentionWork, memory: Memory) -> Bound:
        """Sequences of one length of queries, pages of 64."""
        s = work.shape
        if memory.page_size != 64:
            raise Unsupported("its kernel takes pages of 64 tokens")
        query = _by_sequence(work).contiguous()
        plan: list[Tensor | None] = [None, None]

        def run() -> Tensor:
            out, _, *plan[:] = torch.ops._flashmla_C.dense_decode_fwd(
                query, memory.key, s.value_dim, work.seq_lens, work.page_table, s.head_dim**-0.5, True, *plan, None
            )
            return out.flatten(0, 1)

        return Bound(run)


class VLLMLatent(Implementation):
    """vLLM's Triton kernels for decode: parts of the KV axis, and joining them."""

    name = "vllm_mla"
    kinds = LATENT
    scope = _SCOPE

    def __init__(self, folder: Path | None) -> None:
        module = import_module(folder, "vllm.v1.attention.ops.triton_decode_attention")
        self._attend = module.decode_attention_fwd
        self._version = version(folder, "vllm", module)

    def version(self) -> str:
        """Release or digest."""
        return self._version

    def latent(self, work: AttentionWork, memory: Memory) -> Bound:
        """One query a sequence, and as many parts as its backend takes."""
        s, query = work.shape, work.query
        if max(s.query_lens) > 1:
            raise Unsupported("its latent kernel is for decode")
        batch = len(s.seq_lens)
        # Its backend's rule: parts of about 512 keys, a power of two, but not more than two a multiprocessor
        most = 2 * torch.cuda.get_device_properties(query.device).multi_processor_count
        parts = min(1 << (max(max(s.seq_lens) // 512, 1) - 1).bit_length(), most)
        out = query.new_empty(batch, s.q_heads, s.value_dim)
        lse = query.new_empty(batch, s.q_heads)
        logits = torch.empty(batch, s.q_heads, parts, s.value_dim + 1, device=query.device)
        one = torch.ones((), device=query.device)  # scales that it would otherwise make in the call, unfit for a graph

        def run() -> Tensor:
            self._attend(
                query, memory.key, memory.value, out, lse, work.page_table, work.seq_lens, logits, parts,
                s.head_dim**-0.5, memory.page_size, k_scale=one, v_scale=one, is_mla=True,
            )  # fmt: skip
            return out

        return Bound(run, out)


class FlashInferLatent(FlashInferPeer):
    """``BatchMLAPagedAttentionWrapper``, planned ahead of the call."""

    name = "flashinfer_mla"
    kinds = LATENT
    scope = _SCOPE

    def latent(self, work: AttentionWork, memory: Memory) -> Bound:
        """Plan, and bind ``run``; the latent and the rest of the key are slices of one row."""
        s, device = work.shape, work.query.device
        pages = [-(-n // memory.page_size) for n in s.seq_lens]
        starts = torch.tensor([sum(pages[:b]) for b in range(len(pages) + 1)], dtype=torch.int32, device=device)
        ids = torch.cat([work.page_table[b, :count] for b, count in enumerate(pages)])
        wrapper = self._module.mla.BatchMLAPagedAttentionWrapper(self.workspace(device))
        dims = (s.value_dim, s.head_dim - s.value_dim)
        wrapper.plan(
            work.query_start, starts, ids, work.seq_lens, s.q_heads, *dims, memory.page_size, True,
            s.head_dim**-0.5, s.dtype, s.kv_dtype,
        )  # fmt: skip
        cache = memory.key[:, :, 0].split(dims, -1)
        query = [part.contiguous() for part in work.query.split(dims, -1)]
        out = work.query.new_empty(s.tokens, s.q_heads, s.value_dim)
        return Bound(lambda: wrapper.run(*query, *cache, out=out), out)


def _by_sequence(work: AttentionWork) -> Any:
    """Queries as ``[batch, n, heads, dim]``."""
    s = work.shape
    if len(set(s.query_lens)) > 1:
        raise Unsupported("its kernel takes equally many queries of every sequence")
    return work.query.unflatten(0, (len(s.query_lens), -1))
