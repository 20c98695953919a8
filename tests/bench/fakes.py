"""Stand-ins for the peers' kernels: the same names and parameters, plain float64 torch behind them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pm_ops.bench.attention_shape import AttentionShape, decode
from pm_ops.bench.cases import RopeShape, StoreShape

CPU = torch.device("cpu")
TINY: dict[str, Any] = dict(
    q_heads=4, kv_heads=2, head_dim=8, value_dim=8, page_size=4, layers=3, dtype=torch.float32, kv_dtype=torch.float32
)
SHAPES = {
    "decode": decode("", 3, 21, **TINY),
    "window": decode("window and sinks", 3, 21, **TINY, window=5, sinks=True),
    "fp8": decode("fp8", 3, 21, **{**TINY, "kv_dtype": torch.float8_e4m3fn}),
    "unequal": decode("unequal dims", 3, 21, **{**TINY, "head_dim": 16}),
    "page size 1": decode("page size 1", 3, 21, **{**TINY, "page_size": 1}),
    "prefill": AttentionShape("prefill", (9, 9), (9, 9), **TINY),
    "extend": AttentionShape("extend", (5, 5), (21, 21), **TINY),
    "mixed": AttentionShape("mixed", (9, 1, 3), (9, 21, 14), **TINY),
}
ROWS: dict[str, Any] = dict(pages=9, layers=3, kv_heads=2, head_dim=8, page_size=4, dtype=torch.float32)
STORE = StoreShape("store", 7, **ROWS)
ROPE = RopeShape("rope", 7, q_heads=4, positions=16, **ROWS)

FA3_SCHEMAS = (
    "fwd(Tensor(a!) q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor(b!)? out, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, "
    "int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, "
    "Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, "
    "Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
    "float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, "
    "int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]",
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, "
    "int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, "
    "bool is_causal, int window_size_left, int window_size_right, bool has_softcap, int num_splits, bool? pack_gqa, "
    "int sm_margin) -> Tensor",
)
"""FlashAttention 3's operators, as vLLM 0.26's library registers them."""


SWAP_SCHEMA = (
    "swap_blocks_batch(Tensor src_ptrs, Tensor dst_ptrs, Tensor sizes, bool is_src_access_order_any=False) -> ()"
)
"""vLLM 0.26's batch of copies, as its library registers it."""


