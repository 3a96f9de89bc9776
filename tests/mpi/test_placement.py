"""Which layer lives where."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

import tparmpi as tpm
from tparmpi.parallel import LayerPlacement

pytestmark = pytest.mark.mpi(min_size=4)


def counts(placement: LayerPlacement) -> list[tuple[int, int]]:
    """Rank and number of hidden layers of each run of them on one device."""
    found: list[tuple[int, int]] = []
    for place in placement.hidden:
        rank = place.devices[0].rank
        before = found[-1][1] if found and found[-1][0] == rank else 0
        found[len(found) - bool(before) :] = [(rank, before + 1)]
    return found


def test_every_layer_is_placed_once():
    devices = tpm.devices()
    for layers, places in ((10, 3), (30, 4), (7, 2), (4, 4)):
        placement = LayerPlacement.even(devices[:places], layers)
        sizes = [count for _, count in counts(placement)]
        assert sum(sizes) == layers
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)
        assert [rank for rank, _ in counts(placement)] == list(range(places))
        covered = [n for stage in placement.stages() for n in stage.layers]
        assert covered == list(range(layers + 2))


def test_places_beyond_the_layers_are_left_out_with_a_warning():
    with pytest.warns(UserWarning, match="3 hidden layers for 4 places: the last 1"):
        placement = LayerPlacement.even(tpm.devices(), 3)
    assert placement.devices() == list(tpm.devices()[:3])


def test_new_and_interleaved():
    a, b, c, _ = tpm.devices()
    placement = LayerPlacement.new([(a, 0), (b, 3), (c, 1)])
    assert placement.places == (a, b, b, b, c, c)
    assert [tuple(stage.layers) for stage in placement.stages()] == [
        (0,),
        (1, 2, 3),
        (4, 5),
    ]
    assert "layers 1-3" in repr(placement)
    placement = LayerPlacement.interleaved([a, b], 5, 2)
    assert counts(placement) == [(0, 2), (1, 1), (0, 1), (1, 1)]
    assert placement.output is b


def test_devices_are_in_the_order_of_their_first_layers():
    a, b, _, _ = tpm.devices()
    view = a.autodiff()
    assert LayerPlacement(a, [b, view], a).devices() == [a, b]
    assert LayerPlacement(view, [view], a).devices() == [view]
    assert len(LayerPlacement(view, [view], a).stages()) == 1


def costliest(costs, sizes, first, last) -> float:
    bounds = np.cumsum([0, *sizes])
    sums = [sum(costs[a:b]) for a, b in pairwise(bounds)]
    sums[0] += first
    sums[-1] += last
    return max(sums)


def test_balanced_is_the_best_of_all():
    rng = np.random.default_rng(0)
    devices = tpm.devices()
    for _ in range(40):
        layers = int(rng.integers(4, 9))
        costs = rng.integers(0, 9, layers).tolist()
        first, last = rng.integers(0, 12, 2).tolist()
        for places in (1, 2, 3, 4):
            placement = LayerPlacement.balanced(
                devices[:places], costs, input_cost=first, output_cost=last
            )
            sizes = [count for _, count in counts(placement)]
            assert len(sizes) == places
            best = min(
                costliest(costs, np.diff([0, *cuts, layers]), first, last)
                for cuts in combinations(range(1, layers), places - 1)
            )
            assert costliest(costs, sizes, first, last) == best


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: LayerPlacement("gpu", [], d[0]), "'gpu' is no place for a layer"),
        (lambda d: LayerPlacement.new([]), "at least one"),
        (lambda d: LayerPlacement.new([(d[0], -1)]), "-1 layers cannot be put on"),
        (lambda d: LayerPlacement.even([], 3), "at least one place"),
        (lambda d: LayerPlacement.even(d, 0), "0 layers"),
        (lambda d: LayerPlacement.interleaved(d, 7, 2), "cannot be cut into 2 chunks"),
        (lambda d: LayerPlacement.interleaved(d, 7, 0), "0 chunks"),
        (lambda d: LayerPlacement.balanced(d, [1.0] * 3), "each place needs one"),
        (lambda d: LayerPlacement.balanced(d[:1], [1, -1]), "a cost is negative"),
        (
            lambda d: LayerPlacement.even(d[:1], 10).check_count(12),
            "the model has 12 hidden layers, the placement gives 10 places",
        ),
    ],
)
def test_what_is_no_placement_is_refused(make, words):
    with pytest.raises(tpm.UsageError, match=words):
        make(tpm.devices())
