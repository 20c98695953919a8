"""PageStore: keys, the bound and its order, other processes, and writers that die."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import store_processes
import torch
from pages import LAYOUTS, packed_pool, spaced_pool

import pm_ops
from pm_ops import PageHeader, PagePool, PageStore
from pm_ops.testing import page_bytes, writes_only

LAYOUT = LAYOUTS["page_major"]
MODEL = "llama@1f2e"
ENTRY = 4096 + 2 * LAYOUT.page_bytes
"""Bytes of an entry of two pages."""
ROOT = Path(__file__).parents[1]


def run(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "tests" / "store_processes.py"), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def temporaries(folder: Path) -> list[Path]:
    return list(folder.glob(".pm_ops-*"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_pages_come_back_under_their_key(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    src, dst = packed_pool(layout, 6), spaced_pool(layout, 6, seed=1)
    store = PageStore(tmp_path / "deep" / "folder", 1 << 20, model=MODEL)
    assert store.put("one", src, [3, 0]) and store.put("two", src, torch.tensor([5]))
    with writes_only(dst.buffer, page_bytes(dst, [4, 1])):
        assert store.get("one", dst, [4, 1]) == [4, 1]
    assert torch.equal(dst.gather([4, 1]), src.gather([3, 0]))
    (page,) = PageStore(tmp_path / "deep" / "folder", 1 << 20, model=MODEL).get("two", dst) or []
    assert torch.equal(dst.pages[page], src.pages[5])
    assert "one" in store and "three" not in store and len(store) == 2
    assert store.nbytes == sum(path.stat().st_size for path in store.folder.glob("*.pages.safetensors"))


def test_a_key_that_is_not_there_is_none_and_takes_no_page(tmp_path: Path) -> None:
    pool = packed_pool(LAYOUT, 6)
    store = PageStore(tmp_path, 1 << 20, model=MODEL)
    with writes_only(pool.buffer, []):
        assert store.get("a", pool) is None and store.get("a", pool, [0]) is None
    assert pool.allocator.num_free == 6
    assert not store.discard("a")


def test_the_first_pages_of_a_key_stay(tmp_path: Path) -> None:
    store = PageStore(tmp_path, 1 << 20, model=MODEL)
    assert store.put("a", packed_pool(LAYOUT, 6, seed=1), [0])
    assert not store.put("a", packed_pool(LAYOUT, 6, seed=2), [0])
    pool = packed_pool(LAYOUT, 6, seed=3)
    store.get("a", pool, [2])
    assert torch.equal(pool.pages[2], packed_pool(LAYOUT, 6, seed=1).pages[0])
    assert store.discard("a") and "a" not in store and store.keys() == []
    assert store.put("a", packed_pool(LAYOUT, 6, seed=2), [0])


def test_the_least_recently_used_make_room(tmp_path: Path) -> None:
    """Written, read and put again count as used; looked for does not."""
    pool = packed_pool(LAYOUT, 6)
    store = PageStore(tmp_path, 3 * ENTRY + 100, model=MODEL)
    for key in "abc":
        store.put(key, pool, [0, 1])
    assert store.nbytes == 3 * ENTRY and store.keys() == ["a", "b", "c"]
    store.get("a", pool, [2, 3])
    assert "b" in store
    store.put("d", pool, [0, 1])
    assert store.keys() == ["c", "a", "d"]
    store.put("c", pool, [0, 1])
    store.put("e", pool, [0, 1, 2, 3])  # larger: two have to go
    assert store.keys() == ["c", "e"] and store.nbytes <= store.max_bytes


def test_entries_may_count_as_used_at_another_time(tmp_path: Path) -> None:
    """As a prefix's blocks do, which are of no use without those in front of them."""
    pool = packed_pool(LAYOUT, 6)
    store = PageStore(tmp_path, 3 * ENTRY + 100, model=MODEL)
    for i in range(6):
        assert store.put(f"block{i}", pool, [0, 1], used=1000 - i)
    assert store.keys() == ["block5", "block1", "block0"]
    assert store.get("block0", pool, [2, 3], used=10) == [2, 3] and store.touch("block1", used=20)
    assert not store.put("block5", pool, [0, 1], used=5) and not store.touch("block2")
    assert store.keys() == ["block5", "block0", "block1"]
    assert store.touch("block0") and store.keys()[-1] == "block0"


