"""transformers on pages: a Cache over a :class:`pm_ops.PagePool`, and the attention function that reads it.

    model.set_attn_implementation("pm_ops")
    cache = PageMajorCache.for_model(model, num_pages=256)
    model.generate(**inputs, past_key_values=cache)

Importing this module registers ``"pm_ops"`` with transformers' attention and mask interfaces. Eager code, decoder-only
models with full attention in every layer; greedy, sampling, beams and assisted decoding, batches of ragged prompts.
Compiled models use transformers' StaticCache through :mod:`pm_ops.compile_passes` instead.

How the pieces meet: transformers builds the mask first, then each layer calls ``update`` and hands what that returns to
the attention function. ``get_mask_sizes`` returns a length that knows its cache, so the mask function can say which
tokens are padding before the first is stored; ``update`` returns handles instead of keys and values, so the attention
function knows which pages to read, and any other attention function stops with an error.
"""

from __future__ import annotations

from typing import Any, Self

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import causal_mask_function

import pm_ops
from pm_ops import PagePool
from pm_ops.layout import dtype_name

from .paged_batch import PagedBatch, Row, Step

NAME = "pm_ops"
"""The attention implementation's name, for ``model.set_attn_implementation``."""
REMEDY = f"call model.set_attn_implementation({NAME!r}) and pass past_key_values=PageMajorCache.for_model(model, ...)"
WITHOUT_PAGES = (
    f"attn_implementation {NAME!r} attends over the pages of a PageMajorCache, and the model was called with another "
    "cache or none (transformers makes a DynamicCache then); pass past_key_values=PageMajorCache.for_model(model, "
    "num_pages), or go back with model.set_attn_implementation('sdpa')"
)
OLDEST = (5, 12)
"""The oldest supported release, from which on masks are sized by query length. Tested: 5.12, 5.17 and 5.24."""

if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < OLDEST:
    raise ImportError(
        f"pm_ops.adapters.transformers needs transformers >= {OLDEST[0]}.{OLDEST[1]}, found "
        f"{transformers.__version__}: pip install -U 'pm-ops[transformers]'"
    )


