"""vLLM's attention backend over the operators: ``store_kv`` and ``attention`` on whatever block-outermost layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from vllm.config import CUDAGraphMode, get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from pm_ops.kernels import fa3
from pm_ops.ops.attention import AttentionOut

from ..prompts import reads_prompts
from .config import HOW, Settings
from .layout import LayerCache, locate
from .packed import PackedViews
from .rope import RopeStore, register_operators

FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""vLLM keeps these caches as uint8."""


class PageMajorBackend(PackedViews, AttentionBackend):
    """Attention and cache writes by pm_ops. What it does not support, vLLM's ``validate_configuration`` names."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *FP8]

    @staticmethod
    def get_name() -> str:
        return AttentionBackendEnum.CUSTOM.name

    @staticmethod
    def get_impl_cls() -> type[PageMajorImpl]:
        return PageMajorImpl

    @staticmethod
    def get_builder_cls() -> type[PageMajorMetadataBuilder]:
        return PageMajorMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return (KVCacheLayout.BLNHC, KVCacheLayout.BLHNC, KVCacheLayout.BHLNC)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_dcp(cls) -> bool:
        return False


@dataclass
class PageMajorMetadata(AttentionMetadata):
    """What the layers of one cache group share in one step."""

    tokens: int
    query_start: Tensor | None
    seq_lens: Tensor
    page_table: Tensor
    max_query_len: int
    max_seq_len: int
    causal: bool
    prompts: bool
    """Whether impl "auto" takes FlashAttention 3 for it, in layers that it can serve."""


class PageMajorMetadataBuilder(AttentionMetadataBuilder[PageMajorMetadata]):
    """The operators take vLLM's tensors as they are.

    A CUDA graph of any batch can be captured: grids follow from shapes and from the two maxima, of which the longest
    sequence is a hint, and the most queries is made a bound of all batches that the graph may run.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> PageMajorMetadata:
        step = common_attn_metadata
        if isinstance(step.causal, Tensor):
            raise NotImplementedError(
                "pm_ops: attention that is causal for some sequences of a batch and not for others is not supported; "
                "run this model without pm_ops"
            )
        if getattr(step, "rswa_prefix_lens", None) is not None:
            raise NotImplementedError(
                "pm_ops: sliding windows that leave a prefix visible (R-SWA) are not supported; run this model without "
                "pm_ops"
            )
        one_each = step.max_query_len == 1 and step.num_actual_tokens == step.seq_lens.shape[0]
        return PageMajorMetadata(
            tokens=step.num_actual_tokens,
            query_start=None if one_each else step.query_start_loc,
            seq_lens=step.seq_lens,
            page_table=step.block_table_tensor,
            max_query_len=step.max_query_len,
            max_seq_len=step.max_seq_len,
            causal=step.causal,
            prompts=reads_prompts(step.max_query_len, step.max_seq_len),
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> PageMajorMetadata:
        """A graph of decodes runs decodes alone; one of any batch may run a single sequence of all its tokens.

        Neither counts as a step that reads prompts: what a graph calls is chosen once, and FlashAttention 3 would stay
        for all batches of so many tokens, with the right results, but many short sequences among them, too.
        """
        step = common_attn_metadata
        if self.vllm_config.compilation_config.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL:
            step = step.replace(max_query_len=step.num_actual_tokens)
        return replace(self.build(0, step), prompts=False)


class PageMajorImpl(RopeStore, AttentionImpl[PageMajorMetadata]):
    """One layer's cache writes and attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        settings = Settings.of(get_current_vllm_config())
        if settings is None:
            raise ValueError(f"attention backend CUSTOM is pm_ops' here, and pm_ops was not asked for: {HOW}")
        if settings.fuse_rope:
            register_operators()  # compiled code that comes out of a cache calls them
        self.settings = settings
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.window = sliding_window or 0
        self.softcap = logits_soft_cap or 0.0
        self.sinks = sinks
        self.kv_cache_dtype = kv_cache_dtype
        self._takes_fa3: bool | None = None
        self._located = WeakTensorKeyDictionary()  # vLLM frees the cache by dropping its views: keep none alive

    def locate(self, kv_cache: Tensor) -> LayerCache:
        """Where this layer's keys and values lie in the engine's buffer."""
        found: LayerCache | None = self._located.get(kv_cache)
        if found is None:
            dtype = FP8.get(self.kv_cache_dtype, kv_cache.dtype)
            found = self._located[kv_cache] = locate(kv_cache, self.settings.layout, self.head_size, dtype)
        return found

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write this step's rows. Rows past the slots are padding, and so are slots of -1."""
        cache = self.locate(kv_cache)
        torch.ops.pm_ops.store_kv(
            cache.buffer,
            key,
            value,
            slot_mapping,
            cache.key,
            cache.value,
            cache.page_size,
            cache.dtype,
            cache.dtype,
            layer._k_scale_float,
            layer._v_scale_float,
        )

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PageMajorMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend over the pages; ``output [tokens, heads, value_dim]`` is written and returned."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("pm_ops: fused quantisation of attention's output is not supported")
        if attn_metadata is None:  # a run that only measures memory
            return output.zero_()
        step, cache = attn_metadata, self.locate(kv_cache)
        call = {
            "buffer": cache.buffer,
            "query": query[: step.tokens],
            "page_table": step.page_table,
            "seq_lens": step.seq_lens,
            "query_start": step.query_start,
            "key_plane": cache.key,
            "value_plane": cache.value,
            "page_size": cache.page_size,
            "kv_heads": cache.heads,
            "value_dim": cache.value_dim,
            "key_dtype": cache.dtype,
            "value_dtype": cache.dtype,
            "softmax_scale": self.scale,
            "causal": step.causal,
            "window": self.window,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "alibi_slopes": self.alibi_slopes,
            "key_scale": layer._k_scale_float,
            "value_scale": layer._v_scale_float,
            "max_query_len": step.max_query_len,
            "max_seq_len": step.max_seq_len,
            "impl": self.settings.impl,
            "out": output[: step.tokens],
        }
        if self.settings.impl == "auto" and step.prompts and self._fa3_takes(call):
            # 16 prompts of 16384 on an H200: 1.007 of FLASH_ATTN's tokens a second, and 0.995 with our own kernels.
            call["impl"] = "fa3"
        torch.ops.pm_ops.attention_out(**call)
        return output

    def _fa3_takes(self, call: dict[str, Any]) -> bool:
        """Whether FlashAttention 3 is there for this layer's calls, which differ in sizes alone."""
        if self._takes_fa3 is None:
            self._takes_fa3 = fa3.reason(AttentionOut(**call)) is None
        return self._takes_fa3


PATH = f"{PageMajorBackend.__module__}.{PageMajorBackend.__qualname__}"


def install() -> None:
    """Make this the backend CUSTOM, which the configuration of an engine that asked for pm_ops names."""
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != PATH:
        raise RuntimeError(
            f"pm_ops: another plugin has registered {custom.get_path()} as vLLM's attention backend CUSTOM; keep that "
            "plugin out with VLLM_PLUGINS=pm_ops"
        )
    register_backend(custom, PATH)
