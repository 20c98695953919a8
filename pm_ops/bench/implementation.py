"""What the runner knows of an implementation: a name, what it takes part in, and calls bound to data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from .memory import Memory
    from .work import AttentionWork, PagesWork, RopeWork, StoreWork

ATTENTION = frozenset({"decode", "prefill", "extend", "mixed", "host attention"})
STORE = frozenset({"store", "host store"})
ROPE = frozenset({"rope and store"})
PAGES = frozenset({"pages", "move"})


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

    def store(self, work: StoreWork, memory: Memory) -> Bound:
        """The work's rows to their slots in this memory."""
        raise NotImplementedError

    def rope_store(self, work: RopeWork, memory: Memory) -> Bound:
        """The same after rotating query and key; ``run`` returns the rotated query."""
        raise NotImplementedError

    def pages(self, work: PagesWork, layout: str) -> Bound:
        """The verb of the work's shape on its pages or tokens; gather's ``run`` returns the rows."""
        raise NotImplementedError
