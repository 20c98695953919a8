"""Pages on their way: nothing is read before it is there, nothing is given away before it was read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engines

from delayed import arrive, broken_copies, delay
from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.request import RequestStatus
from vllm_engine import FULL, PREFIXES, engine, generate, host_tier, metric, tokens

from pm_ops import transfer_plan, transfer_queue
from pm_ops.adapters.vllm.host_transfers import Moved
from pm_ops.copy_engine import copy_runs

HOW = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, detokenize=False)


@pytest.fixture(autouse=True)
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies on a delayed stream are made when that is told to."""

    def copy_later(*args: Any) -> None:
        *what, stream = args
        if stream is None:
            copy_runs(*what, None)
        else:
            stream.work.append(lambda: copy_runs(*what, None))

    monkeypatch.setattr(transfer_queue, "copy_runs", copy_later)


class Held:
    """An engine with both connectors, whose copies to and from the host are made when the test says so."""

    def __init__(self, llm: Any) -> None:
        self.llm, self.core = llm, llm.llm_engine
        self.scheduler = self.core.engine_core.engine_core.scheduler
        self.connector = self.scheduler.connector
        self.host = get_kv_transfer_group().transfers.host
        self.outputs: dict[str, Any] = {}

    def hold(self) -> None:
        """From now on copies wait for :meth:`arrive`."""
        delay(self.host, [])

    def let_go(self) -> None:
        """From now on copies are made at once."""
        self.arrive()
        self.host._out.stream = self.host._in.stream = None

    def arrive(self) -> None:
        arrive(self.host._out)
        arrive(self.host._in)

    def add(self, name: str, prompt: list[int]) -> None:
        self.core.add_request(name, {"prompt_token_ids": prompt}, HOW)

    def status(self, name: str) -> Any:
        (request,) = (r for r in self.scheduler.requests.values() if r.request_id.startswith(name))
        return request.status

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.outputs.update((output.request_id, output) for output in self.core.step())

    def finish(self, *names: str) -> list[list[int]]:
        """Run until these are done."""
        for _ in range(200):
            if all(name in self.outputs and self.outputs[name].finished for name in names):
                return tokens([self.outputs[name] for name in names])
            self.step()
        raise AssertionError(f"{names} never end")

    def settle(self) -> None:
        """Run something else, so that what has arrived is noticed."""
        self.add("settle", [7, 8, 9])
        self.finish("settle")
        self.outputs.clear()

    @property
    def used(self) -> int:
        """Blocks of the engine's that have an owner."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return pool.num_gpu_blocks - pool.get_num_free_blocks() - 1


def preemptions(held: Held) -> int:
    return metric(held.llm, "num_preemptions")


@pytest.fixture(scope="module")
def llm(model: Path, stock: list[list[int]]) -> Iterator[Any]:  # a process has one such engine at a time
    """An engine of 31 blocks, so that what is freed is used again at once."""
    with engine(
        model,
        True,
        skip_tokenizer_init=True,
        block_size=16,
        num_gpu_blocks_override=32,
        max_model_len=240,
        disable_log_stats=False,
        kv_transfer_config=host_tier(kv_load_failure_policy="recompute"),
    ) as llm:
        yield llm


@pytest.fixture
def held(llm: Any) -> Iterator[Held]:
    held = Held(llm)
    yield held
    held.let_go()
    held.settle()
    connector = held.connector
    assert (connector.saves, connector.loads, connector.tracked, held.used) == ({}, {}, {}, 0)
    assert llm.reset_prefix_cache(reset_connector=True)
    assert connector.index._free and len(connector.index) == 0


def test_a_prompt_waits_for_its_blocks_while_others_run(held: Held, stock: list[list[int]]) -> None:
    assert tokens(generate(held.llm, PREFIXES)) == stock
    assert held.llm.reset_prefix_cache()
    held.hold()
    held.add("found", PREFIXES[4])
    held.add("other", [7, 8, 9])
    held.step(30)
    assert held.status("found") is RequestStatus.WAITING_FOR_REMOTE_KVS and "found" not in held.outputs
    assert len(held.outputs["other"].outputs[0].token_ids) > 20
    (pages,) = held.connector.loads.values()
    assert len(pages) == FULL[4] // 16 and all(page.users == 1 for page in pages)
    held.let_go()
    assert held.finish("found", "other")[0] == stock[4]
    assert held.outputs["found"].num_cached_tokens == FULL[4]
    assert held.connector.loads == {} and not any(page.users for page in pages)


def test_blocks_are_kept_until_they_were_offloaded_whatever_becomes_of_the_request(
    held: Held, stock: list[list[int]]
) -> None:
    """The next request would get blocks of the first ones, were they free."""
    held.hold()
    held.add("done", PREFIXES[3])
    assert held.finish("done") == [stock[3]]
    held.add("aborted", PREFIXES[5])
    held.step(2)
    held.core.abort_request(["aborted"])
    held.step()
    filled = (100 + 47) // 16
    assert held.used == filled + 98 // 16 and len(held.connector.saves) > 1
    assert held.core.has_unfinished_requests() or held.scheduler.has_requests(), "the engine goes on asking"
    assert not held.llm.reset_prefix_cache()
    held.add("next", PREFIXES[4])
    assert held.finish("next") == [stock[4]]
    assert held.connector.index.find((b"", 0)) is None
    assert not any(page.ready for page in held.connector.index._pages.values()), "nothing was said to be there"
    held.let_go()
    held.settle()
    assert held.connector.saves == {} and held.used == 0 and held.llm.reset_prefix_cache()
    outputs = generate(held.llm, PREFIXES)
    assert tokens(outputs) == stock
    assert [outputs[i].num_cached_tokens for i in (3, 4, 5)] == [FULL[3], FULL[4], FULL[5]]


@pytest.mark.parametrize("asks", [True, False])
def test_preempted_requests_leave_their_blocks_to_what_offloads_them(
    held: Held, stock: list[list[int]], asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.26 does not ask whether blocks come free without preemption."""
    if not asks:
        monkeypatch.setattr(held.connector, "has_pending_block_frees", lambda: False)
    before = preemptions(held)
    held.hold()
    for name, prompt in zip("abcdefg", PREFIXES, strict=True):
        held.add(name, prompt)
    for _ in range(400):  # now and then everything arrives
        held.step()
        if not held.core.has_unfinished_requests():
            break
        if held.scheduler.current_step % 7 == 0:
            held.arrive()
    assert held.finish(*"abcdefg") == stock
    assert preemptions(held) > before
    held.let_go()
    held.settle()
    assert held.llm.reset_prefix_cache()
    outputs = generate(held.llm, PREFIXES)
    assert tokens(outputs) == stock and [output.num_cached_tokens for output in outputs] == FULL


