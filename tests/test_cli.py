"""pm-ops inspect: what it reads of a model, what it prints, and what it refuses."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import pm_ops
from pm_ops import cli
from pm_ops.model_config import model_shape

expecttest = pytest.importorskip("expecttest")

ROOT = Path(__file__).parents[1]
SMOLLM2: Mapping[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "torch_dtype": "bfloat16",
}


def inspect(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["inspect", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["inspect", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMOLLM2))
    return path


def test_the_figures_of_a_real_model(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SmolLM2-135M: 30 layers x (K and V) x 3 heads x 64 x 2 bytes = 23,040 bytes a token; 60 copies against 1."""
    record = inspect(capsys, str(config))
    assert record["model"] == {"layers": 30, "kv_heads": 3, "head_dim": 64, "value_dim": 64, "dtype": "bfloat16"}
    assert record["token_bytes"] == 23_040
    assert record["page_bytes"] == 16 * 23_040
    assert record["page_size"] == 16
    assert record["copies_per_page_layer_major"] == 60
    assert record["copies_per_page_page_major"] == 1
    assert record["read_from"]["head_dim"] == "hidden_size 576 / num_attention_heads 9"
    layout = pm_ops.PageLayout.from_json(json.dumps(record["layout"]))
    assert layout == pm_ops.page_major(30, 3, 64, 16, torch.bfloat16)
    assert record["fingerprint"] == layout.fingerprint


def test_a_folder_is_read_like_its_config_json(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(capsys, str(config.parent)) == inspect(capsys, str(config))


def test_flags_alone_give_the_same_layout(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--layers", "30", "--kv-heads", "3", "--head-dim", "64", "--dtype", "bfloat16"]
    assert inspect(capsys, *flags)["layout"] == inspect(capsys, str(config))["layout"]


def test_dtypes_have_short_names(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--layers", "2", "--kv-heads", "1", "--head-dim", "8", "--dtype"]
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn"}
    for short, name in names.items():
        assert inspect(capsys, *flags, short) == inspect(capsys, *flags, name)
    assert "int8, bf16, fp16, fp32, fp8" in refusal(capsys, *flags, "float64")


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("page_major", pm_ops.page_major(2, 3, 8, 4, torch.float16, value_dim=16)),
        ("token_major", pm_ops.token_major(2, 3, 8, 4, torch.float16, value_dim=16)),
        ("BLNHC", pm_ops.vllm(2, 3, 8, 4, torch.float16, "BLNHC", value_dim=16)),
        ("BLHNC", pm_ops.vllm(2, 3, 8, 4, torch.float16, "BLHNC", value_dim=16)),
        ("BHLNC", pm_ops.vllm(2, 3, 8, 4, torch.float16, "BHLNC", value_dim=16)),
    ],
)
def test_every_format(name: str, layout: pm_ops.PageLayout, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--layers 2 --kv-heads 3 --head-dim 8 --value-dim 16 --page-size 4 --dtype float16 --format"
    record = inspect(capsys, *flags.split(), name)
    assert pm_ops.PageLayout.from_json(json.dumps(record["layout"])) == layout


def test_flags_go_before_the_configuration(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = inspect(capsys, str(config), "--layers", "2", "--head-dim", "32", "--dtype", "float8_e4m3fn")
    assert record["model"] == {"layers": 2, "kv_heads": 3, "head_dim": 32, "value_dim": 32, "dtype": "float8_e4m3fn"}
    assert record["read_from"]["layers"] == "--layers"
    assert record["read_from"]["kv_heads"] == "num_key_value_heads"
    assert record["read_from"]["dtype"] == "--dtype"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"head_dim": 128}, (30, 3, 128, 128)),
        ({"num_key_value_heads": None}, (30, 9, 64, 64)),
        ({"num_key_value_heads": None, "head_dim": 32}, (30, 9, 32, 32)),
        ({"head_dim": None, "v_head_dim": 32}, (30, 3, 64, 32)),
        ({"num_key_value_heads": None, "multi_query": True}, (30, 1, 64, 64)),
        ({"multi_query": True, "new_decoder_architecture": True}, (30, 3, 64, 64)),
        ({"num_key_value_heads": [3] * 29 + [1]}, (30, [3] * 29 + [1], 64, 64)),
        ({"layer_types": ["full_attention"] * 30}, (30, 3, 64, 64)),
    ],
)
def test_what_a_configuration_leaves_out_or_adds(change: dict[str, Any], expected: tuple[Any, ...]) -> None:
    shape = model_shape({**SMOLLM2, **change})
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.value_dim) == expected
    assert shape.notes == ()


def test_the_names_of_older_models() -> None:
    shape = model_shape({"n_layer": 12, "n_head": 12, "n_embd": 768})
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.dtype) == (12, 12, 64, None)


