"""What changing hands costs can be changed, and what is wrong with the change is told with its place."""

from __future__ import annotations

from dataclasses import fields

import pytest

from cluster.errors import ConfigError, RequestError
from infra.lab.simulator.costs import Costs, costs_of


def test_a_file_and_settings_change_what_they_name_and_the_settings_go_last() -> None:
    costs = costs_of("start_s: 7\nleave_s: 0.5\n", "c.yaml", ["leave_s=2", "doubling=0.8"])
    assert (costs.start_s, costs.leave_s, costs.doubling) == (7, 2, 0.8)
    assert costs.restart_s == Costs().restart_s
    assert costs_of('{"start_s": 7}', "c.json").start_s == 7


def test_every_cost_says_where_it_comes_from() -> None:
    sources = costs_of("start_s: 7\n", "c.yaml").sources()
    assert set(sources) == {entry.name for entry in fields(Costs)}
    assert sources["start_s"] == "given"
    assert all(
        source.startswith(("measured", "assumption", "the broker", "given")) for source in sources.values()
    )


def test_twice_as_many_groups_are_as_fast_as_the_doubling_says() -> None:
    costs = Costs(doubling=0.9)
    assert [costs.speed(groups) for groups in (0, 1, 2, 4)] == pytest.approx([0, 1, 1.8, 3.24])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("starts_s: 7", 'c.yaml:1:1: starts_s: unknown cost "starts_s"; did you mean `start_s`?'),
        ("leave_s: 1\nstart_s: soon", 'c.yaml:2:1: start_s: should be seconds, at least 0, was "soon"'),
        ("start_s: -1", "should be seconds, at least 0, was -1"),
        ("checkpoint_every_s: 0", "should be seconds, above 0, was 0"),
        ("doubling: 1.1", "should be above 0.5, at most 1, was 1.1"),
        ("start_s: true", "should be seconds, at least 0, was true"),
        ("start_s: .nan", "should be seconds, at least 0, was nan"),
        ("- 7", "should be a mapping of costs, was a list of 1"),
        ("start_s: [", "c.yaml:1"),
    ],
)
def test_a_mistake_in_the_file_is_told_with_its_place(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        costs_of(text, "c.yaml")
    assert sentence in str(caught.value)


@pytest.mark.parametrize("setting", ["start_s", "start_s=", "nothing=1", "start_s=-1", "doubling=0.5"])
def test_a_wrong_setting_is_refused(setting: str) -> None:
    with pytest.raises(RequestError, match=f"--cost {setting}: "):
        costs_of(None, "", [setting])