def test_a_prompt_that_is_aborted_while_it_is_restored_holds_its_blocks_until_they_are_there(
    held: Held, stock: list[list[int]]
) -> None:
    assert tokens(generate(held.llm, PREFIXES)) == stock
    assert held.llm.reset_prefix_cache()
    held.hold()
    held.add("aborted", PREFIXES[4])
    held.step(2)
    held.core.abort_request(["aborted"])
    held.step(3)
    assert held.used >= FULL[4] // 16 and len(held.connector.loads) == 1
    held.arrive()
    held.step()
    assert held.used == 0 and held.connector.loads == {} and held.connector.tracked == {}
    held.let_go()
    assert held.llm.reset_prefix_cache()
    outputs = generate(held.llm, PREFIXES)
    assert tokens(outputs) == stock and [output.num_cached_tokens for output in outputs] == FULL


def test_two_prompts_that_begin_alike_are_restored_once(held: Held, stock: list[list[int]]) -> None:
    assert tokens(generate(held.llm, PREFIXES)) == stock
    assert held.llm.reset_prefix_cache()
    held.hold()
    for name in ("first", "second"):
        held.add(name, PREFIXES[5])
    held.add("third", PREFIXES[6])
    held.step(5)
    assert [len(pages) for pages in held.connector.loads.values()] == [96 // 16]
    assert held.status("second") is held.status("third") is RequestStatus.WAITING
    held.core.abort_request(["first"])  # what it began arrives; the others then look again
    for _ in range(10):
        held.step()
        held.arrive()
    assert held.finish("second", "third") == [stock[5], stock[6]]
    assert held.outputs["second"].num_cached_tokens == held.outputs["third"].num_cached_tokens == 96
    assert held.connector.loads == {}


def test_a_full_tier_keeps_what_is_read_and_leaves_the_rest_out(held: Held, stock: list[list[int]]) -> None:
    index = held.connector.index
    taken, index._free = index._free[9:], index._free[:9]  # nine pages are left
    assert tokens(generate(held.llm, [PREFIXES[3]])) == [stock[3]]
    assert held.llm.reset_prefix_cache()
    held.hold()
    held.add("found", PREFIXES[3])
    held.step()
    (reading,) = held.connector.loads.values()
    held.add("long", PREFIXES[4])
    assert held.finish("long") == [stock[4]]
    assert all(index.find(page.key) is page and page.users == 1 for page in reading)
    assert len(reading) == 6 and len(index) == 9, "twelve blocks were filled, and three pages are not read"
    held.let_go()
    assert held.finish("found") == [stock[3]]
    assert held.outputs["found"].num_cached_tokens == FULL[3]
    index._free += taken


def test_what_was_reset_while_it_was_on_its_way_is_not_found(held: Held, stock: list[list[int]]) -> None:
    held.hold()
    held.add("done", PREFIXES[4])
    assert held.finish("done") == [stock[4]]
    assert held.connector.has_pending_push_work()
    assert held.llm.reset_prefix_cache(reset_connector=True) is False, "the engine's own cache is in use"
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        held.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    held.let_go()
    held.settle()
    assert held.connector.saves == {} and len(held.connector.index) == 3, "the last request's"
    assert not held.connector.has_pending_push_work()
    assert held.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    (output,) = generate(held.llm, [PREFIXES[4]])
    assert tokens([output]) == [stock[4]] and output.num_cached_tokens == 0


@pytest.fixture(params=["at once", "in the middle"])
def breaks(request: pytest.FixtureRequest, held: Held, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Copies that the device refuses: when they are asked for, or when some of them are on their way."""
    if request.param == "at once":
        return broken_copies
    held.hold()
    for queue in (held.host._out, held.host._in):
        monkeypatch.setattr(queue, "max_in_flight", 1)
    for limit in ("STEP_LEAST", "STEP_MOST"):
        monkeypatch.setattr(transfer_plan, limit, 1)
    return lambda: broken_copies(kept=2)


def test_blocks_that_cannot_be_offloaded_are_not_found(held: Held, stock: list[list[int]], breaks: Any) -> None:
    with breaks():
        held.add("broken", PREFIXES[4])
        for _ in range(200):
            held.step()
            held.arrive()
            if "broken" in held.outputs and held.outputs["broken"].finished:
                break
    assert held.finish("broken") == [stock[4]]
    held.let_go()
    held.settle()
    assert len(held.connector.index) == 3 + 3, "the prompt's nine are not there, but what was filled later"
    assert held.used == 0 and held.llm.reset_prefix_cache()
    for found in (0, FULL[4]):
        (output,) = generate(held.llm, [PREFIXES[4]])
        assert tokens([output]) == [stock[4]] and output.num_cached_tokens == found
        assert held.llm.reset_prefix_cache()


@pytest.mark.parametrize("recompute", [True, False])
def test_blocks_that_cannot_be_restored_are_dropped_and_not_read(
    held: Held, stock: list[list[int]], breaks: Any, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held.scheduler, "recompute_kv_load_failures", recompute)
    held.host._out.stream = None
    assert tokens(generate(held.llm, [PREFIXES[4]])) == [stock[4]]
    assert held.llm.reset_prefix_cache()
    with breaks():
        held.add("broken", PREFIXES[4])
        for _ in range(10):
            held.step()
            held.arrive()
    if recompute:
        assert held.finish("broken") == [stock[4]]
    else:
        assert held.outputs["broken"].outputs[0].finish_reason == "error"
        assert tokens([held.outputs["broken"]]) == [[]]
    held.let_go()
    held.settle()
    assert held.used == 0 and held.connector.loads == {} and held.llm.reset_prefix_cache()
    (output,) = generate(held.llm, [PREFIXES[4]])
    assert tokens([output]) == [stock[4]]
    assert output.num_cached_tokens == (FULL[4] if recompute else 0), "dropped; and kept again where it was computed"


def test_several_workers_have_to_agree() -> None:
    """A page is there when every worker says so, and is not when one of them failed."""
    first = Moved()
    first.saved[1] += 1
    first.failed_loads.add("a")
    second = Moved()
    second.saved.update({1: 1, 2: 1})
    second.failed_saves.add(2)
    both = first.aggregate(second)
    assert both.saved == {1: 2, 2: 1} and both.failed_saves == {2} and both.failed_loads == {"a"}
