"""SGLang's attention backend ``pm_ops`` over pools of latents (MLA).

Models attend in one of two forms. The absorbed one reads latents: all decode steps, and prompts with a prefix. Prompts
without one attend over keys and values that the model has just computed, many heads of few dims: less work for so many
queries. SGLang chooses by the backend's name, and :func:`make_backend` has it choose as for its Triton backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.runtime_context import get_spec
from torch import Tensor

import pm_ops
from pm_ops.ops.mla import IMPLEMENTATIONS

from .backend import PageMajorAttnBackend, refuse_layer
from .plugin import BACKEND
from .pool import pools_of

PAGE = 64
"""Tokens of a page of prompts' own keys and values."""


@dataclass
class Prompts:
    """Where the keys and values of a pass go, each sequence's into pages of its own."""

    slots: Tensor
    page_table: Tensor
    num_pages: int


class LatentAttnBackend(PageMajorAttnBackend):
    """Attention of a model runner over a pool of latents that this adapter made."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self.prompts: Prompts | None = None
        refuse_latents(self.impl, model_runner.spec_algorithm, self.windowed)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Before an eager pass."""
        super().init_forward_metadata(forward_batch)
        self.prompts = None

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Attend in the form of the layer: ``[tokens, heads * value dim]``.

        Absorbed, rows of ``latent + rope`` in ``k [tokens, 1, latent + rope]`` are stored first; ``v`` is a part of
        them. Else ``k`` and ``v [tokens, heads, …]`` are those of whole prompts, whose latents the model has stored.
        """
        refuse_layer(layer, {"sinks": sinks, **others})
        if layer.logit_cap or (layer.sliding_window_size or -1) > -1:
            raise ValueError(
                "pm_ops: its attention backend has no latent attention (MLA) with caps or windows; choose "
                "--attention-backend triton with layout token_major"
            )
        # SGLang's own backends divide rows by a checkpoint's scale. A cache of another dtype needs none, as with keys.
        if self.scaled and layer.k_scale is not None and layer.k_scale_float != 1.0:
            raise ValueError(
                f"pm_ops: a checkpoint's scales over latents (MLA), {layer.k_scale_float} in layer {layer.layer_id}, "
                f"are not supported by the attention backend {BACKEND}; choose --kv-cache-dtype bfloat16, or "
                "--attention-backend triton with layout token_major"
            )
        step = self.forward_metadata
        assert step is not None
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if (layer.qk_head_dim, layer.v_head_dim) != (self.pool.kv_cache_dim, self.pool.kv_lora_rank):
            prefix = any(forward_batch.extend_prefix_lens_cpu or ())
            if save_kv_cache or k is None or v is None or step.query_start is None or prefix:
                raise ValueError(
                    "pm_ops: its attention backend attends over a model's own keys and values in whole prompts alone, "
                    f"whose latents the model has stored, and not in this {forward_batch.forward_mode.name} batch; "
                    "choose --attention-backend triton with layout token_major"
                )
            return self._over_prompts(query, k, v, layer, forward_batch)
        if save_kv_cache and k is not None:
            self.pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        self.pool.get_key_buffer(layer.layer_id)  # waits for the layer's transfer, where one is under way
        out = pm_ops.mla_attention(
            self.pool.page_pool,
            layer.layer_id - self.pool.start_layer,
            query,
            step.page_table,
            step.seq_lens,
            softmax_scale=layer.scaling,
            value_dim=layer.v_head_dim,
            query_start=step.query_start,
            max_query_len=step.max_query_len,
            max_seq_len=step.max_seq_len,
            impl=self.impl,
        )
        assert isinstance(out, Tensor)
        return out.flatten(1)

    def _over_prompts(self, query: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any) -> Tensor:
        step = self.forward_metadata
        assert step is not None
        if self.prompts is None:
            self.prompts = prompts_of(step.seq_lens, forward_batch.extend_seq_lens_cpu)
        prompts, heads = self.prompts, k.shape[1]
        planes, end = [], 0  # no PagePool: making one copies a table to the GPU, which waits, in every layer
        for rows in (k, v):
            head = rows.shape[2] * rows.dtype.itemsize
            planes.append([end, PAGE * heads * head, heads * head, head, prompts.num_pages])
            end += prompts.num_pages * PAGE * heads * head
        buffer = torch.empty(end, dtype=torch.uint8, device=k.device)
        torch.ops.pm_ops.store_kv.default(buffer, k, v, prompts.slots, *planes, PAGE, k.dtype, v.dtype)
        out: Tensor = torch.ops.pm_ops.attention.default(
            buffer,
            query,
            prompts.page_table,
            step.seq_lens,
            step.query_start,
            *planes,
            PAGE,
            heads,
            v.shape[2],
            k.dtype,
            v.dtype,
            layer.scaling,
            max_query_len=step.max_query_len,
            max_seq_len=step.max_seq_len,
            impl=self.impl,
        )[0]
        return out.flatten(1)


def refuse_latents(impl: str, algorithm: Any, windowed: bool = False) -> None:
    """Raise ValueError for latent attention that the backend does not have.

    Args:
        impl: of the settings.
        algorithm: of speculation.
        windowed: whether layers of sliding windows have a pool.
    """
    for holds, what in (
        (windowed, "in sliding windows"),
        (impl not in IMPLEMENTATIONS, f"by impl {impl}"),
        (
            not algorithm.is_none() and (algorithm.is_ngram() or get_spec().speculative_eagle_topk != 1),
            "of trees of drafts (NGRAM, or --speculative-eagle-topk of more than 1)",
        ),
    ):
        if holds:
            raise ValueError(
                f"pm_ops: its attention backend has no latent attention (MLA) {what}; leave that out, or choose "
                "--attention-backend triton with layout token_major"
            )


def make_backend(model_runner: Any) -> PageMajorAttnBackend:
    """The backend for a model runner's pool: of keys and values, or of latents."""
    if getattr(pools_of(model_runner.token_to_kv_pool)[0], "KINDS", None) != ("latent",):
        return PageMajorAttnBackend(model_runner)
    # not sooner: this imports models
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

    AttentionBackendRegistry.register(BACKEND, AttentionBackendRegistry.get_handler("triton"))
    return LatentAttnBackend(model_runner)


def prompts_of(lengths: Tensor, on_host: list[int]) -> Prompts:
    """Pages one after the other for sequences of ``lengths [sequences]`` tokens, without waiting for the device."""
    counts = [-(-length // PAGE) for length in on_host]
    pages = torch.div(lengths + PAGE - 1, PAGE, rounding_mode="floor")
    first = pages.cumsum(0) - pages
    gaps = first * PAGE - (lengths.cumsum(0) - lengths)  # slots that the sequences before leave free
    total = sum(on_host)
    slots = torch.arange(total, device=lengths.device) + gaps.repeat_interleave(lengths, output_size=total)
    table = first[:, None] + torch.arange(max(counts, default=0), device=lengths.device)
    return Prompts(slots, table.int(), sum(counts))
