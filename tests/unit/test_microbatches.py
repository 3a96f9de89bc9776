"""Which rows each microbatch is made of."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as some

from tparmpi.parallel.microbatches import rows_held, rows_of
from tparmpi.sharding import chunk_sizes


@given(
    batch=some.integers(0, 40),
    parts=some.lists(some.integers(1, 4), max_size=2),
    microbatches=some.integers(1, 7),
)
def test_microbatches_cover_the_batch_once_and_follow_the_chunk_rule(
    batch, parts, microbatches
):
    seen = []
    for number in range(microbatches):
        runs = rows_of(batch, parts, microbatches, number)
        rows = sum(count for _, count in runs)
        held = [count for _, count in rows_held(rows, parts)]
        assert [count for _, count in runs] == held
        if len(parts) == 1:
            assert tuple(held) == chunk_sizes(rows, parts[0])
        seen += [first + i for first, count in runs for i in range(count)]
    assert sorted(seen) == list(range(batch))
