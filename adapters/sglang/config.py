"""What is asked for: the environment variable ``PM_OPS``, which every process of the engine inherits."""

from __future__ import annotations

from dataclasses import dataclass

from pm_ops.ops.attention import IMPLEMENTATIONS

from ..environment import VARIABLE, asked, options, require_supported

LAYOUTS = ("token_major", "page_major")
HOW = f"""set {VARIABLE}=1, or {VARIABLE}='{{"layout": "page_major"}}'"""


@dataclass(frozen=True)
class Settings:
    """What the engine was asked for.

    Args:
        layout: of the KV cache, one buffer in which a page of every layer is one run of bytes. ``"token_major"``: a
            token's layers side by side, so that a layer is a tensor ``[slots, heads, dim]`` with wide strides, which
            SGLang's own Triton, FlashAttention 3 and FlashInfer backends read. ``"page_major"``: a page's tokens of
            one layer side by side.
        impl: of attention, as :func:`pm_ops.attention` takes it; for ``--attention-backend pm_ops``. Over latents
            ``"fa3"`` is refused.
        fuse_rope: rotary embedding, QK-norm and cache write of a layer in one launch under ``--enable-torch-compile``,
            see :mod:`pm_ops.adapters.sglang.rope`. ``True`` warns of layers that stay as they are, ``"strict"`` stops
            there.
    """

    layout: str = "token_major"
    impl: str = "auto"
    fuse_rope: bool | str = False

    def __post_init__(self) -> None:
        require_supported(
            self,
            layout=LAYOUTS,
            impl=IMPLEMENTATIONS,
            fuse_rope=(False, True, "strict"),
        )

    @classmethod
    def asked(cls) -> Settings | None:
        """What ``PM_OPS`` asks for; None: nothing."""
        given = options(cls, asked(HOW), HOW)
        return None if given is None else cls(**given)
