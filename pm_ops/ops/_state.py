"""What the state operators share: a state plane is a plane of pages that hold one token each.

Entry ``(i, …)`` of page ``s`` lies at byte ``offset + s * page_stride + i * head_stride``, contiguous behind the first
axis; ``plane`` is :meth:`PagePool.geometry`'s five numbers, whose token stride is 0. State index ``s`` is a page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..layout import dtype_name
from ._common import plane_view, require_plane

STATE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def require_state_plane(name: str, nbytes: int, plane: Sequence[int], shape: Sequence[int], dtype: torch.dtype) -> None:
    """``{name}_plane`` holds states of this shape and dtype, aligned and inside the buffer of ``nbytes``."""
    if dtype not in STATE_DTYPES:
        supported = ", ".join(map(dtype_name, STATE_DTYPES))
        raise ValueError(f"{name} dtype {dtype_name(dtype)} is not supported for a state; use one of {supported}")
    require_plane(name, nbytes, plane, 1, shape[0], math.prod(shape[1:]), dtype)


def state_view(buffer: Tensor, plane: Sequence[int], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The states as a typed strided view ``[num_pages, *shape]``; writes go through."""
    rows = plane_view(buffer, plane, 1, shape[0], math.prod(shape[1:]), dtype)[:, 0]
    return rows.unflatten(2, shape[1:]) if len(shape) > 1 else rows[..., 0]
