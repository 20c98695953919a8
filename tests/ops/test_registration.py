"""What every operator promises to torch: schema, fake, autograd, compile."""

import copy
import dataclasses
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.library import opcheck
from torch.utils._pytree import tree_leaves, tree_map

import pm_ops
from pm_ops.ops import attention, conv, gated_delta, merge, mla, pages, repack, rope, selective, store
from pm_ops.testing import sample_inputs

MUTATING = ["store_kv", "rope_store_kv", "copy_pages", "zero_pages", "scatter_pages", "copy_slots", "repack_pages"]
CONV = ["conv1d_update", "conv1d_prefill"]
SELECTIVE = ["selective_state_update", "selective_scan_prefill"]
GATED_DELTA = ["gated_delta_update", "gated_delta_prefill"]
MUTATING += CONV + SELECTIVE + GATED_DELTA
READING = ["load_kv", "attention", "mla_attention", "merge_attention", "gather_pages"]
INTO = ["attention_out"]
RETURNING = [*READING, "rope_store_kv", *CONV, *SELECTIVE, *GATED_DELTA]


def op_of(name):
    return getattr(torch.ops.pm_ops, name).default


@pytest.mark.parametrize("name", MUTATING + READING + INTO)
def test_opcheck_passes_all_four_tests_on_every_sample(name):
    count = 0
    for args, kwargs in sample_inputs(name):
        results = opcheck(op_of(name), args, kwargs)
        assert set(results.values()) == {"SUCCESS"} and len(results) == 4
        count += 1
    assert count >= 6


def test_every_operator_of_the_namespace_is_tested_here():
    registered = {
        n.removeprefix("pm_ops::").partition(".")[0]
        for n in torch._C._dispatch_get_all_op_names()
        if n.startswith("pm_ops::")
    }
    assert set(MUTATING + READING + INTO) <= registered
    public = {n for n in registered if not n.startswith("_")}
    assert public == set(MUTATING + READING + INTO)


@pytest.mark.parametrize("name", MUTATING + READING + INTO)
def test_only_the_buffer_is_declared_mutated_and_nothing_returned_aliases(name):
    schema = op_of(name)._schema
    mutated = [a.name for a in schema.arguments if a.alias_info is not None]
    written = {"repack_pages": "target", "attention_out": "out"}.get(name, "buffer")
    assert mutated == ([] if name in READING else [written])
    assert all(r.alias_info is None for r in schema.returns)
    assert bool(schema.returns) == (name in RETURNING)


@pytest.mark.parametrize("name", RETURNING)
def test_fake_with_symbolic_sizes_has_the_real_kernels_shapes_strides_and_dtypes(name):
    for args, kwargs in sample_inputs(name):
        real = tree_leaves(op_of(name)(*args, **kwargs))
        env = ShapeEnv()
        mode = FakeTensorMode(shape_env=env)

        def symbolic(x, mode=mode):
            if not isinstance(x, torch.Tensor):
                return x
            sizes = [DimDynamic.DYNAMIC if size > 1 else DimDynamic.STATIC for size in x.shape]
            return mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

        fake_args, fake_kwargs = tree_map(symbolic, (args, kwargs))
        with mode:
            fake = tree_leaves(op_of(name)(*fake_args, **fake_kwargs))
        for f, r in zip(fake, real, strict=True):
            assert [int(n) for n in f.shape] == list(r.shape), (name, f.shape, r.shape)
            assert [int(n) for n in f.stride()] == list(r.stride())
            assert f.dtype == r.dtype and f.device == r.device


def test_fake_keeps_the_token_count_symbolic():
    """A new number of tokens must not specialise the graph."""
    args, kwargs = next(s for s in sample_inputs("load_kv") if s[0][1].shape[0] > 2)
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    slots = mode.from_tensor(args[1], symbolic_context=context)
    with mode:
        out = op_of("load_kv")(mode.from_tensor(args[0]), slots, *args[2:], **kwargs)
    assert isinstance(out.shape[0], torch.SymInt) and out.shape[0].node.expr == slots.shape[0].node.expr


@pytest.mark.parametrize("name", MUTATING + READING + INTO)
@pytest.mark.parametrize("around", ["autocast", "float64", "bfloat16"])
def test_neither_autocast_nor_the_default_dtype_changes_a_byte(name, around):
    """What a kernel computes in is part of the specification; attention once gave its lse in the default dtype."""

    def run(args, kwargs):
        args, kwargs = copy.deepcopy((args, kwargs))
        out = tree_leaves((op_of(name)(*args, **kwargs), args, kwargs))
        return [x for x in out if isinstance(x, torch.Tensor)]

    for args, kwargs in sample_inputs(name):
        expected = run(args, kwargs)
        if around == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                got = run(args, kwargs)
        else:
            torch.set_default_dtype(getattr(torch, around))
            try:
                got = run(args, kwargs)
            finally:
                torch.set_default_dtype(torch.float32)
        for g, e in zip(got, expected, strict=True):
            assert g.dtype == e.dtype
            torch.testing.assert_close(g.double(), e.double(), rtol=0, atol=0, equal_nan=True)


def test_no_rows_and_rows_of_one_element_have_the_fakes_strides():
    pool = pm_ops.PagePool(pm_ops.page_major(1, 3, 1, 2, torch.bfloat16), 2)
    for count in (0, 1, 2):
        assert pm_ops.load_kv(pool, 0, torch.arange(count)).stride() == (3, 1, 1)


