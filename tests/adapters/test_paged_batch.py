"""PagedBatch and PageMajorCache keep the right tokens in the right pages, and account for every page."""

import random
from collections import Counter

import pytest
import torch

import pm_ops
from pm_ops.adapters.paged_batch import PagedBatch
from pm_ops.adapters.transformers import PageMajorCache
from pm_ops.testing import fill_random

LAYERS, HEADS, DIM = 2, 2, 4


def make_pool(num_pages: int = 32, page_size: int = 3) -> pm_ops.PagePool:
    pool = pm_ops.PagePool(pm_ops.page_major(LAYERS, HEADS, DIM, page_size, torch.float32), num_pages)
    fill_random(pool.buffer)
    return pool


def cell(pool: pm_ops.PagePool, layer: int, kind: str, page: int, offset: int) -> torch.Tensor:
    """One token's row, read by the page_major byte formula: page = [L0_K | L0_V | L1_K | ...], each [ps, H, D]."""
    block = pool.page_size * HEADS * DIM
    start = page * LAYERS * 2 * block + (2 * layer + (kind == "value")) * block + offset * HEADS * DIM
    return pool.buffer.view(torch.float32)[start : start + HEADS * DIM].view(HEADS, DIM)


class Reference:
    """What the cache must hold: per layer and row, the tokens' keys and values, as plain lists."""

    def __init__(self) -> None:
        self.rows: list[list[torch.Tensor]] = []  # one [layers, 2, H, D] a token
        self.mask = torch.ones(0, 0, dtype=torch.bool)

    def append(self, tokens: torch.Tensor, real: torch.Tensor) -> None:
        """tokens ``[layers, 2, rows, n, H, D]``, real ``[rows, n]``."""
        if not self.rows:
            self.rows, self.mask = [[] for _ in range(len(real))], real[:, :0]
        for b, row in enumerate(self.rows):
            row += [tokens[:, :, b, i] for i in range(real.shape[1]) if real[b, i]]
        self.mask = torch.cat((self.mask, real), 1)

    def crop(self, n: int) -> None:
        keep = max(self.mask.shape[1] - n, 0)
        self.rows = [row[: int(self.mask[b, :keep].sum())] for b, row in enumerate(self.rows)]
        self.mask = self.mask[:, :keep]

    def select(self, indices: list[int]) -> None:
        self.rows = [list(self.rows[i]) for i in indices]
        self.mask = self.mask[indices]


def store(cache: PageMajorCache, reference: Reference, tokens: torch.Tensor, real: torch.Tensor | None = None) -> None:
    """One pass as transformers makes it, mask first, then every layer; and the same in the reference."""
    _, _, rows, n, _, _ = tokens.shape
    real = torch.ones(rows, n, dtype=torch.bool) if real is None else real
    cache.batch.announce(torch.cat((reference.mask.view(rows, -1), real), 1), rows, n)
    for layer in range(LAYERS):
        cache.update(tokens[layer, 0].transpose(1, 2), tokens[layer, 1].transpose(1, 2), layer)
    reference.append(tokens, real)


