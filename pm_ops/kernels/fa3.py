"""FlashAttention 3 behind `pm_ops::attention`: its kernels read the pages where they lie, through strided views.

The library is one that is installed already: vLLM's build, or `flash_attn_interface`. It is looked for once, at the
first call that could use it. What it does differently from the operator is refused by `reason`, but for two things that
are mended: padding rows, which it does not write; and pages loaded whole by the copy engine, values past a sequence's
end included, so that NaN there would leak. A left padding of 0 makes it load row by row, with zeros past the end.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..layout import dtype_name
from .device import is_hopper

if TYPE_CHECKING:
    from ..ops.attention import Attention

LIBRARY = "_vllm_fa3_C.abi3.so"
_SMALLEST_TILE = 64  # keys: smaller pages than its tiles are never loaded whole
_MAX_INT = 2**31 - 1


class Library(NamedTuple):
    """A build of FlashAttention 3."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    """Takes the arguments of :func:`vllm_forward`, from `out` on with their defaults left out; vLLM's, `out` too."""
    has_sinks: bool


def vllm_forward(
    query: Tensor, key: Tensor, value: Tensor, page_table: Tensor, seq_lens: Tensor, query_start: Tensor | None,
    *,
    max_query_len: int, max_keys: int, softmax_scale: float, causal: bool, softcap: float = 0.0,
    leftpad: Tensor | None = None, sinks: Tensor | None = None, window: tuple[int, int] = (-1, -1),
    descale: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    schedule: Tensor | None = None, out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`fwd` of vLLM's build: query ``[Tq, Hq, D]``, or without query_start ``[B, n, Hq, D]``; int32 indices.

    Returns out, of the query's shape, and lse ``[Hq, Tq]`` or ``[B, Hq, n]``.
    """
    result = torch.ops._vllm_fa3_C.fwd(
        query, key, value, None, None, None, out,
        query_start, None, None, None, seq_lens, max_query_len, max_keys,
        page_table, None, leftpad, None, None, None, *descale,
        softmax_scale, causal, *window, softcap, True, schedule, 0, None, 0, sinks, 1, 0, None,
    )  # fmt: skip
    return result[0], result[1]


def _interface_forward(
    query: Tensor, key: Tensor, value: Tensor, page_table: Tensor, seq_lens: Tensor, query_start: Tensor | None,
    *,
    max_query_len: int, max_keys: int, softmax_scale: float, causal: bool, softcap: float, leftpad: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same by `flash_attn_interface`, which takes the most keys from the page table, and no sinks."""
    assert sinks is None
    result = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache(
        query, key, value, cache_seqlens=seq_lens, cache_leftpad=leftpad, page_table=page_table,
        cu_seqlens_q=query_start, max_seqlen_q=max_query_len, softmax_scale=softmax_scale, causal=causal,
        softcap=softcap, return_softmax_lse=True,
    )  # fmt: skip
    return result[0], result[1]


_found: Library | str | None = None


def load(path: Path | str) -> None:
    """Use this file, vLLM's `_vllm_fa3_C`. Raises OSError or RuntimeError where torch cannot load it."""
    global _found
    torch.ops.load_library(str(path))
    _found = Library(vllm_forward, has_sinks=True)


def library() -> Library | str:
    """FlashAttention 3 as this process has it, or why it has not. Looked for once."""
    global _found
    if _found is None:
        _found = _find()
    return _found


def _find() -> Library | str:
    vllm = Library(vllm_forward, has_sinks=True)
    if hasattr(torch.ops._vllm_fa3_C, "fwd"):  # somebody has loaded it; a second copy would clash with it
        return vllm
    path = os.environ.get("PM_OPS_FA3") or installed()
    if path:
        try:
            torch.ops.load_library(str(path))
        except (OSError, RuntimeError) as error:
            return f"{path} does not load with torch {torch.__version__}: {error}"
        return vllm
    if importlib.util.find_spec("flash_attn_interface") is not None:
        try:
            importlib.import_module("flash_attn_interface")
        except (ImportError, OSError, RuntimeError) as error:
            return f"flash_attn_interface cannot be imported: {error}"
        return Library(_interface_forward, has_sinks=False)
    return f"it is not installed: neither vllm nor flash_attn_interface is, and PM_OPS_FA3 does not name a {LIBRARY}"


def installed(*path: str) -> Path | None:
    """The library in vLLM's installation, which is not imported for that; or another file, by its path there."""
    present = sys.modules.get("vllm")
    spec = importlib.util.find_spec("vllm") if present is None else present.__spec__
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent.joinpath(*(path or ("vllm_flash_attn", LIBRARY)))
    return file if file.is_file() else None


def reason(a: Attention) -> str | None:
    """Why FlashAttention 3 cannot make this call; None if it can. Looks at shapes, dtypes and the machine only."""
    dtype, heads, dim = a.query.dtype, a.query.shape[1], a.query.shape[2]
    scaled = (a.key_scale, a.value_scale, a.key_scale_tensor, a.value_scale_tensor) != (1.0, 1.0, None, None)
    rules = (
        (dtype in (torch.float16, torch.bfloat16), f"it takes no {dtype_name(dtype)} queries"),
        (
            a.key_dtype == a.value_dtype == dtype,
            f"it takes keys and values of the query's dtype, {dtype_name(dtype)} (its fp8 kernels round the query too)",
        ),
        (not scaled, "it takes no scales but of fp8"),
        (a.alibi_slopes is None, "it has no ALiBi"),
        (a.bias is None, "it has no bias"),
        (not a.batch_invariant, "its results depend on the batch"),
        (not a.window, "its sliding window reads page ids and values before the window, which may be gone"),
        (a.softmax_scale > 0, f"softmax_scale={a.softmax_scale} is not positive"),
        (_takes_dims(dim, a.value_dim), f"it takes no head dims {dim} and {a.value_dim}"),
        (a.planes_divide_by(16), "it takes planes whose offset and strides are multiples of 16 bytes"),
        (a.page_table.shape[1] * a.page_size <= _MAX_INT, "it counts keys in 32 bits"),
        (
            a.sinks is None or (a.sinks.dtype == torch.bfloat16 and heads <= 64 and dim == a.value_dim),
            "it takes sinks in bfloat16, for at most 64 heads of equal dims",
        ),
        (is_hopper(a.query.device), "its kernels are for compute capability 9.x"),
    )
    for holds, text in rules:
        if not holds:
            return text
    found = library()
    if isinstance(found, str):
        return found
    return None if a.sinks is None or found.has_sinks else "flash_attn_interface has no sinks"


def _takes_dims(key: int, value: int) -> bool:
    if key % 8 or value % 8 or key < 8:
        return False
    return key <= 256 if key == value else 128 < key <= 192 and 96 < value <= 128


def attention(a: Attention) -> tuple[Tensor, Tensor]:
    """`pm_ops::attention` with ``impl="fa3"``. Raises ValueError where :func:`reason` has one."""
    why = reason(a)
    if why is not None:
        raise ValueError(
            f"impl='fa3' was asked for, but FlashAttention 3 cannot make this call: {why}; use impl='triton' or 'auto'"
        )
    found = library()
    assert isinstance(found, Library)
    tokens, heads, _ = a.query.shape
    batch, width = a.page_table.shape
    if not (tokens and batch and width):  # nobody sees a key
        out = a.query.new_zeros((tokens, heads, a.value_dim))
        return out, _finished_lse(a, a.query.new_full((tokens, heads), -torch.inf, dtype=torch.float32))
    key, value = a.plane_views()
    query, start = _aligned_rows(a.query), None
    if a.query_start is None:
        query = query.unflatten(0, (batch, tokens // batch))
    else:
        start = a.query_start.int().contiguous()
    seq_lens, table = a.seq_lens.int().contiguous(), a.page_table.int()
    target: Tensor | None = getattr(a, "out", None) if found.forward is vllm_forward else None
    out, lse = found.forward(
        query,
        key,
        value,
        table if table.stride(1) == 1 else table.clone(memory_format=torch.contiguous_format),
        seq_lens,
        start,
        max_query_len=tokens // batch if start is None else a.max_query_len or tokens,
        max_keys=width * a.page_size,
        softmax_scale=a.softmax_scale,
        causal=a.causal,
        softcap=a.softcap,
        leftpad=torch.zeros_like(seq_lens) if a.page_size >= _SMALLEST_TILE else None,
        sinks=a.sinks,
        **({} if target is None else {"out": target.view(*query.shape[:-1], a.value_dim)}),
    )
    if start is None:
        out, lse = out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
    else:
        from .padding import zero_padding  # triton is needed for nothing else here

        zero_padding(out, start)
        lse = lse.t()
    return out if target is None else target, _finished_lse(a, lse)


def _aligned_rows(query: Tensor) -> Tensor:
    """The query, or a copy if its rows are no runs of elements that begin at multiples of 16 bytes."""
    item = query.itemsize
    aligned = query.stride(2) == 1 and all(
        x % 16 == 0 for x in (query.data_ptr(), query.stride(0) * item, query.stride(1) * item)
    )
    return query if aligned else query.clone(memory_format=torch.contiguous_format)


def _finished_lse(a: Attention, lse: Tensor) -> Tensor:
    """`lse [Tq, Hq]` with the sinks of rows that see no key, and -inf in padding rows, as far as it is asked for."""
    if not a.return_lse:
        return lse.new_empty(0)
    if a.sinks is not None:
        lse = torch.where(lse == -torch.inf, a.sinks.float(), lse)
    if a.query_start is not None:
        rows = torch.arange(lse.shape[0], device=lse.device)[:, None]
        lse = torch.where(rows < a.query_start[-1], lse, -torch.inf)
    return lse.contiguous()