@pytest.mark.parametrize("used", [-1, 1 << 63, 1.5, float("nan"), "1"])
def test_a_time_that_is_none_is_refused_before_anything_is_done(used: Any, tmp_path: Path) -> None:
    pool = packed_pool(LAYOUT, 6)
    store = PageStore(tmp_path, 2 * ENTRY, model=MODEL)
    store.put("a", pool, [0, 1], used=3)
    store.put("b", pool, [0, 1], used=(1 << 63) - 1)
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.iterdir()}
    with writes_only(pool.buffer, []):
        for call in (
            lambda: store.put("a", pool, [0, 1], used=used), lambda: store.put("c", pool, [0, 1], used=used),
            lambda: store.get("a", pool, used=used), lambda: store.get("c", pool, used=used),
            lambda: store.touch("a", used=used), lambda: store.touch("c", used=used),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=r"used=.*time\.time_ns"):
                call()
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.iterdir()} == before
    assert store.keys() == ["a", "b"] and pool.allocator.num_free == 6


def test_a_folder_is_listed_only_when_it_seems_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full store of 64 entries makes room for four at once. What was discarded is noticed before more is evicted."""
    pool = packed_pool(LAYOUT, 6)
    store = PageStore(tmp_path, 64 * ENTRY, model=MODEL)
    listed, entries = [], store._entries
    monkeypatch.setattr(store, "_entries", lambda: listed.append(len(os.listdir(tmp_path))) or entries())
    for n in range(64):
        store.put(f"{n}", pool, [0, 1])
    assert not listed and len(entries()) == 64
    for n in range(64, 69):
        store.put(f"{n}", pool, [0, 1])
    assert len(listed) == 1 and [int(entry.path.name.split(".")[0]) for entry in entries()] == [*range(5, 69)]
    for n in range(5, 10):
        store.discard(f"{n}")
    store.put("more", pool, [0, 1])
    assert len(listed) == 2 and len(entries()) == 60


def test_a_store_that_is_opened_smaller_keeps_to_it(tmp_path: Path) -> None:
    store = PageStore(tmp_path, 3 * ENTRY, model=MODEL)
    for key in "abc":
        store.put(key, packed_pool(LAYOUT, 6), [0, 1])
    assert PageStore(tmp_path, 2 * ENTRY - 1, model=MODEL).keys() == ["c"]


def test_other_files_of_the_folder_neither_count_nor_are_touched(tmp_path: Path) -> None:
    """Weights of a model, say, and files of save_pages: opened, filled beyond its bound, and every key discarded."""
    pool, others = packed_pool(LAYOUT, 6), ["model.safetensors", "a.safetensors", "a.pages", ".x.pages.safetensors"]
    for name in others:
        pm_ops.save_pages(tmp_path / name, pool, [0, 1], model=MODEL)
    before = {name: (tmp_path / name).read_bytes() for name in others}
    store = PageStore(tmp_path, 2 * ENTRY, model=MODEL)
    assert store.keys() == [] and store.nbytes == 0 and "a" not in store and "model" not in store
    for key in "abc":
        assert store.put(key, pool, [0, 1])
    assert store.keys() == ["b", "c"] == [key for key in "bcd" if store.discard(key)]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != ".lock"} == before


@pytest.mark.parametrize("damage", [lambda lock: lock.unlink(), lambda lock: os.truncate(lock, 1)])
def test_the_bound_outlives_the_file_in_which_the_total_is_kept(damage: Any, tmp_path: Path) -> None:
    pool = packed_pool(LAYOUT, 6)
    store = PageStore(tmp_path, 3 * ENTRY, model=MODEL)
    for key in "abc":
        store.put(key, pool, [0, 1])
    damage(tmp_path / ".lock")
    store.put("d", pool, [0, 1])
    assert store.keys() == ["b", "c", "d"]


def test_locks_end_with_their_block_though_a_forked_child_has_their_files(tmp_path: Path) -> None:
    """A descriptor that was duplicated shares its lock, as one that a child was born with does."""
    store, pool = PageStore(tmp_path, 1 << 20, model=MODEL), packed_pool(LAYOUT, 6)
    with store._locked() as lock:
        kept = [os.dup(lock)]
    with pm_ops.disk.finished(tmp_path, pm_ops.disk.packed(pool, [0, 1], MODEL)) as temporary:
        (fd,) = [fd for fd in os.listdir("/proc/self/fd") if Path(f"/proc/self/fd/{fd}").resolve() == temporary]
        kept.append(os.dup(int(fd)))
        temporary.rename(tmp_path / "published")
    for path in (tmp_path / ".lock", tmp_path / "published"):
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for fd in kept:
        os.close(fd)


def test_entries_copied_into_the_folder_count_from_the_next_opening_on(tmp_path: Path) -> None:
    pool = packed_pool(LAYOUT, 6)
    PageStore(tmp_path / "there", 3 * ENTRY, model=MODEL)
    here = PageStore(tmp_path / "here", 3 * ENTRY, model=MODEL)
    for key in "abc":
        here.put(key, pool, [0, 1])
        os.rename(here.folder / f"{key}.pages.safetensors", tmp_path / "there" / f"{key}.pages.safetensors")
    store = PageStore(tmp_path / "there", 3 * ENTRY, model=MODEL)
    store.put("d", pool, [0, 1])
    assert store.keys() == ["b", "c", "d"]


def test_what_can_never_fit_is_refused_and_evicts_nothing(tmp_path: Path) -> None:
    pool = packed_pool(LAYOUT, 6)
    store = PageStore(tmp_path, ENTRY, model=MODEL)
    store.put("a", pool, [0, 1])
    with pytest.raises(ValueError, match=f"an entry of {ENTRY + LAYOUT.page_bytes} bytes in a store of {ENTRY}"):
        store.put("b", pool, [0, 1, 2])
    assert store.keys() == ["a"] and not temporaries(tmp_path)
    with pytest.raises(ValueError, match="max_bytes=0"):
        PageStore(tmp_path, 0, model=MODEL)


@pytest.mark.parametrize("key", ["", ".", "..", "../a", "a/b", ".hidden", "a\n", "ä", "x" * 201])
def test_a_key_that_is_no_plain_name_is_refused(key: str, tmp_path: Path) -> None:
    store, pool = PageStore(tmp_path, 1 << 20, model=MODEL), packed_pool(LAYOUT, 6)
    for call in (lambda: store.put(key, pool, [0]), lambda: store.get(key, pool), lambda: store.discard(key)):
        with pytest.raises(ValueError, match="a string of 1 to 200 letters"):
            call()
    store.put("x" * 200, pool, [0])


def test_arguments_in_another_order_are_refused(tmp_path: Path) -> None:
    store, pool = PageStore(tmp_path, 1 << 20, model=MODEL), packed_pool(LAYOUT, 6)
    with pytest.raises(ValueError, match="key must be a string .* got PagePool"):
        store.put(pool, "a", [0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pool must be a PagePool, such as HostPool.pool, got HostPool"):
        store.put("a", pm_ops.HostPool(pool, 2), [0])  # type: ignore[arg-type]
    assert not store.keys()


def test_an_entry_that_was_cut_is_none_that_is_there_already(tmp_path: Path) -> None:
    store, pool = PageStore(tmp_path, 1 << 20, model=MODEL), packed_pool(LAYOUT, 6)
    store.put("a", pool, [0, 1])
    os.truncate(tmp_path / "a.pages.safetensors", ENTRY - 1)
    with pytest.raises(ValueError, match="truncated: .* inside page 1 of 2"):
        store.put("a", pool, [0, 1])
    assert store.discard("a") and store.put("a", pool, [0, 1])


def test_an_entry_evicted_while_it_is_read_is_read_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src, dst = packed_pool(LAYOUT, 6), packed_pool(LAYOUT, 6, seed=1)
    store = PageStore(tmp_path, ENTRY, model=MODEL)
    store.put("a", src, [3, 0])
    verify = PageHeader.verify

    def evict(header: PageHeader, rows: torch.Tensor) -> None:
        PageStore(tmp_path, ENTRY, model=MODEL).put("b", src, [1, 2])
        assert "a" not in store
        verify(header, rows)

    monkeypatch.setattr(PageHeader, "verify", evict)
    assert store.get("a", dst, [0, 1]) == [0, 1]
    assert torch.equal(dst.pages[:2], src.gather([3, 0]))
    assert store.keys() == ["b"]


def test_of_two_that_write_one_key_the_first_to_finish_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = packed_pool(LAYOUT, 6), packed_pool(LAYOUT, 6, seed=1)
    store = PageStore(tmp_path, 1 << 20, model=MODEL)
    fsync = os.fsync

    def overtaken(fd: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        assert PageStore(tmp_path, 1 << 20, model=MODEL).put("a", first, [3, 0])
        fsync(fd)

    monkeypatch.setattr(os, "fsync", overtaken)
    assert not store.put("a", second, [3, 0])
    got = PagePool(LAYOUT, 2)
    store.get("a", got, [0, 1])
    assert torch.equal(got.pages, first.gather([3, 0]))
    assert store.nbytes == ENTRY and not temporaries(tmp_path)


def test_entries_of_another_layout_model_or_number_are_refused_and_stay(tmp_path: Path) -> None:
    store, pool = PageStore(tmp_path, 1 << 20, model=MODEL), packed_pool(LAYOUT, 6)
    store.put("a", pool, [0, 1])
    other = packed_pool(LAYOUTS["token_major"], 6)
    cases = [
        (PageStore(tmp_path, 1 << 20, model="gpt"), pool, [0, 1], "model 'llama@1f2e' instead of 'gpt'"),
        (store, other, [0, 1], f"layout {LAYOUT.fingerprint}"),
        (store, pool, [0], "2 pages instead of 1"),
    ]
    for opened, target, pages, message in cases:
        for call in (opened.get, opened.put):
            with writes_only(target.buffer, []), pytest.raises(ValueError, match=f"a.pages.safetensors: .*{message}"):
                call("a", target, pages)
    assert store.keys() == ["a"]


def test_a_damaged_entry_is_refused_until_it_is_discarded(tmp_path: Path) -> None:
    store, pool = PageStore(tmp_path, 1 << 20, model=MODEL), packed_pool(LAYOUT, 6)
    for damage, message in ((lambda d: d[:-1], "inside page 1 of 2"), (lambda d: d[:-1] + b"?", "page 1 of 2"),
                            (lambda d: d[:50], "before page 0"), (lambda d: b"", "before page 0")):  # fmt: skip
        store.put("a", pool, [0, 1])
        path = tmp_path / "a.pages.safetensors"
        path.write_bytes(damage(path.read_bytes()))
        for _ in range(2):
            with writes_only(pool.buffer, []), pytest.raises(ValueError, match=message):
                store.get("a", pool)
        assert pool.allocator.num_free == 6
        store.discard("a")


def test_a_file_that_is_being_written_is_left_alone_and_is_no_entry(tmp_path: Path) -> None:
    pool = packed_pool(LAYOUT, 6)
    store = PageStore(tmp_path, ENTRY, model=MODEL)
    store.put("a", pool, [0, 1])
    content = pm_ops.disk.packed(pool, [0, 1], MODEL)
    with pm_ops.disk.finished(tmp_path, content) as temporary:
        assert PageStore(tmp_path, ENTRY, model=MODEL).keys() == ["a"]
        assert temporaries(tmp_path) == [temporary] and store.nbytes == ENTRY
    assert not temporaries(tmp_path)


def test_a_left_over_file_that_may_not_be_removed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's, in a folder that all may write, once kept everybody else from opening the store."""
    left, ours = tmp_path / ".pm_ops-0.tmp", tmp_path / ".pm_ops-1.tmp"
    left.touch()
    ours.touch()
    unlink = Path.unlink

    def refusing(path: Path, missing_ok: bool = False) -> None:
        if path == left:
            raise PermissionError(1, "Operation not permitted")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refusing)
    assert PageStore(tmp_path, ENTRY, model=MODEL).put("a", packed_pool(LAYOUT, 6), [0, 1])
    assert temporaries(tmp_path) == [left]