def test_a_multimodal_models_text_part_is_read() -> None:
    shape = model_shape({"dtype": "float16", "text_config": {**SMOLLM2, "torch_dtype": None}, "vision_config": {}})
    assert (shape.layers, shape.dtype) == (30, torch.float16)
    assert "text_config" in shape.notes[0]


def test_sliding_layers_are_taken_and_what_that_means_is_said() -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 10
    (note,) = model_shape({**SMOLLM2, "layer_types": kinds}).notes
    assert note.startswith("20 of 30 layers see a window only (sliding_attention)")
    assert note.endswith("the layout keeps all tokens until you free pages")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lora_rank": 512}, "kv_lora_rank is 512.*latent attention"),
        ({"mamba_d_state": 16}, "mamba_d_state.*state instead of K and V"),
        ({"linear_conv_kernel_dim": 4}, "linear_conv_kernel_dim.*state instead of K and V"),
        ({"layer_types": ["linear_attention", "full_attention"] * 15}, "linear_attention.*not supported yet"),
        ({"layer_types": ["full_attention"] * 3}, "names 3 layers, the model has 30"),
        ({"num_kv_shared_layers": 10}, "share another layer's cache"),
        ({"per_layer_config": {"05": {"head_dim": 512}}}, "heads of their own"),
        ({"model_type": "mimo_v2_flash"}, "mimo_v2_flash has layers with heads of their own"),
        ({"index_head_dim": 128}, "index beside K and V"),
        ({"is_encoder_decoder": True}, "cross attention"),
        ({"num_hidden_layers": None}, "number of layers: none of num_hidden_layers"),
        ({"num_hidden_layers": "30"}, "must be one positive integer"),
        ({"num_hidden_layers": True}, "must be one positive integer"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"num_key_value_heads": [3, 1]}, r"num_key_value_heads is \[3, 1\]"),
        ({"num_key_value_heads": None, "num_attention_heads": None}, "number of KV heads, nor of attention heads"),
        ({"hidden_size": None}, "head dim, nor the hidden size"),
        ({"hidden_size": 577}, "577 is not a multiple of num_attention_heads 9"),
        ({"torch_dtype": "float17"}, "unknown dtype 'float17'"),
    ],
)
def test_a_model_of_another_kind_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=message):
        model_shape({**SMOLLM2, **change})
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SMOLLM2, **change}))
    assert refusal(capsys, str(path)).startswith("pm-ops inspect: ")


@pytest.mark.parametrize(
    "arguments",
    [
        "inspect", "inspect --layers 2 --kv-heads 2", "inspect --layers 2 --kv-heads 2 --head-dim 8 --page-size 0",
        "inspect --layers 2 --kv-heads 2 --head-dim 8 --dtype float17",
        "inspect --layers 2 --kv-heads 2 --head-dim 8 --dtype int64", "inspect --layers -1 --kv-heads 2 --head-dim 8",
        "inspect no/such/config.json", "inspect some-org/some-model",
    ],
)  # fmt: skip
def test_bad_input_ends_with_status_2_and_one_line(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("pm-ops inspect: ")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--layers 0 --kv-heads 2 --head-dim 8", "--layers is 0; it must be 1 or more"),
        ("--layers 2 --kv-heads -2 --head-dim 8", "--kv-heads is -2; it must be 1 or more"),
        ("--layers 2 --kv-heads 2 --head-dim 8 --page-size 0", "--page-size is 0; it must be 1 or more"),
        ("no/such/config.json", "there is no file or folder no/such/config.json; give a config.json"),
        ("Llama", "there is no file or folder Llama; of a model on the Hugging Face hub"),
        ("org/model-1.7B", "download org/model-1.7B config.json --local-dir model-1.7B && pm-ops inspect model-1.7B"),
    ],
)
def test_bad_input_is_told_what_to_give(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refusal(capsys, *arguments.split())


@pytest.mark.parametrize(
    ("keys", "note"),
    [
        ({}, None),
        ({"sliding_window": None}, None),
        ({"sliding_window": 4096}, "sliding_window is 4096: layers may see a window only; the layout keeps all tokens"),
        ({"sliding_window": 4096, "use_sliding_window": True}, "sliding_window is 4096: "),
        ({"sliding_window": 4096, "use_sliding_window": False}, None),
        ({"attention_chunk_size": 8192}, "attention_chunk_size is 8192: "),
        ({"sliding_window": 4096, "layer_types": ["full_attention"] * 30}, None),
        ({"layer_types": ["sliding_attention"] * 30}, "30 of 30 layers see a window only (sliding_attention); "),
    ],
)
def test_a_window_is_noted(keys: dict[str, Any], note: str | None) -> None:
    notes = model_shape({**SMOLLM2, **keys}).notes
    assert len(notes) == (note is not None)
    assert note is None or notes[0].startswith(note)


@pytest.mark.parametrize("content", ["", "[1]", "{", '"text"', "\x00"])
def test_a_file_that_is_no_configuration_is_refused(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    assert str(path) in refusal(capsys, str(path))


def test_a_binary_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\xff\xfe\x00\x81")
    assert "is not JSON" in refusal(capsys, str(path))


@pytest.mark.parametrize("name", ["page_first_direct", "layer_first", "page_first", "page_head"])
def test_hicaches_formats_need_dims_that_are_equal(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"--layers 2 --kv-heads 3 --head-dim 8 --page-size 4 --dtype float16 --format {name}".split()
    record = inspect(capsys, *flags)
    assert pm_ops.PageLayout.from_json(json.dumps(record["layout"])) == pm_ops.hicache(2, 3, 8, 4, "float16", name)
    assert "needs K and V of equal dims" in refusal(capsys, *flags, "--value-dim", "16")


def test_layers_that_differ_are_refused_by_the_formats_that_need_them_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SMOLLM2, "num_key_value_heads": [3] * 29 + [1]}))
    assert "use page_major or token_major" in refusal(capsys, str(path), "--format", "BLNHC")
    assert inspect(capsys, str(path))["token_bytes"] == (29 * 3 + 1) * 2 * 64 * 2


