"""What the adapter can do with the vLLM that is installed, as one line of JSON.

``pm-ops doctor`` runs it in a process of its own: ``python -m pm_ops.adapters.vllm.doctor``.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from typing import Any

from . import connectors, hooks
from .config import LAYOUTS
from .packed import ORDERS

GROUP = "vllm.general_plugins"
FEATURES = {
    "sinks": "supports_sink",
    "sliding windows": "supports_sliding_window",
    "latent attention": "is_mla",
    "non-causal": "supports_non_causal",
    "context parallelism": "supports_dcp",
    "batch invariance": "supports_batch_invariance",
}
"""What vLLM asks a backend for, and the question."""


def examine() -> dict[str, Any]:
    """``found``: version and device; ``usable``; ``notes``: problems with their remedies, or what is possible."""
    device, generation = hooks.device(), hooks.generation()
    found = f"{_version()}, on {device or 'no device here'}"
    problems = [f"no {hook}: vLLM {hooks.VERSION} has it" for hook in hooks.missing(hooks.needed(device))]
    if (generation, device) not in hooks.WORKERS:
        problems.append(f"vLLM runs on {device or 'no device here'}: supported is {hooks.supported(generation)}")
    names = {point.name for point in importlib.metadata.entry_points(group=GROUP)}
    if "pm_ops" not in names:
        problems.append("vLLM does not see the plugin: install pm_ops into this environment")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "pm_ops" not in allowed.split(","):
        problems.append(f"VLLM_PLUGINS={allowed} keeps the plugin out: add pm_ops")
    if problems:
        return {"found": found, "usable": False, "notes": problems}
    from .backend import PageMajorBackend as backend

    able = {what: bool(getattr(backend, question)()) for what, question in FEATURES.items()}
    packed = generation == hooks.PACKED
    layouts = ("page_major", *ORDERS) if packed else LAYOUTS
    states = "all of them" if packed else "not BHLNC"
    notes = [
        f"hooks: all {len(hooks.needed(device))} present",
        f"layouts: {', '.join(layouts)}; models with state layers: {states}",
        f"caches: {', '.join(backend.supported_kv_cache_dtypes)}",
        f"attention: {', '.join(what for what, yes in able.items() if yes)}, softcap, ALiBi",
        "engine: prefix cache; speculative decoding by n-grams, and by draft models where there is one cache group",
        f"refused: {', '.join(what for what, yes in able.items() if not yes)}",
    ]
    others = "no others, and of models with one cache group" if packed else "others not on page_major"
    notes.append(f"KV connectors: {', '.join(connectors.usable()) or 'none'}; {others}")
    if absent := hooks.missing(hooks.FUSE_ROPE):
        notes.append(f"fuse_rope: not here, there is no {'; no '.join(absent)}")
    if (generation, device) in hooks.NEVER_RUN:
        notes.append("never run: the adapter is written after vLLM's sources here")
    return {"found": found, "usable": True, "notes": notes}


def _version() -> str:
    """Of the distribution that holds the package ``vllm``: builds for other devices have names of their own."""
    for name in importlib.metadata.packages_distributions().get("vllm", []):
        return f"{name} {importlib.metadata.version(name)}"
    return "unknown version"


if __name__ == "__main__":
    print(json.dumps(examine()))
