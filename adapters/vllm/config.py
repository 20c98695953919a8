"""What is asked for: the ``pm_ops`` entry of vLLM's ``additional_config``, or the environment variable ``PM_OPS``.

``additional_config`` travels with the engine's configuration into every process and takes part in the hash of compiled
code; so the environment variable only writes itself into it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pm_ops.formats import VLLM_ORDERS
from pm_ops.ops.attention import IMPLEMENTATIONS

from ..environment import VARIABLE, asked, options, require_supported

KEY = "pm_ops"
LAYOUTS = ("page_major", *VLLM_ORDERS)
HOW = f"""use --additional-config '{{"{KEY}": {{"layout": "page_major"}}}}', or {VARIABLE}=1"""


@dataclass(frozen=True)
class Settings:
    """What one engine was asked for.

    Args:
        layout: of the KV cache: ``"page_major"``, or one of vLLM's block-outermost layouts ``"BLNHC"``, ``"BLHNC"``,
            ``"BHLNC"``. Either way the cache is one buffer, and a page of every layer one run of bytes in it.
        impl: of attention, as :func:`pm_ops.attention` takes it. ``"auto"`` takes FlashAttention 3, where it is there,
            also for steps outside of CUDA graphs in which a sequence has 2,048 new tokens or more, or most of its keys
            are new.
        hybrid_blocks: of models with state layers. ``"aligned"``: vLLM makes attention blocks as large as a layer's
            state, many hundred tokens. ``"small"``: they stay at the block size that was asked for, and several layers
            share a block; prefixes are found in smaller steps, and short sequences waste less. On the CPU alone: vLLM
            0.26 plans pages of one size for all layers, and as many in every group's block, so that blocks of other
            layers' pages would need a planner in place of its own; newer ones plan them, but have not run on a GPU yet.
        fuse_rope: rotary embedding, QK-norm and cache write of a layer in one launch, see
            :mod:`pm_ops.adapters.vllm.rope`. ``True`` warns of layers that stay as they are, ``"strict"`` stops there.
    """

    layout: str = "page_major"
    impl: str = "auto"
    hybrid_blocks: str = "aligned"
    fuse_rope: bool | str = False

    def __post_init__(self) -> None:
        require_supported(
            self,
            layout=LAYOUTS,
            impl=IMPLEMENTATIONS,
            hybrid_blocks=("aligned", "small"),
            fuse_rope=(False, True, "strict"),
        )

    @property
    def engine_layout(self) -> str:
        """vLLM's name of the layout. Its enum has no page_major, whose (block, layer) runs are those of BLNHC."""
        return "BLNHC" if self.layout == "page_major" else self.layout

    @classmethod
    def read(cls, entry: Any) -> Settings | None:
        """The value of the ``pm_ops`` entry: an object, ``true`` for all defaults, or ``false``, which gives None."""
        given = options(cls, entry, HOW)
        return None if given is None else cls(**given)

    @classmethod
    def of(cls, vllm_config: Any) -> Settings | None:
        """What this ``VllmConfig`` asks for; None: nothing."""
        additional = vllm_config.additional_config
        return cls.read(additional.get(KEY)) if isinstance(additional, dict) else None


def write_environment(vllm_config: Any) -> None:
    """Put what ``PM_OPS`` asks for into the configuration, unless that says something itself."""
    entry = asked(HOW)
    if entry is False:
        return
    if not isinstance(vllm_config.additional_config, dict):
        raise ValueError(
            f"{VARIABLE} is set, but additional_config is a {type(vllm_config.additional_config).__name__}, which "
            f"pm_ops cannot add to; pass a dict with an entry {KEY!r}"
        )
    vllm_config.additional_config = {KEY: entry, **vllm_config.additional_config}
