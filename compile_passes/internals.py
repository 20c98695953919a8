"""Private API of torch, but for the recordings in :mod:`trace`: Dynamo's state, storages, symbolic numbers, schemas.

The rest of the package calls these functions, so that a new release of torch changes two files alone.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend as lookup_backend
from torch._dynamo.backends.registry import register_backend as register_backend
from torch._dynamo.convert_frame import CatchErrorsWrapper
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
from torch._dynamo.source import LocalSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._higher_order_ops.auto_functionalize import (
    AliasViewInfo,
    AsStridedViewInfo,
    NotView,
    SliceViewInfo,
    auto_functionalized,
    read_view_information_from_args,
)
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2 as auto_functionalized_v2
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.experimental.symbolic_shapes import guard_or_false as guard_or_false
from torch.utils._pytree import tree_leaves

DataDependent = GuardOnDataDependentSymNode
without_facades = torch._C.DisableTorchFunctionSubclass
WRAPPERS = (auto_functionalized, auto_functionalized_v2)  # of operators that write in place, in functional graphs

_LIBRARY = torch.library.Library("pm_ops_trace", "FRAGMENT")
# What a facade records before every operation on it, and the backend takes out again: no other backend can run it.
_LIBRARY.define("in_pages(str label) -> ()")
IN_PAGES = torch.ops.pm_ops_trace.in_pages.default


def _in_pages(label: str, *_: Any) -> None:
    raise RuntimeError(
        f"{label} was moved into pages by pm_ops.compile_passes.bind, but this code was compiled by another backend; "
        "compile it with torch.compile(model, backend=page_major_backend(binding)), or call binding.release() first"
    )


_LIBRARY.impl("in_pages", _in_pages, "CompositeExplicitAutograd")
torch.library.register_fake(IN_PAGES, lambda label: None, lib=_LIBRARY)
torch.library.register_torch_dispatch(  # AOTAutograd would drop an operator without results instead of running it
    IN_PAGES, FunctionalTensorMode, lambda mode, func, types, args, kwargs: _in_pages(*args), lib=_LIBRARY
)


def drop_marks(gm: GraphModule) -> None:
    """Take :data:`IN_PAGES` out of a Dynamo graph and the graphs within it."""
    for module in gm.modules():
        if isinstance(module, GraphModule):
            marks = module.graph.find_nodes(op="call_function", target=IN_PAGES)
            for node in marks:
                module.graph.erase_node(node)
            if marks:
                module.recompile()


def ends_in_break(gm: GraphModule) -> bool:
    """Did Dynamo stop this graph in the middle of a frame?"""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return bool(getattr(reason, "graph_break", False))


def compiled_part() -> str:
    """Which part of a compiled function Dynamo is at.

    ``"start"``; ``"rest"``, which follows graph breaks; or ``"inner"``, in another function that a broken one calls.
    """
    frame = sys._getframe()
    while frame.f_code is not CatchErrorsWrapper.__call__.__code__:
        if frame.f_back is None:
            return "inner"
        frame = frame.f_back
    code, caller, resumed = frame.f_locals["frame"].f_code, frame.f_back, False
    while caller is not None and code.co_name.startswith(TORCH_DYNAMO_RESUME_IN_PREFIX):
        code, caller, resumed = caller.f_code, caller.f_back, True
    while caller is not None and caller.f_code.co_filename == torch.nn.modules.module.__file__:
        caller = caller.f_back  # Module.__call__ around forward, which is not compiled itself
    if caller is None or caller.f_code.co_filename != torch._dynamo.eval_frame.__file__:
        return "inner"
    return "rest" if resumed else "start"


def inlined_only(function: Any) -> None:
    """Let Dynamo trace a function as a part of others, but never compile a call of it from eager code."""
    skip_code(function.__code__)


def guard_modules() -> None:
    """Compile anew for other module objects in the frame's arguments.

    Dynamo's recompile limit counts the graphs of one module object, and so not layers that are compiled one by one.
    """
    for name, value in InstructionTranslator.current_tx().output.root_tx.f_locals.items():
        if isinstance(value, torch.nn.Module):
            install_guard(LocalSource(name, is_input=True).make_guard(GuardBuilder.ID_MATCH))


def wants_gradient(gm: GraphModule, caches: Iterable[int]) -> bool:
    """Does an output of a Dynamo graph need a gradient, or what it writes to one of these of its inputs?

    Under ``no_grad``, inside the graph or around it, none does.
    """
    (output,), placeholders = (gm.graph.find_nodes(op=op) for op in ("output", "placeholder"))
    nodes = [*output.all_input_nodes, *(placeholders[i] for i in caches)]  # a tensor is told what was written to it
    values = [node.meta.get("example_value") for node in nodes]
    return any(isinstance(v, Tensor) and v.requires_grad for v in values)


def inductor(gm: GraphModule, inputs: Sequence[Any], mode: str | None, options: dict[str, Any]) -> Callable[..., Any]:
    """Compile with Inductor, under torch.compile's ``mode`` and ``options``."""
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    # reorder_for_locality can move a read behind the next store, and the pool would be cloned to keep the old bytes.
    patches = {**(list_mode_options(mode) if mode else {}), **options, "reorder_for_locality": False}
    compiled: Callable[..., Any] = compile_fx(gm, list(inputs), config_patches=patches)  # type: ignore[assignment]
    return compiled


