"""What a person reads of a rewrite: layers that are alike on one line, counts, and what is missing."""

from __future__ import annotations

from typing import Any

import pytest

from pm_ops.compile_passes import RewriteReport
from pm_ops.compile_passes.report import Entry

expecttest = pytest.importorskip("expecttest")

PACKAGES = "/home/a b/.venv/lib/python3.11/site-packages/"


def entry(layer: int, **changes: Any) -> Entry:
    write = {"kinds": ("key",), "action": "write", "form": "index_copy_", "line": "/home/me/model.py:9: k[pos] = x"}
    return Entry(**{"layer": layer, "became": "store_kv", **write, **changes})  # type: ignore[arg-type]


def report(layers: int, entries: list[Entry], kinds: tuple[str, ...] = ("key",)) -> RewriteReport:
    made = RewriteReport([(i, kind) for i in range(layers) for kind in kinds], layers * 64)
    made.add(entries)
    return made


class TestText(expecttest.TestCase):
    def test_layers_alike_are_one_line_and_packages_lose_their_prefix(self) -> None:
        line = PACKAGES + "transformers/cache_utils.py:482: keys.index_copy_(2, pos, k)"
        sdpa = PACKAGES + "transformers/sdpa.py:158: out = sdpa("
        read = {"kinds": ("key", "value"), "action": "read", "form": "sdpa"}
        entries = []
        for i in range(30):
            entries += [entry(i, line=line), entry(i, kinds=("value",), line=line)]
            entries.append(entry(i, **read, became="attention", line=sdpa))
        self.assertExpectedInline(
            str(report(30, entries, ("key", "value"))),
            """\
layers        planes     does   form found   became     line
0-29    30 x  key        write  index_copy_  store_kv   transformers/cache_utils.py:482: keys.index_copy_(2, pos, k)
0-29    30 x  value      write  index_copy_  store_kv   transformers/cache_utils.py:482: keys.index_copy_(2, pos, k)
0-29    30 x  key+value  read   sdpa         attention  transformers/sdpa.py:158: out = sdpa(
1 graph: 60 writes and 30 reads rewritten, 0 materialized; 1920 bytes of layer-major cache released""",
        )

    def test_layers_that_differ_keep_lines_of_their_own(self) -> None:
        other = "/home/me/model.py:12: k[:, pos] = x"
        entries = [entry(i, **({"line": other} if i in (1, 4) else {})) for i in range(5)]
        self.assertExpectedInline(
            str(report(6, entries)),
            """\
layers       planes  does   form found   became    line
0, 2-3  3 x  key     write  index_copy_  store_kv  /home/me/model.py:9: k[pos] = x
1, 4    2 x  key     write  index_copy_  store_kv  /home/me/model.py:12: k[:, pos] = x
1 graph: 5 writes and 0 reads rewritten, 0 materialized; 384 bytes of layer-major cache released
no write seen yet of L5 key
no read seen yet of L0 key, L1 key, L2 key, L3 key, L4 key, L5 key""",
        )

    def test_one_of_each(self) -> None:
        entries = [entry(0), entry(0, action="read", form="index", became="load_kv")]
        made = RewriteReport([(0, "key")], 1)
        made.add(entries)
        made.add(entries)
        assert "2 graphs: 1 write and 1 read rewritten, 0 materialized; 1 byte of" in str(made)


def test_a_deep_model_without_two_layers_alike_is_cut_in_the_middle() -> None:
    lines = str(report(40, [entry(i, line=f"model.py:{i}: k[pos] = x") for i in range(40)])).splitlines()
    assert len(lines) == 1 + 12 + 1 + 12 + 2  # header, half, cut, half, summary and what was not read
    assert "(16 more)" in lines[13]
    assert lines[1].startswith("0 ") and lines[25].startswith("39 ")
