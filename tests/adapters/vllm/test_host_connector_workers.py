"""Workers that tell of one transfer in different steps, by vLLM's own aggregation of what they tell."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engines

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from pm_ops.adapters.vllm.host_connector import HostStats, PageHostConnector, Save
from pm_ops.adapters.vllm.host_transfers import Moved
from pm_ops.adapters.vllm.page_index import Page, PageIndex

KEYS = ("first", "second", "third")


class Workers:
    """Two, and the scheduler's half of a connector that keeps three pages."""

    def __init__(self, ready: bool) -> None:
        self.freed: list[Any] = []
        self.connector: Any = object.__new__(PageHostConnector)
        self.connector.index, self.connector.stats = PageIndex(4), HostStats()
        self.connector.saves, self.connector.loads, self.connector.failed = {}, {}, set()
        self.connector.block_pool = SimpleNamespace(free_blocks=lambda blocks: self.freed.extend(blocks))
        self.pages: list[Page] = [self.connector.index.add(key) for key in KEYS]
        for page in self.pages:
            page.ready = ready
        self.together = KVOutputAggregator(2)

    def step(self, *told: tuple[set[str], Moved | None]) -> None:
        """Each worker's loads that have ended, and its news."""
        outputs = []
        for ended, moved in told:
            failed = set(moved.failed_loads) if moved else set()
            news = KVConnectorOutput(finished_recving=ended, failed_recving=failed, kv_connector_worker_meta=moved)
            outputs.append(ModelRunnerOutput([], {}, [], kv_connector_output=news))
        self.connector.update_connector_output(self.together.aggregate(outputs).kv_connector_output)

    def found(self) -> list[bool]:
        return [self.connector.index.find(key) is not None for key in KEYS]


SILENT = (set(), None)
FAILED = ({"a"}, Moved(failed_loads={"a"}))
DONE = ({"a"}, None)


@pytest.mark.parametrize("steps", [[(FAILED, SILENT), (SILENT, DONE)], [(SILENT, DONE), (FAILED, SILENT)]])
def test_what_one_worker_could_not_restore_is_not_restored(steps: list[Any]) -> None:
    workers = Workers(ready=True)
    workers.connector.loads["a"] = workers.pages
    for told in steps:
        assert [page.users for page in workers.pages] == [1, 1, 1], "held until both have ended"
        workers.step(*told)
    assert workers.connector.stats.data == {"restored": 0} and workers.found() == [False] * 3
    assert workers.connector.loads == {} and len(workers.connector.index._free) == 4

    again = [workers.connector.index.add(key) for key in KEYS]  # the same request, once more
    workers.connector.loads["a"] = again
    workers.step(SILENT, DONE)
    assert workers.connector.stats.data == {"restored": 0}
    workers.step(DONE, SILENT)
    assert workers.connector.stats.data == {"restored": 3}


@pytest.mark.parametrize("failing", [None, 0, 1])
def test_blocks_are_let_go_when_the_last_worker_has_offloaded_them(failing: int | None) -> None:
    workers = Workers(ready=False)
    blocks = [SimpleNamespace(ref_cnt=2) for _ in KEYS]
    workers.connector.saves[7] = Save(workers.pages, blocks, workers=2)
    assert not workers.connector.has_pending_block_frees(), "their request runs"
    blocks[1].ref_cnt = 1
    assert workers.connector.has_pending_block_frees()
    for worker in range(2):
        assert workers.freed == [] and workers.found() == [False] * 3
        moved = Moved(failed_saves={7} if worker == failing else set())
        moved.saved[7] = 1
        workers.step(*((set(), moved if i == worker else None) for i in range(2)))
    kept = failing is None
    assert workers.freed == blocks[::-1] and workers.found() == [kept] * 3
    assert workers.connector.stats.data == {"offloaded": 3 if kept else 0}
    assert not workers.connector.has_pending_block_frees() and not workers.connector.has_pending_push_work()
