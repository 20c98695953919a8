"""The OpenAI server, as examples/vllm_serve.md starts it: PM_OPS=1, processes of its own, the same tokens."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engines

from vllm_engine import ENVIRONMENT, PROMPTS, TOKENS, engine, generate, smollm2

ASKED = PROMPTS[2::3]
STARTED_WITHIN = 300  # seconds


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, Path]]:
    """(address, log file, folder of the kept pages) of a server that was asked for pm_ops by the environment alone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8", "--enforce-eager"]
    options += ["--kv-cache-memory-bytes", str(1 << 27), "--host", "127.0.0.1", "--port", str(port)]
    folder = tmp_path_factory.mktemp("pages")
    transfer = {
        "kv_connector": "PageStoreConnector",
        "kv_connector_module_path": "pm_ops.adapters.vllm.store_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"folder": str(folder)},
    }
    options += ["--block-size", "16", "--kv-transfer-config", json.dumps(transfer)]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(smollm2()), *options]
    environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PM_OPS": "1"}
    environment["VLLM_SERVER_DEV_MODE"] = "1"  # takes calls of its workers' methods
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        address = f"http://127.0.0.1:{port}"
        until = time.monotonic() + STARTED_WITHIN
        while not answers(f"{address}/health"):
            assert process.poll() is None and time.monotonic() < until, log.read_text()[-4000:]
            time.sleep(0.5)
        yield address, log, folder
    finally:
        process.terminate()
        process.wait(60)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def complete(address: str, prompt: str) -> str:
    body = {"model": str(smollm2()), "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return post(f"{address}/v1/completions", body)["choices"][0]["text"]


def test_completions_equal_those_of_a_stock_engine(server: tuple[str, Path, Path]) -> None:
    address, log, folder = server
    with engine(smollm2()) as llm:
        stock = [output.outputs[0].text for output in generate(llm, ASKED)]
    assert [complete(address, prompt) for prompt in ASKED] == stock
    kept = len(list(folder.glob("*/*.pages.safetensors")))
    assert kept > len(ASKED)
    assert [complete(address, prompt) for prompt in ASKED] == stock, "from the caches"
    assert len(list(folder.glob("*/*.pages.safetensors"))) == kept
    with pytest.raises(urllib.error.HTTPError):
        post(f"{address}/collective_rpc", {"method": "page_pools"})
    assert "a pool cannot leave it; set VLLM_ENABLE_V1_MULTIPROCESSING=0" in log.read_text()
    assert complete(address, ASKED[0]) == stock[0], "what asks for pools in another process does no harm"
    lines = re.findall(r"pm_ops \S+: .*", log.read_text())
    assert len(lines) == 1 and "KV cache page_major, 30 layers in" in lines[0]
