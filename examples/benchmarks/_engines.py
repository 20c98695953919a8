"""What the benchmarks of vLLM share: a model with random weights, and engines in processes of their own."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def model_folder(name: str, **sizes: Any) -> str:
    """A folder with the configuration of a Llama of these sizes, and nothing else."""
    folder = Path(tempfile.gettempdir()) / name
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    file = folder / f"config.{os.getpid()}"
    file.write_text(json.dumps(config))
    file.replace(folder / "config.json")  # the engines all do so
    return str(folder)


def real_weights() -> None:
    """vLLM's dummy loader draws norms and weights alike from ±1e-3, and the last token alone decides then."""
    import torch
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    stock = DummyModelLoader.load_weights

    def load_weights(self: Any, model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        stock(self, model, *args, **kwargs)
        for i, (name, weight) in enumerate(model.named_parameters()):
            generator = torch.Generator(device=weight.device).manual_seed(1234 + i)
            weight.data.fill_(1.0) if "norm" in name else weight.data.normal_(0, 0.02, generator=generator)

    DummyModelLoader.load_weights = load_weights


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

    def __init__(self, serve: Callable[..., None], name: str, options: Any) -> None:
        self.name, self.log = name, options.out / f"{name.replace(':', '-')}.log"
        self.connection, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=_process, args=(serve, name, self.log, options, theirs))
        self.process.start()
        theirs.close()

    def answer(self) -> Any:
        """The next one. Raises RuntimeError, with the end of the log, where the process has ended."""
        try:
            return self.connection.recv()
        except EOFError:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])
            raise RuntimeError(f"{self.name} ended; {self.log} ends with\n{tail}") from None

    def ask(self, *what: Any) -> Any:
        """Send this, and wait for the answer."""
        self.connection.send(what)
        return self.answer()
