"""The command ``pm-ops``: ``inspect`` prints a model's page, ``doctor`` what works here, ``bench`` measures."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from .bench.command import add_arguments as add_bench_arguments
from .bench.command import run as run_bench
from .doctor import add_arguments as add_doctor_arguments
from .doctor import run as run_doctor
from .formats import HICACHE_ORDERS, VLLM_ORDERS, hicache, page_major, token_major, vllm
from .layout import PageLayout, draw, dtype_name, dtype_of
from .model_config import ModelShape, read_model_config
from .ops._common import PLANE_DTYPES

ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn"}
FORMATS = ("page_major", "token_major", *VLLM_ORDERS, *HICACHE_ORDERS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status. Bad input ends with status 2 and one line saying what is wrong."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except ValueError as error:
        print(f"pm-ops {options.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever reads, such as head, has enough; nor may Python complain at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def inspect(options: argparse.Namespace) -> int:
    """Print a layout: its planes, bytes a token and a page, and the copies that moving a page takes."""
    shape = _shape(options)
    layout = _layout(options.format, shape, options.page_size, options.scales)
    if options.json:
        print(json.dumps(_record(layout, shape)))
        return 0
    for name, value in _read(shape).items():
        print(f"{name:<10} {value:<12} {shape.origin[name]}")
    for note in shape.notes:
        print(f"note: {note}")
    print(f"\n{draw(layout, len(layout.planes) if options.all else 14)}\n")
    print(f"one token               {_size(layout.token_bytes)} over all layers")
    print(f"one page                {_size(layout.page_bytes)}")
    print(f"copies to move a page   {layout.copies_per_page_layer_major} layer-major, 1 page-major")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pm-ops", description="Page-major KV caches.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "inspect",
        help="print the page that a model's cache would have",
        description="Print the page that a model's cache would have. Flags go before what the configuration says.",
    )
    command.add_argument("config", nargs="?", help="a config.json as transformers writes it, or its folder")
    command.add_argument("--layers", type=int, help="layers with a cache")
    command.add_argument("--kv-heads", type=int)
    command.add_argument("--head-dim", type=int)
    command.add_argument("--value-dim", type=int, help="where V rows differ from K rows (default: head dim)")
    command.add_argument("--page-size", type=int, default=16, help="tokens of a page (default: 16)")
    names = ", ".join((*map(dtype_name, PLANE_DTYPES), *ALIASES))
    command.add_argument("--dtype", help=f"of the cache: {names} (e4m3fn) (default: the model's own, or bfloat16)")
    command.add_argument("--scales", action="store_true", help="a scale for each token and head of an 8-bit cache")
    command.add_argument("--format", choices=FORMATS, default="page_major", help="(default: page_major)")
    command.add_argument("--all", action="store_true", help="draw every plane, also of deep models")
    command.add_argument("--json", action="store_true", help="print one JSON object instead")
    command.set_defaults(run=inspect)
    command = commands.add_parser(
        "doctor",
        help="tell what this environment offers and lacks",
        description="Tell what this environment offers: torch, triton, GPU, model libraries and engines, and whether "
        "pm_ops can use them. Status 1: something that was asked for is not usable.",
    )
    add_doctor_arguments(command)
    command.set_defaults(run=run_doctor)
    command = commands.add_parser(
        "bench",
        help="measure the operators next to every other implementation found here",
        description="Measure the operators next to every other implementation found here, on page-major and on "
        "layer-major memory, results checked in the same run. Status 1: one was wrong, or a call of ours failed.",
    )
    add_bench_arguments(command)
    command.set_defaults(run=run_bench)
    return parser


def _shape(options: argparse.Namespace) -> ModelShape:
    """The model's shape: from the configuration if there is one, with the flags put in."""
    flags = {name: getattr(options, name) for name in ("layers", "kv_heads", "head_dim", "value_dim")}
    given: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    dtype = _dtype(options.dtype) if options.dtype else None
    for name, value in {**given, "page_size": options.page_size}.items():
        if value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be 1 or more")
    if options.config:
        shape = read_model_config(options.config)
        if "head_dim" in given and shape.origin["value_dim"] == "as head_dim":
            given.setdefault("value_dim", given["head_dim"])
    else:
        missing = [f"--{name.replace('_', '-')}" for name in ("layers", "kv_heads", "head_dim") if name not in given]
        if missing:
            raise ValueError(f"without a config.json, give {', '.join(missing)}")
        given.setdefault("value_dim", given["head_dim"])
        shape = ModelShape(**given, dtype=None, origin={"value_dim": "as head_dim", "dtype": ""})
    origin = dict(shape.origin)
    origin |= {name: f"--{name.replace('_', '-')}" for name in given if flags[name] is not None}
    if dtype is not None:
        origin["dtype"] = "--dtype"
    elif shape.dtype is None:
        origin["dtype"] = "not given, assumed"
    dtype = dtype or _dtype(dtype_name(shape.dtype or torch.bfloat16))
    return replace(shape, **given, dtype=dtype, origin=origin)


def _dtype(name: str) -> torch.dtype:
    dtype = dtype_of(ALIASES.get(name, name))
    if dtype not in PLANE_DTYPES:
        names = ", ".join((*map(dtype_name, PLANE_DTYPES), *ALIASES))
        raise ValueError(f"a cache of {name} is not supported; --dtype may be {names}")
    return dtype


def _layout(name: str, shape: ModelShape, page_size: int, scales: bool) -> PageLayout:
    assert shape.dtype is not None
    if name in ("page_major", "token_major"):
        make = page_major if name == "page_major" else token_major
        value_dim = shape.value_dim
        args = (shape.layers, shape.kv_heads, shape.head_dim, page_size, shape.dtype)
        return make(*args, value_dim=value_dim, scales=scales)
    if scales:
        raise ValueError(f"--format {name} has no place for scales; use page_major or token_major")
    if not isinstance(shape.kv_heads, int):
        raise ValueError(f"--format {name} needs layers that are all alike; use page_major or token_major")
    args = (shape.layers, shape.kv_heads, shape.head_dim, page_size, shape.dtype)
    if name in HICACHE_ORDERS:
        if shape.value_dim != shape.head_dim:
            raise ValueError(f"--format {name} needs K and V of equal dims; use page_major or token_major")
        return hicache(*args, name)
    return vllm(*args, name, value_dim=shape.value_dim)


def _read(shape: ModelShape) -> dict[str, Any]:
    assert shape.dtype is not None
    heads = shape.kv_heads if isinstance(shape.kv_heads, int) else list(shape.kv_heads)
    return {
        "layers": shape.layers,
        "kv_heads": heads if isinstance(heads, int) else f"{min(heads)}-{max(heads)}",
        "head_dim": shape.head_dim,
        "value_dim": shape.value_dim,
        "dtype": dtype_name(shape.dtype),
    }


def _record(layout: PageLayout, shape: ModelShape) -> dict[str, Any]:
    return {
        "model": {**_read(shape), "kv_heads": shape.kv_heads},
        "read_from": dict(shape.origin),
        "notes": list(shape.notes),
        "page_size": layout.page_size,
        "token_bytes": layout.token_bytes,
        "page_bytes": layout.page_bytes,
        "copies_per_page_layer_major": layout.copies_per_page_layer_major,
        "copies_per_page_page_major": 1,
        "fingerprint": layout.fingerprint,
        "layout": json.loads(layout.to_json()),
    }


def _size(nbytes: int) -> str:
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes} B ({nbytes / scale:.4g} {unit})"
    return f"{nbytes} B"


if __name__ == "__main__":
    sys.exit(main())
