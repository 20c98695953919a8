"""What the benchmark of vLLM does around the engines; these are played."""

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "benchmarks"))
import vllm_throughput as bench


class Played:
    """An engine whose tokens follow from a prompt by ``rule``."""

    def __init__(self, name: str, rule: Any, seconds: float = 2.0) -> None:
        self.name, self.rule, self.seconds = name, rule, seconds
        self.asked: list[tuple[int, ...]] = []

    def run(self, count: int, length: int, new_tokens: int, prefix: int = 0) -> dict[str, Any]:
        self.asked.append((count, length, new_tokens, prefix))
        tokens = [self.rule(prompt) for prompt in bench.prompts_of(count, length, prefix)]
        return {"tokens": tokens, "seconds": self.seconds, "step": self.seconds / 1000}


def test_prompts_of_another_prefix_end_alike_and_of_the_same_are_the_same() -> None:
    first, other = bench.prompts_of(9, 20, 0), bench.prompts_of(8, 20, 1)
    assert [p[-1] for p in first[:8]] == [p[-1] for p in other]
    assert all(p[:-1] != q[:-1] for p, q in zip(first, other, strict=False))
    assert first == bench.prompts_of(9, 20, 0) and {len(p) for p in first} == {20}


def test_equal_tokens_are_counted() -> None:
    whole = Played("a", lambda prompt: [sum(prompt)])
    half = Played("b", lambda prompt: [sum(prompt) + prompt[0] % 2])
    found = bench.compare_tokens([whole, half], (12, 20, 4))
    odd = sum(prompt[0] % 2 for prompt in bench.prompts_of(12, 20, 0))
    assert 0 < odd < 12
    assert found["equal"] == {"a": {"a": 12, "b": 12 - odd}, "b": {"a": 12 - odd, "b": 12}}
    assert found["equal when run again"] == {"a": 12, "b": 12}


def test_tokens_that_follow_from_the_last_one_show_nothing() -> None:
    with pytest.raises(RuntimeError, match="tokens do not depend on the context"):
        bench.compare_tokens([Played("a", lambda prompt: prompt[-1:])], (12, 20, 4))


def test_engines_take_turns_and_the_table_has_their_ratios() -> None:
    fast, slow = Played("fast", sum, 1.0), Played("slow", sum, 4.0)
    results = bench.measure([slow, fast], (8, 16, 4), 3)
    assert fast.asked == slow.asked == [(8, 16, 4, 0), (8, 16, 4, 1), (8, 16, 4, 2)]
    assert results["fast"] == {"tokens a second": [32.0] * 3, "ms a step": [1.0] * 3}
    lines = bench.table({"8 x 16": results}, "slow").splitlines()
    assert lines[2].split()[3:] == ["fast", "32.0", "4.000", "1.000", "0.250"]


@pytest.mark.parametrize("text", ["64 x 1023", "tokens=some", "batch 1=-1", ""])
def test_a_workload_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is none of tokens, 64 x 1024"):
        bench.workload_of(bench.WORKLOADS)(text)
    parse = bench.workload_of(bench.WORKLOADS)
    assert parse("batch 1") == ("batch 1", 0) and parse("48 x 16384=1") == ("48 x 16384", 1)
