"""The Dynamo graph as in-place ATen, and back again as a Dynamo graph, by private API of torch.

Two recordings are made. :func:`capture` turns what Dynamo recorded into in-place ATen: one node a write, in program
order. The rewriter then runs that graph under :func:`record`, so that what it calls becomes the new graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx.traceback
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts

from .internals import is_view, settled, value_at_hand, without_facades

Interpreter = PropagateUnbackedSymInts
off_record = disable_proxy_modes_tracing

_LIBRARY = torch.library.Library("pm_ops_trace", "DEF")
_SDPA = torch.nn.functional.scaled_dot_product_attention
# make_fx takes scaled_dot_product_attention apart, differently on every device; this stands in for it meanwhile.
_LIBRARY.define(
    "sdpa(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, "
    "*, float? scale=None, bool enable_gqa=False) -> Tensor"
)
SDPA = torch.ops.pm_ops_trace.sdpa.default


@torch.library.register_fake("pm_ops_trace::sdpa", lib=_LIBRARY)
def _sdpa_fake(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.ops.aten.scaled_dot_product_attention.default(query, key, value, *args, **kwargs)


def _sdpa_leaf(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    device = query.device.type
    if torch.is_autocast_enabled(device):  # what autocast does to the function that this stands for
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (t.to(dtype) for t in (query, key, value))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    return SDPA(query, key, value, attn_mask, *args, **kwargs)


@contextlib.contextmanager
def plain_mode() -> Iterator[None]:
    """A captured graph holds its casts and needs no gradients: what comes after must neither cast nor ask for them.

    The captured function may have switched either off for a part of itself, which its graph no longer shows.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def is_plain_mode() -> bool:
    """Is :func:`plain_mode` in force already?"""
    return not torch.is_grad_enabled() and not torch._C._is_any_autocast_enabled()


class Captured(NamedTuple):
    """The in-place ATen graph of a Dynamo graph, and the fake tensors that its placeholders stand for."""

    graph: GraphModule
    inputs: list[Any]
    mode: FakeTensorMode


@contextlib.contextmanager
def fresh_fakes() -> Iterator[FakeTensorMode]:
    """A fake tensor mode for tracing twice, so that the one AOTAutograd will use stays as Dynamo made it."""
    context = TracingContext.get()
    saved = context.fake_mode
    assert saved is not None
    context.fake_mode = FakeTensorMode(shape_env=saved.shape_env, allow_non_fake_inputs=True)
    try:
        with torch.no_grad():
            yield context.fake_mode
    finally:
        context.fake_mode = saved


def capture(gm: GraphModule, inputs: Sequence[Any], replace: Mapping[int, Tensor], mode: FakeTensorMode) -> Captured:
    """Retrace a Dynamo graph to in-place ATen. ``replace`` gives the fakes of some inputs, by position."""
    fakes = [replace[i] if i in replace else _fake(x, mode) for i, x in enumerate(inputs)]
    leaves = [n for n in gm.graph.nodes if n.op == "call_function" and n.target is _SDPA]
    for node in leaves:
        node.target = _sdpa_leaf
    try:
        graph = record(Interpreter(gm).run, fakes, mode)
    finally:
        for node in leaves:
            node.target = _SDPA
    return Captured(graph, fakes, mode)


def record(run: Callable[..., Any], fakes: Sequence[Any], mode: FakeTensorMode) -> GraphModule:
    """What ``run`` calls, as a graph of ATen and custom operators; nodes keep the stack traces of what is run."""
    # As AOTAutograd traces; some operators have their sizes as symbols there alone. Without, matmul is taken apart
    # by torch's C++, as the goldens have it.
    python = enable_python_dispatcher() if any(map(_has_symbols, fakes)) else contextlib.nullcontext()
    with mode, python, torch.fx.traceback.preserve_node_meta():
        return make_fx(run, _allow_non_fake_inputs=True)(*fakes)


def _has_symbols(x: Any) -> bool:
    sizes = (*x.shape, *x.stride()) if isinstance(x, Tensor) else (x,)
    return any(isinstance(n, torch.SymInt) for n in sizes)


def _fake(x: Any, mode: FakeTensorMode) -> Any:
    if not isinstance(x, Tensor):
        return x
    context = TracingContext.get().tensor_to_context.get(x)
    source = getattr(context, "tensor_source", None)
    return mode.from_tensor(x, static_shapes=context is None, symbolic_context=context, source=source)


