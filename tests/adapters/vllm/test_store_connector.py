"""Prefixes in files: another engine finds them, and what cannot be read is computed. Tokens are always stock's."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engines

import torch
from vllm import EngineArgs, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm_engine import FRESH, FULL, PREFIXES, engine, generate, metric, tokens

from pm_ops import PageStore
from pm_ops.adapters.vllm.store_connector import PageStoreConnector, Prompt


def transfer(options: dict[str, Any], role: Any = "kv_both") -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="PageStoreConnector",
        kv_connector_module_path="pm_ops.adapters.vllm.store_connector",
        kv_role=role,
        kv_connector_extra_config=options,
    )


def storing(model: Path, folder: Path, pm_ops: Any = True, options: dict[str, Any] | None = None, **more: Any) -> Any:
    config = transfer({"folder": str(folder)} if options is None else options)
    return engine(model, pm_ops, skip_tokenizer_init=True, block_size=16, kv_transfer_config=config, **more)


def run(model: Path, folder: Path, **options: Any) -> tuple[list[list[int]], list[int]]:
    """(tokens, how many tokens of each prompt a new engine found)."""
    with storing(model, folder, **options) as llm:
        outputs = generate(llm, PREFIXES)
    return tokens(outputs), [output.num_cached_tokens for output in outputs]


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.pages.safetensors"))


def test_another_engine_finds_every_full_block_of_a_prompt(model: Path, stock: list[list[int]], tmp_path: Path) -> None:
    assert run(model, tmp_path) == (stock, FRESH)
    kept = len(entries(tmp_path))
    assert kept == sum((len(prompt) + 47) // 16 for prompt in PREFIXES) - 3, "every block that was filled, answers too"
    assert run(model, tmp_path) == (stock, FULL)
    assert len(entries(tmp_path)) == kept
    assert run(model, tmp_path, pm_ops={"layout": "BLHNC"}) == (stock, FRESH), "another layout has its own folder"
    assert len({path.parent for path in entries(tmp_path)}) == 2


def damage(path: Path) -> None:
    """Change one byte of a page."""
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)


def test_what_cannot_be_read_or_written_is_computed_and_nothing_wrong_is_kept(
    model: Path, stock: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine, and a store after the other."""
    asked, expected = PREFIXES[5:], stock[5:]
    request = SimpleNamespace(cache_salt=None, all_token_ids=asked[0])
    prefix = [f"{Prompt(request, 16, '').key(block)}.pages.safetensors" for block in range(3)]
    with storing(model, tmp_path / "first") as llm:
        scheduler, worker = llm.llm_engine.engine_core.engine_core.scheduler.connector, get_kv_transfer_group()

        def use(name: str, *entries: Path) -> Path:
            """Empty the engine's own cache, and give it a store with copies of these entries."""
            scheduler.store = worker.store = PageStore(tmp_path / name, 1 << 30, model=scheduler.store.model)
            for path in entries:
                shutil.copy(path, tmp_path / name / path.name)
            assert llm.reset_prefix_cache()
            return tmp_path / name

        def ask() -> list[int]:
            outputs = generate(llm, asked)
            assert tokens(outputs) == expected
            return [output.num_cached_tokens for output in outputs]

        def content(folder: Path) -> dict[str, bytes]:
            return {path.name: path.read_bytes() for path in folder.glob("*.pages.safetensors")}

        good = use("good")
        assert ask() == [0, 48], "the second finds the first's blocks in the engine's cache"
        whole, paths = content(good), list(good.glob("*.pages.safetensors"))
        use("good")
        assert ask() == [96, 96] and content(good) == whole

        # Both requests begin with the damaged blocks, in one step: everything is computed as in the first run.
        shared = use("shared", *(good / name for name in prefix))
        for name in prefix:
            damage(shared / name)
        damaged = content(shared)
        assert ask() == [0, 48]
        after = content(shared)
        assert set(after) == set(whole) and after[prefix[0]] == whole[prefix[0]]
        assert all(after[name] in (whole[name], damaged.get(name)) for name in after), "no wrong block under a digest"
        for _ in range(3):
            use("shared")
            ask()
        assert ask() == [96, 96]

        cut = use("cut", *paths)
        for path in cut.glob("*.pages.safetensors"):  # those that are only written to, too
            path.write_bytes(path.read_bytes()[:20])
        for _ in range(2):
            use("cut")
            ask()
        use("cut")
        assert ask() == [96, 96] and set(content(cut)) == set(whole)

        evicted = use("evicted", *paths)
        read = PageStore.get
        with monkeypatch.context() as patch:  # whatever was found goes before the step
            get = lambda store, key, *to, used: (read(store, key, *to, used=used), store.discard(key))[0]  # noqa: E731
            patch.setattr(PageStore, "get", get)
            assert ask() == [96, 96]
        again = content(evicted)
        assert all(again[name] == whole[name] for name in prefix), "and is written again"

        full = use("full")
        with monkeypatch.context() as patch:
            patch.setattr("pm_ops.page_store.publish", no_space)
            assert ask() == [0, 48] and content(full) == {}


