"""Pages over NIXL: pools registered with an agent, and pages read from, or written to, another process's pool.

Needs the package ``nixl``: ``pip install 'pm-ops[nixl]'``. Whatever carries a few bytes carries an offer to the other
side: a socket, a queue, the request itself.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .descriptors import Descriptor, checked_pages, page_descriptors, page_regions, pair_descriptors
from .header import PageHeader, sealed, unsealed
from .layout import counted
from .pool import PagePool

FORMAT = "pm_ops offer"
VERSION = 1


@dataclass(frozen=True)
class Offer:
    """Pages of one process that another one may read or write: all that it has to know of them.

    Args:
        header: the pages' layout and model; with their digests where they are there to be read.
        layers: the layers whose data is offered; None for whole pages.
        runs: where the bytes lie in the process that owns them.
        memory, device: NIXL's names of the memory: ``"DRAM"`` or ``"VRAM"``, and the GPU's index.
        agent: metadata of the agent that registered the memory.
    """

    header: PageHeader
    layers: tuple[int, ...] | None
    runs: tuple[Descriptor, ...]
    memory: str
    device: int
    agent: bytes

    def to_bytes(self) -> bytes:
        """ASCII JSON; :meth:`from_bytes` gives an equal offer back."""
        record = {"format": FORMAT, "version": VERSION, "layers": self.layers, "runs": self.runs}
        record |= {"memory": self.memory, "device": self.device}
        record |= {"header": self.header.to_bytes().decode(), "agent": base64.b64encode(self.agent).decode()}
        return sealed(record)

    @classmethod
    def from_bytes(cls, data: bytes) -> Offer:
        """Read :meth:`to_bytes`. Raises ValueError for other data, another version, and where a byte has changed."""
        try:
            record = unsealed(data, FORMAT, VERSION)
            header = PageHeader.from_bytes(record["header"].encode())
            layers = None if record["layers"] is None else tuple(record["layers"])
            runs = tuple(Descriptor(*run) for run in record["runs"])
            agent = base64.b64decode(record["agent"], validate=True)
            return cls(header, layers, runs, record["memory"], record["device"], agent)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not an offer of pages: {error}") from error


class NixlPages:
    """Pools that a NIXL agent has registered, until :meth:`close`.

    Args:
        agent: a name, unique among the processes that meet, for an agent with the backend UCX; or a ``nixl_agent``.
        pools: whose memory is registered. Pools in one another's gaps share a region.
        model: whose pages these are, see :class:`PageHeader`; offers of another model are refused.

    Raises:
        ImportError: nixl is not installed, or has no build for this machine.
        RuntimeError: NIXL cannot register the memory.
    """

    def __init__(self, agent: Any, *pools: PagePool, model: str) -> None:
        self.agent = _new_agent(agent) if isinstance(agent, str) else agent
        self.model = model
        self._regions = page_regions(*pools)
        self._registered: list[Any] = []
        self._peers: dict[bytes, Any] = {}
        """The other agents' names, by their metadata: an agent that has registered more has new ones."""
        try:
            for address, nbytes, where in self._regions:
                memory, device = _memory(where)
                with _reported(f"{nbytes} bytes on {where} cannot be registered"):
                    self._registered.append(self.agent.register_memory([(address, nbytes, device, "")], memory))
        except BaseException:
            self.close()
            raise

    def offer(
        self,
        pool: PagePool,
        pages: Tensor | Sequence[int],
        layers: Iterable[int] | None = None,
        *,
        digests: bool = True,
    ) -> bytes:
        """Offer pages to whoever gets these bytes: to read what they hold, or to write them.

        Waits on the host for what is queued on the current stream of the pool's device, and so do :meth:`read` and
        :meth:`write`. What another stream does with the pages has to be over, or waited for by the current one.

        The pages must not change, nor be freed, before the other side is done.

        Args:
            pages: page ids; -1 is refused.
            layers: the data of these layers alone.
            digests: let a reader check what has arrived. It takes a copy of the pages on the host and SHA-256 of it;
                leave it out for pages that are to be written. Offers of some layers have none.
        """
        self._require_registered(pool)
        ids, chosen = checked_pages(pool, pages), None if layers is None else tuple(layers)
        runs, where = page_descriptors(pool, ids, chosen), _memory(pool.device)
        if not runs:
            raise ValueError("no pages to offer, or no layers of them; name one at least")
        _settle(pool)
        header = PageHeader(pool.layout, self.model, ())
        if digests and chosen is None:
            header = PageHeader.of(pool.layout, self.model, pool.gather(ids))
        return Offer(header, chosen, tuple(runs), *where, self.agent.get_agent_metadata()).to_bytes()

    def read(self, offer: bytes, pool: PagePool, pages: Tensor | Sequence[int]) -> NixlTransfer:
        """Begin to read offered pages into these, distinct ones, in the offer's order.

        Raises:
            ValueError: the bytes are no offer, or one of another layout, model or number of pages; nothing is read.
            RuntimeError: NIXL cannot begin: the other process is gone, say.
        """
        return self._begin("READ", Offer.from_bytes(offer), pool, checked_pages(pool, pages, distinct=True))

    def write(self, offer: bytes, pool: PagePool, pages: Tensor | Sequence[int], message: bytes = b"") -> NixlTransfer:
        """Begin to write these pages to the offered ones, in the offer's order. Errors as in :meth:`read`.

        Args:
            message: what :meth:`messages` gives the other side when all bytes are there; none where it is empty.
        """
        return self._begin("WRITE", Offer.from_bytes(offer), pool, checked_pages(pool, pages), message)

    def messages(self) -> dict[str, list[bytes]]:
        """Messages of writes that are done, new since the last call, by the name of the writer's agent."""
        found: dict[str, list[bytes]] = self.agent.get_new_notifs()
        return found

    def close(self) -> None:
        """Forget the other agents, and unregister the memory. Transfers must be done."""
        for peer in set(self._peers.values()):
            self.agent.remove_remote_agent(peer)
        for region in self._registered:
            self.agent.deregister_memory(region)
        self._peers, self._registered, self._regions = {}, [], []

    def _require_registered(self, pool: PagePool) -> None:
        (region,) = page_regions(pool)
        end = region.address + region.nbytes
        mine = [r for r in self._regions if r.device == region.device]
        if not any(r.address <= region.address and end <= r.address + r.nbytes for r in mine):
            raise ValueError(f"{pool!r} is not registered, or no more; pass it to NixlPages when that is made")

    def _begin(
        self, operation: str, offer: Offer, pool: PagePool, ids: list[int], message: bytes = b""
    ) -> NixlTransfer:
        self._require_registered(pool)
        offer.header.check(pool.layout, self.model, len(ids) if offer.header.digests else None)
        ours = page_descriptors(pool, ids, offer.layers)
        src, dst = (ours, offer.runs) if operation == "WRITE" else (offer.runs, ours)
        copies = pair_descriptors(src, dst)
        _settle(pool)
        memory, device = _memory(pool.device)
        reads = [(copy.src, copy.nbytes) for copy in copies]
        writes = [(copy.dst, copy.nbytes) for copy in copies]
        here, there = (reads, writes) if operation == "WRITE" else (writes, reads)
        expected = offer.header if operation == "READ" and offer.header.digests else None
        peer = self._peer(offer.agent)
        with _reported(f"a transfer of {counted(len(ids), 'page')} cannot begin"):
            local = self.agent.get_xfer_descs([(*run, device) for run in here], memory)
            remote = self.agent.get_xfer_descs([(*run, offer.device) for run in there], offer.memory)
            handle = self.agent.initialize_xfer(operation, local, remote, peer, message)
            return NixlTransfer(self.agent, handle, pool, ids, len(copies), expected)

    def _peer(self, metadata: bytes) -> Any:
        """The name of the agent that has made an offer."""
        if metadata not in self._peers:
            if metadata == self.agent.get_agent_metadata():
                raise ValueError("an offer of this process's own pages; copy them with PagePool.gather and scatter")
            with _reported("the agent that made the offer cannot be added"):
                self._peers[metadata] = self.agent.add_remote_agent(metadata)
        return self._peers[metadata]