def mark_static(tensor: Tensor) -> None:
    """Sizes of this tensor are constants of every graph."""
    torch._dynamo.mark_static(tensor)


def storage_key(tensor: Tensor) -> int:
    """Equal for tensors, fake ones too, that share a storage."""
    return tensor.untyped_storage()._cdata


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that this one was made a view of."""
    return tensor._base


def empty_storage(tensor: Tensor, message: str) -> None:
    """Give a storage's memory back for good. Code that asks for its address from then on gets an error.

    Only builds of torch with CUDA can do that; the others refuse an address to writers, with a message of their own.
    """
    with without_facades():
        storage = tensor.untyped_storage()
        storage.resize_(0)
        explain = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
        if explain is not None:
            explain(storage._cdata, message)
        else:
            torch._C._set_throw_on_mutable_data_ptr(tensor)


def give_storage(tensor: Tensor, storage: torch.UntypedStorage) -> None:
    """Let a tensor lie in another storage of the same size; ``set_`` would ask for the address of the one it leaves."""
    with without_facades(), torch.inference_mode(tensor.is_inference()), torch.no_grad():
        flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
        tensor.data = flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def value_at_hand(x: Any) -> int | None:
    """The value that Dynamo saw of a number that may be symbolic; None for one read from a tensor."""
    if isinstance(x, int):
        return x
    return int(x.node.hint) if x.node.has_hint() else None


def settled(x: Any) -> Any:
    """A symbolic number of which only one value is left as that value: no recording knows it as a symbol any more."""
    return int(x) if isinstance(x, torch.SymInt) and x.node.expr.is_number else x


def symbolic_terms(x: Any) -> list[Any]:
    """The symbolic summands of a number, each a whole number times an expression."""
    if isinstance(x, int):
        return []
    _, rest = sympy.expand(x.node.expr).as_coeff_Add()
    terms = [t for t in sympy.Add.make_args(rest) if t != 0]
    return terms if all(t.as_coeff_Mul()[0].is_Integer for t in terms) else [sum(terms)]


def divisible(term: Any, by: int) -> bool:
    """Is the factor of one of :func:`symbolic_terms` a multiple?"""
    return bool(term.as_coeff_Mul()[0] % by == 0)


def sum_of_terms(terms: Sequence[Any], over: int, like: Any) -> Any:
    """The sum of terms of ``like``, divided by a number that divides them, as a symbolic number."""
    return like.node.shape_env.create_symintnode(sympy.Add(*terms) / over, hint=None)


def is_operator(target: Any) -> bool:
    """Is this one overload of an operator?"""
    return isinstance(target, torch._ops.OpOverload)


def overloads(op: Any) -> list[Any]:
    """The overloads of an operator, or the one that is given; empty for anything else."""
    if isinstance(op, torch._ops.OpOverloadPacket):
        return [getattr(op, name) for name in op.overloads()]
    return [op] if is_operator(op) else []


def operator_name(target: Any) -> str:
    """An operator's name without namespace and overload."""
    return target._schema.name.partition("::")[2] if is_operator(target) else str(target)


def is_view(target: Any) -> bool:
    """Does an operator only look at its input's data in another shape?"""
    if target is operator.getitem:
        return True
    if not is_operator(target):
        return False
    returns = target._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def is_mutable(target: Any) -> bool:
    """May an operator write to one of its inputs? Control flow and other higher-order operators may."""
    if is_operator(target):
        return bool(target._schema.is_mutable)
    return isinstance(target, torch._ops.HigherOrderOperator) and target not in WRAPPERS


