"""Which KV connectors are refused, and why; on what this or another vLLM has, without an engine."""

import sys
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from pm_ops.adapters.vllm import connectors, hooks
from pm_ops.adapters.vllm.config import Settings
from pm_ops.adapters.vllm.layout import bytes_of_page
from pm_ops.adapters.vllm.tracking import hit_source

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


def test_hits_are_counted_by_source_where_vllm_does_so(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "vllm.v1.metrics.cache_hit_source"
    sources = Enum("CacheHitSource", ["HOST", "DISK"])
    for package in ("vllm", "vllm.v1", "vllm.v1.metrics"):
        monkeypatch.setitem(sys.modules, package, SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(CacheHitSource=sources))
    assert (hit_source("HOST"), hit_source("DISK")) == (sources.HOST, sources.DISK)
    monkeypatch.setitem(sys.modules, module, None)
    assert hit_source("DISK") is None


def test_a_page_is_all_layers_of_a_block_whether_the_plan_is_packed_or_is_to_be() -> None:
    def plan(*tensors: tuple[int, int]) -> Any:
        planned = [SimpleNamespace(size=size, block_stride=stride) for size, stride in tensors]
        return SimpleNamespace(num_blocks=10, kv_cache_tensors=planned)

    assert bytes_of_page(plan((640, 0), (640, 0), (320, 0))) == 160
    assert bytes_of_page(plan((1600, 160), (1600, 160), (1600, 160))) == 160
