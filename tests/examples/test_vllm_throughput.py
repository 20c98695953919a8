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
        self.connection = self.process = self
        self.killed = False

    def send(self, what: tuple[int, ...]) -> None:
        self.sent = what

    def answer(self) -> dict[str, Any]:
        return self.run(*self.sent)

    def kill(self) -> None:
        self.killed = True

    def join(self) -> None:
        pass

    def run(self, count: int, length: int, new_tokens: int, prefix: int = 0) -> dict[str, Any]:
        self.asked.append((count, length, new_tokens, prefix))
        tokens = [self.rule(prompt) for prompt in bench.prompts_of(count, length, prefix)]
        seen = [ask[0] for ask in self.asked[:-1] if ask[3] == prefix]
        return {"tokens": tokens, "cached": sum(seen), "seconds": self.seconds, "step": self.seconds / 1000}


def report() -> dict[str, Any]:
    return {"engines": {}}


def test_prompts_of_another_prefix_end_alike_and_of_the_same_are_the_same() -> None:
    first, other = bench.prompts_of(9, 20, 0), bench.prompts_of(8, 20, 1)
    assert [p[-1] for p in first[:8]] == [p[-1] for p in other]
    assert all(p[:-1] != q[:-1] for p, q in zip(first, other, strict=False))
    assert first == bench.prompts_of(9, 20, 0) and {len(p) for p in first} == {20}


def test_equal_tokens_are_counted() -> None:
    whole = Played("a", lambda prompt: [sum(prompt)])
    half = Played("b", lambda prompt: [sum(prompt) + prompt[0] % 2])
    found = bench.compare_tokens([whole, half], (12, 20, 4), report())
    odd = sum(prompt[0] % 2 for prompt in bench.prompts_of(12, 20, 0))
    assert 0 < odd < 12
    assert found["equal"] == {"a": {"a": 12, "b": 12 - odd}, "b": {"a": 12 - odd, "b": 12}}
    assert found["equal when run again"] == {"a": 12, "b": 12}
    assert found["tokens of prompts that were cached when run again"] == {"a": 12, "b": 12}


def test_tokens_are_counted_until_they_differ() -> None:
    whole = Played("a", lambda prompt: [*prompt[:3], sum(prompt)])
    other = Played("b", lambda prompt: [*prompt[:3], -1])
    found = bench.compare_tokens([whole, other], (12, 20, 4), report())
    assert found["tokens until they differ"] == {"a": {"a": 4.0, "b": 3.0}, "b": {"a": 3.0, "b": 4.0}}


def test_an_engine_that_fails_is_left_out_and_the_others_go_on() -> None:
    def fail(prompt: list[int]) -> Any:
        raise RuntimeError("b ended")

    noted, whole, bad = report(), Played("a", sum), Played("b", fail)
    engines = [bad, whole]
    found = bench.measure(engines, (8, 16, 4), 2, noted)
    assert engines == [whole] and bad.killed and not whole.killed
    assert list(found) == ["a"] and len(found["a"]["ms a step"]) == 2
    assert noted == {"engines": {"b": {"failed": "b ended"}}}
    lines = bench.table({"8 x 16": found, "all failed": {}}).splitlines()
    assert [line.partition("  (")[2] for line in lines] == ["ratios to a)", "", "ratios to none)"]


def test_tokens_that_follow_from_the_last_one_show_nothing() -> None:
    with pytest.raises(RuntimeError, match="tokens do not depend on the context"):
        bench.compare_tokens([Played("a", lambda prompt: prompt[-1:])], (12, 20, 4), report())


def test_engines_take_turns_and_the_table_has_their_ratios() -> None:
    fast, slow = Played("fast", sum, 1.0), Played("slow", sum, 4.0)
    results = bench.measure([slow, fast], (8, 16, 4), 3, report())
    assert fast.asked == slow.asked == [(8, 16, 4, 0), (8, 16, 4, 1), (8, 16, 4, 2)]
    assert results["fast"] == {"tokens a second": [32.0] * 3, "ms a step": [1.0] * 3}
    lines = bench.table({"8 x 16": results}).splitlines()
    assert lines[0].endswith("(ratios to slow)")
    assert lines[2].split()[3:] == ["fast", "32.0", "4.000", "1.000", "0.250"]


@pytest.mark.parametrize("text", ["64 x 1023", "tokens=some", "batch 1=-1", ""])
def test_a_workload_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is none of tokens, 64 x 1024"):
        bench.workload_of(bench.WORKLOADS)(text)
    parse = bench.workload_of(bench.WORKLOADS)
    assert parse("batch 1") == ("batch 1", 0) and parse("48 x 16384=1") == ("48 x 16384", 1)