def static_fake(x: Tensor, mode: FakeTensorMode | None = None) -> Tensor:
    """The fake of a tensor whose sizes never change; without a mode, in the one that AOTAutograd will use."""
    mode = mode or TracingContext.get().fake_mode
    assert mode is not None
    return mode.from_tensor(x, static_shapes=True)


def cache_fake(tensor: Tensor, base: Tensor) -> Tensor:
    """A facade's fake: its view of a fake byte tensor that stands for its storage."""
    with without_facades():
        dtype, shape = tensor.dtype, tensor.shape
        stride, offset = tensor.stride(), tensor.storage_offset()
    return base.view(dtype).as_strided(shape, stride, offset)


def finish(new: GraphModule, old: GraphModule, kept: Sequence[int], added: Sequence[str]) -> GraphModule:
    """Make a recorded graph one that AOTAutograd takes for Dynamo's: parameters keep their marks and their guards.

    ``kept`` are the positions of the inputs that are left of the old graph's; behind them stand ``added`` ones, whose
    addresses never change.
    """
    placeholders = [n for n in old.graph.nodes if n.op == "placeholder"]
    fresh = [n for n in new.graph.nodes if n.op == "placeholder"]
    assert len(fresh) == len(kept) + len(added)
    for node, position in zip(fresh, kept, strict=False):
        _carry(node, placeholders[position])
    for node, name in zip(fresh[len(kept) :], added, strict=True):
        _rename(node, name)
        node._dynamo_source = None
        node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    for node in reversed(list(new.graph.nodes)):
        if not node.users and (node.op == "get_attr" or (node.op == "call_function" and is_view(node.target))):
            new.graph.erase_node(node)  # an engine op's adapter may have looked at a part of a cache
    for node in new.graph.nodes:
        if node.target is SDPA:
            node.target = _SDPA
        if node.op == "get_attr" and isinstance(getattr(new, node.target, None), FakeTensor):
            raise AssertionError(f"{node.name} is computed from a cache, but was not rewritten")
    for name in [*new._buffers]:  # constants: AOTAutograd looks for the source of every buffer, and they have none
        setattr(new, name, new._buffers.pop(name))
    for key, value in old.meta.items():
        new.meta.setdefault(key, value)
    if hasattr(old, "_param_name_to_source"):
        new._param_name_to_source = old._param_name_to_source
    new.graph.lint()
    new.recompile()
    return new


def _carry(node: Node, old: Node) -> None:
    _rename(node, old.name)
    for key in ("tensor_dict", "steal_arg", "grapharg"):
        if key in old.meta:
            node.meta[key] = old.meta[key]
    node._dynamo_source = getattr(old, "_dynamo_source", None)


def _rename(node: Node, name: str) -> None:
    node._rename(name)
    node.target = node.name


def attribute_to(n: Node) -> Any:
    """What is recorded meanwhile carries this node's stack trace."""
    return torch.fx.traceback.set_current_meta(n)


def restride(x: Any, like: Any) -> Any:
    """A tensor with the strides that later nodes were recorded with; where those have gaps, left as it is."""
    if not isinstance(x, Tensor) or not isinstance(like, Tensor):
        return x
    shapes, strides = ([[settled(n) for n in of(t)] for t in (x, like)] for of in (Tensor.size, Tensor.stride))
    assert shapes[0] == shapes[1], f"a rule gave {x.shape} for {like.shape}"
    if all(n == 1 or a == b for n, a, b in zip(shapes[0], *strides, strict=True)):
        return x
    return laid_out(x, in_memory_order(like))


def laid_out(x: Tensor, order: list[int]) -> Tensor:
    """A dense tensor whose dimensions lie in memory in this order, the widest first."""
    if order == sorted(order):
        return x.contiguous()
    return x.permute(order).contiguous().permute([order.index(i) for i in range(x.dim())])


def in_memory_order(x: Tensor) -> list[int]:
    """A tensor's dimensions from the widest stride to the narrowest; size-1 and expanded ones stay where they are."""
    return sorted(range(x.dim()), key=lambda i: -_width(x.stride(i)))


def _width(stride: Any) -> int:
    known = value_at_hand(stride)
    assert known is not None, "strides of a cache and of what stands for it have values"
    return known