def check(cache: PageMajorCache, reference: Reference) -> None:
    pool = cache.pool
    assert [row.length for row in cache.rows] == [len(tokens) for tokens in reference.rows]
    owners = Counter(page for row in cache.rows for page in row.pages)
    assert pool.allocator.num_free == pool.num_pages - len(owners), "every page is free or owned by a row"
    for page in range(pool.num_pages):
        assert pool.allocator.refcount(page) == owners[page]
    for row, tokens in zip(cache.rows, reference.rows, strict=True):
        assert len(row.pages) == -(-len(tokens) // pool.page_size), "no page is kept that holds no token"
        for t, token in enumerate(tokens):
            page, offset = row.pages[t // pool.page_size], t % pool.page_size
            for layer in range(LAYERS):
                for i, kind in enumerate(("key", "value")):
                    assert torch.equal(cell(pool, layer, kind, page, offset), token[layer, i])
    for layer in cache.layers:
        assert layer.get_seq_length() == reference.mask.shape[1]


def some_padding(rows: int, n: int) -> torch.Tensor:
    """Rows without padding, padded on the left, and with padding anywhere."""
    kinds = {"none": [0.0] * n, "left": [2.0] * random.randint(0, n), "any": [0.4] * n}
    rows_of = [kinds[random.choice(list(kinds))] for _ in range(rows)]
    return torch.tensor([[random.random() >= (p[i] if i < len(p) else 0.0) for i in range(n)] for p in rows_of])


@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("seed", range(6))
def test_any_history_of_operations_keeps_tokens_and_page_counts(page_size: int, seed: int) -> None:
    random.seed(seed)
    cache, reference = PageMajorCache(make_pool(400, page_size)), Reference()
    for _ in range(40):
        rows = len(reference.rows) or random.randint(1, 4)
        action = random.choice(["append", "append", "append", "crop", "reorder", "repeat", "select", "reset"])
        if action == "append":
            n = random.randint(1, 7)
            tokens, real = torch.randn(LAYERS, 2, rows, n, HEADS, DIM), some_padding(rows, n)
            if max((len(row) for row in reference.rows), default=0) > 40:
                continue
            store(cache, reference, tokens, real)
        elif action == "crop":
            n = random.randint(0, 5)
            cache.crop(-n)
            reference.crop(n)
        elif action == "reset":
            if random.random() < 0.3:
                cache.reset()
                reference = Reference()
        elif reference.rows:
            if action == "reorder":
                indices = [random.randrange(rows) for _ in range(rows)]
                cache.reorder_cache(torch.tensor(indices))
            elif action == "repeat":
                if rows > 3:
                    continue
                indices = [i for i in range(rows) for _ in range(2)]
                cache.batch_repeat_interleave(2)
            else:
                indices = sorted(random.sample(range(rows), random.randint(1, rows)))
                chosen = torch.zeros(rows, dtype=torch.bool)
                chosen[indices] = True
                cache.batch_select_indices(chosen if random.random() < 0.5 else torch.tensor(indices))
            reference.select(indices)
        check(cache, reference)
    cache.reset()
    assert cache.pool.allocator.num_free == cache.pool.num_pages


def test_a_pass_writes_its_own_cells_and_nothing_else() -> None:
    pool = make_pool(8, 4)
    cache, reference = PageMajorCache(pool), Reference()
    first, second = torch.randn(LAYERS, 2, 2, 5, HEADS, DIM), torch.randn(LAYERS, 2, 2, 2, HEADS, DIM)
    store(cache, reference, first, torch.tensor([[True] * 5, [False] * 3 + [True] * 2]))
    before = pool.buffer.view(torch.int32).clone()
    store(cache, reference, second)
    changed = pool.buffer.view(torch.int32) != before
    tokens = ((0, 5), (0, 6), (1, 2), (1, 3))  # (row, token) of the second pass
    cells = [(cache.rows[b].pages[t // 4], t % 4) for b, t in tokens]
    for page, offset in cells:
        for layer in range(LAYERS):
            for kind in ("key", "value"):
                block = 4 * HEADS * DIM
                start = page * LAYERS * 2 * block + (2 * layer + (kind == "value")) * block + offset * HEADS * DIM
                changed[start : start + HEADS * DIM] = False
    assert not changed.any()


def test_reordering_moves_no_bytes_and_the_first_writer_of_a_shared_page_gets_a_copy() -> None:
    pool = make_pool(8, 4)
    cache, reference = PageMajorCache(pool), Reference()
    store(cache, reference, torch.randn(LAYERS, 2, 3, 6, HEADS, DIM))
    full, open_page = cache.rows[1].pages
    before = pool.buffer.clone()
    cache.reorder_cache(torch.tensor([1, 1, 1]))
    assert torch.equal(pool.buffer, before)
    assert [row.pages for row in cache.rows] == [[full, open_page]] * 3
    assert (pool.allocator.refcount(full), pool.allocator.refcount(open_page)) == (3, 3)
    assert pool.allocator.num_free == 6, "the pages of the beams that ended are free"

    tokens = torch.randn(LAYERS, 2, 3, 1, HEADS, DIM)
    store(cache, reference, tokens)
    assert [row.pages[0] for row in cache.rows] == [full] * 3, "a full page stays shared"
    own = [row.pages[1] for row in cache.rows]
    assert len(set(own)) == 3 and open_page in own, "the last writer keeps the page itself"
    old = before.view(8, -1)[open_page].view(torch.float32).view(LAYERS, 2, 4, HEADS, DIM)
    for b, page in enumerate(own):
        new = pool.pages[page].view(torch.float32).view(LAYERS, 2, 4, HEADS, DIM)
        assert torch.equal(new[:, :, :2], old[:, :, :2]), "tokens 4 and 5 came along, in every layer"
        assert torch.equal(new[:, :, 2], tokens[:, :, b, 0])


def test_exhaustion_is_refused_before_anything_changes() -> None:
    pool = make_pool(4, 4)
    cache, reference = PageMajorCache(pool), Reference()
    store(cache, reference, torch.randn(LAYERS, 2, 2, 6, HEADS, DIM))
    cache.reorder_cache(torch.tensor([0, 0]))
    reference.select([0, 0])
    held = pool.allocator.alloc(2)  # somebody else's: no page is left for the copy
    before = pool.buffer.clone()
    with pytest.raises(RuntimeError, match="needs 0 new and 1 copy of shared ones, 0 of 4 are free"):
        cache.update(torch.randn(2, HEADS, 1, DIM), torch.randn(2, HEADS, 1, DIM), 0)
    assert torch.equal(pool.buffer, before)
    pool.allocator.free(held)
    check(cache, reference)
    store(cache, reference, torch.randn(LAYERS, 2, 2, 1, HEADS, DIM))
    check(cache, reference)


def test_caches_that_share_a_pool_take_different_pages() -> None:
    pool = make_pool(8, 4)
    one, two = PageMajorCache(pool), PageMajorCache(pool)
    references = [Reference(), Reference()]
    for cache, reference in zip((one, two), references, strict=True):
        store(cache, reference, torch.randn(LAYERS, 2, 2, 5, HEADS, DIM))
    assert not {p for row in one.rows for p in row.pages} & {p for row in two.rows for p in row.pages}
    two.reset()
    check(one, references[0])
    with pytest.raises(RuntimeError, match="out of pages"):
        two.update(torch.randn(5, HEADS, 4, DIM), torch.randn(5, HEADS, 4, DIM), 0)
    assert two.batch_size == -1


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]), "other cached tokens"),
        (torch.ones(2, 4), r"needs \[2, 5\]; the cache holds 3 tokens already: cache\.reset"),
        (torch.ones(3, 5), "3 sequences for a cache of 2; .*cache\\.reset|3, 5.* needs"),
    ],
)
def test_masks_that_pages_cannot_follow_are_refused(mask: torch.Tensor, says: str) -> None:
    batch = PagedBatch(make_pool())
    batch.step(0, 2, 3)
    with pytest.raises(ValueError, match=says):
        batch.announce(mask, 2, 2)
    assert batch.step(3, 2, 2).seq_lens.tolist() == [5, 5], "a refused mask leaves nothing behind"


def test_leaving_the_mask_out_after_padding_is_refused() -> None:
    batch = PagedBatch(make_pool())
    batch.announce(torch.tensor([[0, 1, 1], [1, 1, 1]]), 2, 3)
    assert batch.step(0, 2, 3).seq_lens.tolist() == [2, 3]
    with pytest.raises(ValueError, match="other cached tokens"):
        batch.announce(None, 2, 1)


def test_batches_and_passes_that_do_not_fit_are_refused() -> None:
    batch = PagedBatch(make_pool())
    batch.step(0, 2, 3)
    with pytest.raises(ValueError, match="3 sequences for a cache of 2"):
        batch.step(3, 3, 1)
    with pytest.raises(ValueError, match="3 sequences for a cache of 2"):
        batch.announce(None, 3, 1)
    with pytest.raises(RuntimeError, match="every layer has to store every pass"):
        batch.step(1, 2, 1)
    batch.announce(None, 2, 2)
    with pytest.raises(ValueError, match="the attention mask spoke of"):
        batch.step(3, 2, 1)
