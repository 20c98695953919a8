"""Two processes that move pages over NIXL, for tests/test_nixl.py. Prints what happened as one line of JSON.

    python nixl_processes.py

This process has a pool of its own, and asks the other one for offers, or for a write, by a pipe.
"""

import json
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from pages import LAYOUTS, packed_pool, spaced_pool

import pm_ops
from pm_ops.testing import page_bytes, writes_only

MODEL = "llama@1f2e"
LARGE = pm_ops.page_major(8, 4, 64, 16, torch.bfloat16)  # pages of 128 KiB
SCATTERED = list(range(0, 128, 2))
THERE = [3, 0, 5, 4]
HERE = [2, 3, 6, 1]


def other(pipe: Connection) -> None:
    """Answers ``(verb, name of the layout, ...)`` until it gets None."""
    pools = {name: packed_pool(layout, 8, 1) for name, layout in LAYOUTS.items()} | {
        "large": packed_pool(LARGE, 129, 1)
    }
    from nixl._api import nixl_agent

    nixl = pm_ops.NixlPages(nixl_agent("other"), *pools.values(), model=MODEL)
    while (request := pipe.recv()) is not None:
        verb, name, *arguments = request
        if verb == "offer":
            pipe.send(nixl.offer(pools[name], *arguments))
        elif verb == "room":
            pipe.send(nixl.offer(pools[name], *arguments, digests=False))
        elif verb == "change":
            pools[name].pages[arguments[0], 5] ^= 1
            pipe.send(None)
        elif verb == "write":
            offer, pages, message = arguments
            nixl.write(offer, pools[name], pages, message).wait()
            pipe.send(None)
    nixl.close()


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "taken"


def main(pipe: Connection, process: BaseProcess) -> dict[str, Any]:
    def ask(*request: Any) -> Any:
        pipe.send(request)
        return pipe.recv()

    theirs = {name: packed_pool(layout, 8, 1) for name, layout in LAYOUTS.items()}  # what the other process has
    ours = {name: spaced_pool(layout, 8) for name, layout in LAYOUTS.items()}
    large = pm_ops.PagePool(LARGE, 129)
    nixl = pm_ops.NixlPages("this", *ours.values(), large, model=MODEL)
    happened: dict[str, Any] = {"read": {}, "layers": {}, "written": {}, "refused": {}}

    for name, pool in ours.items():
        offer = ask("offer", name, THERE)
        with writes_only(pool.buffer, page_bytes(pool, HERE)):
            transfer = nixl.read(offer, pool, HERE)
            transfer.wait()
        same = torch.equal(pool.gather(HERE), theirs[name].gather(THERE))
        happened["read"][name] = [same, transfer.copies]

        offer = nixl.offer(pool, [0, 7], digests=False)
        with writes_only(pool.buffer, page_bytes(pool, [0, 7])):
            ask("write", name, offer, [6, 6], f"{name} is there".encode())
            end, messages = time.monotonic() + 20, {}
            while not messages and time.monotonic() < end:
                messages = nixl.messages()
        same = torch.equal(pool.gather([0, 7]), theirs[name].gather([6, 6]))
        happened["written"][name] = [same, [text.decode() for text in messages.get("other", [])]]

    pool = ours["page_major"]
    pool.buffer.zero_()
    nixl.read(ask("offer", "page_major", THERE, [1]), pool, HERE).wait()
    for layer in range(3):
        got, wanted = (
            torch.cat([p.view(layer, kind)[pages].flatten() for kind in ("key", "value")]).view(torch.int16)
            for p, pages in ((pool, HERE), (theirs["page_major"], THERE))
        )
        happened["layers"][layer] = [torch.equal(got, wanted), not got.any().item()]

    offer, room = ask("offer", "page_major", THERE), ask("room", "page_major", THERE)
    foreign = pm_ops.NixlPages("foreign", pool, model="gpt")
    with writes_only(pool.buffer, []):
        happened["refused"] = {
            "model": refused(lambda: foreign.read(offer, pool, HERE)),
            "layout": refused(lambda: nixl.read(offer, ours["token_major"], HERE)),
            "number": refused(lambda: nixl.read(offer, pool, HERE[:3])),
            "number written": refused(lambda: nixl.write(room, pool, HERE[:3])),
            "twice": refused(lambda: nixl.read(offer, pool, [1, 1, 2, 3])),
            "no page": refused(lambda: nixl.offer(pool, [])),
            "no layer": refused(lambda: nixl.offer(pool, [0], [])),
            "changed": refused(lambda: nixl.read(offer.replace(b'"device":0', b'"device":1'), pool, HERE)),
            "cut": refused(lambda: nixl.read(offer[:-1], pool, HERE)),
            "own": refused(lambda: nixl.read(nixl.offer(pool, [0]), pool, [1])),
            "unregistered": refused(lambda: nixl.read(offer, packed_pool(LAYOUTS["page_major"], 8), HERE)),
        }
    ask("change", "page_major", THERE[2])  # after the offer
    happened["refused"]["torn"] = refused(lambda: nixl.read(offer, pool, HERE).wait())
    foreign.close()

    offer, begun = ask("offer", "large", SCATTERED), time.monotonic()
    transfer = nixl.read(offer, large, SCATTERED)
    transfer.wait()
    happened["scattered"] = {
        "same": torch.equal(large.gather(SCATTERED), packed_pool(LARGE, 129, 1).gather(SCATTERED)),
        "copies": transfer.copies,
        "layer_major": pm_ops.count_layer_major(large, SCATTERED),
        "seconds": time.monotonic() - begun,
    }
    pipe.send(None)
    process.join(30)
    happened["exit"] = process.exitcode
    happened["refused"]["gone"] = refused(lambda: nixl.read(offer, large, SCATTERED).wait())
    nixl.close()
    happened["refused"]["closed"] = refused(lambda: nixl.read(offer, large, SCATTERED))
    return happened


if __name__ == "__main__":
    torch.set_num_threads(1)
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=other, args=(there,), daemon=True)
    process.start()
    print(json.dumps(main(here, process)))