def test_a_file_taken_for_left_over_before_it_was_locked_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, pool = PageStore(tmp_path, 1 << 20, model=MODEL), packed_pool(LAYOUT, 6)
    flock, opened = pm_ops.disk.fcntl.flock, []

    def late(file: Any, how: int) -> None:
        if len(opened) < 2 and file.name not in opened and str(file.name).endswith(".tmp"):
            opened.append(file.name)
            os.unlink(file.name)  # what another process does between our open and our lock
        flock(file, how)

    monkeypatch.setattr(pm_ops.disk.fcntl, "flock", late)
    store.put("a", pool, [0, 1])
    assert len(opened) == 2
    got = PagePool(LAYOUT, 2)
    store.get("a", got, [0, 1])
    assert torch.equal(got.pages, pool.pages[:2])


def test_a_file_that_is_being_replaced_when_its_writer_is_killed_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    happened = run("replaced", tmp_path, 30)
    assert len(happened["found"]) == 30 and all(done <= held <= done + 1 for held, done, _ in happened["found"])
    assert all(whole for *_, whole in happened["found"])
    assert happened["cut"] > 0, "no writer was killed while it wrote: this run proves nothing"


def test_it_says_where_it_is(tmp_path: Path) -> None:
    assert repr(PageStore(tmp_path, 4096, model="any")) == f"PageStore({str(tmp_path)!r}, max_bytes=4096, model='any')"