def written_names(target: Any) -> list[str]:
    """The names of the arguments that an operator writes to."""
    return [a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def unwrapped(target: Any, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """What ``auto_functionalized_v2`` of an operator is given.

    Returns the arguments that are not written, by name; for each written one its base's place among the bases, and the
    operator and arguments that make a view of that, None for the base itself; and the bases.
    """
    given = dict(kwargs)
    bases, names = given.pop("_all_bases"), written_names(target)
    types = [a.type for a in target._schema.arguments if a.name in names]
    views: dict[str, Any] = {}
    for name, view in read_view_information_from_args(names, types, given, bases).items():
        if isinstance(view, AsStridedViewInfo):
            op, args = torch.ops.aten.as_strided.default, (view.size, view.stride, view.storage_offset)
            views[name] = (view.base_index, op, args)
        elif isinstance(view, SliceViewInfo):
            views[name] = (view.base_index, torch.ops.aten.slice.Tensor, (view.dim, view.start, view.end))
        elif isinstance(view, NotView | AliasViewInfo):
            views[name] = (view.base_index, None, ())
        else:
            given[name] = None  # an optional one that is not there, or a list
    return given, views, bases


def asks_metadata(target: Any) -> bool:
    """Does an operator answer from sizes and strides alone? ``item()`` does not: it reads the data."""
    return is_operator(target) and target.name().startswith("aten::sym_")


def written(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What an operator writes to, lists and dicts of arguments taken apart; all arguments where nothing tells."""
    if not is_operator(target):
        return tree_leaves((args, kwargs)) if is_mutable(target) and not _in_subgraphs_that_read(args) else []
    found = []
    for position, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return tree_leaves(found)


def _in_subgraphs_that_read(args: Sequence[Any]) -> bool:
    """Is a higher-order operator all done by graphs, such as the branches of ``cond``, that write to nothing?"""
    graphs = [m for a in args if isinstance(a, GraphModule) for m in a.modules() if isinstance(m, GraphModule)]
    calls = [n for m in graphs for n in m.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    return bool(graphs) and all(n.op == "call_function" and not is_mutable(n.target) for n in calls)


def is_pointwise(target: Any) -> bool:
    """Is every element of an ATen operator's result computed from the inputs' elements at the same place, broadcast?"""
    tags = target.tags if is_operator(target) else ()
    aten = is_operator(target) and target.namespace == "aten"
    return aten and torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def has_effect(n: Node) -> bool:
    """Does a node do more than to compute its results? An operator without any is there for something else."""
    return bool(n.is_impure()) or (is_operator(n.target) and not n.target._schema.returns)  # type: ignore[union-attr]


def alike(a: Tensor, b: Tensor) -> bool:
    """Does one address of a storage hold the same number for two tensors?"""
    return (a.dtype, a.is_neg(), a.is_conj()) == (b.dtype, b.is_neg(), b.is_conj())


def is_repeatable(target: Any) -> bool:
    """Do two calls of an operator on the same values give the same?"""
    if not is_operator(target):
        return target is operator.getitem
    random = torch.Tag.nondeterministic_seeded in target.tags
    return target.namespace == "aten" and not random and not target._schema.is_mutable


def symbolic(x: Any) -> Any:
    """A size as an integer, or where Dynamo has no one value for it as a sympy expression, which guards nothing."""
    return x.node.expr if isinstance(x, torch.SymInt) else x


def simplified(x: Any) -> Any:
    """An integer or sympy expression in a form that is equal for equal ones."""
    if isinstance(x, int):
        return x
    x = sympy.expand(x)
    return int(x) if x.is_Integer else x


def quotient(x: Any, by: Any) -> Any:
    """``x / by`` if that is a whole number, 1 or more, whatever values sizes have; else None."""
    if isinstance(x, int) and isinstance(by, int):
        return x // by if x >= by and x % by == 0 else None
    found = simplified(sympy.cancel(sympy.sympify(x) / by))
    return found if isinstance(found, int) or (found.is_integer and found.is_positive) else None


def never_negative(x: Any) -> bool:
    """Is a number 0 or more, whatever values sizes have?"""
    return x >= 0 if isinstance(x, int) else bool(x.is_nonnegative)