def attend(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], lens: Sequence[int], scale: float,
    scales: tuple[float, float] = (1.0, 1.0), window: int = 0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention, query by query and head by head: ``q [T, Hq, D]``; each sequence's ``[S, Hkv, D]``."""
    out, start = [], 0
    for key, value, n in zip(keys, values, lens, strict=True):
        group = q.shape[1] // key.shape[1]
        for i in range(n):
            end = len(key) - n + i + 1
            begin = max(end - window, 0) if window else 0
            heads = []
            for h in range(q.shape[1]):
                k, v = (
                    key[begin:end, h // group].double() * scales[0],
                    value[begin:end, h // group].double() * scales[1],
                )
                weights = (k @ q[start + i, h].double() * scale).exp()
                rest = sinks[h].double().exp() if sinks is not None else 0.0
                heads.append(weights @ v / (weights.sum() + rest))
            out.append(torch.stack(heads))
        start += n
    return torch.stack(out)


def paged(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lens: Tensor, table: Tensor, scale: float, **options: Any
) -> Tensor:
    """:func:`attend` over pages ``[pages, page_size, heads, dim]``."""
    rows = []
    for cache in (k, v):
        pages = [cache.float()[table[b, : -(-int(n) // k.shape[1])].long()] for b, n in enumerate(lens)]
        rows.append([p.flatten(0, 1)[: int(n)] for p, n in zip(pages, lens, strict=True)])
    return attend(q, *rows, starts.diff().tolist(), scale, **options)


VLLM_FILES = {
    "vllm/__init__.py": "raise RuntimeError('the whole engine is imported')\n",
    "vllm/v1/attention/ops/__init__.py": "raise RuntimeError('the whole engine is imported')\n",
    "vllm/v1/attention/ops/helpers.py": "from vllm.triton_utils import tl, triton\nfrom bench.fakes import paged\n",
    "vllm/v1/attention/ops/triton_unified_attention.py": """
import torch
import vllm.envs as envs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.ops.helpers import paged
from vllm.v1.kv_cache_interface import KVQuantMode
assert not envs.VLLM_BATCH_INVARIANT and torch.finfo(current_platform.fp8_dtype()).max == 448

def unified_attention(q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal,
                      window_size, block_table, softcap, q_descale, k_descale, v_descale, seq_threshold_3D=None,
                      num_par_softmax_segments=None, softmax_segm_output=None, softmax_segm_max=None,
                      softmax_segm_expsum=None, sinks=None, kv_quant_mode=KVQuantMode.NONE):
    assert causal and softcap == 0 and q_descale is None and max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert (kv_quant_mode == KVQuantMode.FP8_PER_TENSOR) == (k.dtype.itemsize == 1) == (k_descale is not None)
    assert softmax_segm_max.shape == (seq_threshold_3D, q.shape[1], num_par_softmax_segments)
    scales = (1.0, 1.0) if k_descale is None else (k_descale.item(), v_descale.item())
    out.copy_(paged(q, k, v, cu_seqlens_q, seqused_k, block_table, softmax_scale, scales=scales,
                    window=window_size[0] + 1, sinks=sinks))
""",
    "vllm/v1/attention/ops/triton_unified_attention_diffkv.py": """
from vllm.v1.attention.ops.helpers import paged

def unified_attention_diffkv(q, k, v, out, cu_seqlens_q, seqused_k, softmax_scale, causal, window_size, block_table,
                             softcap, max_seqlen_q=1, sinks=None, seq_threshold_3D=None, num_par_softmax_segments=None,
                             softmax_segm_output=None, softmax_segm_max=None, softmax_segm_expsum=None):
    out.copy_(paged(q, k, v, cu_seqlens_q, seqused_k, block_table, softmax_scale, window=window_size[0] + 1,
                    sinks=sinks))
""",
    "vllm/v1/kv_offload/cpu/swap_blocks_triton.py": """
from vllm import _custom_ops as ops
from vllm.triton_utils import tl, triton

def swap_blocks_batch(src_addrs, dst_addrs, sizes, is_src_access_order_any=False, *, bytes_per_chunk):
    assert bytes_per_chunk in (128, 1024)  # the next power of two of the parts' 96 or 576 bytes
    ops.swap_blocks_batch(src_addrs, dst_addrs, sizes, is_src_access_order_any=is_src_access_order_any)
""",
    "vllm/v1/attention/ops/triton_reshape_and_cache_flash.py": """
from vllm.model_executor.layers.quantization.utils.quant_utils import FP8_DTYPE, get_fp8_min_max
from vllm.utils.torch_utils import is_quantized_kv_cache
assert get_fp8_min_max() == (-448.0, 448.0) and is_quantized_kv_cache("fp8_e4m3")

def triton_reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale):
    assert kv_cache_dtype == "auto"
    size = key_cache.shape[1]
    key_cache[slot_mapping // size, slot_mapping % size] = key
    value_cache[slot_mapping // size, slot_mapping % size] = value
""",
}  # fmt: skip

SGLANG_FILES = {
    "sglang/__init__.py": "raise RuntimeError('the whole engine is imported')\n",
    "sglang/kernels/ops/attention/decode_attention.py": """
from bench.fakes import attend
from sglang.srt.utils import is_cuda, is_hip

def rows(buffer, indices, page_size):
    assert buffer.dim() == (4 if page_size > 1 or buffer.dim() == 4 else 3)
    if buffer.dim() == 3:
        return buffer.float()[indices]
    return buffer.float()[indices // page_size, indices % page_size]

def split(buffer, indptr, indices, page_size):
    return [rows(buffer, indices[a:b], page_size) for a, b in zip(indptr.tolist(), indptr.tolist()[1:])]

def decode_attention_fwd(q, k_buffer, v_buffer, o, kv_indptr, kv_indices, attn_logits, attn_lse, num_kv_splits,
                         max_kv_splits, sm_scale, k_scale, v_scale, logit_cap=0.0, sinks=None, page_size=1):
    assert max_kv_splits == attn_logits.shape[2] and attn_lse.shape == attn_logits.shape[:3]
    parts = [split(buffer, kv_indptr, kv_indices, page_size) for buffer in (k_buffer, v_buffer)]
    o.copy_(attend(q, *parts, [1] * len(q), sm_scale, scales=(k_scale, v_scale), sinks=sinks))
""",
    "sglang/kernels/ops/attention/extend_attention.py": """
import torch
from bench.fakes import attend
from sglang.kernels.ops.attention.decode_attention import split

def extend_attention_fwd(q_extend, k_extend, v_extend, o_extend, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices,
                         custom_mask, is_causal, mask_indptr, max_len_extend, k_scale, v_scale, sm_scale=None,
                         sliding_window_size=-1, sinks=None, page_size=1):
    assert is_causal and custom_mask is None and max_len_extend == int(qo_indptr.diff().max())
    lens = qo_indptr.diff().tolist()
    parts = [
        [torch.cat(both) for both in zip(split(buffer, kv_indptr, kv_indices, page_size), new.split(lens))]
        for buffer, new in ((k_buffer, k_extend), (v_buffer, v_extend))
    ]
    o_extend.copy_(attend(q_extend, *parts, lens, sm_scale, window=sliding_window_size + 1, sinks=sinks))
""",
    "sglang/kernels/ops/attention/rotary_triton.py": """
import torch

def triton_mrope_fused(q, k, cos_sin_cache, positions, mrope_section, head_size, rotary_dim, mrope_interleaved,
                       mrope_interleaved_glm, is_neox_style, axis_map):
    assert is_neox_style and rotary_dim == head_size == 2 * sum(mrope_section) and positions.shape == (3, len(q))
    for rows in (q, k):
        cos, sin = cos_sin_cache[positions[0]][:, None].chunk(2, -1)
        first, second = rows.view(len(rows), -1, head_size).clone().chunk(2, -1)
        rows.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), -1).flatten(1))
""",
    "sglang/kernels/ops/kvcache/cache_move.py": """
import ctypes

def store_cache_4d(k_view, v_view, cache_k, cache_v, loc, page_size):
    k_view[loc // page_size, loc % page_size] = cache_k
    v_view[loc // page_size, loc % page_size] = cache_v

def copy_all_layer_kv_cache_func(data_ptrs, strides, tgt_loc, src_loc, num_locs, num_locs_upper, kv_copy_config):
    assert num_locs <= num_locs_upper < 2 * num_locs and len(tgt_loc) == len(src_loc) == num_locs
    for pointer, stride in zip(data_ptrs.tolist(), strides.tolist()):
        assert kv_copy_config["bytes_per_tile"] * kv_copy_config["byte_tiles"] >= stride
        rows = [ctypes.string_at(pointer + slot * stride, stride) for slot in src_loc.tolist()]
        for slot, row in zip(tgt_loc.tolist(), rows):
            ctypes.memmove(pointer + slot * stride, row, stride)
""",
}


def write_files(folder: Path, files: dict[str, str]) -> Path:
    """These files below the folder; the folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


class _Wrapper:
    """What FlashInfer's wrappers have in common: planned once, then run on K and V pages."""

    def __init__(self, workspace: Tensor, layout: str, **options: Any) -> None:
        assert layout == "NHD"
        assert workspace.dtype == torch.uint8

    def _run(self, q: Tensor, cache: tuple[Tensor, Tensor], out: Tensor, window: int, scale: float | None, **more: Any):
        starts, indptr, ids, last = self.planned
        size = cache[0].shape[1]
        counts = indptr.diff()
        table = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
        for b, count in enumerate(counts.tolist()):
            table[b, :count] = ids[indptr[b] : indptr[b] + count]
        lens = (counts - 1) * size + last
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return out.copy_(paged(q, *cache, starts, lens, table, scale, window=window + 1, **more))


class _Decode(_Wrapper):
    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *, window_left,
             q_data_type, kv_data_type):  # fmt: skip
        self.planned = (torch.arange(len(indptr), dtype=torch.int32), indptr, indices, last_page_len)
        self.window = window_left

    def run(self, q, paged_kv_cache, *, out, k_scale=1.0, v_scale=1.0):
        return self._run(q, paged_kv_cache, out, self.window, None, scales=(k_scale, v_scale))


class _Prefill(_Wrapper):
    def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
             head_dim_qk, page_size, *, head_dim_vo, causal, window_left, q_data_type, kv_data_type):  # fmt: skip
        assert causal
        self.planned = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self.window = window_left

    def run(self, q, paged_kv_cache, *args, out):
        sinks, scale = args or (None, None)
        return self._run(q, paged_kv_cache, out, self.window, scale, sinks=sinks)


def _append(append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr,
            kv_last_page_len):  # fmt: skip
    """Row i to position ``positions[i]`` of sequence ``batch_indices[i]``."""
    for rows, cache in zip((append_key, append_value), paged_kv_cache, strict=True):
        size = cache.shape[1]
        for row, b, position in zip(rows, batch_indices.tolist(), positions.tolist(), strict=True):
            assert position < (kv_indptr[b + 1] - kv_indptr[b] - 1) * size + kv_last_page_len[b]
            cache[kv_indices[kv_indptr[b] + position // size], position % size] = row


def _rotate(positions, query, key, head_size, cos_sin_cache, is_neox=True):
    assert is_neox and cos_sin_cache.dtype == torch.float32
    for rows in (query, key):
        cos, sin = cos_sin_cache[positions][:, None].chunk(2, -1)
        first, second = rows.view(len(rows), -1, head_size).clone().chunk(2, -1)
        rows.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), -1).flatten(1))


def flashinfer() -> ModuleType:
    """A module with FlashInfer's wrappers, as far as they are used."""
    module = ModuleType("flashinfer")
    module.__version__ = "0.0.fake"
    module.BatchDecodeWithPagedKVCacheWrapper = _Decode
    module.BatchPrefillWithPagedKVCacheWrapper = _Prefill
    module.BatchAttentionWithAttentionSinkWrapper = _Prefill
    module.append_paged_kv_cache = _append
    module.apply_rope_with_cos_sin_cache_inplace = _rotate
    return module
