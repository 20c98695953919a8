"""Pages that one engine wrote, read by another: SGLang's layout to vLLM's, and one rank's heads out of them.

Two engines with the same model and other page sizes: SGLang 0.5.15 writes page-major pages of 16 tokens, vLLM reads
pages of 64 as `[layer][token][head][K | V]`. Their bytes differ, their content does not.
Run: `python examples/cross_engine_repack.py`.
"""

import torch

import pm_ops

LAYERS, HEADS, DIM, TOKENS = 4, 8, 32, 150


def main() -> None:
    torch.manual_seed(0)
    sglang = pm_ops.PagePool(pm_ops.page_major(LAYERS, HEADS, DIM, 16, torch.bfloat16), num_pages=32)
    vllm = pm_ops.PagePool(pm_ops.vllm(LAYERS, HEADS, DIM, 64, torch.bfloat16, "BLNHC"), num_pages=8)
    rank = pm_ops.PagePool(pm_ops.vllm(LAYERS, HEADS // 2, DIM, 64, torch.bfloat16, "BLNHC"), num_pages=8)

    # One engine writes a sequence of 150 tokens, which takes ten of its pages; the other one needs three of its own.
    written, read = [17, 4, 30, 0, 9, 22, 5, 13, 8, 26], [6, 1, 3]
    slots = torch.tensor([written[t // 16] * 16 + t % 16 for t in range(TOKENS)])
    cache = torch.randn(LAYERS, 2, TOKENS, HEADS, DIM).bfloat16()
    for layer, (key, value) in enumerate(cache):
        pm_ops.store_kv(sglang, layer, key, value, slots)

    plan = pm_ops.RepackPlan(sglang.layout, vllm.layout)
    print(plan)
    plan.run(sglang, vllm, written, read, tokens=TOKENS)  # one launch on a GPU, whatever the number of pages

    # What vLLM sees of a page: [token, head, K | V] of every layer, by its own arithmetic.
    pages = vllm.pages.view(torch.bfloat16).view(8, LAYERS, 64, HEADS, 2, DIM)[read]
    tokens = pages.permute(1, 4, 0, 2, 3, 5).flatten(2, 3)[:, :, :TOKENS]
    assert torch.equal(tokens, cache)

    # A rank of a tensor-parallel engine gets its half of the heads out of the same pages.
    second = pm_ops.RepackPlan(sglang.layout, rank.layout, heads=(HEADS // 2, 0, HEADS // 2))
    print(second)
    second.run(sglang, rank, written, read, tokens=TOKENS)
    assert torch.equal(rank.view(2, "value")[read].flatten(0, 1)[:TOKENS], cache[2, 1, :, HEADS // 2 :])

    query = torch.randn(1, HEADS, DIM).bfloat16()  # and both caches answer alike
    lengths = torch.tensor([TOKENS])
    here = pm_ops.attention(sglang, 1, query, torch.tensor([written]), lengths)
    there = pm_ops.attention(vllm, 1, query, torch.tensor([read]), lengths)
    torch.testing.assert_close(here, there)
    print(f"{TOKENS} tokens: {len(written)} pages of 16 became {len(read)} of 64, bit for bit")


if __name__ == "__main__":
    main()
