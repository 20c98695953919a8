"""Affine indices and addresses: a place in a tensor is known only where every element has one."""

from __future__ import annotations

import torch

from pm_ops.compile_passes.affine import Affine, Axis, address, place

ROW, LANE = Axis("row", 3), Axis("lane", 4)


def test_a_place_leads_back_to_the_address() -> None:
    x = torch.empty(2, 3, 8).transpose(0, 1)[:, :, 1:]
    index = (Affine.of(ROW), Affine(const=1), Affine.of(LANE, 2))
    where = address(index, x)
    assert where == Affine.of(ROW, 8, 25).plus(Affine.of(LANE, 2)) and place(where, x) == index
    assert place(where.plus(Affine(const=24)), x) is None


def test_an_address_outside_of_a_view_has_no_place_in_it() -> None:
    x = torch.empty(3, 8)
    assert place(Affine.of(ROW, 8, 4).plus(Affine.of(LANE)), x[:, 4:]) == (Affine.of(ROW), Affine.of(LANE))
    assert place(Affine.of(ROW, 8, 2).plus(Affine.of(LANE)), x[:, 4:]) is None
    assert place(Affine.of(Axis("row", 4), 8), x) is None
    assert place(Affine.of(Axis("lane", 9)), x) is None
