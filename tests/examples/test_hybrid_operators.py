"""The example of the operators over states prints what it says, and its Mamba-2 mixer on pages is transformers' own."""

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pm_ops

transformers = pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("hybrid_operators")


def test_the_hybrid_model_gives_the_same_tokens_on_one_pool(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    example.main()
    text = capsys.readouterr().out
    assert "the same 72 tokens as on transformers' own caches: True" in text
    assert "3 sequences own 9 pages of 81920 B, 3 of them of states" in text
    assert "moved halfway: 9 pages in 3 calls" in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mamba_2_mixer_on_pages_is_transformers_own(example: Any, dtype: torch.dtype) -> None:
    """Prefill of 65 tokens, a second of 7 on its state, and five steps: outputs, and the states in the end."""
    from transformers.cache_utils import LinearAttentionLayer
    from transformers.models.mamba2 import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = Mamba2Config(
        hidden_size=48, num_heads=6, head_dim=16, expand=2, state_size=12, n_groups=2, conv_kernel=4, chunk_size=16,
        num_hidden_layers=1, use_conv_bias=True, time_step_limit=(0.01, 2.0),
    )  # fmt: skip
    mixer = Mamba2Mixer(config, 0).to(dtype).eval()
    states = {"conv": ((mixer.conv_dim, 3), dtype), "ssm": ((6, 16, 12), torch.float32)}
    pool = pm_ops.PagePool(pm_ops.state_page(1, states, align=16), 4)
    pages = torch.tensor([3, 1])
    ours = SimpleNamespace(pool={"state": pool}, layers=[example.StateLayer()], state_indices=lambda rows: pages[:rows])
    theirs = transformers.cache_utils.Cache(layers=[LinearAttentionLayer()])
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    with torch.inference_mode():
        for length in (65, 7, 1, 1, 1, 1, 1):
            hidden = torch.randn(2, length, 48, dtype=dtype)
            expected = mixer(hidden, cache_params=theirs)
            got = example.paged_mixer(mixer, hidden, ours)
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    conv, ssm = theirs.layers[0].conv_states[0], theirs.layers[0].recurrent_states[0]
    torch.testing.assert_close(pool.view(0, "conv")[pages], conv[..., 1:], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(pool.view(0, "ssm")[pages], ssm.float(), rtol=tolerance, atol=tolerance)
