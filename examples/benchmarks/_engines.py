"""What the benchmarks of engines share: a model with random weights, prompts, and processes that engines run in."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar


def model_folder(name: str, **sizes: Any) -> str:
    """A folder with the configuration of a Llama of these sizes, or of what else they say, and nothing else."""
    folder = Path(tempfile.gettempdir()) / name
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **sizes,
    }
    file = folder / f"config.{os.getpid()}"
    file.write_text(json.dumps(config))
    file.replace(folder / "config.json")  # the engines all do so
    return str(folder)


def draw_weights(model: Any) -> None:
    """Norms of 1, and N(0, 0.02) for the rest: tokens then depend on the whole context.

    The dummy loaders of vLLM and SGLang draw norms and weights alike from ±1e-3, and the last token alone decides.
    """
    import torch

    for i, (name, weight) in enumerate(model.named_parameters()):
        generator = torch.Generator(device=weight.device).manual_seed(1234 + i)
        weight.data.fill_(1.0) if "norm" in name else weight.data.normal_(0, 0.02, generator=generator)


def real_weights() -> None:
    """:func:`draw_weights` for vLLM's dummy loader, in this process."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    stock = DummyModelLoader.load_weights

    def load_weights(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, model, *args, **kwargs)
        draw_weights(model)

    DummyModelLoader.load_weights = load_weights


GATE = "PM_OPS_BENCHMARK_GATE"
"""Names a file that :func:`sglang_scheduler` waits for, once it has imported SGLang."""


def sglang_scheduler(*args: Any, **kwargs: Any) -> None:
    """SGLang's ``run_scheduler_process``, with :func:`draw_weights` for its dummy loader."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.model_loader import loader

    loader.initialize_dummy_weights = draw_weights
    parent = multiprocessing.parent_process()
    while GATE in os.environ and not Path(os.environ[GATE]).exists():
        if parent is None or not parent.is_alive():
            return
        time.sleep(0.1)
    run_scheduler_process(*args, **kwargs)


def workload_of(known: Iterable[str]) -> Callable[[str], tuple[str, int]]:
    """A type of argparse: ``NAME``, one of these, or ``NAME=REPETITIONS``; 0 repetitions: as many as of all."""

    def parse(text: str) -> tuple[str, int]:
        name, _, repetitions = text.partition("=")
        if name not in known or not (repetitions or "1").isdigit():
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(known)}, nor one of them with =3")
        return name, int(repetitions or 0)

    return parse


def prompts_of(count: int, length: int, prefix: int) -> list[list[int]]:
    """Random prompts. The seed of all tokens but the last is ``prefix``; the last ones are always the same."""
    draw, last = random.Random(prefix), random.Random(-1)
    return [
        [*(draw.randrange(10, 128000) for _ in range(length - 1)), last.randrange(10, 128000)] for _ in range(count)
    ]


Tokens = Sequence[Sequence[int]]


def agreement(tokens: Mapping[str, Tokens], again: Mapping[str, Tokens], others: Mapping[str, Tokens]) -> Any:
    """How many prompts get the tokens that another engine gives them, and how many tokens it takes until they differ.

    Args:
        tokens: what each engine gave for each prompt.
        again: the same, once more.
        others: what it gave for the first prompts with another prefix, the same last token.

    Raises:
        RuntimeError: a prompt with another prefix got the same tokens.
    """

    def equal(ours: Tokens, theirs: Tokens) -> int:
        return sum(a == b for a, b in zip(ours, theirs, strict=False))

    def alike(ours: Tokens, theirs: Tokens) -> float:
        """Tokens in front that are equal, in the mean of all prompts."""
        rows = zip(ours, theirs, strict=False)
        heads = [sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))) for a, b in rows]
        return round(sum(heads) / max(len(heads), 1), 1)

    unmoved = {name: equal(tokens[name], others[name]) for name in tokens}
    if any(unmoved.values()):
        raise RuntimeError(f"tokens do not depend on the context, so that a comparison shows nothing: {unmoved}")

    most = max(map(len, others.values()), default=0)
    return {
        "prompts": max(map(len, tokens.values()), default=0),
        "equal": {a: {b: equal(tokens[a], tokens[b]) for b in tokens} for a in tokens},
        "tokens until they differ": {a: {b: alike(tokens[a], tokens[b]) for b in tokens} for a in tokens},
        "equal when run again": {name: equal(tokens[name], again[name]) for name in tokens},
        f"of {most} equal with another prefix, the same last token": unmoved,
    }


def _process(serve: Callable[..., None], name: str, log: Path, options: Any, connection: Connection) -> None:
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    serve(name, options, connection)


class Process:
    """One engine's process, seen from here. Its output goes to a file in ``options.out``.

    Args:
        serve: run there, with name, options and the other end of ``connection``; it answers what is asked.
    """

    patience: float | None = None
    """Seconds to wait for an answer; None: for ever."""

    def __init__(self, serve: Callable[..., None], name: str, options: Any) -> None:
        self.name, self.log = name, options.out / f"{name.replace(':', '-')}.log"
        self.connection, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=_process, args=(serve, name, self.log, options, theirs))
        self.process.start()
        theirs.close()

    def answer(self) -> Any:
        """The next one. Raises RuntimeError, with the end of the log, where the process has ended or takes too long."""
        what = f"has not answered for {self.patience} s"
        try:
            if self.connection.poll(self.patience):
                return self.connection.recv()
        except EOFError:
            what = "ended"
        tail = "\n".join(line[:400] for line in self.log.read_text(errors="replace").splitlines()[-40:])
        raise RuntimeError(f"{self.name} {what}; {self.log} ends with\n{tail}") from None

    def ask(self, *what: Any) -> Any:
        """Send this, and wait for the answer."""
        self.connection.send(what)
        return self.answer()


Seen = TypeVar("Seen", bound=Process)


def each(engines: list[Seen], report: dict[str, Any], call: Callable[[Seen], Any]) -> dict[str, Any]:
    """``call`` for every engine in turn. One that fails is noted in the report, and left out from here on."""
    found = {}
    for engine in list(engines):
        try:
            found[engine.name] = call(engine)
        except (RuntimeError, BrokenPipeError) as error:
            report["engines"].setdefault(engine.name, {})["failed"] = str(error)
            engines.remove(engine)
            engine.process.kill()
            engine.process.join()
            print(error, flush=True)
    return found
