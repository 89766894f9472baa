"""How one revision of an app takes over from another: the next step, from what is seen now; pure.

All three ways keep one rule: requests go only to a revision that is ready and has answered its probes, and a
revision that gets none any more is ended when the last of its requests has been answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from serve_apps.controller.changes import (
    active_of,
    at_application,
    began,
    begin_back,
    coming_of,
    finished,
    numbers,
    same_but_weights,
    succeed,
    told,
    turn_back,
    update_of,
    way_back,
)
from serve_apps.controller.decision import Decision, Seen
from serve_apps.controller.record import AppRecord, Revision

SPARE_WAIT_S = 3.0
"""How long a rolling update waits for a spare replica's devices before it goes on without."""
ROOM_WAIT_S = 30.0
"""How long the first replicas of an app, or a second full set, wait for their devices."""
FEWEST_REQUESTS = 10
"""What an error rate is of, at least; of fewer requests, those that are missing count as answered."""


def decide(record: AppRecord, seen: Mapping[int, Seen], wanted: int, now: float) -> Decision:
    """The next step of an app.

    Args:
        seen: by revision.
        wanted: replicas that the load asks for.
    """
    if record.removed:
        there = numbers(record)
        gone = frozenset(n for n in there if seen[n].gone)
        for number in gone:
            record = record.without(number)
        asks = {revision.holder: seen[revision.number].held for revision in record.revisions}
        return Decision(record, delete=there - gone, asks=asks)
    if record.update is None and record.successor is not None:
        # Nobody has seen anything of it yet: what there is goes on as it is until the next look.
        decision = _steady(replace(record, successor=None, watch_until=0.0), seen, wanted, now)
        record = succeed(record, now)
        events = (began(record),) if record.update is not None else told(record)
        return replace(decision, record=record, events=events)
    if record.update is None:
        return _steady(record, seen, wanted, now)
    if update_of(record).strategy == "start" and record.successor is not None:
        return _give_up_start(record, seen, wanted, now)
    application = coming_of(record).application
    record, events = _check(record, seen, wanted, now)
    if record.update is None:  # it could not even be started
        return Decision(record, delete=numbers(record), events=events)
    if coming_of(record).application != application:
        active = active_of(record)  # what was seen is of another application
        asks = {active.holder: max(1, wanted)}
        return Decision(record, traffic=frozenset({active.number}), asks=asks, events=events)
    record = _note_progress(record, seen, now)
    strategy = update_of(record).strategy
    ways = {"start": _start, "rolling": _rolling, "blue_green": _blue_green, "in_place": _in_place}
    decision = ways[strategy](record, seen, max(1, wanted), now)
    return replace(decision, events=(*events, *decision.events))


def _give_up_start(record: AppRecord, seen: Mapping[int, Seen], wanted: int, now: float) -> Decision:
    """The first version of an app ends before it was there, because another was asked for."""
    new = coming_of(record)
    state = seen[new.number]
    if state.gone:
        return decide(replace(record.without(new.number), update=None), seen, wanted, now)
    asks = {new.holder: state.held}
    delete = frozenset({new.number}) if state.drained else frozenset()
    return Decision(record, {new.number: state.ready}, asks=asks, delete=delete)


def _steady(record: AppRecord, seen: Mapping[int, Seen], wanted: int, now: float) -> Decision:
    active = record.serving
    if active is None:
        return Decision(record, delete=numbers(record))
    state = seen[active.number]
    previous = way_back(record, now)
    if previous is not None and (why := _too_many_errors(active, state)):
        coming = Seen(granted=state.granted, gone=True)
        seen = {**seen, record.newest + 1: coming}
        return decide(begin_back(record, previous, now, why), seen, wanted, now)
    fewest = active.spec.config.replicas.min
    size = max(fewest, min(wanted, state.granted))
    asks = {active.holder: max(wanted, fewest)}
    if wanted == 0:
        # Requests that come now wait, and are wanted a replica for.
        idle = state.drained or state.ready == 0
        return Decision(record, {active.number: 0 if idle else max(1, state.ready)}, asks=asks)
    # From nothing: they wait at the gateway, where they are seen, until there is a replica.
    starts = fewest == 0 and state.ready == 0
    traffic = frozenset() if starts else frozenset({active.number})
    return Decision(record, {active.number: size}, traffic, asks=asks)


def _start(record: AppRecord, seen: Mapping[int, Seen], wanted: int, now: float) -> Decision:
    new = coming_of(record)
    state = seen[new.number]
    size = max(new.spec.config.replicas.min, 1)
    asks = {new.holder: max(size, wanted)}
    sizes = {new.number: size if state.granted >= size else 0}
    if state.ready == 0 or state.probe is None:
        return Decision(record, sizes, asks=asks, probe=new.number if state.ready else None)
    if state.ready < size:
        return Decision(record, sizes, frozenset({new.number}), asks=asks)
    done = finished(record, now)
    return Decision(done, sizes, frozenset({new.number}), asks=asks, events=told(done))


