"""The plugin through SGLang's own machinery: entry point, hooks, the configurator that builds the KV cache's pool.

Everything that a release does between its options and its pool is its own code; a model and a GPU alone are stand-ins.
"""

import ast
import collections
import importlib.util
import inspect
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import sglang_engine

pytestmark = pytest.mark.engines
RELEASE = sglang_engine.require()

import torch
import torch._inductor.config as inductor
import transformers
from sglang.srt import plugins, runtime_context
from sglang.srt.arg_groups import speculative_hook
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.models.utils import enable_fused_set_kv_buffer
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, ServerArgs
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_runner import Batch, Runner

from pm_ops.adapters.sglang import hooks, plugin

SIZE = 64
SPEC = (
    "enable_multi_layer_eagle", "speculative_attention_mode", "speculative_draft_attention_backend",
    "speculative_draft_window_size", "speculative_eagle_topk", "speculative_num_draft_tokens",
)  # fmt: skip
KERNELS = ("decode_attention_backend", "prefill_attention_backend")


class Configurator(kv_cache_configurator.KVCacheConfigurator):
    """SGLang's own, for a dense model of two layers, less what measures a GPU."""

    def __init__(self, **given: Any) -> None:
        text = SimpleNamespace(swa_num_key_value_heads=2, architectures=["LlamaForCausalLM"])
        model = SimpleNamespace(
            head_dim=16, v_head_dim=16, kv_lora_rank=16, qk_rope_head_dim=8, hf_config=text, hf_text_config=text,
            get_num_kv_heads=lambda *_: 2, context_len=128, swa_attention_layer_ids=[0], full_attention_layer_ids=[1],
        )  # fmt: skip
        layers = SimpleNamespace(
            num_effective_layers=2, start_layer=0, end_layer=1, swa_attention_layer_ids=[0],
            full_attention_layer_ids=[1],
        )  # fmt: skip
        args = runtime_context.get_context().server_args
        fields = dict(
            device="cpu", gpu_id=0, model_config=model, server_args=args, kv_cache_dtype=torch.bfloat16,
            model_dtype=torch.bfloat16, page_size=4, is_draft_worker=False, post_capture_kv_active=False,
            is_hybrid_swa=False, is_hybrid_swa_compress=False, use_mla_backend=False, layer_info=layers,
            req_to_token_pool=None, token_to_kv_pool_allocator=None, mambaish_config=None, kv_shard_rank=None,
            draft_swa_full_capacity=False, kv_cache_dtype_str="auto", memory_pool_config=None,
            spec_algorithm=SimpleNamespace(is_none=lambda: True), is_inkling_mtp_draft=False,
        )  # fmt: skip
        for name, value in {**fields, **given}.items():
            setattr(self, name, value)

    def _resolve_memory_pool_config(self, *_: Any) -> None:
        return None

    def _derive_pool_sizes(self, config: Any) -> Any:
        most = {f"{kind}max_total_num_tokens": SIZE for kind in ("", "full_", "swa_")}
        return SimpleNamespace(**most, max_running_requests=4)

    def _init_pools(self, *, sizes: Any, **_: Any) -> Any:
        requests = SimpleNamespace(req_to_token=torch.zeros(4, 8))
        build = {"sizes": sizes, "is_dsa_model": False, "is_dsv4_model": False, "req_to_token_pool": requests}
        pool = self._build_token_to_kv_pool(**build)
        none = dict.fromkeys(("req_to_token_pool", "token_to_kv_pool_allocator", "unified_memory_pool"))
        return SimpleNamespace(token_to_kv_pool=pool, **none)


