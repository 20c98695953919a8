"""What the adapter can do with the SGLang that is installed, as one line of JSON.

``pm-ops doctor`` runs it in a process of its own: ``python -m pm_ops.adapters.sglang.doctor``.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from typing import Any

from . import hooks
from .plugin import BACKEND, STRIDED, STRIDED_LATENTS

GROUP = "sglang.srt.plugins"
UNSERVED = "GptOss, Llama 4, Gemma 4 and Exaone 4"
"""Models for which SGLang itself takes backends out of a list of its own, and refuses others."""


def examine() -> dict[str, Any]:
    """``found``: version and device; ``usable``; ``notes``: problems with their remedies, or what is possible."""
    import sglang  # noqa: F401 (what it lacks itself is an error of its own)
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = f"{importlib.metadata.version('sglang')}, on {device}"
    problems = [f"no {hook}: SGLang {hooks.VERSIONS} has it" for hook in hooks.missing()]
    names = {point.name for point in importlib.metadata.entry_points(group=GROUP)}
    if "pm_ops" not in names:
        problems.append("SGLang does not see the plugin: install pm_ops into this environment")
    allowed = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    if allowed and "pm_ops" not in allowed:
        problems.append(f"SGLANG_PLUGINS={','.join(allowed)} keeps the plugin out: add pm_ops")
    if problems:
        return {"found": found, "usable": False, "notes": problems}
    notes = [
        f"hooks: all {len(hooks.NEEDED)} present; the pool's class by {', '.join(hooks.pool_hooks())}",
        f"layouts: token_major, read by {', '.join(STRIDED)}; page_major, by {BACKEND}",
        "caches: the model's dtype, bfloat16, fp8_e4m3, fp8_e5m2",
        f"latent attention (MLA): token_major, read by {', '.join(STRIDED_LATENTS)}; page_major, by {BACKEND}",
        "refused: indexers (DSA), FP4 and MXFP8 caches, hierarchical cache, LMCache, FlexKV, disaggregation",
        f"attention backend {BACKEND}: GQA, sliding windows, softcap, sinks; drafts of EAGLE, EAGLE3, STANDALONE and "
        f"NGRAM, chains and trees; not for {UNSERVED}, which SGLang gives to backends of its own lists",
    ]
    return {"found": found, "usable": True, "notes": notes}


def main() -> None:
    """Print it."""
    print(json.dumps(examine()))


if __name__ == "__main__":
    main()
