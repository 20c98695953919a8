"""States bound by sequence: read whole or in part, in every order with writes; kernels that write them are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pm_ops
from pm_ops.compile_passes import bind, page_major_backend
from pm_ops.testing import fill_random, page_bytes, writes_only

BATCH, SHAPE = 2, (3, 4)
Body = Callable[[Tensor, Tensor, Tensor], Any]

separate = lambda: [torch.randn(BATCH, *SHAPE) for _ in range(2)]  # noqa: E731
layers_first = lambda: list(torch.randn(2, BATCH, *SHAPE))  # noqa: E731
last_layer_first = lambda: list(torch.randn(2, BATCH, *SHAPE))[::-1]  # noqa: E731
sequences_first = lambda: list(torch.randn(BATCH, 2, *SHAPE).unbind(1))  # noqa: E731


class Twins:
    """The states of two layers, bound to shuffled pages among random bytes, and their eager copies."""

    def __init__(self, body: Body, make: Callable[[], list[Tensor]] = separate) -> None:
        torch.manual_seed(0)
        self.body, self.states = body, make()
        self.stock = [s.clone() for s in self.states]
        self.pool = pm_ops.PagePool(pm_ops.state_page(2, {"ssm": (SHAPE, torch.float32)}, align=16), 6)
        fill_random(self.pool.buffer)
        self.pool.allocator.free(self.pool.allocator.alloc(6)[::-1])
        self.binding = bind(self.pool, states={"ssm": self.states})
        self.compiled = torch.compile(body, backend=page_major_backend(self.binding, "eager"), fullgraph=True)

    @property
    def pages(self) -> Tensor:
        assert self.binding.page_table is not None
        return self.binding.page_table[:, 0].long()

    def check(self) -> None:
        """Outputs, what is written to the input, and states are eager's; no other byte is written."""
        for _ in range(2):
            x = torch.randn(BATCH, *SHAPE)
            own = x.clone()
            with writes_only(self.pool.buffer, page_bytes(self.pool, self.pages.tolist())):
                got = self.compiled(*self.states, own)
            torch.testing.assert_close(got, self.body(*self.stock, x))
            assert torch.equal(own, x)
            for layer, state in enumerate(self.stock):
                torch.testing.assert_close(self.pool.view(layer, "ssm")[self.pages], state)
        assert self.binding.report().materialized == 0

    def refuses(self, message: str) -> None:
        x, before = torch.randn(BATCH, *SHAPE), self.pool.buffer.clone()
        own = x.clone()
        with pytest.raises(Exception, match=message):
            self.compiled(*self.states, own)
        assert torch.equal(self.pool.buffer, before) and torch.equal(own, x)


def held_write(s0: Tensor, s1: Tensor, x: Tensor) -> Tensor:
    """The write to s1 is of x as it was, and the state that x becomes was loaded before."""
    y = s0 * 2
    s1.copy_(x)
    x.copy_(s0)
    return y + s1


def read_write_read(s0: Tensor, s1: Tensor, x: Tensor) -> list[Tensor]:
    before = s0 * 2
    s0.copy_(before + x)
    between = s0 + s1
    s1.copy_(between)
    s0.copy_(s1 * 0.5)
    return [before, between, s0 + s1]


def parts(s0: Tensor, s1: Tensor, x: Tensor) -> list[Tensor]:
    out = [s1[1] * 3, s0[:, 1] + 1, s0[:, :, 2:] + 0, s0[1:].transpose(1, 2) + 0, s1.view(-1)[5:9] * 2]
    s1.copy_(s1 * 0.5 + x)
    return [*out, s1[1] * 3, s1.unbind(0)[1] + s0[1, 1:2]]


def branches_read(s0: Tensor, s1: Tensor, x: Tensor) -> Tensor:
    s0.copy_(s0 * 0.5 + x)
    return torch.cond(x.sum() > 0, lambda s, x: s + x, lambda s, x: s - x, (s0, x))


@pytest.mark.parametrize("body", [held_write, read_write_read, parts, branches_read], ids=lambda f: f.__name__)
def test_what_is_read_of_a_state_is_what_was_written_last(body: Body) -> None:
    Twins(body).check()


@pytest.mark.parametrize("make", [layers_first, last_layer_first], ids=["layers first", "last layer first"])
def test_states_of_layers_in_one_tensor_are_told_apart(make: Callable[[], list[Tensor]]) -> None:
    Twins(read_write_read, make).check()
    torch._dynamo.reset()
    Twins(parts, make).check()


@pytest.mark.parametrize("read", [lambda s: s * 2, lambda s: s[0] * 2], ids=["whole", "first"])
def test_a_state_with_others_between_its_sequences_is_not_read_by_operators(read: Callable[[Tensor], Tensor]) -> None:
    """One sequence's state in the second layer lies where the first layer's next would, had that no gaps."""
    Twins(lambda s0, s1, x: read(s1), sequences_first).refuses("mul reads a bound cache")


@torch.library.custom_op("pm_ops_test::halve", mutates_args=("states",))
def halve(states: list[Tensor], x: Tensor) -> Tensor:
    for s in states:
        s.mul_(0.5)
    return x * 2


@halve.register_fake
def _(states: list[Tensor], x: Tensor) -> Tensor:
    return torch.empty_like(x)


def foreach(s0: Tensor, s1: Tensor, x: Tensor) -> Tensor:
    torch._foreach_copy_([s0, x], [x + 1, x * 2])
    return s0 + 1


def operator_on_a_list(s0: Tensor, s1: Tensor, x: Tensor) -> Tensor:
    return halve([s0, x + 0], x) + s0


def a_branch_writes(s0: Tensor, s1: Tensor, x: Tensor) -> Tensor:
    def write(s: Tensor, x: Tensor) -> Tensor:
        s.copy_(x)
        return x + 1

    return torch.cond(x.sum() > 0, write, lambda s, x: s - x, (s0, x))


@pytest.mark.parametrize(
    ("body", "operator"),
    [(foreach, "aten._foreach_copy_"), (operator_on_a_list, "pm_ops_test.halve"), (a_branch_writes, "cond")],
    ids=["foreach", "operator", "cond"],
)
def test_operators_that_write_a_state_among_other_tensors_are_refused(body: Body, operator: str) -> None:
    with torch.inference_mode():  # where Dynamo lets a branch write
        Twins(body).refuses(rf"{operator}\S* may write to a bound cache(.|\n)*test_states_by_sequence.py")


def double(state, size):  # type: ignore[no-untyped-def]
    import triton.language as tl

    at = tl.arange(0, size)
    tl.store(state + at, tl.load(state + at) * 2)


def test_a_triton_kernel_that_writes_states_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers' Bamba calls one for a step of Mamba-2."""
    jit = pytest.importorskip("triton.runtime.jit")
    kernel = jit.JITFunction(double)  # as triton.jit makes it outside of the interpreter

    def step(s0: Tensor, s1: Tensor, x: Tensor) -> Tensor:
        kernel[(1,)](s0, 8)
        return x + 1

    monkeypatch.setattr("torch.utils._triton.has_triton", lambda *_: True)
    Twins(step).refuses("triton_kernel_wrapper_mutation may write to a bound cache")
