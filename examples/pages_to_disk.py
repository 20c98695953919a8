"""A prompt's pages outlive the process that computed them: they are kept on disk by a hash of their tokens.

A page's key is the hash of all tokens up to its end, so that two prompts share the pages of the beginning that they
share. Run `python examples/pages_to_disk.py --folder /tmp/pages` twice: the first run computes the six pages of its
first prompt, the second run none. Without a folder they are kept in a temporary one, as long as the run takes.
"""

import argparse
import hashlib
import tempfile

import torch
from torch import Tensor

import pm_ops

LAYERS, HEADS, DIM, PAGE, WIDTH = 4, 2, 32, 16, 64
MODEL = "three matrices a layer, seed 0"


class Model:
    """Layers of attention and nothing else, which keep keys and values in a pool."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.embedding = torch.randn(1000, WIDTH)
        self.qkv = torch.randn(LAYERS, 3, WIDTH, HEADS * DIM) / WIDTH**0.5
        self.layout = pm_ops.page_major(LAYERS, HEADS, DIM, PAGE, torch.float32)

    def prefill(self, pool: pm_ops.PagePool, tokens: Tensor, pages: list[int], cached: int) -> Tensor:
        """Run the tokens behind the first ``cached`` ones, whose keys and values the pages hold already."""
        positions = torch.arange(cached, len(tokens))
        slots = torch.tensor(pages)[positions // PAGE] * PAGE + positions % PAGE
        table, lengths = torch.tensor([pages]), torch.tensor([len(tokens)])
        starts = torch.tensor([0, len(positions)])
        x = self.embedding[tokens[cached:]]
        for layer in range(LAYERS):
            query, key, value = (torch.einsum("tw,cwd->ctd", x, self.qkv[layer])).unflatten(2, (HEADS, DIM))
            pm_ops.store_kv(pool, layer, key, value, slots)
            x = x + pm_ops.attention(pool, layer, query, table, lengths, query_start=starts).flatten(1)
        return x[-1]


def page_keys(tokens: Tensor) -> list[str]:
    """A key for every full page but one that ends the prompt: its last token has to be run for what follows it."""
    ends = range(PAGE, len(tokens), PAGE)
    return [hashlib.sha256(repr(tokens[:end].tolist()).encode()).hexdigest() for end in ends]


def generate_first(model: Model, store: pm_ops.PageStore, tokens: Tensor) -> tuple[Tensor, int]:
    """The state behind the prompt, and how many of its pages came from the store."""
    pool = pm_ops.PagePool(model.layout, num_pages=16)
    pages, keys = [], page_keys(tokens)
    for key in keys:
        found = store.get(key, pool)
        if found is None:
            break
        pages += found
    hits = len(pages)
    pages += pool.allocator.alloc(-(-len(tokens) // PAGE) - hits)
    state = model.prefill(pool, tokens, pages, cached=hits * PAGE)
    for key, page in list(zip(keys, pages, strict=False))[hits:]:
        store.put(key, pool, [page])
    return state, hits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="where the pages are kept (default: in a temporary folder)")
    folder = parser.parse_args().folder
    if folder:
        return show(folder)
    with tempfile.TemporaryDirectory() as folder:
        show(folder)


def show(folder: str) -> None:
    model, store = Model(), pm_ops.PageStore(folder, max_bytes=64 << 20, model=MODEL)
    system = torch.randint(1000, (100,), generator=torch.Generator().manual_seed(1))
    for question in ([3, 1, 4], [2, 7, 1, 8]):
        tokens = torch.cat((system, torch.tensor(question)))
        state, hits = generate_first(model, store, tokens)
        pool = pm_ops.PagePool(model.layout, num_pages=16)
        torch.testing.assert_close(state, model.prefill(pool, tokens, list(range(7)), cached=0))
        print(
            f"{len(tokens)} tokens: {hits} of {len(page_keys(tokens))} pages from {folder}, the same result as without"
        )
    print(f"{len(store)} entries, {store.nbytes} bytes; a page is {model.layout.page_bytes}")


if __name__ == "__main__":
    main()