def test_gated_delta_update_takes_no_tokens():
    pool = pm_ops.PagePool(pm_ops.state_page(1, {"ssm": ((2, 3, 4), torch.float32)}), 2)
    rows = (torch.zeros(2, 0, 1, 4), torch.zeros(2, 0, 1, 4), torch.zeros(2, 0, 2, 3), *torch.zeros(2, 2, 0, 2))
    indices = torch.zeros(2, 0, dtype=torch.int32)
    assert pm_ops.gated_delta_update(pool, 0, *rows, indices).shape == (2, 0, 2, 3)


def test_int32_indices_go_with_more_slots_than_they_can_name():
    buffer = torch.arange(2**17).to(torch.uint8)
    plane = [0, 1, 1, 1, 2**16]  # 2**32 slots, which overlap
    slots = torch.tensor([7, 3 * 2**16 + 5, 2**31 - 1], dtype=torch.int32)
    rows = torch.ops.pm_ops.load_kv(buffer, slots, plane, 2**16, 1, 1, torch.int8)
    assert rows.flatten().tolist() == [7, 8, -2]


SCALES = ["key_scale_tensor", "value_scale_tensor"]
GRAD_INPUTS = {
    "store_kv": ["key", "value", *SCALES],
    "rope_store_kv": ["query", "key", "value", "cos_sin", "q_weight", "k_weight", *SCALES],
    "load_kv": ["scale_tensor"],
    "attention": ["query", "sinks", "alibi_slopes", "bias", *SCALES],
    "attention_out": ["query", "out"],
    "mla_attention": ["query", "scale_tensor"],
    "merge_attention": ["out_a", "lse_a", "out_b", "lse_b"],
    **{name: ["x", "weight", "bias"] for name in CONV},
    **{name: ["x", "dt", "A", "B", "C", "D", "z", "dt_bias"] for name in SELECTIVE},
    **{name: ["query", "key", "value", "g", "beta", "a_log", "dt_bias"] for name in GATED_DELTA},
}


@pytest.mark.parametrize(("name", "argument"), [(n, a) for n, names in GRAD_INPUTS.items() for a in names])
@pytest.mark.parametrize("fake", [False, True], ids=["kernel", "fake"])
def test_an_input_that_needs_a_gradient_is_refused(name, argument, fake):
    names = [a.name for a in op_of(name)._schema.arguments]
    args, kwargs = next(s for s in sample_inputs(name) if len(s[0]) > 1 and s[0][1] is not None and s[0][1].numel())
    values = dict(zip(names, args, strict=False)) | kwargs
    if name == "load_kv":
        values["out_dtype"] = torch.float32
    shapes = {"sinks": (4,), "alibi_slopes": (4,), "bias": (1, 1, 1, 20)}
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else torch.enable_grad():
        like = values.get(argument)
        values[argument] = torch.zeros(like.shape if like is not None else shapes.get(argument, ()), requires_grad=True)
        with pytest.raises(RuntimeError, match=f"{argument} requires grad"):
            op_of(name)(**values)
        with torch.no_grad():
            op_of(name)(**values)


@pytest.mark.parametrize("name", MUTATING + READING + INTO)
def test_schema_and_argument_class_agree_in_names_order_and_defaults(name):
    """The dispatcher drops arguments that equal the schema's default, so that a drift would be silent."""
    modules = {"store_kv": store, "load_kv": store, "rope_store_kv": rope, "attention": attention}
    modules["attention_out"] = attention
    modules |= {**dict.fromkeys(CONV, conv), **dict.fromkeys(SELECTIVE, selective)}
    modules |= dict.fromkeys(GATED_DELTA, gated_delta)
    module = {**modules, "merge_attention": merge, "repack_pages": repack, "mla_attention": mla}.get(name, pages)
    cls = getattr(module, "".join(w.capitalize() for w in name.split("_")).replace("Kv", "KV").replace("Mla", "MLA"))
    fields = dataclasses.fields(cls)
    arguments = op_of(name)._schema.arguments
    assert [f.name for f in fields] == [a.name for a in arguments]
    for field, argument in zip(fields, arguments, strict=True):
        assert (field.default is not dataclasses.MISSING) == argument.has_default_value()
        if argument.has_default_value():
            assert field.default == argument.default_value and type(field.default) is type(argument.default_value)


@pytest.mark.parametrize("name", MUTATING + READING + INTO)
@pytest.mark.parametrize("fake", [False, True], ids=["kernel", "fake"])
def test_tensors_of_too_few_and_too_many_axes_are_refused(name, fake):
    args, kwargs = list(sample_inputs(name))[1]
    names = [a.name for a in op_of(name)._schema.arguments]
    values = dict(zip(names, args, strict=False)) | kwargs
    tensors = {k: x for k, x in values.items() if isinstance(x, torch.Tensor) and x.dim()}  # a scale's axes are its own
    assert tensors
    for argument, x in tensors.items():
        for shape in ((), (1,) * 6):
            with FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext(), pytest.raises(ValueError):
                op_of(name)(**{**values, argument: torch.zeros(shape, dtype=x.dtype)})


@pytest.mark.parametrize("name", [n for n in MUTATING + READING + INTO if n != "merge_attention"])
def test_a_buffer_of_another_shape_is_refused(name):
    args, kwargs = next(iter(sample_inputs(name)))
    with pytest.raises(ValueError, match="1-D contiguous uint8"):
        op_of(name)(args[0][: args[0].numel() // 2 * 2].view(2, -1), *args[1:], **kwargs)
