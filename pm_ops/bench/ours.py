"""pm_ops itself. On page-major memory through the functions that people call; on layer-major memory, which is no pool,
through ``torch.ops.pm_ops`` with the same memory's strides as integers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import pm_ops

from ..transfer import Transfer
from .implementation import (
    ATTENTION,
    GATED_DELTA,
    LATENT,
    PAGES,
    REPACK,
    ROPE,
    STATE,
    STORE,
    TRANSFER,
    Bound,
    Implementation,
    Missing,
    Unsupported,
)
from .memory import PAGE_MAJOR, Memory
from .peer_fa3 import FA3
from .state_work import StateWork
from .transfer_work import RepackWork, TransferWork
from .work import AttentionWork, PagesWork, RopeWork, StoreWork

_NO_PAGES = "pages of a layer-major cache are no runs of bytes: there is nothing to call"


class PmOps(Implementation):
    """What a call without further options does, with kernels of pm_ops' own where it might take another's."""

    name = "pm_ops"
    kinds = ATTENTION | LATENT | STORE | ROPE | PAGES | TRANSFER | REPACK | STATE | GATED_DELTA
    ours = True

    def attention(self, work: AttentionWork, memory: Memory) -> Bound:
        """``pm_ops.attention``, all of K and V read from pages."""
        return Bound(_attention(work, memory, impl=_own(work)))

    def latent(self, work: AttentionWork, memory: Memory) -> Bound:
        """``pm_ops.mla_attention``."""
        return Bound(_latent(work, memory))

    def store(self, work: StoreWork, memory: Memory) -> Bound:
        """``pm_ops.store_kv``."""
        if memory.pool is not None:
            pool, layer = memory.pool, memory.layer
            return Bound(lambda: pm_ops.store_kv(pool, layer, work.key, work.value, work.slots))
        rows, geometry = (memory.buffer, work.key, work.value, work.slots), _geometry(memory)
        return Bound(lambda: torch.ops.pm_ops.store_kv(*rows, **geometry))

    def rope_store(self, work: RopeWork, memory: Memory) -> Bound:
        """``pm_ops.rope_store_kv``."""
        if not hasattr(pm_ops, "rope_store_kv"):
            raise Missing("this pm_ops has no rope_store_kv")
        store = work.store
        rows = (work.query, store.key, store.value, work.positions, work.cos_sin, store.slots)
        if memory.pool is not None:
            pool, layer = memory.pool, memory.layer
            return Bound(lambda: pm_ops.rope_store_kv(pool, layer, *rows))  # type: ignore[arg-type, return-value]
        geometry = _geometry(memory)
        return Bound(lambda: torch.ops.pm_ops.rope_store_kv(memory.buffer, *rows, **geometry)[0])

    def pages(self, work: PagesWork, layout: str) -> Bound:
        """The methods of :class:`pm_ops.PagePool`."""
        if layout != PAGE_MAJOR:
            raise Unsupported(_NO_PAGES)
        pool, src, dst = work.pool, work.src, work.dst
        verbs: dict[str, Callable[[], Tensor | None]] = {
            "copy": lambda: pool.copy(src, dst),
            "gather": lambda: pool.gather(src),
            "scatter": lambda: pool.scatter(dst, work.rows),
            "move": lambda: pool.copy_slots(src, dst),
        }
        return Bound(verbs[work.shape.verb])

    def transfer(self, work: TransferWork, layout: str) -> Bound:
        """:class:`pm_ops.HostPool`. A restore is waited for as a whole."""
        return _transfer(work, layout, by_layer=False)

    def state(self, work: StateWork, layout: str) -> Bound:
        """The operator, through ``torch.ops``."""
        call = work.calls[layout]
        operator, arguments = getattr(torch.ops.pm_ops, snake(type(call).__name__)), work.arguments(call)
        return Bound(lambda: operator(*arguments))

    def repack(self, work: RepackWork, layout: str) -> Bound:
        """:meth:`pm_ops.RepackPlan.run`."""
        if layout != PAGE_MAJOR:
            raise Unsupported(_NO_PAGES)
        plan, pages = work.plan, (work.source, work.target, work.src, work.dst)
        return Bound(lambda: plan.run(*pages))


class PmOpsByLayer(Implementation):
    """The same restore layer by layer: attention of a layer waits for that layer alone."""

    name = "pm_ops_by_layer"
    kinds = frozenset({"prefix"})
    scope = "it is a second way to restore, and nothing else"
    ours = True

    def transfer(self, work: TransferWork, layout: str) -> Bound:
        """``HostPool.restore(..., by_layer=True)``."""
        return _transfer(work, layout, by_layer=True)


class PmOpsFA3(Implementation):
    """``attention`` with FlashAttention 3's kernel behind it."""

    name = "pm_ops_fa3"
    kinds = ATTENTION
    ours = True
    compiles = False

    def __init__(self, library: FA3) -> None:
        self.library = library  # loaded: what impl="fa3" calls

    def attention(self, work: AttentionWork, memory: Memory) -> Bound:
        """``pm_ops.attention(..., impl="fa3")``."""
        return _if_taken(_attention(work, memory, impl="fa3"))


