"""vLLM's own scheduler and the connector, with a model that only writes down what each cell of its cache stands for.

Every step checks that each token's cells, and those of all tokens that it reads, hold what they should: wherever a
block came from, nothing of another prefix, and nothing that has not arrived, is ever read. Requests share prefixes, are
preempted and aborted at random; copies are late, or are refused.
"""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engines

import torch
from delayed import arrive, delay
from vllm import EngineArgs, SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm_engine import host_tier, tiny_llama

from pm_ops import PagePool, page_major, transfer_queue
from pm_ops.adapters.vllm.host_transfers import HostTransfers
from pm_ops.copy_engine import copy_runs

SIZE = 16
SPEC = {"block_size": SIZE, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
LAYOUT = page_major(2, 2, 32, SIZE, torch.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


def scheduler_of(model: Path, windows: tuple[int, ...], ahead: bool, blocks: int, pages: int) -> Scheduler:
    """A scheduler of cache groups of two layers, the first with full attention; ``ahead``: by a step."""
    config = EngineArgs(
        str(model),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        block_size=SIZE,
        async_scheduling=ahead,
        additional_config={"pm_ops": True},
        kv_transfer_config=host_tier({"max_pages": pages}, kv_load_failure_policy="recompute"),
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = blocks
    specs = [FullAttentionSpec(**SPEC), *(SlidingWindowSpec(**SPEC, sliding_window=window) for window in windows)]
    groups = [KVCacheGroupSpec([f"layers.{2 * i}", f"layers.{2 * i + 1}"], spec) for i, spec in enumerate(specs)]
    page = LAYOUT.page_bytes
    tensors = [KVCacheTensor(blocks * page, group.layer_names, page // 2, page) for group in groups]
    kind = AsyncScheduler if ahead else Scheduler
    return kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks, tensors, groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=SIZE,
        hash_block_size=SIZE,
        log_stats=True,
    )


def cell(group: int, tokens: list[int], position: int) -> int:
    """What a token leaves in the cache of a group: something of its own for every prefix."""
    return hash((group, tuple(tokens[: position + 1])))


def next_token(tokens: list[int]) -> int:
    return hash(tuple(tokens)) % 500


class Fake:
    """The engine but for its scheduler: a worker, and a model of few words.

    Args:
        late: copies arrive after so many steps on average; 0: at once.
        refused: the share of copies that are refused.
    """

    def __init__(
        self, scheduler: Scheduler, windows: tuple[int, ...], ahead: bool, late: int, refused: float, seed: int
    ) -> None:
        self.scheduler, self.connector, self.ahead, self.late = scheduler, scheduler.connector, ahead, late
        self.windows: tuple[int | None, ...] = (None, *windows)
        self.random = random.Random(seed)
        self.pool = PagePool(LAYOUT, scheduler.kv_cache_config.num_blocks, reserve_null=True)
        self.cells = self.pool.pages.view(torch.int64)
        self.transfers = HostTransfers(self.pool, self.connector.num_pages)
        self.refused = refused
        if late:
            delay(self.transfers.host, [])
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.blocks: dict[str, list[list[int]]] = {}
        self.steps: list[Any] = []
        self.counts: Counter[str] = Counter()

    def copy(self, *args: Any) -> None:
        """In place of the copies of pm_ops."""
        *what, stream = args
        if self.random.random() < self.refused:
            raise RuntimeError("refused")
        if stream is None:
            copy_runs(*what, None)
        else:
            stream.work.append(lambda: copy_runs(*what, None))

    def add(self, name: str, prompt: list[int], new_tokens: int) -> None:
        how = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        hasher = get_request_block_hasher(SIZE, sha256)
        request = Request(name, prompt, how, None, block_hasher=hasher)
        self.requests[name], self.tokens[name] = request, list(prompt)
        self.scheduler.add_request(request)

    def step(self) -> None:
        output = self.scheduler.schedule()
        moves = output.kv_connector_metadata
        self.transfers.load(moves)
        sampled = self.forward(output)
        self.transfers.save(moves)
        if self.late and self.random.random() < 1 / self.late:
            arrive(self.transfers.host._out)
            arrive(self.transfers.host._in)
        one_group = len(self.windows) == 1
        news = KVConnectorOutput(
            finished_recving=self.transfers.poll(),
            failed_recving=set() if one_group else self.transfers.failed_loads(),
            invalid_block_ids=self.transfers.failed_blocks() if one_group else set(),
            kv_connector_worker_meta=self.transfers.news(),
        )
        names = list(output.num_scheduled_tokens)
        tokens, rows = [sampled[name] for name in names], {name: i for i, name in enumerate(names)}
        result = ModelRunnerOutput(names, rows, tokens, kv_connector_output=news)
        self.steps.append((output, result))
        while len(self.steps) > (self.ahead and bool(names)):
            for outputs in self.scheduler.update_from_output(*self.steps.pop(0)).values():
                stats = outputs.scheduler_stats and outputs.scheduler_stats.kv_connector_stats
                self.counts.update(stats or {})

    def forward(self, output: Any) -> dict[str, list[int]]:
        """Write the cells of all scheduled tokens, then look at those that they read; the tokens that come next."""
        rows: list[tuple[str, int, int]] = []
        for new in output.scheduled_new_reqs:
            self.blocks[new.req_id] = [list(group) for group in new.block_ids]
            rows.append((new.req_id, new.num_computed_tokens, output.num_scheduled_tokens[new.req_id]))
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            if name in cached.resumed_req_ids:
                self.blocks[name] = [[] for _ in self.windows]
                self.counts["preempted"] += 1
            for group, more in zip(self.blocks[name], cached.new_block_ids[i] or (), strict=False):
                group += more
            rows.append((name, cached.num_computed_tokens[i], output.num_scheduled_tokens[name]))
        for name, computed, count in rows:
            tokens = self.tokens[name]
            while len(tokens) < computed + count:  # sampled in the step before
                tokens.append(next_token(tokens))
            for group in range(len(self.windows)):
                for i in range(computed, computed + count):
                    self.cells[self.blocks[name][group][i // SIZE], i % SIZE] = cell(group, tokens, i)
        for name, computed, count in rows:
            for group, window in enumerate(self.windows):
                for i in range(0 if window is None else max(0, computed + 1 - window), computed + count):
                    found = int(self.cells[self.blocks[name][group][i // SIZE], i % SIZE])
                    assert found == cell(group, self.tokens[name], i), (name, group, i, computed)
        return {
            name: [next_token(self.tokens[name])] if computed + count == len(self.tokens[name]) else []
            for name, computed, count in rows
        }


@pytest.mark.parametrize(("late", "refused"), [(0, 0.0), (4, 0.0), (4, 0.05)])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("windows", [(), (17, 100)])
def test_no_request_reads_a_cell_that_is_not_its_own(
    model: Path, windows: tuple[int, ...], ahead: bool, late: int, refused: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    init_none_hash(sha256)
    counts: Counter[str] = Counter()
    for seed in range(2):
        draw = random.Random(seed)
        blocks, pages = (44, 50) if windows else (24, 40)
        scheduler = scheduler_of(model, windows, ahead, blocks, pages=(pages, 300)[seed])
        fake = Fake(scheduler, windows, ahead, late, refused, seed)
        monkeypatch.setattr(transfer_queue, "copy_runs", fake.copy)
        if seed == 0:  # as vLLM 0.26, which preempts without asking
            monkeypatch.setattr(fake.connector, "has_pending_block_frees", lambda: False)
        shared = [[draw.randrange(500) for _ in range(length)] for length in (48, 90, 150)]
        asked: dict[str, tuple[list[int], int]] = {}
        for i in range(24):
            beginning = draw.choice(shared)[: draw.choice((20, 60, 150))]
            prompt = beginning + [draw.randrange(500) for _ in range(draw.randrange(1, 60))]
            asked[str(i)] = prompt, draw.randrange(1, 40)
            fake.add(str(i), *asked[str(i)])
            for _ in range(draw.randrange(14)):
                fake.step()
            if draw.random() < 0.25:
                name = draw.choice(list(asked))
                if scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED):
                    del asked[name]
            if draw.random() < 0.2:
                scheduler.reset_prefix_cache()
        for _ in range(3000):
            if not (scheduler.has_requests() or fake.steps):
                break
            fake.step()
        for name, (prompt, count) in asked.items():
            tokens = list(prompt)
            for _ in range(count):
                tokens.append(next_token(tokens))
            assert list(fake.requests[name].all_token_ids) == tokens, "every request ends, with its own tokens"
        ours = fake.connector
        assert (ours.saves, ours.loads, ours.tracked) == ({}, {}, {})
        assert scheduler.reset_prefix_cache(), "no block has an owner left"
        assert len(ours.index) <= ours.num_pages and not any(page.users for page in ours.index._pages.values())
        counts.update(fake.counts)
    assert counts["restored"] > 20 and counts["evicted"] > 20 and counts["preempted"] > 0
