"""What can be asked for, and how; without vLLM."""

from types import SimpleNamespace
from typing import Any

import pytest

from pm_ops.adapters.vllm.config import Settings, write_environment


@pytest.mark.parametrize("entry", [True, {}])
def test_asking_for_nothing_in_particular_gives_page_major(entry: Any) -> None:
    assert Settings.read(entry) == Settings("page_major", "auto", "aligned")


@pytest.mark.parametrize("entry", [None, False])
def test_not_asking_gives_none(entry: Any) -> None:
    assert Settings.read(entry) is None


def test_page_major_is_blnhc_to_the_engine() -> None:
    assert Settings("page_major").engine_layout == "BLNHC"
    assert Settings("BHLNC").engine_layout == "BHLNC"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"layout": "NHD"}, "layout is 'NHD'; supported: page_major, BLNHC, BLHNC, BHLNC"),
        ({"layout": ["BLNHC"]}, "layout is"),
        ({"impl": "cuda"}, "impl is 'cuda'; supported: auto, triton, fa3, reference"),
        ({"page_size": 16}, "any of layout, impl, hybrid_blocks, fuse_rope: use --additional-config"),
        ({"hybrid_blocks": True}, "hybrid_blocks is True; supported: aligned, small"),
        ({"fuse_rope": "on"}, "fuse_rope is 'on'; supported: False, True, strict"),
        (1, "is not understood"),
        ("BLNHC", "is not understood"),
    ],
)
def test_what_is_not_understood_is_refused(entry: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings.read(entry)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("0", {}),
        ("false", {}),
        ("1", {"pm_ops": True}),
        ("true", {"pm_ops": True}),
        ('{"layout": "BLHNC"}', {"pm_ops": {"layout": "BLHNC"}}),
    ],
)
def test_the_environment_variable(monkeypatch: pytest.MonkeyPatch, text: str, expected: dict[str, Any]) -> None:
    monkeypatch.setenv("PM_OPS", text)
    config = SimpleNamespace(additional_config={})
    write_environment(config)
    assert config.additional_config == expected


@pytest.mark.parametrize("text", ["page_major", "2", "[1]", '"BLNHC"'])
def test_an_environment_variable_that_says_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("PM_OPS", text)
    with pytest.raises(ValueError, match="must be 1, 0 or a JSON object"):
        write_environment(SimpleNamespace(additional_config={}))


def test_a_configuration_that_cannot_be_added_to_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PM_OPS", "1")
    with pytest.raises(ValueError, match="additional_config is a object, which pm_ops cannot add to"):
        write_environment(SimpleNamespace(additional_config=object()))
    monkeypatch.setenv("PM_OPS", "0")
    write_environment(SimpleNamespace(additional_config=object()))
