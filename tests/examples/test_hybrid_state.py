"""The example of a hybrid model that is compiled as it is prints what it says."""

import importlib
from pathlib import Path

import pytest

pytest.importorskip("transformers")


def test_eight_layers_of_states_and_two_of_attention_say_the_same_on_one_pool(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    importlib.import_module("hybrid_state").main()
    out = capsys.readouterr().out
    assert "0-3, 5-8  8 x  ssm        write  copy_" in out and "4, 9      2 x  key+value  read" in out
    assert "2 graphs: 20 writes and 18 reads rewritten, 0 materialized" in out
    assert "moved halfway in one call: 3 pages, of keys, of values and of states" in out
    assert "the same 40 tokens as on transformers' own cache: True" in out
    assert "copied in one call, the other sequence goes on as this one: True" in out