def test_scales_add_planes_to_the_formats_that_have_a_place_for_them(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [str(config), "--dtype", "int8", "--scales"]
    record = inspect(capsys, *flags)
    layout = pm_ops.PageLayout.from_json(json.dumps(record["layout"]))
    assert layout == pm_ops.page_major(30, 3, 64, 16, torch.int8, scales=True)
    assert record["token_bytes"] == 30 * 2 * 3 * (64 + 4)
    record = inspect(capsys, *flags, "--format", "token_major")
    assert "value_scale" in {plane["kind"] for plane in record["layout"]["planes"]}
    assert "BLHNC has no place for scales" in refusal(capsys, *flags, "--format", "BLHNC")
    assert "scales=True is for 8-bit dtypes" in refusal(capsys, str(config), "--scales")


def test_all_draws_every_plane(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(config), "--all"]) == 0
    out = capsys.readouterr().out
    assert all(f"L{layer} {kind} " in out for layer in range(30) for kind in ("key", "value"))
    assert "more planes" not in out


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "pm_ops.cli", "inspect", "--layers", "1", "--kv-heads", "1", "--head-dim", "8"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert "copies to move a page   2 layer-major, 1 page-major" in done.stdout


class TestText(expecttest.TestCase):
    """What a person sees."""

    @pytest.fixture(autouse=True)
    def _files(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path, self.capsys = tmp_path / "config.json", capsys

    def test_two_layers(self) -> None:
        kinds = ["sliding_attention", "full_attention"]
        self.path.write_text(json.dumps({**SMOLLM2, "num_hidden_layers": 2, "layer_types": kinds}))
        assert cli.main(["inspect", str(self.path), "--page-size", "32"]) == 0
        self.assertExpectedInline(
            self.capsys.readouterr().out,
            """\
layers     2            num_hidden_layers
kv_heads   3            num_key_value_heads
head_dim   64           hidden_size 576 / num_attention_heads 9
value_dim  64           as head_dim
dtype      bfloat16     torch_dtype
note: 1 of 2 layers see a window only (sliding_attention); the layout keeps all tokens until you free pages

page_major: a page of 32 tokens, 2 layers, 49152 B (1536 B a token)
      0  L0 key    32 tokens x 3 x 64 bfloat16  strides: token 384 B, head 128 B
  12288  L0 value  32 tokens x 3 x 64 bfloat16  strides: token 384 B, head 128 B
  24576  L1 key    32 tokens x 3 x 64 bfloat16  strides: token 384 B, head 128 B
  36864  L1 value  32 tokens x 3 x 64 bfloat16  strides: token 384 B, head 128 B
  49152  end       no padding

one token               1536 B (1.5 KiB) over all layers
one page                49152 B (48 KiB)
copies to move a page   4 layer-major, 1 page-major
""",
        )


@pytest.mark.parametrize(("layers", "lines"), [(4000, 1), (1, 0)])
def test_a_reader_that_has_enough_ends_it_in_silence(layers: int, lines: int) -> None:
    """As ``head`` does, before all is written; be that more than Python keeps until the end, or less."""
    program = "import sys; from pm_ops.cli import main; sys.exit(main(sys.argv[1:]))"
    numbers = ["--layers", str(layers), "--kv-heads", "1", "--head-dim", "8", "--all"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [sys.executable, "-c", program, "inspect", *numbers],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as command:  # fmt: skip
        assert command.stdout is not None and command.stderr is not None
        for _ in range(lines):
            command.stdout.readline()
        command.stdout.close()
        assert command.stderr.read() == b"" and command.wait() == 1
