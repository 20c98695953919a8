"""Page ids that a kernel reads when its turn comes."""

from types import SimpleNamespace

import torch

from pm_ops.index_ring import IndexRing


def ring_transfer(count: int) -> SimpleNamespace:
    return SimpleNamespace(pairs=torch.randint(1 << 40, (count, 2)), finished=False)


def test_the_ring_overwrites_nothing_in_flight_and_waits_for_nothing() -> None:
    ring = IndexRing(torch.zeros(10, 2, dtype=torch.int64))
    transfers = first, second, third, fourth, fifth = [ring_transfer(count) for count in (4, 4, 3, 3, 5)]
    kept = [ring.put(first), ring.put(second)]
    first.finished = True
    rows = ring.rows
    kept.append(ring.put(third))  # where the first was
    assert kept[2].data_ptr() == rows.data_ptr() and torch.equal(kept[2], third.pairs)
    kept.append(ring.put(fourth))  # which has no room
    assert ring.rows is not rows and len(ring.rows) == 20
    kept.append(ring.put(fifth))
    for transfer, pairs in list(zip(transfers, kept, strict=True))[1:]:
        assert torch.equal(pairs, transfer.pairs)


def test_the_ring_goes_round_to_its_begin_only_where_that_has_arrived() -> None:
    for finished in ((), (0,), (0, 1)):
        ring = IndexRing(torch.zeros(10, 2, dtype=torch.int64))
        transfers = [ring_transfer(4), ring_transfer(4)]
        kept = [ring.put(transfer) for transfer in transfers]
        for i in finished:
            transfers[i].finished = True
        transfers += [ring_transfer(4), ring_transfer(3)]  # round again, and where the second begins
        rows = ring.rows
        kept += [ring.put(transfer) for transfer in transfers[2:]]
        for transfer, pairs in zip(transfers, kept, strict=True):
            assert transfer.finished or torch.equal(pairs, transfer.pairs)
        assert (ring.rows is rows) == (len(finished) == 2)


def test_the_ring_grows_with_a_transfer_and_keeps_what_is_in_flight() -> None:
    ring = IndexRing(torch.zeros(4, 2, dtype=torch.int64))
    first, second = ring_transfer(3), ring_transfer(9)
    kept = ring.put(first)
    assert torch.equal(ring.put(second), second.pairs) and len(ring.rows) == 9
    assert torch.equal(kept, first.pairs)
