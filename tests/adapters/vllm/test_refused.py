"""What the plugin refuses, before the engine loads anything; and that it changes nothing unless it was asked."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engines

import transformers
from vllm import EngineArgs
from vllm.config import CUDAGraphMode, KVTransferConfig, VllmConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm_engine import engine, save_tiny

from pm_ops.adapters.vllm import connectors, hooks, plugin
from pm_ops.adapters.vllm.config import Settings
from pm_ops.adapters.vllm.plugin import register

SIZES = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SEVERAL = [
    KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "connectors": [{"kv_connector": name, "kv_connector_module_path": module, "kv_role": "kv_both"}]
        },
    )
    for module, (name, _) in connectors.OWN.items()
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.LlamaConfig(**SIZES, intermediate_size=256, max_position_embeddings=512)
    return save_tiny(transformers.LlamaForCausalLM(config), tmp_path_factory.mktemp("llama"))


def configure(model: Path, pm_ops: Any = None, **options: Any) -> VllmConfig:
    """The configuration of an engine, without the engine."""
    additional = {} if pm_ops is None else {"pm_ops": pm_ops}
    args = EngineArgs(str(model), dtype="float32", skip_tokenizer_init=True, additional_config=additional, **options)
    return args.create_engine_config()


def test_an_engine_that_asks_gets_our_worker_and_attention_and_another_stays_stock(model: Path) -> None:
    asked, stock = configure(model, True), configure(model)
    assert asked.parallel_config.worker_cls == "pm_ops.adapters.vllm.worker_cpu.PageMajorCPUWorker"
    assert asked.attention_config.backend is AttentionBackendEnum.CUSTOM
    assert stock.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert stock.attention_config.backend is None and stock.additional_config == {}
    assert asked.compute_hash() != stock.compute_hash(), "compiled code is kept apart"
    assert configure(model, {"layout": "BLHNC"}).compute_hash() != asked.compute_hash()
    same = {configure(model, entry).compute_hash() for entry in ({}, {"layout": "page_major"}, {"impl": "auto"})}
    assert same == {asked.compute_hash()}, "and shared by all that ask for the same"
    assert configure(model, False).parallel_config.worker_cls == stock.parallel_config.worker_cls


def test_the_environment_writes_itself_into_the_configuration(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PM_OPS", '{"layout": "BLNHC"}')
    config = configure(model)
    assert Settings.of(config) == Settings("BLNHC")
    assert config.attention_config.backend is AttentionBackendEnum.CUSTOM
    assert Settings.of(configure(model, {"layout": "BHLNC"})) == Settings("BHLNC")
    assert configure(model, False).attention_config.backend is None, "the configuration has the last word"


def test_loading_the_plugin_again_hooks_nothing_twice() -> None:
    hooked = VllmConfig.__post_init__
    register()
    assert VllmConfig.__post_init__ is hooked
    assert not hasattr(hooked.pm_ops_original, "pm_ops_original")


def test_loading_the_plugin_leaves_backends_and_platform_alone() -> None:
    code = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.config import VllmConfig
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
print(hasattr(VllmConfig.__post_init__, "pm_ops_original"), AttentionBackendEnum.CUSTOM.is_overridden(),
      hasattr(CpuPlatform.get_attn_backend_cls.__func__, "pm_ops_original"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["True False False"], done.stderr


def test_a_torch_that_the_adapter_cannot_be_imported_with_stops_the_engine_that_asked() -> None:
    """vLLM only logs what a plugin raises while it is loaded, and would run without it."""
    code = """
import vllm.config
import torch._dynamo.resume_execution
del torch._dynamo.resume_execution.TORCH_DYNAMO_RESUME_IN_PREFIX
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.config import VllmConfig
print(VllmConfig().attention_config.backend)
VllmConfig(additional_config={"pm_ops": True})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["None"], done.stderr
    assert done.returncode == 1 and "ImportError: cannot import name 'TORCH_DYNAMO_RESUME_IN_PREFIX'" in done.stderr


