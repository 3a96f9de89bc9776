"""The choice of a layout."""

from __future__ import annotations

import pytest

from tparmpi.errors import UsageError
from tparmpi.train.layout import Layout, choose_layout


@pytest.mark.parametrize(
    ("ranks", "heads", "tp", "dp", "layout"),
    [
        (1, 8, None, None, Layout(dp=1, tp=1)),
        (3, 8, None, None, Layout(dp=1, tp=3)),
        (8, 8, None, None, Layout(dp=1, tp=8)),
        (9, 8, None, None, Layout(dp=9, tp=1)),
        (6, 8, 2, None, Layout(dp=3, tp=2)),
        (6, 8, None, 2, Layout(dp=2, tp=3)),
        (6, 8, 3, 2, Layout(dp=2, tp=3)),
        (4, 8, 1, None, Layout(dp=4, tp=1)),
    ],
)
def test_axes_that_are_not_given_take_what_is_left(ranks, heads, tp, dp, layout):
    assert choose_layout(ranks, heads, tp=tp, dp=dp) == layout


@pytest.mark.parametrize(
    ("ranks", "tp", "dp", "words"),
    [
        (4, 3, None, ["tp=3", "there are 4: start so many or a multiple", "--tp"]),
        (4, 2, 1, ["tp=2 * dp=1", "2 ranks", "there are 4", "leave tp or dp out"]),
        (2, 4, None, ["4 ranks", "there are 2"]),
        (6, 6, None, ["n_head (4)", "tp (6)"]),
        (6, None, 1, ["n_head (4)", "tp (6)"]),
    ],
)
def test_a_layout_that_does_not_fit_names_both_numbers(ranks, tp, dp, words):
    with pytest.raises(UsageError) as refused:
        choose_layout(ranks, 4, tp=tp, dp=dp)
    for word in words:
        assert word in str(refused.value)


def test_stages_come_first():
    assert choose_layout(8, 8, tp=None, dp=None, pp=2) == Layout(dp=1, tp=4, pp=2)
    assert str(choose_layout(8, 8, tp=2, dp=None, pp=2)) == "pp=2 dp=2 tp=2"
    with pytest.raises(UsageError, match=r"pp=3 is for 3 ranks .* another --pp$"):
        choose_layout(8, 8, tp=None, dp=None, pp=3)
