"""Rotary embedding, QK-norm and cache write of SGLang's layers in one launch: ``PM_OPS='{"fuse_rope": true}'``.

Under ``--enable-torch-compile`` SGLang has decode steps compiled by Inductor, whole models with rotary embeddings in
plain torch, and our pool's store is an operator in that graph. So :class:`pm_ops.compile_passes.RopeStorePass` finds
both there. In SGLang's piecewise graphs of prompts the store stays inside of an operator for all of the attention; what
is not compiled is not fused. The rotated values are rounded once, where the graph rounds them in between too: tokens of
fused and unfused models part where two are nearly as likely.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from typing import Any

import torch._inductor.config as inductor

from pm_ops.compile_passes import RopeStorePass

from .config import Settings

logger = logging.getLogger(__name__)


class FuseRope(RopeStorePass):
    """The pass, with what to do where it finds no store."""

    remedy = (
        "SGLang writes the cache inside of an operator there, which it does not in the decode steps that it compiles"
    )


def add_pass(settings: Settings, pools: list[Any], compiled: bool) -> None:
    """Have Inductor run the pass in this process, behind one that is there; warn where it can do nothing.

    One of an earlier call stays as it is, strict or not: settings are a process's, for all of its models.

    Raises:
        ValueError: that one has no ``uuid()``, which the key of compiled code needs.
    """
    if not compiled:
        logger.warning("pm_ops: fuse_rope does nothing, as SGLang compiles nothing: give it --enable-torch-compile")
        return
    before: Any = inductor.post_grad_custom_pre_pass
    if isinstance(before, FuseRope):  # of the model whose drafts this one makes
        return
    FuseRope.require_uuid(before, "torch._inductor.config.post_grad_custom_pre_pass")
    found = [pool.page_pool for pool in pools if pool.page_pool is not None]
    known = {"settings": asdict(settings), "pools": [str(pool) for pool in found]}
    strict = settings.fuse_rope == "strict"
    inductor.post_grad_custom_pre_pass = FuseRope(json.dumps(known, sort_keys=True), strict, before, __name__)
