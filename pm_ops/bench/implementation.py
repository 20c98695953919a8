"""What the runner knows of an implementation: a name, what it takes part in, and calls bound to data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from .memory import Memory
    from .state_work import StateWork
    from .transfer_work import RepackWork, TransferWork
    from .work import AttentionWork, PagesWork, RopeWork, StoreWork

ATTENTION = frozenset({"decode", "prefill", "extend", "mixed", "host attention"})
LATENT = frozenset({"mla"})
STORE = frozenset({"store", "host store"})
ROPE = frozenset({"rope and store"})
PAGES = frozenset({"pages", "move"})
TRANSFER = frozenset({"transfer", "prefix", "host transfer"})
REPACK = frozenset({"repack"})
STATE = frozenset({"conv1d update", "conv1d prefill", "selective update", "selective prefill"})
GATED_DELTA = frozenset({"gated delta update", "gated delta prefill"})


class Unsupported(Exception):
    """An implementation cannot do a case; the text says why."""


class Missing(Unsupported):
    """An implementation, or a part of it, is not on this machine; the text says what was looked for."""


@dataclass(frozen=True)
class Bound:
    """A call with all its arguments, ready to be checked and timed."""

    run: Callable[[], Tensor | None]
    """Makes the call; the result if there is one."""
    out: Tensor | None = None
    """Where the call writes its result, if that is the same tensor each time: poisoned before a check."""
    tolerance: float | None = None
    """Relative error allowed, where this implementation computes in lower precision than the case asks for."""
    prepare: Callable[[], object] | None = None
    """Puts inputs back that the call overwrites; made before a check, not timed."""
    finish: Callable[[], object] | None = None
    """Sees to what is still under way when ``run`` returns, where that is not only the device's work; not timed."""
    pages: Callable[[], list[int]] | None = None
    """Host pages that the last offload went to, where the call chooses them itself."""
    note: str | None = None
    """How the call was set up, where that is a choice that the results should tell."""


class Implementation:
    """One way to do some of the work. A method that is not overridden is of a kind it takes no part in."""

    name: str
    kinds: frozenset[str]
    """Kinds of case that it takes part in."""
    scope: str | None = None
    """Why not in the others, for the notes."""
    ours = False
    """Whether it is pm_ops itself and so no peer."""
    compiles = True
    """Whether its first call compiles a kernel, so that compiling ahead pays."""

    def version(self) -> str | None:
        """What was measured, for the results; None: nothing beyond pm_ops' and torch's own versions."""
        return None

    def attention(self, work: AttentionWork, memory: Memory) -> Bound:
        """Attention of the work's queries over this memory; ``run`` returns ``[Tq, Hq, Dv]``."""
        raise NotImplementedError

    def latent(self, work: AttentionWork, memory: Memory) -> Bound:
        """Latent attention of the work's queries: ``memory.value`` is the first elements of ``memory.key``'s rows."""
        raise NotImplementedError

    def store(self, work: StoreWork, memory: Memory) -> Bound:
        """The work's rows to their slots in this memory."""
        raise NotImplementedError

    def rope_store(self, work: RopeWork, memory: Memory) -> Bound:
        """The same after rotating query and key; ``run`` returns the rotated query."""
        raise NotImplementedError

    def pages(self, work: PagesWork, layout: str) -> Bound:
        """The verb of the work's shape on its pages or tokens; gather's ``run`` returns the rows."""
        raise NotImplementedError

    def transfer(self, work: TransferWork, layout: str) -> Bound:
        """The work's pages between device and host; what follows on the current stream finds them there.

        An offload goes to the work's spare host pages, or to ``Bound.pages``, or, side by side, to ``Bound.out``,
        ``[parts, count, part_bytes]``.
        """
        raise NotImplementedError

    def repack(self, work: RepackWork, layout: str) -> Bound:
        """The work's pages of one layout as pages of another."""
        raise NotImplementedError

    def state(self, work: StateWork, layout: str) -> Bound:
        """The work's call over states; ``run`` returns its output."""
        raise NotImplementedError
