"""As much of SGLang's model runner as its attention backends ask, over a pool of ours, and the oracle's results there.

Import it after ``sglang_engine.require()``. The pool is full of NaN but for the rows that are stored.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import oracle
import torch
import triton_interpreter  # noqa: F401
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import Tensor

from pm_ops.adapters.sglang.pool import pool_class

PAGE, CONTEXT, LAYERS, DIM = 4, 32, 2, 16
SIZE = 32 * PAGE


@dataclass
class Batch:
    """Sequences of a step: keys in all, and how many of them are new."""

    lengths: list[int]
    new: list[int]


def kwargs(dtype: torch.dtype, value_dim: int | None = None, page_size: int = PAGE) -> dict[str, Any]:
    return {
        "size": SIZE, "page_size": page_size, "dtype": dtype, "head_num": 2, "head_dim": DIM, "v_head_dim": value_dim,
        "layer_num": LAYERS, "device": "cpu", "enable_memory_saver": False,
    }  # fmt: skip


class Runner:
    """As much of SGLang's model runner as a backend asks: pools, and pages given out at random."""

    def __init__(
        self,
        layout: str,
        dtype: torch.dtype,
        batch: Batch,
        *,
        windowed: bool = False,
        page_size: int = PAGE,
        spec: SpeculativeAlgorithm = SpeculativeAlgorithm.NONE,
        context: int = CONTEXT,
    ) -> None:
        made = pool_class(MHATokenToKVPool, layout)
        options = kwargs(dtype, page_size=page_size)
        if windowed:
            del options["layer_num"], options["enable_memory_saver"]
            self.token_to_kv_pool: Any = SWAKVPool(
                **options, size_swa=SIZE, swa_attention_layer_ids=[1], full_attention_layer_ids=[0],
                token_to_kv_pool_class=made,
            )  # fmt: skip
            pages = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(SIZE // PAGE)])
            mapping = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()
            self.token_to_kv_pool.register_mapping(mapping)
            pools = [self.token_to_kv_pool.full_kv_pool, self.token_to_kv_pool.swa_kv_pool]
        else:
            self.token_to_kv_pool = made(**options)
            pools = [self.token_to_kv_pool]
        for pool in pools:
            pool.page_pool.buffer.view(dtype).fill_(torch.nan)
        self.pools = pools
        self.spec_algorithm, self.is_draft_worker = spec, False
        table = torch.zeros(len(batch.lengths) + 2, context, dtype=torch.int32)
        self.rows = torch.randperm(len(table))[: len(batch.lengths)]
        free = iter((1 + torch.randperm(SIZE // page_size)).tolist())
        for row, length in zip(self.rows, batch.lengths, strict=True):
            for start in range(0, length, page_size):
                table[row, start : start + page_size] = torch.arange(page_size) + page_size * next(free)
        self.req_to_token_pool = SimpleNamespace(req_to_token=table, size=len(table))
        self.slots = [table[row, :length].long() for row, length in zip(self.rows, batch.lengths, strict=True)]
        self.batch = batch

    def forward_batch(self, mode: ForwardMode, **more: Any) -> Any:
        """SGLang's description of the step."""
        lengths, new = torch.tensor(self.batch.lengths), torch.tensor(self.batch.new)
        fields = dict(
            forward_mode=mode, batch_size=len(lengths), req_pool_indices=self.rows, seq_lens=lengths,
            seq_lens_cpu=lengths, extend_seq_lens=new, extend_seq_lens_cpu=self.batch.new,
            out_cache_loc=torch.cat([s[-n:] for s, n in zip(self.slots, self.batch.new, strict=True)]),
        )  # fmt: skip
        return SimpleNamespace(**{**fields, **more})


def layer(index: int, heads: int, *, softcap: float = 0.0, window: int = 0, **more: Any) -> Any:
    """An attention layer; SGLang counts a window without the query's own key."""
    window = window - 1 if window else -1
    more = {"scaling": DIM**-0.5, "num_kv_heads": 2, "layer_id": index, **more}
    return RadixAttention(heads, DIM, logit_cap=softcap, sliding_window_size=window, **more)


def rows(count: int, heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return (torch.randn(count, n, DIM).to(dtype) for n in (heads, 2, 2))  # type: ignore[return-value]


def expected(pool: Any, index: int, table: Tensor, batch: Batch, query: Tensor, **options: Any) -> Tensor:
    """By the oracle, ``[tokens, heads, dim]`` float64."""
    key, value = (pool.page_pool.plane(index, kind) for kind in ("key", "value"))
    starts = torch.tensor([0, *batch.new]).cumsum(0)
    return oracle.attention(
        pool.page_pool.buffer, query, table, torch.tensor(batch.lengths), starts, key.geometry, value.geometry,
        pool.page_size, 2, DIM, key.dtype, value.dtype, softmax_scale=DIM**-0.5, **options,
    )[0]  # fmt: skip


def page_table(runner: Runner, mapping: Tensor | None = None) -> Tensor:
    size = runner.token_to_kv_pool.page_size
    first = runner.req_to_token_pool.req_to_token[runner.rows][:, ::size].long()
    return (first if mapping is None else mapping[first]) // size


def fill(runner: Runner, index: int, dtype: torch.dtype) -> None:
    """Store every key but the step's own."""
    for slots, new in zip(runner.slots, runner.batch.new, strict=True):
        _, key, value = rows(len(slots) - new, 2, dtype)
        place = slots[: len(slots) - new]
        if isinstance(runner.token_to_kv_pool, SWAKVPool):
            pool = runner.pools[index]
            place = runner.token_to_kv_pool.translate_loc_from_full_to_swa(place) if index else place
            pool.set_kv_buffer(None, place, key, value, layer_id_override=0)
        else:
            runner.token_to_kv_pool.set_kv_buffer(None, place, key, value, layer_id_override=index)


def close(out: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    tolerance = {"atol": 2e-3, "rtol": 2e-3} if dtype == torch.float16 else {"atol": 2e-5, "rtol": 2e-5}
    torch.testing.assert_close(out.double().view_as(wanted), wanted, **tolerance)
