"""Which accesses to shared memory a Gluon kernel has put in order, by vector clocks; `gluon_interpreter.py` asks.

A clock says of each agent how many of its steps are known to be over. Agents are the partitions, whose steps end with
their `thread_barrier`s, the products of each, in their order, and the mbarriers, whose phases the copy engine's writes
end with. An access is marked with its agent and step, and raises a `Race` unless the partition knows that all accesses
before it that it may not overlap with are over: of a read the last write, of a write also the reads since. Of two that
nothing orders, whichever comes second this time raises.

    thread_barrier           what any thread has done, each thread of the partition knows
    mbarrier.arrive, expect  hand on what one thread of the partition knows
    async_copy's arrive      hands on what every thread knows and has done
    mbarrier.wait            takes over what the arrivals of the phase handed on
    warp_specialize          partitions begin with all that was done; what they have done is known at its end

Taken as given is what the compiled kernels show: within a partition the compiler orders loads and stores of different
threads, and it has the threads meet before one of them arrives, which `test_compile.py` holds it to. So a wait for
products is enough before an arrival; but a store over their operands, by other threads, needs a `thread_barrier`.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from torch import Tensor

CELL = 64
"""Elements that are accessed together: a row of a tile in shared memory, or one number for each of a tile's rows."""
AGENTS = 64
EVER = np.iinfo(np.int64).max
PATIENCE = 20.0
"""Seconds after which a barrier that nobody completes is a deadlock."""


class Race(AssertionError):
    """Two accesses, one of them a write, that nothing orders."""


class Partition:
    """Its own entry of `known` is of what one thread knows of the others."""

    def __init__(self, clocks: Clocks, known: np.ndarray, name: str) -> None:
        self.agent, self.products = clocks.new_agent(name), clocks.new_agent(f"a product of {name}")
        self.known = known
        self.step = self.issued = self.done = 0

    @property
    def now(self) -> tuple[int, int]:
        """Agent and step of what its threads do."""
        return self.agent, self.step

    def meet(self) -> None:
        """All its threads, at a barrier."""
        self.step += 1
        self.known[[self.agent, self.products]] = self.step, self.done

    def one_threads(self) -> np.ndarray:
        """What one thread has to hand on."""
        known = self.known.copy()
        known[self.products] = self.done
        return known

    def every_threads(self) -> np.ndarray:
        """What all threads together have to hand on; what they do from here on is another step."""
        self.step += 1
        known = self.one_threads()
        known[self.agent] = self.step
        return known


class Clocks:
    """Of one program."""

    def __init__(self) -> None:
        self.agents: list[str] = []
        self.lock = threading.Lock()
        self.stopped: list[BaseException] = []  # why partitions have failed, the first one first
        self.here = threading.local()
        self.here.partition = Partition(self, np.zeros(AGENTS, np.int64), "the kernel")

    def new_agent(self, name: str) -> int:
        assert len(self.agents) < AGENTS, "more partitions and barriers than clocks have entries for"
        self.agents.append(name)
        return len(self.agents) - 1

    @property
    def partition(self) -> Partition:
        """The one that this thread stands for."""
        return self.here.partition

    def split(self, number: int) -> list[Partition]:
        known = self.partition.every_threads()
        return [Partition(self, known.copy(), f"partition {i}") for i in range(number)]

    def join(self, partitions: list[Partition]) -> None:
        for partition in partitions:
            self.learn(partition.every_threads())

    def learn(self, known: np.ndarray) -> None:
        np.maximum(self.partition.known, known, out=self.partition.known)

    def issue(self) -> tuple[int, int]:
        """Agent and step of a product that begins."""
        partition = self.partition
        partition.issued += 1
        return partition.products, partition.issued - 1

    def finish(self, pending: int) -> None:
        """All products but the last ones have been waited for."""
        self.partition.done = max(self.partition.done, self.partition.issued - pending)


class Accesses:
    """The last ones to each cell of a piece of shared memory."""

    def __init__(self, clocks: Clocks, elements: int) -> None:
        assert elements % CELL == 0
        cells = elements // CELL
        self.clocks = clocks
        self.writer = np.zeros(cells, np.int64)
        self.write = np.full(cells, -1, np.int64)
        self.reads = np.full((AGENTS, cells), -1, np.int64)

    def note(self, places: Tensor, writes: bool, agent: int | None = None, step: int = 0) -> None:
        """An access of the partition's threads, or of a product or a copy: of that agent's step."""
        place = places.numpy().ravel()
        cells = place[place % CELL == 0] // CELL
        assert len(cells) * CELL == len(place), "part of a cell"
        partition = self.clocks.partition
        with self.clocks.lock:
            known = partition.known.copy()
            if agent is None:
                agent, step = partition.now
                known[agent] = EVER  # the compiler orders its threads' loads and stores
            self.refuse(agent, "a write", self.writer[cells][self.write[cells] >= known[self.writer[cells]]])
            if writes:
                self.refuse(agent, "a read", np.flatnonzero((self.reads[:, cells] >= known[:, None]).any(1)))
                self.writer[cells], self.write[cells] = agent, step
                self.reads[:, cells] = -1
            else:
                self.reads[agent, cells] = step

    def refuse(self, agent: int, what: str, others: np.ndarray) -> None:
        """Agents whose access may overlap with this one."""
        if len(others):
            names = self.clocks.agents
            raise Race(f"{names[agent]} is not behind {what} by {', '.join(sorted({names[i] for i in others}))}")


class Barrier:
    """An mbarrier: a phase ends with its last arrival and its last byte."""

    changed = threading.Condition()

    def __init__(self, clocks: Clocks) -> None:
        self.count = self.arrivals = self.nbytes = self.phase = 0
        self.clocks, self.agent = clocks, clocks.new_agent("what comes with a barrier")
        self.arriving = self.arrived = np.zeros(AGENTS, np.int64)

    def step(self, known: np.ndarray | bool, arrivals: int = 0, nbytes: int = 0) -> None:
        """`known`: what arrivals or bytes hand on; False for nothing."""
        with self.changed:
            self.arrivals += arrivals
            self.nbytes += nbytes
            self.arriving = np.maximum(self.arriving, known)
            assert self.count and self.arrivals <= self.count, "more arrivals than the barrier was made for"
            if self.arrivals == self.count and self.nbytes == 0:
                self.arrivals, self.phase = 0, self.phase + 1
                self.arrived = self.arriving.copy()
                self.arrived[self.agent] = self.phase
                self.changed.notify_all()

    def wait(self, parity: Any, learn: bool = True) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.clocks.stopped or self.phase % 2 != int(parity), PATIENCE):
                raise TimeoutError("deadlock: a barrier is waited for that nobody completes")
            if self.clocks.stopped:
                raise SystemExit("another partition has failed")
            if learn:
                self.clocks.learn(self.arrived)


class Barriers(list[Barrier]):
    def index(self, i: Any) -> Barrier:  # type: ignore[override]
        return self[int(i)]
