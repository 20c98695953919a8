"""SGLang's attention backend ``pm_ops``: decode, extend and mixed batches, and verified drafts, by ``attention``.

Page tables are built on the device from SGLang's table of slots, so that nothing waits for the GPU; under CUDA graphs
they are filled in place before each replay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.eagle_utils import TreeMaskMode, default_tree_mask_mode
from sglang.srt.speculative.spec_info import SpecInputType
from torch import Tensor

import pm_ops
from pm_ops.functional import attention_call
from pm_ops.kernels import fa3

from ..prompts import reads_prompts
from .config import HOW, Settings
from .pool import MARK, pools_of
from .tree import Tree, attend, pages_of, refuse_window, tree_of, visible_of


@dataclass
class Step:
    """What the layers of one forward pass share; ``*_window``: layers of sliding windows, where they have a pool."""

    page_table: Tensor
    """int32 ``[sequences, pages]``."""
    seq_lens: Tensor
    """Keys of each sequence; with a tree those in front of its drafts."""
    query_start: Tensor | None = None
    """int32 ``[sequences + 1]``; None: every sequence has equally many."""
    max_query_len: int = 0
    """At most; 0: as many as query_start None says."""
    max_seq_len: int = 0
    page_table_window: Tensor | None = None
    slots_window: Tensor | None = None
    tree: Tree | None = None


class PageMajorAttnBackend(AttentionBackend):
    """Attention of a model runner over the pool that this adapter made."""

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        settings = Settings.asked()
        # SGLang's models look for both pools here, and by these names
        self.pool = self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        if settings is None or any(not hasattr(pool, MARK) for pool in pools_of(self.pool)):
            raise ValueError(
                f"pm_ops: its attention backend reads a KV cache of pm_ops, and this one is SGLang's own "
                f"({type(self.pool).__qualname__}): {HOW}, or choose another --attention-backend"
            )
        self.impl = settings.impl
        self.windowed = isinstance(self.pool, SWAKVPool)
        if not self.windowed and not hasattr(self.pool, MARK):
            raise ValueError(
                f"pm_ops: its attention backend does not read a {type(self.pool).__qualname__} (models with state "
                "layers); choose --attention-backend triton with layout token_major"
            )
        self.scaled = pools_of(self.pool)[0].dtype.itemsize == 1
        self.page_size = self.pool.page_size
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.forward_metadata: Step | None = None
        self._fa3_takes: dict[int, bool] = {}
        self.drafts, self._verify_mask = 0, None
        if not model_runner.spec_algorithm.is_none():
            verifies = not model_runner.is_draft_worker
            _refuse_algorithm(model_runner.spec_algorithm, settings.impl, verifies)
            self.drafts = get_spec().speculative_num_draft_tokens
            if verifies:
                most, device = model_runner.req_to_token_pool.size, self.req_to_token.device
                cells = torch.zeros(most * self.drafts**2, dtype=torch.bool, device=device)
                self._verify_mask = VerifyMask(buffer=cells, mode=TreeMaskMode.QLEN_ONLY, max_bs=most)

    @property
    def verify_mask(self) -> VerifyMask | None:
        """Where EAGLE writes who descends from whom: drafts x drafts cells a sequence, none for its prefix."""
        return self._verify_mask

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Where a replay was prepared while the drafts were still being made: see their tree now."""
        step = self.forward_metadata
        if cuda_graph_bs is not None and step is not None and step.tree is not None:
            put(step.tree.visible, self._visible(spec_info, step.seq_lens))

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Before an eager pass."""
        step, mode = self._step(forward_batch), forward_batch.forward_mode
        if not (mode.is_decode_or_idle() or mode.is_target_verify()):
            step.query_start = torch.nn.functional.pad(forward_batch.extend_seq_lens.cumsum(0), (1, 0)).int()
            step.max_query_len = max(forward_batch.extend_seq_lens_cpu or (0,))
        self.forward_metadata = step

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make the tensors that graphs read."""
        like: dict[str, Any] = {"dtype": torch.int32, "device": self.req_to_token.device}
        pages = -(-self.req_to_token.shape[1] // self.page_size)
        self.graph = Step(torch.zeros(max_bs, pages, **like), torch.ones(max_bs, **like))
        if self.windowed:
            self.graph.page_table_window = torch.zeros(max_bs, pages, **like)
            self.graph.slots_window = torch.zeros(max_num_tokens, dtype=torch.int64, device=like["device"])
        if self._verify_mask is not None:
            few = pages_of(self.drafts, self.page_size)
            cells = torch.zeros(max_bs, 1, self.drafts, few * self.page_size, dtype=torch.bool, device=like["device"])
            self.graph.tree = Tree(cells, torch.zeros(max_bs, few, **like), torch.ones(max_bs, **like))
            if self.windowed:
                self.graph.tree.page_table_window = torch.zeros(max_bs, few, **like)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a step of decode, or of drafts that are verified or stored, is captured, and before each replay."""
        mode, tokens = forward_batch.forward_mode, 1  # of each sequence
        if mode.is_target_verify():
            tokens = forward_batch.spec_info.draft_token_num
        elif mode.is_draft_extend_v2():
            tokens = self.drafts
        elif not mode.is_decode_or_idle():
            raise ValueError(
                f"pm_ops: CUDA graphs of {mode.name} batches are not supported, those of decode steps and of drafts "
                "are; turn the others off, those of prefills by --cuda-graph-backend-prefill disabled"
            )
        now, kept = self._step(forward_batch), self.graph
        self.forward_metadata = Step(put(kept.page_table, now.page_table), put(kept.seq_lens, now.seq_lens))
        if self.windowed:
            self.forward_metadata.page_table_window = put(kept.page_table_window, now.page_table_window)
            # A padded replay has sequences without slots: their rows go to the sink, not where the last step wrote.
            slots = put(kept.slots_window, now.slots_window)
            assert kept.slots_window is not None
            kept.slots_window[len(slots) :].zero_()
            self.forward_metadata.slots_window = kept.slots_window[: len(now.seq_lens) * tokens]
        if now.tree is not None:
            assert kept.tree is not None
            fields = ("visible", "page_table", "seq_lens", *(["page_table_window"] if self.windowed else []))
            tree = {name: put(getattr(kept.tree, name), getattr(now.tree, name)) for name in fields}
            self.forward_metadata.tree = Tree(**tree)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of a graph's idle rows."""
        return 1

    def forward_decode(self, q: Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **more: Any) -> Any:
        """One query a sequence; see :meth:`forward_extend`."""
        return self.forward_extend(q, k, v, layer, forward_batch, *args, **more)

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
        """Store this pass's rows, then attend over the pages: ``[tokens, heads * value dim]``."""
        refuse_layer(layer, others)
        step = self.forward_metadata
        assert step is not None
        window = 0 if layer.sliding_window_size is None else layer.sliding_window_size + 1  # with the query's own key
        if step.tree is not None:
            refuse_window(window, step.tree.visible.shape[2])
        scales = (1.0, 1.0)
        if self.scaled and layer.k_scale is not None:  # a checkpoint's scales are for fp8 caches alone
            scales = layer.k_scale_float, layer.v_scale_float
        if save_kv_cache and k is not None:
            location = KVWriteLoc(forward_batch.out_cache_loc, step.slots_window)
            self.pool.set_kv_buffer(layer, location, k, v, *scales)
        self.pool.get_key_buffer(layer.layer_id)  # waits for the layer's transfer, where one is under way
        index, in_window = layer.layer_id - self.pool.start_layer, False
        if self.windowed:
            index, in_window = self.pool.layers_mapping[layer.layer_id]
        table = step.page_table_window if in_window else step.page_table
        assert table is not None
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        options = {
            "softmax_scale": layer.scaling,
            "window": window,
            "softcap": layer.logit_cap or 0.0,
            "sinks": sinks,
            "key_scale": scales[0],
            "value_scale": scales[1],
            "max_seq_len": step.max_seq_len,
            "impl": self.impl,
        }
        # A number: torch 2.11's Dynamo takes no bool for an index, and would end the graph in front of the store.
        pages, tree = pools_of(self.pool)[int(in_window)].page_pool, step.tree
        if tree is not None:
            few = tree.page_table_window if in_window else tree.page_table
            assert few is not None
            return attend(pages, index, query, table, step.seq_lens, tree, few, **options).flatten(1)
        call = (pages, index, query, table, step.seq_lens)
        options |= {"query_start": step.query_start, "max_query_len": step.max_query_len}
        if self.impl == "auto" and reads_prompts(step.max_query_len, step.max_seq_len):
            if layer.layer_id not in self._fa3_takes:  # its calls differ in sizes alone
                self._fa3_takes[layer.layer_id] = fa3.reason(attention_call(*call, **options)) is None
            options["impl"] = "fa3" if self._fa3_takes[layer.layer_id] else "auto"
        # Between the CUDA graphs of a prefill SGLang copies the rows to this tensor, unless they are there.
        out = getattr(forward_batch, "_attn_output", None)
        if out is not None:
            out = out.view(-1, layer.tp_q_head_num, layer.v_head_dim) if out.dtype == query.dtype else None
        out = pm_ops.attention(*call, **options, out=out)
        assert isinstance(out, Tensor)
        return out.flatten(1)

    def _step(self, forward_batch: Any) -> Step:
        """All but prompts' queries. A page's first slot names it: SGLang gives pages out whole, in both pools."""
        batch, verify = forward_batch.batch_size, forward_batch.forward_mode.is_target_verify()
        spec: Any = forward_batch.spec_info if verify else None
        drafts = spec.draft_token_num if verify else 0  # SGLang's lengths are without them
        lengths = forward_batch.seq_lens[:batch]
        longest = self.longest(forward_batch, drafts)
        first = self.first_slots(forward_batch, longest)
        step = Step(pages_of_slots(first, self.page_size), lengths + drafts, max_seq_len=longest)
        if self.windowed:
            translate = self.pool.translate_loc_from_full_to_swa
            step.page_table_window = pages_of_slots(translate(first), self.page_size)
            step.slots_window = translate(forward_batch.out_cache_loc)
        if verify and spec.custom_mask is not None and spec.tree_topk != 1:  # a chain is causal
            visible = self._visible(spec, lengths)
            step.tree = tree_of(visible, lengths, drafts, self.page_size, step.page_table, step.page_table_window)
            step.seq_lens, step.max_seq_len = lengths, longest - drafts
        return step

    def first_slots(self, forward_batch: Any, longest: int) -> Tensor:
        """Those of each sequence's pages, of as many as hold ``longest`` keys: ``[sequences, pages]``."""
        pages, rows = -(-longest // self.page_size), forward_batch.req_pool_indices[: forward_batch.batch_size]
        return self.req_to_token[:, :: self.page_size][:, :pages][rows]

    def longest(self, forward_batch: Any, drafts: int) -> int:
        """Keys of the longest sequence, where the host knows them; else the most that there can be."""
        lengths, most = forward_batch.seq_lens_cpu, self.req_to_token.shape[1]
        # SGLang may capture this very function, and what is read here on the host would stay as it was then.
        if lengths is None or (self.req_to_token.is_cuda and torch.cuda.is_current_stream_capturing()):
            return most
        return min(max(lengths[: forward_batch.batch_size].tolist(), default=0) + drafts, most)

    def _visible(self, spec: Any, prefix: Tensor) -> Tensor:
        ngram = spec.spec_input_type == SpecInputType.NGRAM_VERIFY  # it goes by no backend's :attr:`verify_mask`
        whole = ngram and default_tree_mask_mode() == TreeMaskMode.FULL_MASK
        return visible_of(spec.custom_mask, prefix, spec.draft_token_num, self.page_size, whole)


def pages_of_slots(slots: Tensor, page_size: int) -> Tensor:
    """The pages that slots lie in, int32."""
    return torch.div(slots, page_size, rounding_mode="floor").int()


def put(kept: Tensor | None, now: Tensor | None) -> Tensor:
    """The rows of the tensor that graphs read, ``now`` copied into them; columns past it keep what they had."""
    assert kept is not None and now is not None
    kept[tuple(map(slice, now.shape))].copy_(now)
    return kept[: len(now)]


def _refuse_algorithm(algorithm: Any, impl: str, verifies: bool) -> None:
    eagle = algorithm.is_eagle() and not algorithm.is_frozen_kv_mtp()
    if not (eagle or algorithm.is_standalone() or algorithm.is_ngram()):
        raise ValueError(
            f"pm_ops: its attention backend verifies drafts of EAGLE, EAGLE3, STANDALONE and NGRAM, not of "
            f"{algorithm.name}; choose one of these, or --attention-backend triton with layout token_major"
        )
    if verifies and impl == "fa3" and (algorithm.is_ngram() or get_spec().speculative_eagle_topk != 1):
        raise ValueError(f"pm_ops: FlashAttention 3 has no masks, which trees of drafts need; {HOW}, without impl fa3")


def refuse_layer(layer: Any, others: dict[str, Any]) -> None:
    """Raise ValueError for attention that no pool's backend has."""
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise ValueError(
            f"pm_ops: attention with {', '.join(given)} is not supported; choose --attention-backend triton"
        )
    for holds, what in (
        (layer.is_cross_attention or layer.attn_type != AttentionType.DECODER, "that is not causal self-attention"),
        (getattr(layer, "xai_temperature_len", -1) > 0, "with temperatures by position"),
        (layer.use_irope, "in chunks (iRoPE)"),
        (layer.logit_cap and layer.logit_capping_method != "tanh", f"capped by {layer.logit_capping_method}"),
    ):
        if holds:
            raise ValueError(f"pm_ops: attention {what} is not supported; choose --attention-backend triton")