def no_space(*args: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_cache_that_is_too_small_for_all_reads_its_own_blocks_back(
    model: Path, stock: list[list[int]], tmp_path: Path
) -> None:
    with storing(
        model,
        tmp_path,
        num_gpu_blocks_override=16,
        max_model_len=240,
        max_num_batched_tokens=32,
        disable_log_stats=False,
    ) as llm:
        assert tokens(generate(llm, PREFIXES)) == stock
        preempted = metric(llm, "num_preemptions")
        assert preempted > 0
        outputs = generate(llm, PREFIXES)
        assert tokens(outputs) == stock
        assert [output.num_cached_tokens for output in outputs] == FULL


def test_a_store_that_is_too_small_keeps_the_beginning_of_a_prompt(model: Path, tmp_path: Path) -> None:
    """The prompt has 8 full blocks, its answer fills two more, and the store takes 7."""
    prompt = [(7 * i) % 97 for i in range(8 * 16 + 1)]
    with storing(model, tmp_path, options={"folder": str(tmp_path), "max_bytes": 15 * (4096 + 32768) // 2}) as llm:
        scheduler, found, answers = llm.llm_engine.engine_core.engine_core.scheduler.connector, [], []
        for _ in range(4):
            (output,) = generate(llm, [prompt])
            found.append(output.num_cached_tokens // 16)
            answers.append(tokens([output]))
            assert llm.reset_prefix_cache()
        assert found[0] == 0 and min(found[1:]) >= 6 and answers[1:] == answers[:-1]

        generate(llm, [prompt])
        keys = [Prompt(SimpleNamespace(cache_salt=None, all_token_ids=prompt), 16, "").key(i) for i in range(8)]
        scheduler.store.discard(keys[0])
        generate(llm, [prompt])  # the engine finds them all by itself
        assert all(key in scheduler.store for key in keys[:6])


def test_requests_that_are_aborted_leave_nothing_behind_and_whole_blocks_only(
    model: Path, stock: list[list[int]], tmp_path: Path
) -> None:
    with storing(model, tmp_path, max_num_batched_tokens=32) as llm:
        core = llm.llm_engine
        for name, prompt in zip("abcde", PREFIXES[:5], strict=True):
            core.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=48))
        for _ in range(4):  # the longest prompts are half read, or waiting
            core.step()
        core.abort_request(list("abcde"))
        assert tokens(generate(llm, PREFIXES)) == stock
        core.step()
        assert core.engine_core.engine_core.scheduler.connector.tracked == {}
    assert run(model, tmp_path) == (stock, FULL)


@pytest.mark.parametrize(
    ("pm_ops", "options", "message"),
    [
        (None, {"folder": "pages"}, "pm_ops was not asked for"),
        (True, {}, "it needs a folder, and may have max_bytes, model"),
        (True, {"folder": "pages", "size": 1}, "it needs a folder, and may have max_bytes, model"),
        (True, {"folder": "pages", "max_bytes": 20000}, "one block of 16 tokens is 32768 bytes; raise max_bytes"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pm_ops: Any, options: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message), storing(model, tmp_path, pm_ops, options):
        pass


def connector(
    model: Path, folder: Path, spec: Any = None, size: Any = 1 << 30, role: str = "kv_both", **options: Any
) -> PageStoreConnector:
    """The scheduler's side, without an engine."""
    config = EngineArgs(
        str(model),
        dtype="float32",
        skip_tokenizer_init=True,
        additional_config={"pm_ops": True},
        kv_transfer_config=transfer({"folder": str(folder), "max_bytes": size}, role),
        **options,
    ).create_engine_config()
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32) if spec is None else spec
    groups, tensors = [SimpleNamespace(kv_cache_spec=spec)], [SimpleNamespace(block_stride=32768)]
    cache = SimpleNamespace(num_blocks=4, kv_cache_groups=groups, kv_cache_tensors=tensors)
    return PageStoreConnector(config, KVConnectorRole.SCHEDULER, cache)


def test_sizes_that_are_no_numbers_and_other_roles_are_refused(model: Path, tmp_path: Path) -> None:
    for size in ("many", None):
        with pytest.raises(ValueError, match=f"max_bytes is {size!r}; it must be a number of bytes"):
            connector(model, tmp_path, size=size)
    for role in ("kv_producer", "kv_consumer"):
        with pytest.raises(ValueError, match=f"writes and reads; kv_role is {role}, set it to kv_both"):
            connector(model, tmp_path, role=role)


def test_the_folder_may_be_in_the_users_home(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell looks into the JSON, and so ~ would be a folder's name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert connector(model, Path("~/pages")).store.folder.parent == tmp_path / "pages"


def test_whatever_changes_keys_or_values_has_a_folder_of_its_own(model: Path, tmp_path: Path) -> None:
    weights, draft = tmp_path / "weights", tmp_path / "draft"
    for copy in (weights, draft):
        shutil.copytree(model, copy)

    def folder(**options: Any) -> str:
        return connector(weights, tmp_path / "pages", **options).store.folder.name

    plain = folder()
    assert folder() == plain == folder(enforce_eager=True, gpu_memory_utilization=0.5)
    others = [
        folder(hf_overrides={"rope_parameters": {"rope_theta": 777.0, "rope_type": "default"}}),
        folder(hf_overrides={"rms_norm_eps": 0.5}),
        folder(load_format="dummy"),
        folder(load_format="dummy", seed=5),
        folder(kv_cache_dtype="fp8"),
    ]
    drafts = {"num_speculative_tokens": 2, "prompt_lookup_max": 2}
    assert folder(speculative_config={"method": "ngram", **drafts}) == plain, "which keeps nothing"
    drafting = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    others.append(folder(speculative_config=dict(drafting)))
    (file,) = draft.glob("*.safetensors")
    os.utime(file, (0, 0))
    others.append(folder(speculative_config=dict(drafting)))
    (file,) = weights.glob("*.safetensors")
    os.utime(file, (0, 0))
    others.append(folder())
    assert len({plain, *others}) == 9


def test_requests_that_their_tokens_do_not_tell_are_left_alone(model: Path, tmp_path: Path) -> None:
    plain = {"mm_features": [], "prompt_embeds": None, "lora_request": None, "resumable": False}
    ours = connector(model, tmp_path)
    for change in ({"mm_features": [1]}, {"prompt_embeds": 1}, {"lora_request": 1}, {"resumable": True}):
        assert ours.get_num_new_matched_tokens(SimpleNamespace(**{**plain, **change}), 0) == (0, False)
    assert ours.tracked == {}


def test_a_request_that_must_not_find_a_prefix_is_not_looked_up_and_kept(model: Path, tmp_path: Path) -> None:
    """Such as one whose prompt's log probabilities are asked for; vLLM 0.26 takes whatever a connector finds."""
    plain = {"mm_features": [], "prompt_embeds": None, "lora_request": None, "resumable": False, "cache_salt": None}
    ours = connector(model, tmp_path)
    request = SimpleNamespace(**plain, request_id="a", num_tokens=40, skip_reading_prefix_cache=True)
    assert ours.get_num_new_matched_tokens(request, 0) == (0, False)
    assert list(ours.tracked) == ["a"]


def test_after_a_reset_nothing_is_found_that_was_kept_before_it(
    model: Path, stock: list[list[int]], tmp_path: Path
) -> None:
    """Nor what was being computed then: other weights may have been loaded. Other engines still find their files."""
    with storing(model, tmp_path, enable_prefix_caching=False) as llm:
        assert tokens(generate(llm, PREFIXES)) == stock
        kept = entries(tmp_path)
        ours = llm.llm_engine.engine_core.engine_core.scheduler.connector
        llm.llm_engine.add_request("running", {"prompt_token_ids": PREFIXES[3]}, SamplingParams(max_tokens=40))
        llm.llm_engine.step()
        assert llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        assert ours.tracked == {}
        llm.llm_engine.abort_request(["running"])
        outputs = generate(llm, PREFIXES)
        assert tokens(outputs) == stock and not any(output.num_cached_tokens for output in outputs[:5])
        assert set(kept) < set(entries(tmp_path))
        outputs = generate(llm, PREFIXES)
        assert tokens(outputs) == stock and [output.num_cached_tokens for output in outputs] == FULL
    assert run(model, tmp_path) == (stock, FULL)


def test_layers_that_drop_or_overwrite_blocks_are_refused(model: Path, tmp_path: Path) -> None:
    window = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=32)
    with pytest.raises(
        ValueError, match="full attention, in one cache group; the groups of this one are SlidingWindow"
    ):
        connector(model, tmp_path, window)
