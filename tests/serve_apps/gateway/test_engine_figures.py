"""The engines' figures in Prometheus' words: complete, well named, and counters never go back."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from dataclasses import asdict, fields
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from serve_apps.engine.protocol import Statistics
from serve_apps.gateway.engine_figures import COUNTERS, FORGET_S, GAUGES, EngineFigures
from serve_apps.gateway.metrics import GatewayMetrics
from serve_apps.http.request_record import RequestRecord
from serve_apps.routing import decisions
from tests.serve_apps.controller.world import World

BEGAN = -100.0


def said(ready_s: float = 0.0, **figures: float) -> dict[str, Any]:
    """What the controller tells of an engine that is ready for so long."""
    return {"ready_s": ready_s, **asdict(Statistics(**figures))}  # type: ignore[arg-type]


def shown(figures: EngineFigures) -> dict[tuple[str, ...], float]:
    """By name and labels."""
    samples = [sample for metric in figures.collect() for sample in metric.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def tokens(figures: EngineFigures) -> float:
    return shown(figures)["shoal_engine_generated_tokens_total", "chat"]


def test_all_that_engines_say_is_shown() -> None:
    assert GAUGES.keys() | COUNTERS.keys() == {field.name for field in fields(Statistics)}
    assert not GAUGES.keys() & COUNTERS.keys()


def test_gauges_are_of_the_replicas_that_are_there_and_counters_of_the_app() -> None:
    figures = EngineFigures(BEGAN)
    figures.take_over({"chat": {"a": said(running=2, generated_tokens=7), "b": said(cache_use=0.5)}}, 0)
    page = shown(figures)
    assert page["shoal_engine_running_requests", "chat", "a"] == 2
    assert page["shoal_engine_kv_cache_usage_ratio", "chat", "b"] == 0.5
    assert page["shoal_engine_generated_tokens_total", "chat"] == 7
    figures.take_over({"chat": {"b": said(generated_tokens=3)}, "idle": {}}, 1)
    page = shown(figures)
    assert {key[2] for key in page if len(key) == 3} == {"b"}
    assert page["shoal_engine_generated_tokens_total", "chat"] == 10
    assert page["shoal_engine_steps_total", "idle"] == 0, "a series that begins with its first count hides it"
    figures.take_over({"idle": {}}, 2)
    assert {key[1] for key in shown(figures)} == {"idle"}


def test_what_engines_did_before_this_process_began_is_not_counted_again() -> None:
    figures = EngineFigures(BEGAN)
    figures.take_over({"chat": {"old": said(160, generated_tokens=1000)}}, 0)
    assert tokens(figures) == 0
    figures.take_over({"chat": {"old": said(161, generated_tokens=1005), "new": said(generated_tokens=1)}}, 1)
    assert tokens(figures) == 6


def test_a_replica_that_was_out_of_reach_is_not_counted_twice() -> None:
    figures = EngineFigures(BEGAN)
    figures.take_over({"chat": {"a": said(generated_tokens=100)}}, 0)
    figures.take_over({"chat": {}}, 10)
    figures.take_over({"chat": {"a": said(generated_tokens=110)}}, FORGET_S - 1)
    assert tokens(figures) == 110
    for at in range(1, 5):
        figures.take_over({"chat": {}}, at * FORGET_S)
    assert figures._known == {}, "what is gone for good takes no memory"
    assert tokens(figures) == 110


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50)), max_size=3), min_size=1, max_size=30
    )
)
def test_counters_have_every_token_once_and_never_go_back(looks: list[list[tuple[str, int]]]) -> None:
    """At each look some replicas are heard; each has gained so many tokens since it was heard before."""
    figures = EngineFigures(BEGAN)
    counts: Counter[str] = Counter()
    before = 0.0
    for at, look in enumerate(looks):
        counts.update(dict(look))
        heard = {name: said(generated_tokens=counts[name]) for name, _ in look}
        figures.take_over({"chat": heard}, float(at))
        assert before <= (before := tokens(figures)) == counts.total()


def test_an_engine_that_begins_again_goes_on_counting() -> None:
    figures = EngineFigures(BEGAN)
    for count in (100, 3, 5):
        figures.take_over({"chat": {"a": said(generated_tokens=count)}}, 0)
    assert tokens(figures) == 105


def test_the_controller_tells_of_the_engines_that_it_hears() -> None:
    from serve_apps.controller.app import App

    app = App(World(devices=4).serving(1, 1).record)
    facts = {"revision": 1, "context_length": 64, "started_at": "x", "ready_at": "y", "ready_s": 5.0}
    facts |= {"state": "ready", "failures": 0, "parked": None, "woken": False, "not_woken": "", "node": "n"}
    for replica, heard in (("a", 0.0), ("b", 4.0)):
        app.hear("chat:1", replica, {**facts, "engine": asdict(Statistics(steps=9))}, heard)
    app.hear(
        "chat:1",
        "c",
        {"state": "standby", "failures": 0, "parked": None, "woken": False, "not_woken": "", "node": "n"},
        4.0,
    )
    figures = partial(app.replicas.engine_figures, ["chat:1"])
    assert figures(4.0).keys() == {"a", "b"}, "one that stands by has none"
    assert figures(8.0) == {"b": {"ready_s": 9.0, **asdict(Statistics(steps=9))}}
    assert figures(20.0) == {}


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> str:
    """A page with something in every metric."""
    monkeypatch.setattr(decisions, "_routed", Counter())
    metrics = GatewayMetrics()
    metrics.engines.take_over({"chat": {"a": said(running=1), "b": said()}}, 0)
    metrics.replicas({"chat": {"wanted": 2, "granted": 2, "ready": 2}})
    record = RequestRecord("r", "POST", "/v1/completions", "chat", status=499, error="timeout")
    record.first_token_s = record.output_token_s = 0.1
    record.prompt_tokens, record.completion_tokens = 3, 4
    metrics.count(record, 0.5)
    metrics.in_flight.labels("chat").set(1)
    decisions.note("chat", "prefix", "affinity")
    return metrics.text().decode()


def test_names_have_units_and_counters_say_so(page: str) -> None:
    families = {family.name: family for family in text_string_to_metric_families(page)}
    names = {family.name for family in families.values() if not family.name.endswith("_created")}
    assert len(names) >= 20
    for family in families.values():
        assert family.samples, family.name
        assert family.documentation
        assert re.fullmatch(r"shoal_(gateway|engine|app)_[a-z_]+[a-z]", family.name)
        for sample in family.samples:
            if family.type == "counter" and not sample.name.endswith("_created"):
                assert sample.name.endswith("_total")
            assert not re.search("_(ms|milliseconds|percent|kb|mib|gib)(_|$)", sample.name)
    (routed,) = [s for s in families["shoal_gateway_routed"].samples if s.name.endswith("_total")]
    assert (routed.labels, routed.value) == ({"app": "chat", "policy": "prefix", "reason": "affinity"}, 1.0)


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian's prometheus)"
)
def test_promtool_finds_nothing_wrong(page: str) -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=page, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
