"""What a tier of host memory can be asked for, and which models and engines have one."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

NAME = "PageHostConnector"
SPECS = (FullAttentionSpec, SlidingWindowSpec)
"""Cache groups whose blocks stay as they are once they are full."""
ALL = 1 << 62
"""The window, in blocks, of full attention."""


def window_of(spec: Any) -> int:
    """How many of the last full blocks the next token reads."""
    if isinstance(spec, FullAttentionSpec):
        return ALL
    reach = spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0)
    return -(-reach // spec.block_size)


def number_of_pages(options: dict[str, Any], page_bytes: int) -> int:
    """The size that was asked for. Raises ValueError for what cannot be one."""
    try:
        ((name, size),) = options.items()
        pages = {"max_bytes": int(size) // page_bytes, "max_pages": int(size)}[name]
    except (ValueError, TypeError, KeyError):
        raise ValueError(
            f"{NAME}: kv_connector_extra_config is {options}; it needs either max_bytes or max_pages, a number, for "
            "every worker"
        ) from None
    if pages < 1:
        raise ValueError(f"{NAME}: {name}={size} is less than one page of {page_bytes} bytes; raise it")
    return pages


def require_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise ValueError for what the connector cannot do."""
    role, parallel = vllm_config.kv_transfer_config.kv_role, vllm_config.parallel_config
    if role != "kv_both":
        raise ValueError(f"{NAME} offloads and restores; kv_role is {role}, set it to kv_both")
    if parallel.world_size != parallel.tensor_parallel_size or parallel.decode_context_parallel_size > 1:
        raise ValueError(f"{NAME} supports tensor parallelism only; run it without pipeline and context parallelism")
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    names = ", ".join(type(spec).__name__ for spec in specs)
    if not specs or not all(type(spec) in SPECS for spec in specs):
        raise ValueError(
            f"{NAME} supports layers of full and of sliding-window attention, whose blocks stay as they are once they "
            f"are full; the cache groups of this model are {names or 'none'}"
        )
    if len(specs) > 1 and not hasattr(KVConnectorBase_V1, "get_transfer_results"):
        raise ValueError(
            f"{NAME}: this vLLM cannot be told which of several cache groups ({names}) a block belongs to that could "
            "not be restored; run this model without it, or with vLLM 0.32, whose connectors have get_transfer_results"
        )
    sizes = {spec.block_size for spec in specs} | {vllm_config.cache_config.prefix_match_unit or specs[0].block_size}
    if len(sizes) > 1:
        raise ValueError(
            f"{NAME} needs one block size, which prefixes are matched by; the groups {names} and prefix_match_unit "
            f"have {sorted(sizes)}"
        )
