"""A sequence pauses: its pages go to host memory, another sequence takes their place, and they come back by layers.

Two conversations share a pool that has room for one and a half of them. While the first one's user thinks, its pages
are offloaded and the second one runs in their place. Then they come back, to wherever there is room by then, and
attention of layer 0 runs while the other layers are still on their way. The results are the same, bit for bit.
Run: `python examples/offload_pages.py`, with or without a GPU.
"""

import random

import torch
from torch import Tensor

import pm_ops

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
LAYERS, HEADS, DIM, PAGE, TOKENS = (32, 8, 128, 16, 4000) if CUDA else (4, 2, 32, 16, 300)
COUNT = -(-TOKENS // PAGE)


class Sequence:
    """Keys and values that a model might have computed, and the queries of its next token."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.cache = torch.randn(LAYERS, 2, TOKENS, HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
        self.queries = torch.randn(LAYERS, 1, 4 * HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)

    def prefill(self, pool: pm_ops.PagePool, pages: list[int]) -> None:
        """Write keys and values to these pages."""
        t = torch.arange(TOKENS, device=DEVICE)
        slots = torch.tensor(pages, device=DEVICE)[t // PAGE] * PAGE + t % PAGE
        for layer, (key, value) in enumerate(self.cache):
            pm_ops.store_kv(pool, layer, key, value, slots)

    def attend(self, pool: pm_ops.PagePool, pages: list[int], layer: int) -> Tensor:
        """The next token's attention in one layer."""
        table, lengths = torch.tensor([pages], device=DEVICE), torch.tensor([TOKENS], device=DEVICE)
        return pm_ops.attention(pool, layer, self.queries[layer], table, lengths)


def main() -> None:
    layout = pm_ops.page_major(LAYERS, HEADS, DIM, PAGE, torch.bfloat16)
    pool = pm_ops.PagePool(layout, num_pages=COUNT * 3 // 2, device=DEVICE)
    host = pm_ops.HostPool(pool, num_pages=COUNT)
    warm_up(pool, host)
    first, second, clock = Sequence(1), Sequence(2), Clock()

    free = pool.allocator.alloc(pool.num_pages)  # as in a pool that has been in use: free pages lie anywhere
    random.Random(0).shuffle(free)
    pool.allocator.free(free)

    pages = pool.allocator.alloc(COUNT)
    first.prefill(pool, pages)
    right = [first.attend(pool, pages, layer) for layer in range(LAYERS)]

    # The first sequence pauses. Its pages cross in the background; whoever writes to them next has to wait for that.
    clock.mark("start")
    saved = host.offload(pages)
    saved.wait()  # not for the caller: what the current stream does from here on comes after the copies
    clock.mark("offloaded")
    pool.allocator.free(pages)

    # The second one takes the room and is done with it.
    pages = pool.allocator.alloc(COUNT)
    second.prefill(pool, pages)
    other = [second.attend(pool, pages, layer) for layer in range(LAYERS)]
    pool.allocator.free(pages)

    # The first one goes on, on whatever pages are free. Layer by layer: a layer's block lies in one piece in each page.
    held = pool.allocator.alloc(COUNT // 3)  # others have come meanwhile, so that these are other pages than before
    pages = pool.allocator.alloc(COUNT)
    clock.mark("call")
    back = host.restore(saved.pages, pages, by_layer=True)
    out = []
    for layer in range(LAYERS):
        back.wait_layer(layer)
        clock.mark(f"layer {layer}")
        out.append(first.attend(pool, pages, layer))
    host.free(saved.pages)  # in flight, too: they are reused after that
    pool.allocator.free([*held, *pages])

    assert all(map(torch.equal, out, right)), "the restored pages are not what they were"
    assert not torch.equal(other[0], right[0]), "the second sequence was to be another one"
    nbytes = COUNT * layout.page_bytes
    copies, layer_major = len(pm_ops.page_descriptors(pool, pages)), pm_ops.count_layer_major(pool, pages)
    print(f"{TOKENS} tokens are {COUNT} pages of {layout.page_bytes} B: {copies} copies, {layer_major} layer-major")
    print(f"attention over the restored pages gave the same {LAYERS} results, bit for bit")
    if CUDA:
        last = f"layer {LAYERS - 1}"
        offload, restore = clock.milliseconds("start", "offloaded"), clock.milliseconds("call", last)
        print(f"offload {nbytes / offload / 1e6:.1f} GB/s, restore {nbytes / restore / 1e6:.1f} GB/s")
        print(f"layer 0 was there after {clock.milliseconds('call', 'layer 0'):.2f} ms, all after {restore:.2f} ms")


def warm_up(pool: pm_ops.PagePool, host: pm_ops.HostPool) -> None:
    """One page there and back: kernels are compiled when they are first needed, and that is not to be timed."""
    saved = host.offload([0])
    host.restore(saved.pages, [0], by_layer=True).synchronize()
    host.free(saved.pages)


class Clock:
    """Moments on the current stream."""

    def __init__(self) -> None:
        self.marks: dict[str, torch.cuda.Event] = {}

    def mark(self, name: str) -> None:
        if CUDA:
            self.marks[name] = torch.cuda.Event(enable_timing=True)
            self.marks[name].record()

    def milliseconds(self, start: str, end: str) -> float:
        """Between two moments, once both have passed."""
        self.marks[end].synchronize()
        return self.marks[start].elapsed_time(self.marks[end])


if __name__ == "__main__":
    main()