def test_a_writer_killed_a_hundred_times_loses_at_most_the_entry_in_flight(tmp_path: Path) -> None:
    rounds = 100
    happened = run("killed", tmp_path, rounds)
    done = happened["done"]
    assert len(done) >= rounds
    assert happened["cut"] > 0, "no writer was killed while it wrote: this run proves nothing"
    store = PageStore(tmp_path, 1 << 40, model=store_processes.MODEL)
    assert not temporaries(tmp_path)
    found = store.keys()
    assert set(done) <= set(found) and len(found) <= len(done) + rounds
    check_entries(store, found)


def test_a_writer_killed_at_any_step_leaves_all_of_an_entry_or_none(tmp_path: Path) -> None:
    steps = run("stopped", tmp_path)["steps"]
    assert [signal for *_, signal in steps] == [9] * 6
    there = [step == "fsync 2" or (step == "replace 1" and after) for step, after, _ in steps]
    store = PageStore(tmp_path, 1 << 40, model=store_processes.MODEL)
    assert not temporaries(tmp_path)
    assert [f"{n}-0" in store for n in range(6)] == there
    check_entries(store, store.keys())
    for n in range(6):  # and what is missing can be written again
        assert store.put(f"{n}-0", store_processes.pool_of(n * 1000), store_processes.PAGES) != there[n]


def test_two_writers_and_a_reader_see_whole_entries_within_the_bound(tmp_path: Path) -> None:
    happened = run("race", tmp_path)
    assert happened["status"] == [0, 0]
    assert min(happened["seen"]) >= 5 and happened["torn"] == 0
    assert 0 < happened["largest"] <= happened["limit"]
    store = PageStore(tmp_path, happened["limit"], model=store_processes.MODEL)
    assert 1 < len(store) <= 5 and not temporaries(tmp_path)


def check_entries(store: PageStore, keys: list[str]) -> None:
    """Every key loads, and holds what its writer put there."""
    pool = PagePool(store_processes.LAYOUT, 4)
    for key in keys:
        n, i = map(int, key.split("-"))
        assert store.get(key, pool, [0, 1, 2, 3]) is not None
        assert torch.equal(pool.pages, store_processes.pool_of(n * 1000 + i).gather(store_processes.PAGES))
