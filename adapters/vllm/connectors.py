"""Which KV connectors an engine with pm_ops can have: they take its cache for what it is, or are refused."""

from __future__ import annotations

from typing import Any

from . import hooks
from .config import Settings

OWN = {
    "pm_ops.adapters.vllm.store_connector": ("PageStoreConnector", hooks.STORE_CONNECTOR),
    "pm_ops.adapters.vllm.host_connector": ("PageHostConnector", hooks.HOST_CONNECTOR),
}
"""By module: pm_ops' own, and what it needs of vLLM."""


def usable() -> list[str]:
    """Those of pm_ops' own that the installed vLLM can run. Imports vLLM."""
    return [name for name, needed in OWN.values() if not hooks.missing(needed)]


def refuse(transfer: Any, settings: Settings) -> None:
    """Raise for a connector that would take our pages for something else, or misses something of this vLLM.

    Args:
        transfer: vLLM's ``KVTransferConfig``, or None.

    Raises:
        ValueError: it cannot read such a cache.
        RuntimeError: it is pm_ops' own, and vLLM lacks what it needs.
    """
    if transfer is None:
        return
    if transfer.kv_connector_module_path in OWN:
        name, needed = OWN[transfer.kv_connector_module_path]
        absent = hooks.missing(needed)
        if absent:
            raise RuntimeError(
                f"pm_ops: {name} needs a newer vLLM, this one has no {'; no '.join(absent)}. Here run: "
                f"{', '.join(usable()) or 'no connector'}"
            )
        return
    if hooks.generation() == hooks.PACKED:
        raise ValueError(
            f"pm_ops: the KV connector {transfer.kv_connector} expects a tensor a layer, and here blocks are packed; "
            "run it without pm_ops, or with a vLLM that has layouts, 0.29 or newer"
        )
    for module, (name, _) in OWN.items():
        if module in str(transfer.kv_connector_extra_config):
            raise ValueError(
                f"pm_ops: {name} inside {transfer.kv_connector} is not supported: it would keep what another "
                "connector failed to load; use it alone"
            )
    if settings.layout == "page_major":
        raise ValueError(
            f"pm_ops: the KV connector {transfer.kv_connector} would read page_major blocks as BLNHC ones, which have "
            f'other bytes; ask for layout "BLNHC", "BLHNC" or "BHLNC", or take one of {", ".join(OWN)}'
        )
