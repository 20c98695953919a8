"""Pages over NIXL: offers as bytes; and, where the package can be fetched, two processes that move pages by UCX."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pages import LAYOUTS, packed_pool

import peers
import pm_ops
from pm_ops.descriptors import Descriptor
from pm_ops.nixl import Offer

ROOT = Path(__file__).parents[1]


def test_without_nixl_the_error_names_the_extra() -> None:
    code = "import sys; sys.modules['nixl'] = None; import pm_ops; pm_ops.NixlPages('a', model='m')"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert "ImportError: NixlPages needs nixl: pip install 'pm-ops[nixl]'" in done.stderr


def offer(**changes: Any) -> Offer:
    pool = packed_pool(LAYOUTS["page_major"], 4)
    fields = {
        "header": pm_ops.PageHeader.of(pool.layout, "llama", pool.pages), "layers": (0, 2), "memory": "DRAM",
        "runs": (Descriptor(2**47, 5), Descriptor(3, 2**40)), "device": 0, "agent": b"\0\xff{any}",
    }  # fmt: skip
    return Offer(**{**fields, **changes})


def test_an_offer_survives_as_bytes_and_no_change_of_it_does() -> None:
    for layers in ((0, 2), None):
        assert Offer.from_bytes(offer(layers=layers).to_bytes()) == offer(layers=layers)
    data = offer().to_bytes()
    for at in range(0, len(data), 7):
        with pytest.raises(ValueError, match="not an offer of pages"):
            Offer.from_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    for other in (b"", b"{}", b"[]", data[:-1], offer().header.to_bytes(), data.replace(b"offer", b"other")):
        with pytest.raises(ValueError, match="not an offer of pages"):
            Offer.from_bytes(other)


class Agent:
    """An agent whose transfers end at once, with ``ends``, and move nothing."""

    def __init__(self, ends: object = "DONE", regions: int = 9) -> None:
        self.ends, self.regions = ends, regions
        self.registered: list[int] = []
        self.removed: list[str] = []
        self.offers = 0

    def register_memory(self, regions: list[tuple[int, int, int, str]], memory: str) -> int:
        if len(self.registered) == self.regions:
            raise KeyError("no more memory")
        self.registered.append(regions[0][0])
        return regions[0][0]

    def deregister_memory(self, region: int) -> None:
        self.registered.remove(region)

    def get_agent_metadata(self) -> bytes:
        self.offers += 1
        return f"metadata {self.offers}".encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        return "peer"

    def remove_remote_agent(self, peer: str) -> None:
        self.removed.append(peer)

    def get_xfer_descs(self, runs: list[tuple[int, int, int]], memory: str) -> list[tuple[int, int, int]]:
        return runs

    def initialize_xfer(self, *arguments: object) -> int:
        return 1

    def transfer(self, handle: int) -> str:
        return "PROC"

    def check_xfer_state(self, handle: int) -> Any:
        if isinstance(self.ends, Exception):
            raise self.ends
        return self.ends

    def release_xfer_handle(self, handle: int) -> None: ...


@pytest.mark.parametrize(
    ("ends", "error", "message"),
    [
        ("DONE", ValueError, "page 0 of 2 is corrupted"),
        ("ERR", RuntimeError, "NIXL: a transfer of 2 pages ended as 'ERR'"),
        (KeyError("gone"), RuntimeError, r"NIXL: a transfer of 2 pages failed: KeyError\('gone'\)"),
    ],
)
def test_a_transfer_that_failed_says_so_at_every_call(ends: object, error: type[Exception], message: str) -> None:
    source, target = (packed_pool(LAYOUTS["page_major"], 4, seed) for seed in (1, 2))
    nixl = pm_ops.NixlPages(Agent(ends), source, target, model="m")
    transfer = nixl.read(nixl.offer(source, [0, 1]), target, [2, 3])
    for call in (transfer.done, transfer.done, transfer.wait, transfer.wait):
        with pytest.raises(error, match=message) as raised:
            call()
    assert len(raised.traceback) < 6


@pytest.mark.parametrize(
    ("call", "message"),
    [("add_remote_agent", "the agent that made the offer cannot be added"),
     ("initialize_xfer", "a transfer of 1 page cannot begin"), ("transfer", "a transfer of 1 page cannot begin")],
)  # fmt: skip
def test_an_error_of_nixl_before_a_transfer_begins_is_a_runtimeerror(
    call: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = packed_pool(LAYOUTS["page_major"], 4)
    nixl = pm_ops.NixlPages(Agent(), pool, model="m")
    offer = nixl.offer(pool, [0])

    def gone(*arguments: object) -> None:
        raise KeyError("gone")

    monkeypatch.setattr(Agent, call, gone)
    for begin in (nixl.read, nixl.write):
        with pytest.raises(RuntimeError, match=rf"NIXL: {message}: KeyError\('gone'\)"):
            begin(offer, pool, [1])


def test_a_peer_is_forgotten_once_whatever_metadata_it_had() -> None:
    pool = packed_pool(LAYOUTS["page_major"], 4)
    nixl = pm_ops.NixlPages(agent := Agent(), pool, model="m")
    for page in (0, 1):
        nixl.read(nixl.offer(pool, [page], digests=False), pool, [2]).wait()
    nixl.close()
    nixl.close()
    assert agent.removed == ["peer"] and not agent.registered


def test_what_was_registered_is_given_back_where_more_cannot_be() -> None:
    pools = [packed_pool(LAYOUTS["page_major"], 4) for _ in range(3)]
    agent = Agent(regions=2)
    with pytest.raises(RuntimeError, match="bytes on cpu cannot be registered: KeyError.*no more memory"):
        pm_ops.NixlPages(agent, *pools, model="m")
    assert not agent.registered


@pytest.fixture(scope="module")
def happened() -> dict[str, Any]:
    folders = [*map(peers.fetched, peers.NIXL), ROOT, ROOT / "tests"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "NIXL_LOG_LEVEL": "WARN"}
    command = [sys.executable, str(ROOT / "tests" / "nixl_processes.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.engines
def test_pages_are_read_and_written_between_processes_and_no_other_byte_changes(happened: dict[str, Any]) -> None:
    assert set(happened["read"]) == set(LAYOUTS) == set(happened["written"])
    for name, (same, copies) in happened["read"].items():
        assert same and copies == 4, name  # the reader's pages are apart
    for name, (same, messages) in happened["written"].items():
        assert same and messages == [f"{name} is there"]
    assert happened["exit"] == 0


@pytest.mark.engines
def test_layers_are_read_alone(happened: dict[str, Any]) -> None:
    assert happened["layers"] == {"0": [False, True], "1": [True, False], "2": [False, True]}


@pytest.mark.engines
def test_what_does_not_fit_is_refused_before_a_byte_lands_and_what_changed_is_noticed(happened: dict[str, Any]) -> None:
    messages = {
        "model": "model 'llama@1f2e' instead of 'gpt'", "layout": "these pages do not fit: layout",
        "number": "4 pages instead of 3", "number written": "name as many pages of the same layout",
        "twice": "page 1 is named twice", "no page": "no pages to offer", "no layer": "or no layers",
        "cut": "not an offer of pages", "changed": "it has changed since it was written",
        "unregistered": "is not registered", "torn": "page 2 of 4 is corrupted", "closed": "is not registered",
        "own": "ValueError: an offer of this process's own pages", "gone": "RuntimeError: NIXL: ",
    }  # fmt: skip
    assert set(happened["refused"]) == set(messages)
    for name, message in messages.items():
        assert message in happened["refused"][name], name


@pytest.mark.engines
def test_a_page_is_one_descriptor_where_layer_major_needs_one_a_plane(happened: dict[str, Any]) -> None:
    """64 scattered pages of 8 layers."""
    scattered = happened["scattered"]
    assert scattered["same"]
    assert (scattered["copies"], scattered["layer_major"]) == (64, 64 * 16)
