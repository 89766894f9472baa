"""What the audit of a log finds, and what it lets pass."""

from __future__ import annotations

from typing import Any

from cluster.sharing.audit import granted_twice


def node(name: str, cpus: float, cause: str = "node_joined") -> dict[str, Any]:
    return {"cause": cause, "node": name, "resources": {"CPU": cpus}, "foreign": {}}


def grant(
    holder: str,
    after: dict[str, int],
    held: dict[str, int],
    cause: str = "started",
    cpus: float = 1,
    starting: dict[str, int] | None = None,
) -> dict[str, Any]:
    kind = "serving" if holder == "app" else "training"
    event = {"cause": cause, "holder": holder, "kind": kind, "unit": {"CPU": cpus}}
    return {**event, "after": after, "held": held, "starting": starting or {}}


def test_a_device_that_two_were_granted_is_found():
    log = [node("a", 2), grant("x", {"a": 2}, {}), grant("y", {"a": 1}, {})]
    (found,) = granted_twice(log)
    assert found == "event ?: granted on a, which has 2 CPU, are 3 CPU: x (2) and y (1)"


def test_what_is_still_held_counts_after_it_was_taken_back():
    log = [node("a", 1), grant("x", {"a": 1}, {"a": 1}), grant("x", {}, {"a": 1}, "gave_way")]
    assert granted_twice([*log, grant("y", {"a": 1}, {})])
    assert granted_twice([*log, grant("x", {}, {}, "held"), grant("y", {"a": 1}, {})]) == []


def test_the_end_of_a_lease_frees_all_of_it():
    for cause in ("released", "expired"):
        log = [node("a", 1), grant("x", {"a": 1}, {"a": 1}), {"cause": cause, "holder": "x"}]
        assert granted_twice([*log, grant("y", {"a": 1}, {})]) == []


def test_fractions_are_summed_exactly():
    thirds = [grant(f"h{index}", {"a": 1}, {}, cpus=0.1) for index in range(10)]
    assert granted_twice([node("a", 1), *thirds]) == []
    assert granted_twice([node("a", 1), *thirds, grant("more", {"a": 1}, {}, cpus=0.0001)])


def test_a_replica_that_serve_put_elsewhere_is_held_twice_only_if_both_run():
    log = [node("a", 1), node("b", 1), grant("job", {"a": 1}, {}), grant("app", {"b": 1}, {})]
    log += [grant("app", {"a": 1}, {"a": 1}, "placed_elsewhere")]
    assert granted_twice(log) == []
    (found,) = granted_twice([*log, grant("job", {"a": 1}, {"a": 1}, "held")])
    assert "held on a" in found


def at(second: int, event: dict[str, Any]) -> dict[str, Any]:
    return {**event, "time": f"2026-01-01T00:00:{second:02}+00:00"}


def test_serve_may_take_the_place_of_a_worker_before_its_job_says_that_it_has_ended():
    log = [at(0, node("a", 1)), at(0, node("b", 1))]
    log += [at(1, grant("job", {"a": 1}, {"a": 1})), at(1, grant("app", {"b": 1}, {}))]
    log += [at(2, grant("app", {"a": 1}, {"a": 1}, "placed_elsewhere"))]
    assert granted_twice([*log, at(3, grant("job", {"b": 1}, {}, "place_taken"))]) == []
    (found,) = granted_twice([*log, at(3, grant("job", {"a": 1}, {"a": 1}, "held"))])
    assert "held on a" in found
    # Its lease would have ended by now, so that it has said since that it runs there as before.
    (found,) = granted_twice([*log, at(50, node("b", 2, "node_changed"))])
    assert "held on a" in found