@pytest.mark.parametrize(
    ("entry", "options", "message"),
    [
        ({"layout": "LBNHC"}, {}, "layout is 'LBNHC'; supported: page_major, BLNHC, BLHNC, BHLNC"),
        ({"impl": "fast"}, {}, "impl is 'fast'; supported: auto, triton, fa3, reference"),
        ({"layouts": "BLNHC"}, {}, "is not understood; it must be true, or an object with any of layout, impl"),
        ("page_major", {}, "is not understood"),
        ({"hybrid_blocks": "small"}, {}, "is for models with attention and state layers"),
        ({"impl": "triton"}, {}, "impl triton needs a GPU, and vLLM runs on the CPU"),
        (True, {"attention_backend": "TORCH_SDPA"}, "attention backend TORCH_SDPA and pm_ops were both asked for"),
        (True, {"worker_cls": "my.Worker"}, "worker_cls is my.Worker"),
        (
            True,
            {"speculative_config": {"method": "custom_class", "model": "my.Drafts", "num_speculative_tokens": 2}},
            "speculative decoding by custom_class is not supported, by ngram and draft_model it is",
        ),
        (
            True,
            {"kv_transfer_config": KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both")},
            "the KV connector OffloadingConnector would read page_major blocks as BLNHC ones",
        ),
        (
            True,
            {"kv_offloading_size": 1.0},
            "the KV connector OffloadingConnector would read page_major blocks as BLNHC ones",
        ),
        *(
            ({"layout": "BLNHC"}, {"kv_transfer_config": several}, f"{name} inside MultiConnector is not supported")
            for several, (name, _) in zip(SEVERAL, connectors.OWN.values(), strict=True)
        ),
    ],
)
def test_a_wrong_setting_says_what_is_supported(model: Path, entry: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        configure(model, entry, **options)


def test_another_layout_in_the_engines_own_variable_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")
    with pytest.raises(ValueError, match="VLLM_KV_CACHE_LAYOUT=BLHNC, but pm_ops was asked for layout page_major"):
        configure(model, True)
    assert configure(model, {"layout": "BLHNC"}).attention_config.backend is AttentionBackendEnum.CUSTOM


def test_the_other_model_runner_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(model, True)
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)
    with pytest.raises(ValueError, match="model runner V2 is not supported; set VLLM_USE_V2_MODEL_RUNNER=0"):
        plugin._choose_worker(config, Settings())


def test_on_a_gpu_either_model_runner_gets_our_worker(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(model)
    monkeypatch.setattr(hooks, "device", lambda: "cuda")
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)
    for generation in (hooks.LAYOUTS, hooks.PACKED):
        monkeypatch.setattr(hooks, "generation", lambda generation=generation: generation)
        config.parallel_config.worker_cls = "vllm.v1.worker.gpu_worker.Worker"
        plugin._choose_worker(config, Settings(impl="triton"))
        assert config.parallel_config.worker_cls == "pm_ops.adapters.vllm.worker_cuda.PageMajorGPUWorker"
    with pytest.raises(ValueError, match="hybrid_blocks=small is not supported on a GPU"):
        plugin._choose_worker(config, Settings(hybrid_blocks="small"))
    monkeypatch.setattr(type(config.cache_config), "calculate_kv_scales", True, raising=False)
    with pytest.raises(ValueError, match="calculate_kv_scales.* are not supported on a GPU"):
        plugin._choose_worker(config, Settings())
    monkeypatch.undo()
    monkeypatch.setattr(hooks, "device", lambda: "cuda")
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
    with pytest.raises(ValueError, match=r"impl reference waits for the GPU, which CUDA graphs \(FULL\) cannot hold"):
        plugin._choose_worker(config, Settings(impl="reference"))
    monkeypatch.setattr(hooks, "device", lambda: "rocm")
    with pytest.raises(RuntimeError, match="vLLM runs on rocm; this adapter supports cpu, cuda"):
        plugin._choose_worker(config, Settings())


def test_without_layouts_only_packed_blocks_are_offered(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "generation", lambda: hooks.PACKED)
    monkeypatch.setattr(hooks, "missing", lambda hooks: [])
    with pytest.raises(ValueError, match="layout BHLNC needs a vLLM that has layouts"):
        configure(model, {"layout": "BHLNC"})
    with pytest.raises(RuntimeError, match="vLLM runs on cpu; this adapter supports cuda"):
        configure(model, True)
    transfer = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both")
    with pytest.raises(ValueError, match="OffloadingConnector expects a tensor a layer"):
        configure(model, {"layout": "BLNHC"}, kv_transfer_config=transfer)


def test_a_worker_that_was_never_chosen_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "check_and_update_config", classmethod(lambda cls, config: None))
    with pytest.raises(ValueError, match="worker_cls is auto, and pm_ops brings a worker of its own"):
        configure(model, True)


@pytest.mark.parametrize(
    ("owner", "name", "message"),
    [
        (
            "vllm.v1.worker.worker_base.WorkerBase",
            "get_supported_kv_cache_layouts",
            "no layouts of a worker .*WorkerBase",
        ),
        ("vllm.v1.worker.cpu_worker", "CPUWorker", "no CPUWorker .*CPUWorker"),
    ],
)
def test_a_hook_that_is_missing_is_named(
    model: Path, monkeypatch: pytest.MonkeyPatch, owner: str, name: str, message: str
) -> None:
    monkeypatch.delattr(f"{owner}.{name}")
    with pytest.raises(RuntimeError, match=f"this vLLM has {message}"):
        configure(model, True)
    assert configure(model).attention_config.backend is None


def test_what_a_connector_needs_is_looked_for_where_it_was_asked_for(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, host = (
        KVTransferConfig(kv_connector=name, kv_connector_module_path=module, kv_role="kv_both")
        for module, (name, _) in connectors.OWN.items()
    )
    configure(model, True, kv_transfer_config=store)
    monkeypatch.delattr("vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorHandshakeMetadata")
    configure(model, True)
    configure(model, True, kv_transfer_config=host)
    with pytest.raises(RuntimeError, match="no talk of workers and scheduler .* Here run: PageHostConnector"):
        configure(model, True, kv_transfer_config=store)


def test_another_device_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "device_type", "tpu", raising=False)
    with pytest.raises((RuntimeError, ValueError), match="tpu"):
        configure(model, True)


def test_latent_attention_is_refused(tmp_path: Path) -> None:
    """The engine gets as far as building the model, whose layers name their needs."""
    config = transformers.DeepseekV2Config(
        **SIZES,
        intermediate_size=256,
        num_key_value_heads=4,
        kv_lora_rank=32,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        first_k_dense_replace=2,
        max_position_embeddings=512,
    )
    folder = save_tiny(transformers.DeepseekV2ForCausalLM(config), tmp_path)
    refusal = pytest.raises(ValueError, match="cannot serve this model's attention: .*MLA not supported")
    with refusal, engine(folder, True, skip_tokenizer_init=True, max_model_len=256):
        pass


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    transformers.BertModel(transformers.BertConfig(**SIZES, intermediate_size=256)).save_pretrained(tmp_path)
    refusal = pytest.raises(ValueError, match="cannot serve this model's attention: .*ENCODER_ONLY not supported")
    with refusal, engine(tmp_path, True, skip_tokenizer_init=True, runner="pooling"):
        pass
