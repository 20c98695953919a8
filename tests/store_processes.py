"""Processes that share a PageStore, for tests/test_page_store.py: killed writers, and writers that race a reader.

    python store_processes.py killed FOLDER ROUNDS     random moments
    python store_processes.py replaced FOLDER ROUNDS   random moments, while one file is replaced again and again
    python store_processes.py stopped FOLDER           before and after every step of a write
    python store_processes.py race FOLDER              two writers of the same keys, one reader, room for a few entries

The program imports torch once and forks its writers. It prints what happened as one line of JSON.
"""

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import torch

import pm_ops
from pm_ops import PagePool, PageStore
from pm_ops.testing import fill_random

LAYOUT = pm_ops.page_major(4, 2, 64, 64, torch.float16)  # pages of 128 KiB
MODEL = "processes"
PAGES = [5, 1, 0, 4]
RANDOM = torch.empty(6 * LAYOUT.page_bytes, dtype=torch.uint8)
fill_random(RANDOM)


def pool_of(seed: int) -> PagePool:
    """Six pages of random bytes, others for each seed; cheap, so that a writer spends its time writing."""
    return PagePool(LAYOUT, 6, buffer=RANDOM.roll(seed))


def fork(function: Callable[[], Any]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


def kill_at_random(seed: int, write_on: Callable[[Callable[[str], None]], None]) -> list[str]:
    """Run a writer that goes on for ever, and kill it once it has said something; all that it said."""
    read, write = os.pipe()
    pid = fork(lambda: write_on(lambda word: os.write(write, f"{word} ".encode())))
    os.close(write)
    said = os.read(read, 1)  # it writes
    time.sleep(random.Random(seed).uniform(0, 0.02))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while more := os.read(read, 1 << 16):
        said += more
    os.close(read)
    return said.decode().split()


def killed(folder: str, rounds: int) -> dict[str, Any]:
    """Writers write until they are killed: the keys whose ``put`` had returned, and how many died while writing."""
    done: list[str] = []
    cut = 0
    for n in range(rounds):

        def write_on(say: Callable[[str], None], n: int = n) -> None:
            store = PageStore(folder, 1 << 40, model=MODEL)
            for i in count():
                key = f"{n}-{i}"
                store.put(key, pool_of(n * 1000 + i), PAGES)
                say(key)

        done += kill_at_random(n, write_on)
        cut += unfinished(folder)  # the next one to open the folder removes it
    return {"done": done, "cut": cut}


def unfinished(folder: str) -> bool:
    return any(name.startswith(".pm_ops-") for name in os.listdir(folder))


def replaced(folder: str, rounds: int) -> dict[str, Any]:
    """The number that the file held after each kill, the last one whose ``save_pages`` had returned, and as above."""
    path, found, begun, cut = f"{folder}/pages", [], 0, 0
    for n in range(rounds):

        def write_on(say: Callable[[str], None], begun: int = begun) -> None:
            for i in count(begun):
                pm_ops.save_pages(path, pool_of(i), PAGES, model=f"{i}")
                say(f"{i}")

        done = int(kill_at_random(n, write_on)[-1])
        cut += unfinished(folder)
        for name in os.listdir(folder):
            if name.startswith(".pm_ops-"):
                os.unlink(f"{folder}/{name}")
        with open(path, "rb") as file:
            held = int(pm_ops.disk.read_header(file)[0].model)
        pool = PagePool(LAYOUT, 4)
        pm_ops.load_pages(path, pool, [0, 1, 2, 3], model=f"{held}")
        found.append([held, done, torch.equal(pool.pages, pool_of(held).gather(PAGES))])
        begun = held + 1
    return {"found": found, "cut": cut}


def stopped(folder: str) -> dict[str, Any]:
    """One writer for each step, killed before it and after it: the steps as ``put`` calls them."""
    steps = []
    for n, (step, after) in enumerate((s, a) for s in ("fsync 1", "replace 1", "fsync 2") for a in (False, True)):
        name, nth = step.split()

        def write_once(n: int = n, name: str = name, nth: int = int(nth), after: bool = after) -> None:
            calls, original = count(1), getattr(os, name)

            def stop(*args: Any) -> None:
                last = next(calls) == nth
                if last and not after:
                    os.kill(os.getpid(), signal.SIGKILL)
                original(*args)
                if last:
                    os.kill(os.getpid(), signal.SIGKILL)

            store = PageStore(folder, 1 << 40, model=MODEL)
            setattr(os, name, stop)
            store.put(f"{n}-0", pool_of(n * 1000), PAGES)

        _, status = os.waitpid(fork(write_once), 0)
        steps.append([step, after, os.WIFSIGNALED(status) and os.WTERMSIG(status)])
    return {"steps": steps}


def race(folder: str) -> dict[str, Any]:
    """Both writers put keys 0 to 19 again and again, each with its own bytes; the reader must see whole entries."""
    limit = 5 * (4096 + len(PAGES) * LAYOUT.page_bytes)
    stop = multiprocessing.get_context("fork").Event()

    def write_on(writer: int) -> None:
        store, pool = PageStore(folder, limit, model=MODEL), pool_of(writer)
        while not stop.is_set():
            for key in range(20):
                store.put(str(key), pool, PAGES)

    writers = [fork(lambda w=w: write_on(w)) for w in (1, 2)]
    expected = [pool_of(w).gather(PAGES) for w in (1, 2)]
    store, pool = PageStore(folder, limit, model=MODEL), pool_of(3)
    seen, torn, largest = [0, 0], 0, 0
    begun = time.monotonic()
    while time.monotonic() < begun + 2 or (min(seen) < 5 and time.monotonic() < begun + 120):
        for key in range(20):
            if store.get(str(key), pool, [0, 1, 2, 3]) is not None:
                same = [torch.equal(pool.pages[:4], rows) for rows in expected]
                seen = [n + s for n, s in zip(seen, same, strict=True)]
                torn += not any(same)
        with store._locked():  # between two writes
            largest = max(largest, store.nbytes)
    stop.set()
    status = [os.waitpid(pid, 0)[1] for pid in writers]
    return {"seen": seen, "torn": torn, "largest": largest, "limit": limit, "status": status}


if __name__ == "__main__":
    torch.set_num_threads(1)  # threads do not outlive a fork
    name, folder, *rest = sys.argv[1:]
    print(
        json.dumps(
            {"killed": killed, "replaced": replaced, "stopped": stopped, "race": race}[name](folder, *map(int, rest))
        )
    )