def test_what_starts_need_not_be_there_yet_but_is_promised_its_place():
    log = [node("a", 1), node("b", 1), grant("app", {"b": 1}, {"b": 1})]
    log += [grant("job", {"a": 1}, {"a": 1}, starting={"a": 1})]
    assert granted_twice([*log, grant("app", {"a": 1}, {"a": 1}, "placed_elsewhere")]) == []
    assert granted_twice([*log, grant("other", {"a": 1}, {})]), "it is granted to somebody else"
    log += [grant("app", {"a": 1}, {"a": 1}, "placed_elsewhere")]
    (found,) = granted_twice([*log, grant("job", {"a": 1}, {"a": 1}, "held")])
    assert "held on a" in found


def test_a_replica_that_runs_before_it_is_granted_was_put_there_by_serve():
    log = [node("a", 1), node("b", 1), grant("job", {"a": 1}, {}), grant("app", {"b": 1}, {"b": 1})]
    assert granted_twice([*log, grant("app", {"a": 1, "b": 1}, {"a": 1, "b": 1}, "grew")]) == []
    assert granted_twice([*log, grant("app", {"a": 1, "b": 1}, {"b": 1}, "grew")])
    log = [node("a", 3), node("b", 1), grant("job", {"a": 2}, {}), grant("app", {"a": 1, "b": 1}, {})]
    assert granted_twice([*log, grant("app", {"a": 2}, {"a": 3}, "placed_elsewhere")]) == []
    log = [node("a", 1), grant("app", {"a": 1}, {}), grant("app", {"a": 1}, {"a": 1}, "held")]
    assert granted_twice([*log, grant("app", {"a": 2}, {"a": 1}, "grew")])


def test_another_node_of_the_same_name_has_nothing_of_the_one_before():
    log = [node("a", 1), grant("x", {"a": 1}, {"a": 1}), {"cause": "node_gone", "node": "a"}]
    assert granted_twice([*log, node("a", 1), grant("y", {"a": 1}, {})]) == []
    assert granted_twice([*log, node("a", 1, "node_back"), grant("y", {"a": 1}, {})])


def test_a_broker_that_starts_again_hears_everybody_anew():
    log = [node("a", 1), grant("x", {"a": 1}, {}), {"cause": "broker_started"}, node("a", 1)]
    assert granted_twice([*log, grant("y", {"a": 1}, {})]) == []
    assert granted_twice([*log, grant("x", {"a": 1}, {"a": 1}, "found"), grant("y", {"a": 1}, {"a": 1})])


def test_who_was_not_heard_and_ran_on_is_seen_when_another_was_granted_its_place():
    ran = [node("a", 1), grant("x", {"a": 1}, {"a": 1}), {"cause": "expired", "holder": "x"}]
    log = [*ran, grant("y", {"a": 1}, {})]
    assert granted_twice(log) == [], "it may be gone"
    back = grant("x", {}, {"a": 1}, "found")
    assert "x unheard" in granted_twice([*log, back])[0]
    # Who took the place has given it back since: it was granted twice all the same.
    (found,) = granted_twice([*log, {"cause": "released", "holder": "y"}, back])
    assert found == "event ?: granted on a, which has 1 CPU, are 2 CPU: y (1) and x (1), x unheard"
    assert granted_twice([*ran, back]) == [], "nobody was granted its place"


def test_who_was_gone_and_comes_back_was_not_robbed():
    log = [node("a", 1), grant("x", {"a": 1}, {"a": 1}), {"cause": "expired", "holder": "x"}]
    log += [grant("y", {"a": 1}, {}), {"cause": "released", "holder": "y"}]
    assert granted_twice([*log, grant("x", {"a": 1}, {})]) == []
    assert (
        granted_twice([*log, {"cause": "broker_started"}, node("a", 1), grant("x", {}, {"a": 1}, "found")])
        == []
    )
    promised = [node("a", 1), grant("x", {"a": 1}, {"a": 1}, starting={"a": 1})]
    promised += [{"cause": "expired", "holder": "x"}, grant("y", {"a": 1}, {})]
    promised += [{"cause": "released", "holder": "y"}]
    assert granted_twice([*promised, grant("x", {"a": 1}, {"a": 1}, "found")]) == [], "nothing ran yet"
