"""Shards cover the input exactly once, in its order, and the same input always gives the same shards."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve_apps.batch.plan import (
    MAX_SHARD_ROWS,
    InputFile,
    Plan,
    Shard,
    choose_rows_per_shard,
    digest,
    plan_shards,
    shards_at_once,
)

FILES = st.lists(st.integers(0, 50), max_size=8).map(
    lambda sizes: [InputFile(f"in/{i}.parquet", 100 + rows, rows) for i, rows in enumerate(sizes)]
)


@given(FILES, st.integers(1, 20))
def test_every_row_is_in_one_shard_and_names_sort_as_rows_do(files: list[InputFile], rows: int) -> None:
    plan = plan_shards(files, rows)
    covered = [
        (shard.path, row)
        for shard in plan.shards
        for row in range(shard.first_row, shard.first_row + shard.rows)
    ]
    assert covered == [(file.path, row) for file in files for row in range(file.rows)]
    assert plan.rows == len(covered)
    assert all(1 <= shard.rows <= rows for shard in plan.shards)
    names = [plan.file_of(shard) for shard in plan.shards]
    assert names == sorted(set(names))
    assert plan_shards(files, rows) == plan


@given(FILES, st.integers(1, 20), st.data())
def test_what_is_not_there_is_to_do(files: list[InputFile], rows: int, data: st.DataObject) -> None:
    plan = plan_shards(files, rows)
    there = {plan.file_of(shard) for shard in plan.shards if data.draw(st.booleans())}
    done, to_do = plan.done({*there, "_manifest.json", "other.parquet"}), plan.to_do(there)
    assert {plan.file_of(shard) for shard in done} == there
    assert sorted([*done, *to_do], key=lambda shard: shard.index) == list(plan.shards)


def test_names_sort_past_a_hundred_thousand_shards() -> None:
    shards = tuple(Shard(index, "in", index, 1) for index in range(100_001))
    plan = Plan(shards)
    assert plan.file_of(shards[2]) == "part-000002.parquet"
    assert plan.file_of(shards[99_999]) < plan.file_of(shards[100_000])


def test_a_small_input_gives_every_replica_work_and_a_large_one_loses_little() -> None:
    assert choose_rows_per_shard(1_000_000, 4, 32) == MAX_SHARD_ROWS
    assert choose_rows_per_shard(6400, 4, 32) == 200
    # Less than a batch would leave places empty.
    assert choose_rows_per_shard(100, 4, 32) == 32
    assert choose_rows_per_shard(1, 1, 1) == 1


def test_so_many_shards_are_in_hand_that_the_next_one_fills_the_batch() -> None:
    assert shards_at_once(1000, 64) == 2
    assert shards_at_once(32, 64) == 3
    assert shards_at_once(1, 64) == 16


def test_the_digest_changes_with_names_sizes_rows_and_order() -> None:
    one, two = InputFile("a", 10, 5), InputFile("b", 10, 5)
    lists = [[one], [two], [one, two], [two, one], [InputFile("a", 11, 5)], [InputFile("a", 10, 6)], []]
    assert len({digest(files) for files in lists}) == len(lists)
