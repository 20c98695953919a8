"""What pm-ops doctor is told by the real SGLang."""

import pytest
import sglang_engine

pytestmark = pytest.mark.engines
RELEASE = sglang_engine.require()

from pm_ops.adapters.sglang import doctor, hooks


def test_it_finds_every_hook_and_says_what_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    report = doctor.examine()
    assert report["found"].startswith(f"{RELEASE}, on ") and report["usable"]
    how = f"the pool's class by {', '.join(hooks.pool_hooks())}"
    assert report["notes"][0] == f"hooks: all {len(hooks.NEEDED)} present; {how}"
    assert "page_major, by pm_ops" in report["notes"][1]
    latents = next(note for note in report["notes"] if note.startswith("latent attention (MLA)"))
    assert latents.startswith("latent attention (MLA): token_major, read by triton, pm_ops; page_major, by pm_ops")
    assert "not for GptOss, Llama 4, Gemma 4 and Exaone 4" in report["notes"][-1]

    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    report = doctor.examine()
    assert not report["usable"] and report["notes"] == ["SGLANG_PLUGINS=another keeps the plugin out: add pm_ops"]

    monkeypatch.setitem(hooks.NEEDED, "hooks", "sglang.srt.plugins.hook_registry:Gone")
    assert doctor.examine()["notes"][0] == (
        "no hooks (sglang.srt.plugins.hook_registry.Gone): SGLang 0.5.17 or 0.5.23 has it"
    )
