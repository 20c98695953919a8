"""The shape of a model's KV cache, read from the ``config.json`` that transformers writes.

Only what every layer of a plain decoder has in common is read. A model whose cache is of another kind is refused: a
layout that looks right and is not would be worse than none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .layout import counted, dtype_of

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
HIDDEN = ("hidden_size", "n_embd", "d_model")
HEAD_DIM = ("head_dim", "kv_channels")
WINDOW = ("sliding_window", "attention_chunk_size")

# Keys whose presence says that the cache is of a kind that no named format lays out, and what that kind is.
REFUSED = {
    "latent attention (MLA): one latent row a token instead of K and V": ("kv_lora_rank",),
    "layers with a recurrent or convolution state instead of K and V": (
        "ssm_state_size", "mamba_d_state", "state_size", "linear_conv_kernel_dim", "hybrid_override_pattern",
        "layers_block_type", "block_types", "attn_layer_period", "attn_layer_indices", "conv_L_cache",
    ),
    "layers that share another layer's cache": ("num_kv_shared_layers",),
    "layers with heads of their own": (
        "per_layer_config", "global_head_dim", "num_global_key_value_heads", "swa_head_dim", "swa_num_key_value_heads",
    ),
    "a sparse attention's index beside K and V": ("index_head_dim",),
    "cross attention to an encoder": ("cross_attention_layers", "is_encoder_decoder"),
}  # fmt: skip
HEADS_OF_THEIR_OWN = {"mimo_v2_flash"}
"""Model types whose code gives some layers other heads without a key that says so."""
ALIKE = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layer that keep plain K and V of the same shape."""


@dataclass(frozen=True)
class ModelShape:
    """What a page has to hold for one model.

    Args:
        layers: number of layers with a cache.
        kv_heads: KV heads, of all layers or one number a layer.
        head_dim, value_dim: elements of one head's K row and V row.
        dtype: the model's own dtype; ``None`` where the file names none.
        origin: for each of these, the keys it was read from.
        notes: what a reader of the layout has to know about this model.
    """

    layers: int
    kv_heads: int | Sequence[int]
    head_dim: int
    value_dim: int
    dtype: torch.dtype | None
    origin: Mapping[str, str]
    notes: tuple[str, ...] = ()


def read_model_config(path: str | Path) -> ModelShape:
    """Read a ``config.json``, or the one in a model's folder.

    Raises ValueError naming what is missing or unsupported.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(_not_there(path))
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds a {type(config).__name__}, not the object of a model's configuration")
    return model_shape(config)


def _not_there(path: Path) -> str:
    said = f"there is no file or folder {path}"
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(path)) or path.suffix == ".json":
        return f"{said}; give a config.json as transformers writes it, or its folder"
    return (
        f"{said}; of a model on the Hugging Face hub, fetch the configuration first: "
        f"hf download {path} config.json --local-dir {path.name} && pm-ops inspect {path.name}"
    )


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """The cache's shape from a configuration's keys. Raises ValueError naming what is missing or unsupported."""
    notes: list[str] = []
    if isinstance(config.get("text_config"), dict):
        notes.append("read from text_config; the other parts of the model keep no KV cache")
        config = {"dtype": _first(config, ("dtype", "torch_dtype"))[1], **config["text_config"]}
    for kind, keys in REFUSED.items():
        key, value = _first(config, keys)
        if value:
            raise ValueError(f"{key} is {value!r}: this model has {kind}, which is not supported yet")
    if config.get("model_type") in HEADS_OF_THEIR_OWN:
        raise ValueError(f"{config['model_type']} has layers with heads of their own, which is not supported yet")
    layers_key, layers = _number(config, LAYERS, "the number of layers")
    origin = {"layers": layers_key}
    notes += _notes_on_layers(config, layers)
    origin["kv_heads"], kv_heads = _kv_heads(config, layers)
    origin["head_dim"], head_dim = _head_dim(config)
    value_key, value_dim = _first(config, ("v_head_dim",))
    origin["value_dim"] = value_key if value_dim else "as head_dim"
    dtype_key, dtype = _first(config, ("dtype", "torch_dtype"))
    origin["dtype"] = dtype_key
    return ModelShape(
        layers, kv_heads, head_dim, value_dim or head_dim, dtype_of(dtype) if dtype else None, origin, tuple(notes)
    )


def _first(config: Mapping[str, Any], keys: Sequence[str]) -> tuple[str, Any]:
    """The first key that has a value, and the value; ("", None) without one."""
    return next(((key, config[key]) for key in keys if config.get(key) is not None), ("", None))


def _number(config: Mapping[str, Any], keys: Sequence[str], what: str) -> tuple[str, int]:
    key, value = _first(config, keys)
    if not key:
        raise ValueError(f"the configuration does not say {what}: none of {', '.join(keys)} is set")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} is {value!r}: {what} must be one positive integer")
    return key, value


def _kv_heads(config: Mapping[str, Any], layers: int) -> tuple[str, int | list[int]]:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return "multi_query", 1
    key, value = _first(config, KV_HEADS)
    if isinstance(value, list) and len(value) == layers and all(isinstance(n, int) and n > 0 for n in value):
        return key, value
    if key:
        return _number(config, KV_HEADS, "the number of KV heads")
    return _number(config, HEADS, "the number of KV heads, nor of attention heads")


def _head_dim(config: Mapping[str, Any]) -> tuple[str, int]:
    if _first(config, HEAD_DIM)[0]:
        return _number(config, HEAD_DIM, "the head dim")
    hidden_key, hidden = _number(config, HIDDEN, "the head dim, nor the hidden size")
    heads_key, heads = _number(config, HEADS, "the number of attention heads")
    if hidden % heads:
        raise ValueError(f"no head_dim, and {hidden_key} {hidden} is not a multiple of {heads_key} {heads}")
    return f"{hidden_key} {hidden} / {heads_key} {heads}", hidden // heads


def _notes_on_layers(config: Mapping[str, Any], layers: int) -> list[str]:
    kinds = config.get("layer_types") or []
    other = sorted(set(kinds) - ALIKE)
    if other:
        raise ValueError(f"layer_types has {', '.join(other)}: layers without plain K and V are not supported yet")
    if kinds and len(kinds) != layers:
        raise ValueError(f"layer_types names {counted(len(kinds), 'layer')}, the model has {layers}")
    windowed = [kind for kind in kinds if kind != "full_attention"]
    key, window = _first(config, WINDOW)
    if windowed:
        said = f"{len(windowed)} of {counted(layers, 'layer')} see a window only ({', '.join(sorted(set(windowed)))})"
    elif not kinds and key and config.get("use_sliding_window") is not False:
        said = f"{key} is {window}: layers may see a window only"
    else:
        return []
    return [f"{said}; the layout keeps all tokens until you free pages"]
