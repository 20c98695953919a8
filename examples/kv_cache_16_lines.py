"""A layer-major KV cache, as small models write it, and the one line that moves it into pages.

The class below knows nothing of pages: its cache is two tensors `[batch, heads, length, dim]`, written by
`k_cache[:, :, pos] = k` and read whole by scaled_dot_product_attention. Run: `python examples/kv_cache_16_lines.py`.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pm_ops
from pm_ops.compile_passes import bind, page_major_backend

BATCH, HEADS, DIM, LENGTH, LAYERS = 2, 4, 16, 48, 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HEADS * DIM, 3 * HEADS * DIM)
        self.out = nn.Linear(HEADS * DIM, HEADS * DIM)
        self.register_buffer("k_cache", torch.zeros(BATCH, HEADS, LENGTH, DIM))
        self.register_buffer("v_cache", torch.zeros(BATCH, HEADS, LENGTH, DIM))

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        self.k_cache[:, :, pos] = k
        self.v_cache[:, :, pos] = v
        seen = torch.arange(LENGTH, device=x.device) <= pos[:, None]
        y = F.scaled_dot_product_attention(q, self.k_cache, self.v_cache, attn_mask=seen)
        return x + self.out(y.transpose(1, 2).flatten(2))


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    stock = nn.ModuleList(Attention() for _ in range(LAYERS))
    model = copy.deepcopy(stock)
    pool = pm_ops.PagePool(pm_ops.page_major(LAYERS, HEADS, DIM, page_size=16, dtype=torch.float32), num_pages=8)

    binding = bind(pool, keys=[a.k_cache for a in model], values=[a.v_cache for a in model])  # the one line

    def run(layers: nn.ModuleList, x: Tensor, pos: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x, pos)
        return x

    paged = torch.compile(run, backend=page_major_backend(binding))
    steps = [torch.arange(20), *(torch.tensor([i]) for i in range(20, LENGTH))]  # a prompt, then token after token
    for pos in steps:
        x = torch.randn(BATCH, len(pos), HEADS * DIM)
        torch.testing.assert_close(paged(model, x, pos), run(stock, x, pos))

    for i, layer in enumerate(stock):  # and the caches hold the same: here layer-major, there in pages
        for kind, cache in (("key", layer.k_cache), ("value", layer.v_cache)):
            pages = pool.view(i, kind)[binding.page_table]  # [batch, pages, page_size, heads, dim]
            torch.testing.assert_close(pages.flatten(1, 2).transpose(1, 2), cache)
    print(binding.report())
    print(f"{len(steps)} steps and {2 * LAYERS} caches equal; the model's own hold {binding.cache_bytes()} bytes now")


if __name__ == "__main__":
    main()