class PmOpsMLATriton(Implementation):
    """``mla_attention`` by attention's kernel, where auto takes the one for Hopper."""

    name = "pm_ops_mla_triton"
    kinds = LATENT
    scope = "it is a second kernel for latent attention"
    ours = True

    def latent(self, work: AttentionWork, memory: Memory) -> Bound:
        """``pm_ops.mla_attention(..., impl="triton")``."""
        return _if_taken(_latent(work, memory, impl="triton"))


def _if_taken(run: Callable[[], Tensor]) -> Bound:
    """A call by a kernel that was asked for, tried once: where that refuses it, its reason becomes a note."""
    try:
        run()
    except ValueError as error:
        raise Unsupported(str(error)) from error
    return Bound(run)


def snake(name: str) -> str:
    """``"Conv1dUpdate"`` → ``"conv1d_update"``: an operator's name, from that of its arguments."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _geometry(memory: Memory) -> dict[str, Any]:
    """Where rows lie, as the operators take it."""
    return dict(
        key_plane=memory.key_plane,
        value_plane=memory.value_plane,
        page_size=memory.page_size,
        key_dtype=memory.key.dtype,
        value_dtype=memory.value.dtype,
    )


def _own(work: AttentionWork) -> str:
    """Not auto, which takes FlashAttention 3 for many queries, since that is loaded where it is measured too."""
    return "triton" if work.query.is_cuda else "auto"


def _attention(work: AttentionWork, memory: Memory, **options: Any) -> Callable[[], Tensor]:
    shape = work.shape
    if max(shape.query_lens) > 1:
        options |= dict(query_start=work.query_start, max_query_len=max(shape.query_lens))
    if shape.window:
        options["window"] = shape.window
    if work.sinks is not None:
        options["sinks"] = work.sinks
    if shape.scales != (1.0, 1.0):
        options |= dict(key_scale=shape.scales[0], value_scale=shape.scales[1])
    rows = (work.query, work.page_table, work.seq_lens)
    if memory.pool is not None:
        pool, layer = memory.pool, memory.layer
        return lambda: pm_ops.attention(pool, layer, *rows, **options)  # type: ignore[return-value]
    query_start = options.pop("query_start", None)
    geometry = _geometry(memory)
    geometry |= dict(kv_heads=shape.kv_heads, value_dim=shape.value_dim, softmax_scale=shape.head_dim**-0.5)
    return lambda: torch.ops.pm_ops.attention(memory.buffer, *rows, query_start, **geometry, **options)[0]


def _latent(work: AttentionWork, memory: Memory, **options: Any) -> Callable[[], Tensor]:
    s = work.shape
    options |= dict(value_dim=s.value_dim, softmax_scale=s.head_dim**-0.5)
    start = work.query_start if max(s.query_lens) > 1 else None
    rows = (work.query, work.page_table, work.seq_lens)
    if memory.pool is not None:
        pool, layer = memory.pool, memory.layer
        return lambda: pm_ops.mla_attention(pool, layer, *rows, query_start=start, **options)  # type: ignore[return-value]
    plane = dict(latent_plane=memory.key_plane, page_size=memory.page_size, dtype=memory.key.dtype)
    return lambda: torch.ops.pm_ops.mla_attention(memory.buffer, *rows, start, **plane, **options)[0]


def _transfer(work: TransferWork, layout: str, by_layer: bool) -> Bound:
    if layout != PAGE_MAJOR:
        raise Unsupported(_NO_PAGES)
    host = work.host
    pages: list[int] = []
    under_way: list[Transfer] = []

    def offload() -> Transfer:
        host.free(pages)
        saved = host.offload(work.src)
        pages[:], under_way[:] = saved.pages, [saved]
        return saved

    def restore() -> Transfer:
        under_way[:] = [host.restore(work.saved, work.dst, by_layer=by_layer)]
        return under_way[0]

    def both() -> None:
        saved, back = offload(), restore()
        saved.wait()
        back.wait()

    def finish() -> None:
        for transfer in under_way:
            transfer.synchronize()

    verbs: dict[str, Callable[[], None]] = {
        "offload": lambda: offload().wait(),
        "restore": lambda: restore().wait(),
        "both ways": both,
        "first layer": lambda: restore().wait_layer(0) if by_layer else restore().wait(),
        "last layer": lambda: restore().wait(),
    }
    run = verbs[work.shape.verb]
    run()
    finish()
    note = f"auto takes impl={under_way[0].impl!r}"
    return Bound(run, finish=finish, pages=lambda: pages, note=note)
