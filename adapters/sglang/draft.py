"""Attention of EAGLE's and STANDALONE's draft models, where it is the backend ``pm_ops`` too.

A draft model writes ``topk`` branches of a few tokens behind each sequence, one token of each branch a step. To
attention each branch is a sequence: the pages of the prefix, then its own. Its rows of accepted drafts are computed by
the backend itself, as an extension like any other.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from .backend import Step, pages_of_slots, put
from .latent_backend import make_backend


class PageMajorMultiStepDraft(AttentionBackend):
    """``attn_backends[i]`` is step ``i``'s; the last step has none, as its token is the result of the one before."""

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any, topk: int, num_steps: int) -> None:
        super().__init__()
        self.topk, self.num_steps = topk, num_steps
        self.attn_backends = [make_backend(model_runner) for _ in range(num_steps - 1)]
        if self.attn_backends[0].windowed:
            raise ValueError(
                "pm_ops: its attention backend serves draft models of full attention alone in more than one step; "
                "choose --speculative-num-steps 1, or --speculative-draft-attention-backend triton with layout "
                "token_major"
            )

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Before eager steps."""
        tables, lengths, longest = self._branches(forward_batch)
        for step, backend in enumerate(self.attn_backends, 1):
            backend.forward_metadata = Step(tables, lengths + step, max_seq_len=longest)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make the tensors that graphs read."""
        first = self.attn_backends[0]
        like: dict[str, Any] = {"dtype": torch.int32, "device": first.req_to_token.device}
        pages = -(-first.req_to_token.shape[1] // first.page_size)
        self.tables = torch.zeros(max_bs * self.topk, pages, **like)
        self.lengths = torch.ones(len(self.attn_backends), max_bs * self.topk, **like)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before all steps are captured in one graph, and before each replay."""
        tables, lengths, _ = self._branches(forward_batch)
        tables = put(self.tables, tables)
        for step, backend in enumerate(self.attn_backends, 1):
            backend.forward_metadata = Step(tables, put(self.lengths[step - 1], lengths + step))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of a graph's idle rows."""
        return self.attn_backends[0].get_cuda_graph_seq_len_fill_value()

    def _branches(self, forward_batch: Any) -> tuple[Tensor, Tensor, int]:
        """Page tables and prefix lengths of all branches, of one sequence behind one another; the most keys of one.

        SGLang's table of slots holds branch ``b``'s pages as many behind the prefix's last whole page as ``b`` branches
        have, each beginning with a copy of the prefix's end; of pages of one slot nothing needs to be copied.
        """
        backend, batch = self.attn_backends[0], forward_batch.batch_size
        size, prefix = backend.page_size, forward_batch.seq_lens[:batch, None]
        longest = backend.longest(forward_batch, self.num_steps)
        if self.topk == 1:  # a chain: the sequence itself, in a third of the launches
            return pages_of_slots(backend.first_slots(forward_batch, longest), size), prefix.flatten(), longest
        column = torch.arange(-(-longest // size), device=prefix.device)
        branch = torch.arange(self.topk, device=prefix.device)[:, None]
        apart = torch.div(prefix % size + self.num_steps + size - 1, size, rounding_mode="floor")[:, :, None]
        own = column >= torch.div(prefix, size, rounding_mode="floor")[:, :, None]
        first_slots = backend.req_to_token[:, ::size]
        columns = (column + own * branch * apart).clamp(max=first_slots.shape[1] - 1)
        slots = first_slots[forward_batch.req_pool_indices[:batch, None, None], columns]
        return pages_of_slots(slots.flatten(0, 1), size), prefix.expand(-1, self.topk).flatten(), longest