class NixlTransfer:
    """Pages on their way. Poll :meth:`done`, or :meth:`wait`. One that has failed raises its error at every call."""

    def __init__(
        self, agent: Any, handle: Any, pool: PagePool, pages: list[int], copies: int, expected: PageHeader | None
    ) -> None:
        self.copies = copies
        """Descriptors of either side."""
        self._agent, self._handle, self._pool, self._pages, self._expected = agent, handle, pool, pages, expected
        self._error: Exception | None = None
        self._state = agent.transfer(handle)

    def done(self) -> bool:
        """Whether all bytes have arrived.

        Raises:
            RuntimeError: NIXL reports an error; some of the bytes may have been written.
            ValueError: what was read is not what was offered; the page is named.
        """
        if self._handle is not None:
            try:
                if not self._arrived():
                    return False
                self._agent.release_xfer_handle(self._handle)
            except Exception as error:
                self._error = error
            self._handle = None  # which releases it, too
        if self._error is not None:
            raise self._error.with_traceback(None)  # or it would grow with every call
        return True

    def _arrived(self) -> bool:
        what = f"a transfer of {counted(len(self._pages), 'page')}"
        if self._state == "PROC":
            with _reported(f"{what} failed"):
                self._state = self._agent.check_xfer_state(self._handle)
        if self._state == "PROC":
            return False
        if self._state != "DONE":
            raise RuntimeError(f"NIXL: {what} ended as {self._state!r}")
        if self._expected is not None:
            self._expected.verify(self._pool.gather(self._pages))
        return True

    def wait(self, timeout: float = 60.0) -> None:
        """Return when all bytes have arrived; errors as in :meth:`done`, and TimeoutError after these seconds."""
        end = time.monotonic() + timeout
        while not self.done():
            if time.monotonic() > end:
                raise TimeoutError(f"{counted(len(self._pages), 'page')} are still on their way after {timeout} s")
            time.sleep(0)


def _new_agent(name: str) -> Any:
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise ImportError(f"NixlPages needs nixl: pip install 'pm-ops[nixl]' ({error})") from error
    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


@contextmanager
def _reported(what: str) -> Iterator[None]:
    """Errors of NIXL, which have no base of their own, as RuntimeErrors."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"NIXL: {what}: {error!r}") from error


def _memory(device: torch.device) -> tuple[str, int]:
    """NIXL's names of a device's memory."""
    return ("VRAM", device.index or 0) if device.type == "cuda" else ("DRAM", 0)


def _settle(pool: PagePool) -> None:
    """Wait for what is queued on the current stream: NIXL knows none."""
    if pool.device.type == "cuda":
        torch.cuda.current_stream(pool.device).synchronize()
