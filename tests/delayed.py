"""A HostPool whose streams do their work, in order, when the test says so."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from pages import LAYOUTS, packed_pool

from pm_ops import HostPool, PagePool, transfer_queue
from pm_ops.testing import fill_random
from pm_ops.transfer_queue import TransferQueue

LAYOUT = LAYOUTS["page_major"]
PAGE = LAYOUT.page_bytes


class Stream:
    """Carries work out, in order, when a mark behind it is reached, not when it is given."""

    def __init__(self, log: list[Any], name: str) -> None:
        self.log, self.name = log, name
        self.work: list[Callable[[], None]] = []
        self.done = 0

    def record_event(self) -> "Mark":
        return Mark(self, len(self.work))

    def wait_event(self, mark: "Mark") -> None:
        if mark.stream.name != self.name:  # else it is the next turn of one direction
            self.log.append(("wait", mark.stream.name))
        self.work.append(mark.synchronize)

    def synchronize(self) -> None:
        self.record_event().synchronize()


class Mark:
    def __init__(self, stream: Stream, position: int) -> None:
        self.stream, self.position = stream, position

    def query(self) -> bool:
        return self.stream.done >= self.position

    def synchronize(self) -> None:
        while not self.query():
            self.stream.work[self.stream.done]()
            self.stream.done += 1


def delayed(log: list[Any], num_pages: int = 8, **options: Any) -> tuple[PagePool, HostPool]:
    pool = packed_pool(LAYOUT, 8)
    host = HostPool(pool, num_pages, **options)
    fill_random(host.pool.buffer, 9)
    delay(host, log)
    return pool, host


def delay(host: HostPool, log: list[Any]) -> None:
    """Gives each direction two streams, as it has on CUDA."""
    for queue, name in ((host._out, "out"), (host._in, "in")):
        queue.streams = [Stream(log, name), Stream(log, name)]
        queue.stream = queue.streams[0]


def arrive(queue: TransferQueue) -> None:
    """Has a direction's streams do what they were given."""
    for stream in queue.streams:
        stream.synchronize()


def has_arrived(queue: TransferQueue) -> bool:
    return all(stream.record_event().query() for stream in queue.streams)


def on_a_gpu(host: HostPool, log: list[Any], patch: pytest.MonkeyPatch) -> Stream:
    """Has a ``delayed`` pool's queues take it for a GPU's: the stream on which the model's work is queued."""
    current = Stream(log, "model")
    patch.setattr(transfer_queue, "refuse_capture", lambda *_: None)
    patch.setattr(torch.cuda, "current_stream", lambda device: current)
    for queue in (host._out, host._in):
        queue.gpu = torch.device("cuda:0")
    return current


@contextmanager
def broken_copies(kept: int = 0, issued: bool = False) -> Iterator[None]:
    """One step fails, after so many others; before its copies are given to the device, or after that."""
    good, steps = transfer_queue.copy_runs, iter(range(100))

    def copy_runs(*args):
        fails = next(steps) == kept
        if issued or not fails:
            good(*args)
        if fails:
            raise RuntimeError("device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer_queue, "copy_runs", copy_runs)
        yield