def _rolling(record: AppRecord, seen: Mapping[int, Seen], wanted: int, now: float) -> Decision:
    update, old, new = update_of(record), active_of(record), coming_of(record)
    leaving, entering = (new, old) if update.back else (old, new)
    there, here = seen[entering.number], seen[leaving.number]
    broken = update.back and update.broken
    usable = entering is old or there.probe == ""
    ready = there.ready if usable else 0
    shared = leaving.holder == entering.holder
    asks = {entering.holder: wanted + max(1, wanted // 4)}
    if shared:
        wanted = min(wanted, max(1, there.granted))
    # One at a time, or a quarter of many; without a spare device one goes before the next comes.
    spare = there.granted > wanted if shared else there.granted > ready
    surge = max(1, min(wanted // 4, there.granted - wanted))
    waits = not spare and ready == 0 and not update.back and now - update.began_at < SPARE_WAIT_S
    alone = not (spare or waits or update.back) and wanted == 1 and here.ready == 1 and there.gone
    if alone and update.reloads is None and same_but_weights(old.spec, new.spec):
        # Its place would stay empty until the new one is there: other weights are there sooner.
        record = at_application(record, old.application, strategy="in_place", reloads=True)
        return _in_place(record, {**seen, new.number: here}, wanted, now)
    # What the gateways do not send requests to yet takes nobody's place.
    replaced = ready if there.taken else 0
    stays = 0 if broken else max(0, wanted - replaced - (0 if spare or waits else 1))
    if leaving.spec.config.replicas.min == 0 and here.held == 0 and here.ready == 0:
        stays = 0  # it was idle
    enters = wanted if update.back else 0 if waits else min(wanted, ready + surge)

    traffic = set()
    if ready > 0:
        traffic.add(entering.number)
    if replaced < wanted and stays > 0 and here.ready > 0:
        traffic.add(leaving.number)
    if stays == 0 and not here.drained:
        stays = 1  # its last requests are still being answered
    if not shared:
        asks = {entering.holder: wanted, leaving.holder: max(stays, here.held)}
    else:
        # Never more than the lease allows, counting what has not ended yet.
        stays = min(stays, max(here.ready, there.granted - there.held))
        enters = max(min(there.ready, enters), min(enters, there.granted - max(stays, here.held)))
    sizes = {leaving.number: stays, entering.number: max(0, enters)}
    probe = entering.number if there.ready and not usable else None
    complete = replaced >= wanted and leaving.number not in traffic
    if complete and here.gone:
        done = finished(record, now)
        return Decision(
            done, {entering.number: wanted}, frozenset({entering.number}), asks=asks, events=told(done)
        )
    ends = (complete or broken) and here.drained and leaving.number not in traffic
    delete = frozenset({leaving.number}) if ends or here.gone else frozenset()
    return Decision(record, sizes, frozenset(traffic), asks=asks, delete=delete, probe=probe)


def _blue_green(record: AppRecord, seen: Mapping[int, Seen], wanted: int, now: float) -> Decision:
    update, old, new = update_of(record), active_of(record), coming_of(record)
    state, before = seen[new.number], seen[old.number]
    wanted = max(wanted, before.ready) if update.switched_at is None else wanted
    held = max(wanted, before.ready)
    asks = {old.holder: held, new.holder: wanted}
    if old.holder == new.holder:
        asks = {old.holder: held + wanted}
    if update.back:
        sizes = {old.number: wanted, new.number: state.ready}
        if state.gone:
            done = finished(record, now)
            return Decision(done, {old.number: wanted}, frozenset({old.number}), asks=asks, events=told(done))
        delete = frozenset({new.number}) if state.drained else frozenset()
        return Decision(record, sizes, frozenset({old.number}), asks=asks, delete=delete)
    room = state.granted - (before.held if old.holder == new.holder else 0)
    sizes = {old.number: held, new.number: wanted if room >= wanted or state.ready else 0}
    if update.switched_at is None:
        probe = new.number if state.ready >= wanted and state.probe is None else None
        if state.ready < wanted or state.probe != "":
            return Decision(record, sizes, frozenset({old.number}), asks=asks, probe=probe)
        record = replace(record, update=replace(update, switched_at=now))
        events = (("switched", {"revision": new.number, "kept_s": new.spec.config.update.hold_s}),)
        standby = frozenset({old.number})
        return Decision(record, sizes, frozenset({new.number}), standby, asks, events=events)
    traffic = frozenset({new.number})
    if before.gone:
        done = replace(finished(record, now), watch_until=0.0)
        return Decision(done, {new.number: wanted}, traffic, asks=asks, events=told(done))
    kept = frozenset({old.number})
    if now - update.switched_at < new.spec.config.update.hold_s:
        return Decision(record, sizes, traffic, kept, asks)
    return Decision(record, sizes, traffic, asks=asks, delete=kept if before.drained else frozenset())


def _in_place(record: AppRecord, seen: Mapping[int, Seen], wanted: int, now: float) -> Decision:
    update, old, new = update_of(record), active_of(record), coming_of(record)
    state = seen[new.number]
    size = max(1, min(wanted, state.granted))
    asks = {old.holder: max(wanted, old.spec.config.replicas.min)}
    sizes = {old.number: size}
    stage, paused_at = update.stage, update.paused_at

    def at(stage: Any, **changes: Any) -> AppRecord:
        return replace(record, update=replace(update, stage=stage, progress_at=now, **changes))

    if update.back and stage in ("prepare", "drain"):
        done = finished(record, now)
        return Decision(done, sizes, frozenset({old.number}), asks=asks, events=told(done))
    late = now - update.progress_at >= new.spec.config.update.ready_timeout_s
    loads = stage == "load" and not (late or state.refusal or state.loaded >= max(1, state.ready))
    if update.back and loads:
        # A replica that loads cannot be stopped: it would have the new weights after all, later.
        return Decision(record, sizes, asks=asks, order="load", ordered=new.number)
    if update.back and stage != "return":
        return Decision(at("return"), sizes, frozenset(), asks=asks, order="load", ordered=old.number)
    if stage == "prepare":
        if state.ready and state.prepared >= state.ready:
            return Decision(at("drain", paused_at=now), sizes, frozenset(), asks=asks)
        traffic = frozenset({old.number})
        return Decision(record, sizes, traffic, asks=asks, order="prepare", ordered=new.number)
    if stage == "drain":
        if seen[old.number].drained:
            return Decision(at("load"), sizes, frozenset(), asks=asks, order="load", ordered=new.number)
        return Decision(record, sizes, frozenset(), asks=asks)
    goal = old if stage == "return" else new
    if not state.ready or seen[goal.number].loaded < state.ready:
        return Decision(record, sizes, frozenset(), asks=asks, order="load", ordered=goal.number)
    if stage == "load":
        return Decision(at("probe"), sizes, frozenset(), asks=asks, probe=new.number)
    if stage == "probe" and state.probe is None:
        return Decision(record, sizes, frozenset(), asks=asks, probe=new.number)
    done = finished(record, now)
    assert done.outcome is not None
    pause_s = 0.0 if paused_at is None else now - paused_at
    done = replace(done, outcome=replace(done.outcome, pause_s=pause_s))
    return Decision(done, {goal.number: size}, frozenset({goal.number}), asks=asks, events=told(done))


def _check(
    record: AppRecord, seen: Mapping[int, Seen], wanted: int, now: float
) -> tuple[AppRecord, tuple[tuple[str, Mapping[str, Any]], ...]]:
    """Turn back what does not work."""
    update, new = update_of(record), coming_of(record)
    if update.back:
        return record, ()
    why = _wrong(record, seen[new.number], max(1, wanted), now)
    if why is None:
        return record, ()
    if update.reloads and update.stage == "prepare":
        # It has to be a replica of its own.
        application = record.application_of(new.number)
        return at_application(record, application, strategy="rolling", reloads=False, progress_at=now), ()
    events = (("failed", {"revision": new.number, "version": new.spec.model_version, "reason": why}),)
    if update.strategy == "start":
        assert record.outcome is not None
        outcome = replace(record.outcome, status="failed", reason=why, seconds=now - update.began_at)
        return replace(record, update=None, removed=True, outcome=outcome), events
    return turn_back(record, why, now, broken=True), events


def _wrong(record: AppRecord, state: Seen, wanted: int, now: float) -> str | None:
    """Why the coming revision cannot take over; None while it may."""
    update, new = update_of(record), coming_of(record)
    settings = new.spec.config.update
    room_wait_s = min(ROOM_WAIT_S, settings.ready_timeout_s)
    if update.strategy == "in_place":
        if state.refusal is not None:
            return state.refusal
    elif state.failure is not None:
        return state.failure
    if state.probe:
        return f"it did not pass its probes: {state.probe}"
    if why := _too_many_errors(new, state):
        return why
    if update.strategy == "start" and state.held == 0 and state.ready == 0:
        size = max(1, new.spec.config.replicas.min)
        if state.granted < size and now - update.began_at > room_wait_s:
            return state.shortage or f"no room for {size} replicas within {room_wait_s:g} s"
    if update.strategy == "blue_green" and state.held == 0 and now - update.began_at > room_wait_s:
        return f"no room for a second set of {wanted} replicas within {room_wait_s:g} s"
    if update.switched_at is None and now - update.progress_at > settings.ready_timeout_s:
        return f"no further replica of it was ready within {settings.ready_timeout_s:g} s"
    return None


def _too_many_errors(revision: Revision, state: Seen) -> str | None:
    most = revision.spec.config.update.max_error_rate
    if state.errors > most * max(state.requests, FEWEST_REQUESTS):
        return f"{state.errors} of its {state.requests} requests failed (at most {most:.0%} may)"
    return None


def _note_progress(record: AppRecord, seen: Mapping[int, Seen], now: float) -> AppRecord:
    update = update_of(record)
    ready = seen[update.number].ready
    if ready <= update.ready or update.strategy == "in_place":
        return record
    return replace(record, update=replace(update, ready=ready, progress_at=now))