class PageMajorCache(Cache):
    """A transformers cache whose keys and values live in pages of a pool, every layer of a page side by side.

    Pages are taken from ``pool.allocator`` as the sequences grow, and shared between beams until one of them writes.
    ``reset()`` gives them back. Caches may share a pool; padding takes no slots.

    Args:
        pool: with a key and a value plane for each of the model's layers, numbered from 0.
    """

    def __init__(self, pool: PagePool) -> None:
        numbers = pool.layout.layers
        if numbers != tuple(range(len(numbers))) or any({"key", "value"} - set(pool.layout.kinds(i)) for i in numbers):
            raise ValueError(
                f"the pool's layout has {[(i, *pool.layout.kinds(i)) for i in numbers]}; a cache needs a key and a "
                "value plane for each of the layers 0, 1, 2, ..."
            )
        for i in numbers:
            for kind in ("key", "value"):
                dtype = pool.layout.plane(i, kind).dtype
                if not dtype.is_floating_point and (dtype != torch.int8 or f"{kind}_scale" not in pool.layout.kinds(i)):
                    raise ValueError(
                        f"the {kind} plane of layer {i} is {dtype_name(dtype)}; a cache keeps floating point, fp8, or "
                        "int8 in a layout with scales=True"
                    )
        self.pool = pool
        self.batch = PagedBatch(pool)
        super().__init__(layers=[PageMajorLayer(self.batch, i) for i in numbers])

    @classmethod
    def for_model(
        cls,
        model: transformers.PreTrainedModel,
        num_pages: int,
        page_size: int = 16,
        *,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """A cache of the model's shape over a new pool in the ``page_major`` layout, on the model's device.

        Args:
            model: decoder-only, with full attention in every layer.
            num_pages: of the pool; all sequences together may hold ``num_pages * page_size`` tokens.
            page_size: tokens of a page.
            dtype: of the stored keys and values; default the model's. int8 and the two fp8 are quantised with a scale
                for each token and head, which is stored beside them.

        Raises:
            ValueError: the model attends in a way that this cache does not support.
        """
        config = _supported(model.config)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        dtype = dtype or model.dtype
        layout = pm_ops.page_major(config.num_hidden_layers, heads, dim, page_size, dtype, scales=dtype.itemsize == 1)
        return cls(PagePool(layout, num_pages, model.device))

    @property
    def rows(self) -> list[Row]:
        """Each sequence's pages, in order, and its number of tokens. To read; ``reset`` and ``crop`` change them."""
        return self.batch.rows

    @property
    def batch_size(self) -> int:
        """Sequences, or -1 where nothing has been stored yet."""
        return len(self.batch.rows) or -1

    def reset(self) -> None:
        """Forget everything and give all pages back to the pool."""
        self.batch.reset()
        self._follow()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens. A positive number, transformers' older form, is what stays."""
        count = int(tokens_to_remove)  # assisted decoding passes a tensor
        self.batch.crop(max(self.batch.length - count, 0) if count > 0 else -count)
        self._follow()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence ``i`` goes on from sequence ``beam_idx[i]``; their pages are shared until one of them writes."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences, in this order (an index tensor, or a bool mask)."""
        self.batch.select(torch.arange(len(self.rows))[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence ``repeats`` times, one after the other, on shared pages."""
        self.batch.select([i for i in range(len(self.rows)) for _ in range(repeats)])

    def _follow(self) -> None:
        for layer in self.layers:
            layer.length = min(layer.length, self.batch.length)


class PageMajorLayer(CacheLayerMixin):
    """One layer's planes in the pages of a batch. Pages hold all layers: crop, reorder and reset the whole cache."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False  # the pool is there from the start

    def __init__(self, batch: PagedBatch, index: int) -> None:
        self.batch = batch
        self.index = index
        self.length = 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the pool is there from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Store ``[batch, heads, tokens, dim]``; returns handles by which the attention function finds the pages."""
        _refuse_compiling()
        rows, _, length, _ = key_states.shape
        step = self.batch.step(self.length, rows, length)
        key, value = (x.transpose(1, 2).flatten(0, 1) for x in (key_states, value_states))
        pm_ops.store_kv(self.batch.pool, self.index, key, value, step.slots)
        self.length += length
        handle = StoredStates(self.batch, self.index, step)
        return handle, handle

    @property
    def keys(self) -> Tensor:
        """A dense copy, ``[batch, heads, tokens, dim]``, zeros for padding: to look at, never needed to run.

        float32 where the cache is quantised.
        """
        return self._dense("key")

    @property
    def values(self) -> Tensor:
        """As :attr:`keys`."""
        return self._dense("value")

    def get_seq_length(self) -> int:
        """Tokens of a sequence, padding included."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length of keys after the next pass, a :class:`_Length`, and offset 0."""
        _refuse_compiling()
        return _Length(self.length + query_length, self.batch), 0

    def get_max_length(self) -> int:
        """-1: a sequence may grow as long as the pool has pages."""
        return -1

    get_max_cache_shape = get_max_length

    def reset(self, *args: Any) -> None:
        """Refused, like the methods below: see the class."""
        raise RuntimeError("a page holds every layer: call reset(), crop(), reorder_cache(), ... on the PageMajorCache")

    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = offload = prefetch = reset

    def _dense(self, kind: str) -> Tensor:
        slots = self.batch.column_slots()
        pool = self.batch.pool
        out_dtype = torch.float32 if kind in pool.scaled_kinds else None
        rows = pm_ops.load_kv(pool, self.index, slots.flatten().to(pool.device), kind, out_dtype=out_dtype)
        return rows.unflatten(0, slots.shape).transpose(1, 2)


def _refuse_compiling() -> None:
    """Stop torch.compile. An exception of the traced code would not: Dynamo would run the code uncompiled instead."""
    if torch.compiler.is_dynamo_compiling():
        from torch._dynamo.comptime import comptime

        comptime(_not_compiled, _not_compiled)  # at compile time, or now


def _not_compiled(*args: Any) -> None:
    raise RuntimeError(
        "torch.compile reached a PageMajorCache, which keeps its page tables in Python and runs eagerly; call the "
        "model itself, or compile it with a StaticCache: pm_ops.compile_passes.bind(pool, static_cache), then "
        "torch.compile(model, backend=page_major_backend(binding))"
    )


class StoredStates:
    """What ``update`` returns in place of keys and values: where they are stored. Using it as a tensor is an error."""

    def __init__(self, batch: PagedBatch, layer: int, step: Step) -> None:
        self.batch = batch
        self.layer = layer
        self.step = step

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(f"keys and values are in pages, there is no tensor to ask for .{name}; {REMEDY}")


class _Length(int):
    """A length that knows whose it is: transformers hands ``get_mask_sizes``' answer to the mask function as it is."""

    batch: PagedBatch

    def __new__(cls, value: int, batch: PagedBatch) -> Self:
        length = super().__new__(cls, value)
        length.batch = batch
        return length


class _Unsupported:
    """Stands for a mask that is not causal over the whole sequence; refused by the first layer that gets it."""


def pm_ops_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> _Unsupported | None:
    """transformers' mask function: tells the cache which new tokens are padding. Causality needs no mask."""
    if not isinstance(kv_length, _Length):
        raise ValueError(WITHOUT_PAGES)
    if mask_function is not causal_mask_function:
        _supported(kwargs["config"])
        return _Unsupported()  # some models make masks that none of their layers uses
    kv_length.batch.announce(attention_mask, batch_size, q_length)
    return None


def pm_ops_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: StoredStates,
    value: StoredStates,
    attention_mask: Tensor | _Unsupported | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: ``query [batch, heads, tokens, dim]`` over the pages that ``key`` names.

    Args:
        attention_mask: ``None``: causal. A ready-made 4-D mask, bool or additive, replaces that; without padding only.
        softcap, s_aux: as :func:`pm_ops.attention`'s ``softcap`` and ``sinks``.

    Returns ``[batch, tokens, heads, dim]``, zeros for padding, and no weights.
    """
    if not isinstance(key, StoredStates):
        raise ValueError(WITHOUT_PAGES)
    _refuse_extras(module, dropout, is_causal, kwargs)
    rows, _, length, _ = query.shape
    batch, step = key.batch, key.step
    if (rows, length) != (len(batch.rows), step.length):
        raise ValueError(
            f"{rows} x {length} queries for {len(batch.rows)} x {step.length} new tokens; they must be equal"
        )
    if isinstance(attention_mask, _Unsupported):
        raise ValueError(
            "the model hides other keys than the later ones (a window, chunks, blocks, packed sequences), which "
            "PageMajorCache does not support; use transformers' DynamicCache"
        )
    if attention_mask is not None and (attention_mask.dim() != 4 or batch.padded):
        raise ValueError(
            f"an attention mask of shape {list(attention_mask.shape)} reached the attention function; pass the 2-D "
            "mask [batch, tokens] to the model, or, for a batch without padding, a ready-made 4-D one"
        )
    tokens = query.transpose(1, 2).flatten(0, 1)
    out = pm_ops.attention(
        batch.pool,
        key.layer,
        tokens if step.tokens is None else tokens[step.tokens],
        step.page_table,
        step.seq_lens,
        query_start=step.query_start,
        softmax_scale=scaling,
        causal=attention_mask is None,
        softcap=softcap or 0.0,
        sinks=s_aux,
        bias=attention_mask,
    )
    assert isinstance(out, Tensor)
    if step.tokens is not None:
        out = out.new_zeros(len(tokens), *out.shape[1:]).index_copy_(0, step.tokens, out)
    return out.unflatten(0, (rows, length)), None


def _refuse_extras(module: torch.nn.Module, dropout: float, is_causal: bool | None, kwargs: dict[str, Any]) -> None:
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    window, bias = kwargs.get("sliding_window"), kwargs.get("position_bias")
    refused = {
        "dropout": dropout > 0 and f"dropout={dropout} (call model.eval())",
        "is_causal": not causal and "attention that is not causal",
        "sliding_window": window is not None and f"sliding_window={window}",
        "position_bias": bias is not None and "position_bias",
        "output_attentions": kwargs.get("output_attentions") and "output_attentions=True (weights are never formed)",
    }
    found = [text for text in refused.values() if text]
    if found:
        what = ", ".join(map(str, found))
        raise ValueError(f"attn_implementation {NAME!r} does not support {what}; use 'sdpa' or 'eager'")


def _supported(config: transformers.PreTrainedConfig) -> Any:
    """The decoder's config. Raises ValueError for what PageMajorCache cannot hold."""
    if config.is_encoder_decoder:
        raise ValueError(f"{config.model_type} is an encoder-decoder; PageMajorCache supports decoder-only models")
    config = config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or _implied_layer_types(config)) - {"full_attention"}
    if kinds:
        raise ValueError(
            f"{config.model_type} has layers of type {', '.join(sorted(kinds))}; PageMajorCache supports full "
            "attention only. Use transformers' DynamicCache for this model"
        )
    for field, what in (("num_kv_shared_layers", "shared keys and values"), ("kv_lora_rank", "latent attention")):
        if value := getattr(config, field, None):
            raise ValueError(f"{config.model_type} has {what} ({field}={value}), which PageMajorCache does not support")
    return config


def _implied_layer_types(config: Any) -> list[str]:
    """Of configs that name no types, as transformers' own caches read them."""
    hints = {"sliding_window": "sliding_attention", "attention_chunk_size": "chunked_attention"}
    return [kind for field, kind in hints.items() if getattr(config, field, None) is not None]


AttentionInterface.register(NAME, pm_ops_attention)
AttentionMaskInterface.register(NAME, pm_ops_mask)
