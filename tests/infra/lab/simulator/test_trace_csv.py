"""Traces as CSV: what is written is read back, and every mistake is told with its place."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ConfigError
from infra.lab.simulator.jobs import Job, in_order
from infra.lab.simulator.trace_csv import MAX_MISTAKES, read_csv, write_csv

NAMES = ("a", "b c", 'quoted "d"', "e,f", "gé", "1")


@st.composite
def lines(draw: st.DrawFn) -> Job:
    tensor, groups = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    return Job(
        "",
        draw(st.floats(0, 1e7)),
        draw(st.floats(0.001, 1e7)),
        tensor * draw(st.integers(1, 4)),
        groups,
        draw(st.integers(1, groups)),
        draw(st.integers(groups, 9)),
        tensor,
        draw(st.integers(-5, 5)),
        draw(st.sampled_from(["", "ann", 'a "b", c'])),
        draw(st.sampled_from([None, "H100-SXM"])),
    )


@given(st.lists(lines(), min_size=1, max_size=len(NAMES)))
def test_what_is_written_is_read_back(drawn: list[Job]) -> None:
    jobs = [replace(job, name=name) for job, name in zip(drawn, NAMES, strict=False)]
    assert read_csv(write_csv(jobs), "t.csv").jobs == in_order(jobs)


def test_what_is_left_out_has_its_default_and_columns_may_stand_in_any_order() -> None:
    trace = read_csv("devices,duration_s,submit_s,job\n8,60,30,late\n\n2,1.5,0,early\n", "t.csv")
    assert trace.jobs == (Job("early", 0, 1.5, group=2), Job("late", 30, 60, group=8))
    assert (trace.span_s, trace.device_seconds) == (30, 8 * 60 + 2 * 1.5)


HEAD = "job,submit_s,duration_s,devices,group,min_groups,max_groups,tensor\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "t.csv:1: job: the column is missing"),
        (
            "job,submit_s,duration,devices\n",
            't.csv:1:14: unknown column "duration"; did you mean `duration_s`?',
        ),
        ("job,job,submit_s,duration_s,devices\n", "t.csv:1:5: job: is there twice"),
        (HEAD, "t.csv: holds no job"),
        (HEAD + "a,0,1,8\n", "t.csv:2: has 4 fields, should have 8 as the first line"),
        (HEAD + "a,-1,1,8,,,,\n", 't.csv:2:3: submit_s: should be seconds, at least 0, was "-1"'),
        (HEAD + "a,0,nan,8,,,,\n", 't.csv:2:5: duration_s: should be seconds, above 0, was "nan"'),
        (HEAD + "a,0,1,0,,,,\n", "t.csv:2:7: devices: should be a whole number above 0"),
        (HEAD + "a,0,1,,,,,\n", "t.csv:2:7: devices: should be a whole number above 0"),
        (HEAD + "a,0,1,8,3,,,\n", "t.csv:2:9: group: should divide devices (8), was 3"),
        (HEAD + "a,0,1,8,2,5,,\n", "min_groups: should be at most devices / group (4), was 5"),
        (HEAD + "a,0,1,8,2,,3,\n", "max_groups: should be at least devices / group (4), was 3"),
        (HEAD + "a,0,1,8,2,,,4\n", "t.csv:2:13: tensor: should divide group (2), was 4"),
        (HEAD + "a,0,1,8,,,,\na,0,1,8,,,,\n", "t.csv:3:1: job: should be a name that no other line has"),
        (HEAD + '"a\n', "t.csv:2: is no CSV"),
    ],
)
def test_a_mistake_is_told_with_its_place(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_csv(text, "t.csv")
    assert sentence in str(caught.value)


def test_all_mistakes_are_told_at_once_and_many_are_counted() -> None:
    with pytest.raises(ConfigError) as caught:
        read_csv(HEAD + "a,x,1,8,,,,\nb,0,y,z,,,,\n", "t.csv")
    assert [(mistake.line, mistake.path) for mistake in caught.value.mistakes] == [
        (2, "submit_s"),
        (3, "duration_s"),
        (3, "devices"),
    ]
    with pytest.raises(ConfigError) as caught:
        read_csv(HEAD + "a,x,1,8,,,,\n" * (MAX_MISTAKES + 7), "t.csv")
    assert str(caught.value).endswith("and 7 more mistakes, not listed")
