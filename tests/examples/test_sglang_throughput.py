"""What the benchmark of SGLang does around the engines; these are played."""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "benchmarks"))
import sglang_throughput as bench


class Process:
    def kill(self) -> None:
        pass

    def join(self) -> None:
        pass


class Played:
    """An engine that takes so many seconds, and fails in run ``fails``."""

    def __init__(self, name: str, seconds: float, fails: int = -1) -> None:
        self.name, self.seconds, self.fails, self.asked = name, seconds, fails, list[Any]()
        self.process = Process()

    def facts(self) -> Any:
        return {"start": self.seconds}

    def run(self, shape: bench.Workload, prefix: int = 0) -> Any:
        self.asked.append((shape.count, shape.new_tokens, prefix))
        if len(self.asked) > self.fails >= 0:
            raise RuntimeError(f"{self.name} ended")
        tokens = [[sum(prompt)] for prompt in bench.prompts_of(shape.count, shape.length, prefix)]
        return {"tokens": tokens, "seconds": self.seconds, "step": self.seconds / 1000}


def options(tmp_path: Path, *workloads: tuple[str, int]) -> argparse.Namespace:
    return argparse.Namespace(workloads=list(workloads), repetitions=2, out=tmp_path)


def test_engines_take_turns_and_every_figure_is_of_its_own_kind(tmp_path: Path) -> None:
    report: dict[str, Any] = {"engines": {}, "workloads": {}}
    engines: list[Any] = [Played("slow", 4.0), Played("fast", 1.0)]
    bench.run(engines, options(tmp_path, ("small", 0), ("small step", 3), ("prefill 1024", 0)), report, {})
    assert report["tokens"]["equal"] == {name: {"slow": 3, "fast": 3} for name in ("slow", "fast")}
    assert report["workloads"]["small step"] == {"slow": [4.0] * 3, "fast": [1.0] * 3}
    assert report["workloads"]["prefill 1024"]["fast"] == [65536.0] * 2
    for kind, speed in (("small step", "4.000"), ("prefill 1024", "4.000")):
        lines = bench.table(kind, bench.WORKLOADS[kind], report["workloads"][kind]).splitlines()
        assert lines[1].endswith("x 1.000") and lines[2].endswith(f"x {speed}")
    assert (tmp_path / "sglang_throughput.json").exists()


def test_an_engine_that_fails_is_noted_and_the_others_run_on(tmp_path: Path) -> None:
    report: dict[str, Any] = {"engines": {}, "workloads": {}}
    whole, broken = Played("whole", 1.0), Played("broken", 1.0, fails=4)
    tokens: dict[str, Any] = {}
    bench.run([whole, broken], options(tmp_path, ("small", 0), ("64 x 1024", 2)), report, tokens)  # type: ignore[list-item]
    assert report["engines"]["broken"]["failed"] == "broken ended" and "failed" not in report["engines"]["whole"]
    assert report["workloads"]["64 x 1024"] == {"whole": [8192.0] * 2}


def test_tokens_that_follow_from_the_last_one_show_nothing(tmp_path: Path) -> None:
    engine = Played("a", 1.0)
    engine.run = (
        lambda shape, prefix=0: {  # type: ignore[method-assign]
            "tokens": [prompt[-1:] for prompt in bench.prompts_of(shape.count, shape.length, prefix)]
        }
    )
    with pytest.raises(RuntimeError, match="tokens do not depend on the context"):
        bench.run([engine], options(tmp_path, ("small", 0)), {"engines": {}, "workloads": {}}, {})  # type: ignore[list-item]


def test_a_step_is_measured_while_all_sequences_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences, the second of which begins late; a message may bring several tokens."""
    shape = bench.Workload(2, 4, 9, bench.STEP)
    now = iter(range(100))
    monkeypatch.setattr(bench.time, "perf_counter", lambda: float(next(now)))
    order = [(0, 1), (1, 1), (0, 2), (1, 3), (0, 4), (1, 4), (0, 6), (1, 6), (0, 8), (1, 8), (0, 9), (1, 9)]

    class Streaming:
        def generate(self, **given: Any) -> Any:
            assert given["stream"] and given["sampling_params"]["max_new_tokens"] == 9
            return ({"index": i, "meta_info": {"completion_tokens": n}} for i, n in order)

    found = bench.generate(Streaming(), shape, 0)
    assert found["step"] == 1.0 and found["first"] == 2.0


def test_steps_in_which_some_have_ended_are_none_in_which_all_decode() -> None:
    """The last of 48 is taken when the others have all of their tokens, and decodes alone."""
    alone = [(0, n, float(n)) for n in range(1, 66)] + [(n, 65, 65.0 + n) for n in range(1, 66)]
    with pytest.raises(RuntimeError, match=r"all sequences decode in 0 steps of 65 alone: .* #running-req"):
        bench.step_of(alone, 65)
    together = [(n, n, 30.0 * n) for n in range(1, 66)]
    assert bench.step_of(together, 65) == 30.0


def test_a_model_says_more_than_a_llama_of_its_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    given = bench.MODELS["gemma"](4, argparse.Namespace(head_dim=16))
    config = json.loads((Path(bench.model_folder("gemma", hidden_size=64, **given)) / "config.json").read_text())
    assert config["hidden_act"] == config["hidden_activation"] == "gelu_pytorch_tanh"
    assert config["model_type"] == "gemma2" and config["hidden_size"] == 64 and config["vocab_size"] == 128256


def test_features_become_arguments_of_sglang() -> None:
    assert bench.arguments_of([], "folder", 8) == {}
    tree = bench.arguments_of(["tree", "half"], "folder", 8)
    assert tree["speculative_eagle_topk"] == 2
    assert tree["speculative_draft_model_path"] == "folder" and tree["dtype"] == "float16"
    assert bench.arguments_of(["fuse"], "folder", 8)["cuda_graph_bs_decode"] == [1, 8]
    with pytest.raises(ValueError, match="'quick' is none of eager, lazy-prefill"):
        bench.arguments_of(["quick"], "folder", 8)


def test_apart_one_engine_after_the_other_has_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All start at once; the gate of the second opens when the first has ended."""
    events: list[str] = []

    class Gated(Played):
        def __init__(self, serve: Any, name: str, options: argparse.Namespace) -> None:
            super().__init__(name, 1.0)
            self.file = bench.gate(name, options)
            assert not self.file.exists(), "a gate that an earlier run has left"
            events.append(f"start {name}")

        def facts(self) -> Any:
            assert self.file.exists()
            events.append(f"run {self.name}")
            return super().facts()

        def end(self) -> None:
            if f"end {self.name}" not in events:
                events.append(f"end {self.name}")

    (tmp_path / "b.gate").touch()
    monkeypatch.setattr(bench, "Engine", Gated)
    command = ["bench", "--apart", "--workloads", "small=1", "--engines", "a", "b", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    bench.main()
    assert events == ["start a", "start b", "run a", "end a", "run b", "end b"]