@pytest.fixture(scope="module")
def publish(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Loads the plugins, with PM_OPS=1, then makes options those of this process, as SGLang's processes do."""
    folder = tmp_path_factory.mktemp("llama")
    sizes = dict(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    transformers.LlamaConfig(**sizes, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PM_OPS", "1")
        patch.setattr(plugins, "_plugins_loaded", False)
        plugins.load_plugins()

    def publish(page_size: int = 4, backend: str = "triton", **flags: Any) -> None:
        args = ServerArgs(
            model_path=str(folder),
            device="cpu",
            skip_tokenizer_init=True,
            page_size=page_size,
            attention_backend=backend,
        )
        runtime_context.get_context().set_server_args(args)
        bags = {
            "disaggregation_mode": runtime_context.get_disagg,
            "kv_canary": runtime_context.get_observability,
            **dict.fromkeys(SPEC, runtime_context.get_spec),
            **dict.fromkeys(KERNELS, lambda: runtime_context.get_exec().kernel),
            "enable_torch_compile": lambda: runtime_context.get_exec().graph,
        }
        for name, value in flags.items():  # SGLang refuses some of them itself on a CPU
            bags.get(name, runtime_context.get_memory)()._set(name, value)

    publish.folder = folder  # type: ignore[attr-defined]
    return publish


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PM_OPS", "1")
    alone = SimpleNamespace(attn_tp_size=1, attn_dcp_size=1)  # instead of process groups of one
    monkeypatch.setattr(kv_cache_configurator, "get_parallel", lambda: alone)


def build(**given: Any) -> Any:
    """The pool of SGLang's KVCacheConfigurator.configure."""
    return Configurator(**given).configure(pre_model_load_memory=0).token_to_kv_pool


def test_nothing_is_installed_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "0", "false"):
        monkeypatch.setenv("PM_OPS", value)
        before = {target: list(found) for target, found in HookRegistry._hooks.items()}
        plugin.register()
        assert dict(HookRegistry._hooks) == before


def test_the_entry_point_is_the_plugin_and_its_hooks_are_in_place(publish: Any) -> None:
    found = plugins.load_plugins_by_group(plugins.GENERAL_PLUGINS_GROUP)
    assert found["pm_ops"][0] is plugin.register
    assert hooks.missing() == []
    expected = [hooks.RESOLVE] if RELEASE == "0.5.23" else [*hooks.BUILD, hooks.BUILD_LATENT]
    assert hooks.pool_hooks() == expected
    targets = {f"{hooks.CONFIGURATOR}.{name}" for name in (*expected, "configure")} | {hooks.FUSED, hooks.TREES}
    targets |= {f"{hooks.DRAFTS}.{name}" for name in ("create_decode_backend", "create_draft_extend_backend")}
    assert targets == set(hooks.targets()) <= HookRegistry._patched
    assert "pm_ops" in ATTENTION_BACKENDS and "pm_ops" in ATTENTION_BACKEND_CHOICES
    assert enable_fused_set_kv_buffer(None) is False


@pytest.mark.parametrize("layout", ["token_major", "page_major"])
def test_a_dense_model_gets_our_pool(layout: str, publish: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PM_OPS", f'{{"layout": "{layout}"}}')
    publish(backend="pm_ops")
    pool = build()
    assert type(pool).__name__ == "PageMajorKVPool" and pool.page_pool.layout.name == layout
    assert (pool.page_pool.num_pages, pool.page_pool.page_size) == (SIZE // 4 + 1, 4)


def test_an_fp8_cache_is_one_of_ours(publish: Any) -> None:
    publish()
    pool = build(kv_cache_dtype=torch.float8_e4m3fn, kv_cache_dtype_str="fp8_e4m3")
    assert pool.page_pool.plane(0, "key").dtype == torch.float8_e4m3fn and pool.k_buffer[0].dtype == torch.uint8


def test_sliding_windows_get_two_of_ours_and_page_major_of_one_slot_is_read_by_any(
    publish: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish()
    pool = build(is_hybrid_swa=True)
    assert {type(part).__name__ for part in (pool.full_kv_pool, pool.swa_kv_pool)} == {"PageMajorKVPool"}
    monkeypatch.setenv("PM_OPS", '{"layout": "page_major"}')
    publish(page_size=1)
    assert build(page_size=1).k_buffer[0].dim() == 3


@pytest.mark.parametrize(
    ("given", "flags", "says"),
    [
        ({"device": "npu:0"}, {}, "SGLang runs on npu; cuda and cpu are supported"),
        ({"post_capture_kv_active": True}, {}, "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING .* unset it"),
        ({"use_mla_backend": True, "mambaish_config": object()}, {}, r"\(MLA\) beside state layers is not supported"),
        ({"use_mla_backend": True, "kv_cache_dtype": torch.uint8}, {}, "with a cache of torch.uint8 is not supported"),
        ({"use_mla_backend": True}, {"backend": "torch_native"}, "torch_native cannot read .* triton or pm_ops$"),
        ({}, {"backend": "flex_attention"}, "flex_attention cannot read pages of layout token_major; choose"),
        ({}, {"enable_page_major_kv_layout": True}, "--enable-page-major-kv-layout is not supported: pm_ops brings"),
        ({}, {"enable_unified_memory": True}, "--enable-unified-memory is not supported"),
        ({}, {"enable_hierarchical_cache": True}, "--enable-hierarchical-cache is not supported"),
        ({}, {"enable_flexkv": True}, "--enable-flexkv is not supported: it reads one dense"),
        ({}, {"radix_cache_backend": "other"}, "--radix-cache-backend is not supported: a prefix cache"),
        ({}, {"kv_canary": "check"}, "--kv-canary is not supported"),
        ({}, {"speculative_draft_attention_backend": "fa4"}, "speculative_draft_attention_backend fa4 cannot read"),
        (
            {},
            {"backend": "pm_ops", "enable_multi_layer_eagle": True},
            "--enable-multi-layer-eagle; leave it",
        ),
        (
            {},
            {"speculative_draft_attention_backend": "pm_ops", "speculative_draft_window_size": 9},
            "--speculative-draft",
        ),
        ({}, {"disaggregation_mode": "prefill"}, "leave --disaggregation-mode out"),
    ],
)
def test_what_it_cannot_do_stops_the_engine_before_memory_is_taken(
    given: dict[str, Any], flags: dict[str, Any], says: str, publish: Any
) -> None:
    publish(**flags)
    with pytest.raises(ValueError, match=says):
        build(**given)


@pytest.mark.parametrize("compiled", [False, True])
def test_fuse_rope_is_for_what_sglang_compiles(
    compiled: bool, publish: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PM_OPS", '{"fuse_rope": true}')
    publish(backend="pm_ops", enable_torch_compile=compiled)
    with inductor.patch(post_grad_custom_pre_pass=None), caplog.at_level("WARNING"):
        build()
        assert (inductor.post_grad_custom_pre_pass is not None) == compiled
    assert ("fuse_rope does nothing" in caplog.text) == (not compiled)


def test_contexts_split_over_ranks_and_rocm_are_refused(publish: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(backend="pm_ops")
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: SimpleNamespace(dcp_size=2))
    with pytest.raises(ValueError, match="does not work with --dcp-size: it attends over a whole sequence"):
        build()
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(ValueError, match="SGLang runs on cuda, by ROCm; cuda and cpu are supported"):
        build(device="cuda")


@pytest.mark.parametrize(
    ("layout", "page_size", "backend"),
    [("token_major", 4, "triton"), ("page_major", 1, "triton"), ("token_major", 4, "pm_ops")],
)
def test_latents_get_a_pool_of_ours(
    layout: str, page_size: int, backend: str, publish: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PM_OPS", f'{{"layout": "{layout}"}}')
    publish(page_size=page_size, backend=backend)
    pool = build(use_mla_backend=True, page_size=page_size)
    assert type(pool).__name__ == "PageMajorMLAPool" and pool.pm_ops_layout == layout
    assert pool.kv_buffer[0].shape == (SIZE + page_size, 1, 24)
    stock = kv_cache_configurator.MLATokenToKVPool
    assert isinstance(pool, stock) and not hasattr(stock, "pm_ops_layout"), "the module has its own class again"


def test_latents_that_are_not_supported_are_refused(publish: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    publish()
    config = SimpleNamespace(architectures=["DeepseekV32ForCausalLM"], index_topk=64)
    configurator = Configurator(use_mla_backend=True)
    configurator.model_config = SimpleNamespace(**{**vars(configurator.model_config), "hf_config": config})
    with pytest.raises(ValueError, match=r"with an indexer \(DSA\) is not supported; its keys have a pool"):
        configurator.configure(pre_model_load_memory=0)
    monkeypatch.setenv("PM_OPS", "1")
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: SimpleNamespace(dcp_size=2))
    with pytest.raises(ValueError, match="split over ranks is not supported; leave --dcp-size out"):
        build(use_mla_backend=True)


@pytest.mark.parametrize(
    ("target", "draft", "is_draft", "refused"),
    [
        ("pm_ops", None, False, True),
        ("pm_ops", None, True, True),
        ("pm_ops", "triton", True, False),
        ("triton", "pm_ops", True, True),
        ("triton", "pm_ops", False, False),
        ("triton", None, False, False),
    ],
)
def test_what_our_attention_lacks_over_latents_is_refused_where_it_is_theirs(
    target: str, draft: str | None, is_draft: bool, refused: bool, publish: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before memory is taken, and of a draft model by its own backend. A chain of drafts is served."""

    def made(algorithm: Any = SpeculativeAlgorithm.NONE, topk: int = 1) -> Any:
        publish(backend=target, speculative_draft_attention_backend=draft, speculative_eagle_topk=topk)
        given = {"is_draft_worker": is_draft, "spec_algorithm": algorithm, "memory_pool_config": SimpleNamespace()}
        return build(use_mla_backend=True, **given)

    assert type(made(SpeculativeAlgorithm.EAGLE)).__name__ == "PageMajorMLAPool"
    monkeypatch.setattr(Configurator, "_init_pools", lambda *_, **__: pytest.fail("pools are made"))
    outcome = (ValueError, "no latent attention .*{}; leave") if refused else (pytest.fail.Exception, "pools are made")
    for given in ((SpeculativeAlgorithm.EAGLE, 2), (SpeculativeAlgorithm.NGRAM, 1)):
        with pytest.raises(outcome[0], match=outcome[1].format(r"of trees of drafts \(NGRAM, .* more than 1\)")):
            made(*given)
    monkeypatch.setenv("PM_OPS", '{"impl": "fa3"}')
    with pytest.raises(outcome[0], match=outcome[1].format("by impl fa3")):
        made()


@pytest.mark.parametrize("latent", [False, True])
def test_page_major_needs_our_attention(latent: bool, publish: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PM_OPS", '{"layout": "page_major"}')
    publish(backend="triton")
    with pytest.raises(ValueError, match="choose --attention-backend pm_ops, or layout token_major"):
        build(use_mla_backend=latent)
    publish(backend="pm_ops")
    pool = build(use_mla_backend=latent)
    assert pool.pm_ops_layout == "page_major" and pool.page_pool.page_size == 4


@pytest.mark.parametrize(
    ("flags", "steps", "rows"),
    [
        ({"backend": "pm_ops"}, True, True),
        ({"backend": "pm_ops", "speculative_draft_attention_backend": "torch_native"}, False, False),
        ({"speculative_draft_attention_backend": "pm_ops"}, True, True),
        ({"decode_attention_backend": "pm_ops"}, True, False),
        ({"decode_attention_backend": "pm_ops", "speculative_attention_mode": "decode"}, True, True),
        ({"prefill_attention_backend": "pm_ops"}, False, True),
    ],
)
def test_draft_models_are_served_where_they_are_given_to_it(
    flags: dict[str, Any], steps: bool, rows: bool, publish: Any
) -> None:
    """By SGLang's own factory, whose lists do not know us: what is not for us is refused there, as it was."""
    publish(**{"backend": "torch_native", **flags}, speculative_num_draft_tokens=6)
    runner = Runner("token_major", torch.float32, Batch([3], [1]), spec=SpeculativeAlgorithm.EAGLE)
    runner.is_draft_worker, runner.model_config = True, SimpleNamespace(hf_config=None)
    runner.draft_attention_backend = runtime_context.get_spec().speculative_draft_attention_backend
    given = {"draft_model_runner": runner, "topk": 2, "speculative_num_steps": 3}
    if RELEASE == "0.5.17":  # it takes names from the options; later ones, from the runner and the process
        kernel = runtime_context.get_exec().kernel
        names = {name: getattr(kernel, name) for name in (*KERNELS, "attention_backend")}
        draft = runner.draft_attention_backend
        given["server_args"] = SimpleNamespace(**names, speculative_draft_attention_backend=draft)
    factory = DraftBackendFactory(**given)
    for ours, create in ((steps, factory.create_decode_backend), (rows, factory.create_draft_extend_backend)):
        if not ours:
            with pytest.raises(ValueError, match="EAGLE is not supported in .*attention backend torch_native"):
                create()
            continue
        made = create()
        assert type(made).__module__.startswith("pm_ops") and made.decode_attention_backend_str == "pm_ops"
    if steps:
        assert len(factory.create_decode_backend().attn_backends) == 2
        factory.speculative_num_steps = 1
        assert factory.create_decode_backend() is None
        windowed = Runner("token_major", torch.float32, Batch([3], [1]), windowed=True, spec=runner.spec_algorithm)
        factory.draft_model_runner = SimpleNamespace(**{**vars(runner), **vars(windowed), "is_draft_worker": True})
        assert factory.create_decode_backend() is None
        assert not rows or factory.create_draft_extend_backend().windowed


def test_graphs_are_captured_of_the_rows_of_our_backend(
    publish: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By SGLang's own list and question, out of a module that imports its whole scheduler."""
    spec = importlib.util.find_spec(hooks.ROWS)
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin)
    listed = ("graph_supported_backend_types", "graph_supported_backend")
    lines = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in listed
    ]
    assert len(lines) == 2 and path.read_text().count("TritonAttnBackend") == 2  # its import, and its place in the list
    module = ModuleType(hooks.ROWS)
    stock = module.TritonAttnBackend = type("TritonAttnBackend", (), {})  # type: ignore[attr-defined]

    def captured(rows: Any) -> bool:
        names: Any = collections.defaultdict(lambda: type("Other", (), {}))
        names |= {"self": SimpleNamespace(draft_extend_attn_backend=rows), "isinstance": isinstance, "tuple": tuple}
        names["TritonAttnBackend"] = module.TritonAttnBackend
        exec("\n".join(lines), {}, names)
        return bool(names["graph_supported_backend"])

    publish(backend="pm_ops", speculative_num_draft_tokens=6)
    runner = Runner("page_major", torch.float32, Batch([3], [1]), spec=SpeculativeAlgorithm.EAGLE)
    runner.is_draft_worker = True
    factory = SimpleNamespace(draft_attn_backend=None, draft_model_runner=runner)
    ours = plugin._draft_rows(None, factory)  # where no such worker is
    monkeypatch.setitem(sys.modules, hooks.ROWS, module)
    assert captured(stock()) and not captured(ours)
    for _ in range(2):
        ours = plugin._draft_rows(None, factory)
        assert captured(stock()) and captured(ours) and not captured(object())
        assert "run without CUDA graphs" not in caplog.text
    del module.TritonAttnBackend  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING):
        plugin._draft_rows(None, factory)
    assert "run without CUDA graphs" in caplog.text


def test_trees_on_pages_are_drafted_by_our_backend(publish: Any) -> None:
    """SGLang refuses them for all but three of its own; that is its last check, so that none is left out."""
    original = inspect.unwrap(speculative_hook._handle_eagle_family)
    last = ast.parse(inspect.getsource(original)).body[0].body[-1]  # type: ignore[attr-defined]
    assert isinstance(last, ast.If) and isinstance(last.body[-1], ast.Raise) and not last.orelse
    tree = {
        "speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(publish.folder),
        "speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6, "page_size": 16,
    }  # fmt: skip
    options = {"model_path": str(publish.folder), "device": "cpu", "skip_tokenizer_init": True, **tree}

    def resolved(backend: str) -> ServerArgs:
        args = ServerArgs(**options, attention_backend=backend)
        getattr(args, "resolve_once", lambda: None)()  # before 0.5.23 this is done when they are made
        return args

    args = resolved("pm_ops")
    assert (args.attention_backend, args.speculative_eagle_topk) == ("pm_ops", 2)
    with pytest.raises(ValueError, match="topk > 1 with page_size > 1 is only supported"):
        resolved("torch_native")
    with pytest.raises(ValueError, match="topk > 1 with page_size > 1 is only supported"):
        original(args)


@pytest.mark.parametrize("value", ["yes", '{"layout": "BLNHC"}', '{"colour": 1}'])
def test_settings_that_are_not_understood_end_the_process(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang logs an Exception of a plugin and runs on; this is none."""
    monkeypatch.setenv("PM_OPS", value)
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    with pytest.raises(SystemExit, match="not understood|layout is 'BLNHC'; supported: token_major, page_major"):
        plugins.load_plugins()


def test_a_release_without_the_hooks_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hooks.NEEDED, "KvBufferDesc", "sglang.srt.mem_cache.memory_pool:Gone")
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    with pytest.raises(SystemExit, match="no KvBufferDesc .*memory_pool.Gone.*install one of them"):
        plugins.load_plugins()


def test_whatever_fails_in_it_ends_the_process_with_the_cause(
    publish: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Of an Exception SGLang would make a line of its log, and run on without us."""
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    (tmp_path / "broken_build.py").write_text("raise OSError('libother.so.1: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    with monkeypatch.context() as patch:
        patch.setitem(hooks.NEEDED, "KvBufferDesc", "broken_build:KvBufferDesc")
        with pytest.raises(SystemExit, match="no KvBufferDesc .*: OSError: libother.so.1: cannot open"):
            plugins.load_plugins()

    def conflict(*_: Any) -> None:
        raise KeyError("a conflict")

    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    monkeypatch.setattr(HookRegistry, "register", conflict)
    with pytest.raises(SystemExit, match="cannot be installed into this SGLang: KeyError: 'a conflict'.*run without"):
        plugins.load_plugins()


@pytest.mark.parametrize("lost", ["configure", "enable_fused_set_kv_buffer", "pool"])
def test_a_hook_that_sglang_could_not_apply_stops_the_engine(
    lost: str, publish: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish()
    lost = hooks.pool_hooks()[0] if lost == "pool" else lost
    target = next(target for target in hooks.targets() if target.endswith(lost))
    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {target})
    if lost == "configure":  # as it would be: SGLang's own method
        monkeypatch.setattr(Configurator, "configure", Configurator.configure.__wrapped__)
    with pytest.raises(RuntimeError, match=f"SGLang could not hook {target}; its log says why"):
        build()


def test_an_engine_that_applies_none_of_the_hooks_is_stopped_when_it_loads_plugins(
    publish: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish()
    monkeypatch.setattr(HookRegistry, "_patched", set())

    def moved(target: str, hooks: Any) -> None:
        raise AttributeError(target)

    monkeypatch.setattr(HookRegistry, "_apply_target", moved)
    with pytest.raises(RuntimeError, match=f"SGLang could not hook {', '.join(hooks.targets())}; its log says why"):
        HookRegistry.apply_hooks()


def test_a_pool_that_is_not_ours_stops_the_engine(publish: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as where a hook did not take effect: SGLang logs that, and goes on."""
    publish()
    monkeypatch.setattr(plugin, "_ours", lambda chosen: chosen)
    with pytest.raises(RuntimeError, match="built a MHATokenToKVPool for this model's KV cache, which pm_ops does not"):
        build()


def test_a_variable_that_is_gone_when_the_pool_is_built_stops_the_engine(
    publish: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish()
    monkeypatch.delenv("PM_OPS")
    with pytest.raises(RuntimeError, match="was set when the plugin was loaded, and is no more"):
        build()
