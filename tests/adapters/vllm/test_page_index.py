"""A tier of fixed size: what is in use stays, and of the rest the page that was used longest ago goes."""

from pm_ops.adapters.vllm.page_index import Page, PageIndex


def write(index: PageIndex, *keys: str) -> list[Page]:
    """Pages under these keys, written one after another."""
    pages = []
    for key in keys:
        page = index.add(key)
        assert page is not None
        page.ready = True
        index.release(page)
        pages.append(page)
    return pages


def kept(index: PageIndex) -> set[str]:
    return {key for key in "abcdefgh" if key in index}


def test_the_page_that_was_used_longest_ago_is_evicted_and_no_more_are_kept_than_there_are() -> None:
    index = PageIndex(3)
    write(index, "a", "b", "c")
    index.touch(["b", "a", "missing"])
    write(index, "d")
    assert kept(index) == {"a", "b", "d"} and index.evicted == 1
    write(index, "e", "f", "g")
    assert kept(index) == {"e", "f", "g"} and len(index) == 3 and index.evicted == 4
    assert {index.find(key).number for key in "efg"} == {0, 1, 2}


def test_a_page_is_not_found_before_it_was_written() -> None:
    index = PageIndex(1)
    page = index.add("a")
    assert "a" in index and index.find("a") is None
    page.ready = True
    assert index.find("a") is page


def test_pages_that_are_written_or_read_are_not_evicted() -> None:
    index = PageIndex(3)
    a, b = write(index, "a", "b")
    index.hold(a)
    index.hold(a)
    writing = index.add("c")
    write(index, "d")
    assert kept(index) == {"a", "c", "d"}, "the oldest that nobody uses"
    index.hold(index.find("d"))
    assert index.add("e") is None and kept(index) == {"a", "c", "d"}
    index.release(a)
    assert index.add("e") is None, "one reader is left"
    index.release(a)
    assert write(index, "e")[0].number == a.number
    index.release(writing)
    write(index, "f")
    assert kept(index) == {"c", "d", "f"}, "released last, evicted last"
    assert b.number == index.find("d").number


def test_a_dropped_page_is_not_found_and_its_place_is_used_when_nobody_uses_it() -> None:
    index = PageIndex(2)
    a, b = write(index, "a", "b")
    index.hold(a)
    index.clear()
    assert kept(index) == set() and len(index) == 0
    first = index.add("a")
    assert first.number == b.number and index.add("c") is None
    index.drop(a)  # it was already
    assert "a" in index
    index.release(a)
    assert index.add("c").number == a.number
    index.release(first)
    assert "a" in index, "the page that was dropped has taken nothing with it"
