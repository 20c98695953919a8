"""Which KV connectors are refused, and why; on what this or another vLLM has, without an engine."""

from types import SimpleNamespace
from typing import Any

import pytest

from pm_ops.adapters.vllm import connectors, hooks
from pm_ops.adapters.vllm.config import Settings

OWN = "pm_ops.adapters.vllm.store_connector"


@pytest.fixture(params=[hooks.LAYOUTS, hooks.PACKED])
def generation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(hooks, "generation", lambda: request.param)
    return request.param


def transfer(name: str, module: str | None = None, **options: Any) -> Any:
    return SimpleNamespace(kv_connector=name, kv_connector_module_path=module, kv_connector_extra_config=options)


def test_our_own_run_where_this_vllm_has_what_they_need(generation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = {"STORE": "json:CacheHitSource.DISK", "HOST": "json:loads"}
    ours = {f"pm_ops.{name}": (name, {"dumps": "json:dumps", "something": hook}) for name, hook in needed.items()}
    monkeypatch.setattr(connectors, "OWN", ours)
    assert connectors.usable() == ["HOST"]
    connectors.refuse(transfer("HOST", "pm_ops.HOST"), Settings())
    message = r"STORE needs a newer vLLM, this one has no something \(json.CacheHitSource.DISK\). Here run: HOST"
    with pytest.raises(RuntimeError, match=message):
        connectors.refuse(transfer("STORE", "pm_ops.STORE"), Settings())
    connectors.refuse(None, Settings())


def test_others_get_blocks_that_they_can_read(generation: str) -> None:
    if generation == hooks.PACKED:
        for module in (None, "pm_ops.adapters.vllm.theirs"):
            with pytest.raises(ValueError, match="NixlConnector expects a tensor a layer"):
                connectors.refuse(transfer("NixlConnector", module), Settings("BLNHC"))
        return
    connectors.refuse(transfer("NixlConnector"), Settings("BLNHC"))
    with pytest.raises(ValueError, match="NixlConnector would read page_major blocks as BLNHC ones"):
        connectors.refuse(transfer("NixlConnector"), Settings())
    with pytest.raises(ValueError, match="PageStoreConnector inside MultiConnector is not supported"):
        connectors.refuse(transfer("MultiConnector", connectors=[{"kv_connector_module_path": OWN}]), Settings("BLNHC"))
