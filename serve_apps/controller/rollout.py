"""How one revision of an app takes over from another: the next step, from what is seen now; pure.

All three ways keep one rule: requests go only to a revision that is ready and has answered its probes, and a
revision that gets none any more is ended when the last of its requests has been answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from cluster.errors import RequestError
from serve_apps.controller.record import AppRecord, Outcome, Revision, Strategy, Update
from serve_apps.spec import AppSpec

SPARE_WAIT_S = 3.0
"""How long a rolling update waits for a spare replica's devices before it goes on without."""
ROOM_WAIT_S = 30.0
"""How long the first replicas of an app, or a second full set, wait for their devices."""
FEWEST_REQUESTS = 10
"""Of fewer requests no error rate is taken."""


@dataclass(frozen=True)
class Seen:
    """A revision, as Serve, its replicas, the broker and the gateways tell of it now."""

    ready: int = 0
    held: int = 0
    """Its replicas that have devices, those that start and those that end included."""
    granted: int = 0
    """Replicas that the lease it is counted in allows."""
    gone: bool = False
    """Serve does not have it any more."""
    failure: str | None = None
    """Why it cannot be started."""
    probe: str | None = None
    """What was wrong with its answers to the probes: empty if nothing was; None before they came."""
    drained: bool = False
    """Every gateway knows that it gets no requests, and has none of it left."""
    taken: bool = False
    """Every gateway knows that it gets requests."""
    requests: int = 0
    errors: int = 0
    """How many of its requests failed."""
    prepared: int = 0
    """Replicas that could load its weights (in_place)."""
    loaded: int = 0
    """Replicas that run its weights."""
    refusal: str | None = None
    """Why a replica cannot load its weights (in_place)."""
    shortage: str = ""
    """Why its devices are not granted, as far as that is known."""


@dataclass(frozen=True)
class Decision:
    """What is to be done now; repeating it does no harm."""

    record: AppRecord
    sizes: Mapping[int, int] = field(default_factory=dict)
    """Replicas by revision; one that is not named is left as it is."""
    traffic: frozenset[int] = frozenset()
    """The revisions that get requests; while there is none, requests wait."""
    standby: frozenset[int] = frozenset()
    """Revisions that get what those with requests have failed to answer."""
    asks: Mapping[str, int] = field(default_factory=dict)
    """Replicas that each lease should allow."""
    delete: frozenset[int] = frozenset()
    probe: int | None = None
    """A revision whose probes are due."""
    order: Literal["prepare", "load"] | None = None
    """What all replicas are to do with the weights of `ordered` (in_place)."""
    ordered: int | None = None
    events: tuple[tuple[str, Mapping[str, Any]], ...] = ()


def begin(record: AppRecord, spec: AppSpec, now: float, reason: str = "") -> AppRecord:
    """Start to change an app into `spec`; nothing when that is what it is or becomes.

    Raises:
        RequestError: it is changing into something else.
    """
    update, active = record.update, record.serving
    if update is not None:
        if record.wanted == spec:
            return record
        raise RequestError(
            f"{record.name} is being updated to {record.outcome.to_version if record.outcome else '?'};"
            f" `shoal status` shows how far it is, `shoal rollback {record.name}` ends it"
        )
    if active is not None and active.spec == spec:
        return record
    number = record.newest + 1
    strategy: Strategy = "start" if active is None else spec.config.rollout
    if strategy == "in_place" and active is not None and not same_but_weights(active.spec, spec):
        strategy = "rolling"
    application = f"{record.name}:{number}"
    holder = spec.holder
    if active is not None:
        if strategy == "in_place":
            application = active.application
        same_size = active.spec.replica_resources == spec.replica_resources
        if same_size or active.holder != spec.holder:
            holder = active.holder if same_size else spec.holder
        else:
            holder = f"{spec.holder}:{number}"
    return replace(
        record,
        newest=number,
        revisions=(*record.revisions, Revision(number, application, holder, spec, now)),
        update=Update(number, strategy, began_at=now, progress_at=now),
        outcome=Outcome(
            number,
            strategy,
            to_version=spec.model_version,
            from_version=active.spec.model_version if active is not None else None,
            reason=reason,
        ),
        watch_until=0.0,
        removed=False,
    )


def same_but_weights(old: AppSpec, new: AppSpec) -> bool:
    """Whether nothing but the model's version, and how it takes over, differs."""
    weights = {"model": "", "rollout": "rolling", "update": old.config.update}
    return replace(
        new,
        config=new.config.model_copy(update=weights),
        model_path=old.model_path,
        model_version=old.model_version,
    ) == replace(old, config=old.config.model_copy(update=weights))


def roll_back(record: AppRecord, now: float) -> AppRecord:
    """Go back to what the app was before.

    Raises:
        RequestError: there is nothing to go back to.
    """
    update = record.update
    if update is not None:
        if update.strategy == "start":
            raise RequestError(f"{record.name} is being started for the first time; `unserve` takes it down")
        return record if update.back else _turn(record, "asked for", now, broken=False)
    previous, active = record.previous, record.serving
    if previous is None:
        raise RequestError(f"{record.name} has had no other version on this cluster to go back to")
    if active is not None and active.spec.model_version != previous.model_version:
        # A name that the app follows still means it: that must not bring it back.
        record = replace(record, rejected=tuple(dict.fromkeys((*record.rejected, active.spec.model_version))))
    return begin(record, previous, now, "asked for")


def decide(record: AppRecord, seen: Mapping[int, Seen], wanted: int, now: float) -> Decision:
    """The next step of an app.

    Args:
        seen: by revision.
        wanted: replicas that the load asks for.
    """
    if record.removed:
        numbers = frozenset(revision.number for revision in record.revisions)
        gone = frozenset(n for n in numbers if seen[n].gone)
        for number in gone:
            record = record.without(number)
        asks = {revision.holder: seen[revision.number].held for revision in record.revisions}
        return Decision(record, delete=numbers - gone, asks=asks)
    if record.update is None:
        return _steady(record, seen, wanted, now)
    application = _coming(record).application
    record, events = _check(record, seen, wanted, now)
    if record.update is None:  # it could not even be started
        return Decision(record, delete=_numbers(record), events=events)
    if _coming(record).application != application:
        active = _active(record)  # what was seen is of another application
        asks = {active.holder: max(1, wanted)}
        return Decision(record, traffic=frozenset({active.number}), asks=asks, events=events)
    record = _note_progress(record, seen, now)
    strategy = _update(record).strategy
    ways = {"start": _start, "rolling": _rolling, "blue_green": _blue_green, "in_place": _in_place}
    decision = ways[strategy](record, seen, max(1, wanted), now)
    return replace(decision, events=(*events, *decision.events))


def _steady(record: AppRecord, seen: Mapping[int, Seen], wanted: int, now: float) -> Decision:
    active = record.serving
    if active is None:
        return Decision(record, delete=_numbers(record))
    state = seen[active.number]
    previous = record.previous
    if now < record.watch_until and previous is not None and (why := _too_many_errors(active, state)):
        # Not tried again by itself.
        rejected = (*record.rejected, active.spec.model_version)
        record = replace(record, rejected=tuple(dict.fromkeys(rejected)))
        coming = Seen(granted=state.granted, gone=True)
        seen = {**seen, record.newest + 1: coming}
        return decide(begin(record, previous, now, why), seen, wanted, now)
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
    new = _coming(record)
    state = seen[new.number]
    size = max(new.spec.config.replicas.min, 1)
    asks = {new.holder: max(size, wanted)}
    sizes = {new.number: size if state.granted >= size else 0}
    if state.ready == 0 or state.probe is None:
        return Decision(record, sizes, asks=asks, probe=new.number if state.ready else None)
    if state.ready < size:
        return Decision(record, sizes, frozenset({new.number}), asks=asks)
    done = _finished(record, now)
    return Decision(done, sizes, frozenset({new.number}), asks=asks, events=_told(done))


def _rolling(record: AppRecord, seen: Mapping[int, Seen], wanted: int, now: float) -> Decision:
    update, old, new = _update(record), _active(record), _coming(record)
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
        record = _at_application(record, old.application, strategy="in_place", reloads=True)
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
        enters = max(min(there.ready, enters), min(enters, there.granted - max(stays, here.held)))
    sizes = {leaving.number: stays, entering.number: max(0, enters)}
    probe = entering.number if there.ready and not usable else None
    complete = replaced >= wanted and leaving.number not in traffic
    if complete and here.gone:
        done = _finished(record, now)
        return Decision(
            done, {entering.number: wanted}, frozenset({entering.number}), asks=asks, events=_told(done)
        )
    ends = (complete or broken) and here.drained and leaving.number not in traffic
    delete = frozenset({leaving.number}) if ends or here.gone else frozenset()
    return Decision(record, sizes, frozenset(traffic), asks=asks, delete=delete, probe=probe)


def _blue_green(record: AppRecord, seen: Mapping[int, Seen], wanted: int, now: float) -> Decision:
    update, old, new = _update(record), _active(record), _coming(record)
    state, before = seen[new.number], seen[old.number]
    wanted = max(wanted, before.ready) if update.switched_at is None else wanted
    held = max(wanted, before.ready)
    asks = {old.holder: held, new.holder: wanted}
    if old.holder == new.holder:
        asks = {old.holder: held + wanted}
    if update.back:
        sizes = {old.number: wanted, new.number: state.ready}
        if state.gone:
            done = _finished(record, now)
            return Decision(
                done, {old.number: wanted}, frozenset({old.number}), asks=asks, events=_told(done)
            )
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
        done = replace(_finished(record, now), watch_until=0.0)
        return Decision(done, {new.number: wanted}, traffic, asks=asks, events=_told(done))
    kept = frozenset({old.number})
    if now - update.switched_at < new.spec.config.update.hold_s:
        return Decision(record, sizes, traffic, kept, asks)
    return Decision(record, sizes, traffic, asks=asks, delete=kept if before.drained else frozenset())


def _in_place(record: AppRecord, seen: Mapping[int, Seen], wanted: int, now: float) -> Decision:
    update, old, new = _update(record), _active(record), _coming(record)
    state = seen[new.number]
    size = max(1, min(wanted, state.granted))
    asks = {old.holder: max(wanted, old.spec.config.replicas.min)}
    sizes = {old.number: size}
    stage, paused_at = update.stage, update.paused_at

    def at(stage: Any, **changes: Any) -> AppRecord:
        return replace(record, update=replace(update, stage=stage, progress_at=now, **changes))

    if update.back and stage in ("prepare", "drain"):
        done = _finished(record, now)
        return Decision(done, sizes, frozenset({old.number}), asks=asks, events=_told(done))
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
    done = _finished(record, now)
    assert done.outcome is not None
    pause_s = 0.0 if paused_at is None else now - paused_at
    done = replace(done, outcome=replace(done.outcome, pause_s=pause_s))
    return Decision(done, {goal.number: size}, frozenset({goal.number}), asks=asks, events=_told(done))


def _check(
    record: AppRecord, seen: Mapping[int, Seen], wanted: int, now: float
) -> tuple[AppRecord, tuple[tuple[str, Mapping[str, Any]], ...]]:
    """Turn back what does not work."""
    update, new = _update(record), _coming(record)
    if update.back:
        return record, ()
    why = _wrong(record, seen[new.number], max(1, wanted), now)
    if why is None:
        return record, ()
    if update.reloads and update.stage == "prepare":
        # It has to be a replica of its own.
        application = f"{record.name}:{new.number}"
        return _at_application(record, application, strategy="rolling", reloads=False, progress_at=now), ()
    events = (("failed", {"revision": new.number, "version": new.spec.model_version, "reason": why}),)
    if update.strategy == "start":
        assert record.outcome is not None
        outcome = replace(record.outcome, status="failed", reason=why, seconds=now - update.began_at)
        return replace(record, update=None, removed=True, outcome=outcome), events
    return _turn(record, why, now, broken=True), events


def _at_application(record: AppRecord, application: str, **changes: Any) -> AppRecord:
    """The record with the coming revision in another Serve application."""
    new = _coming(record)
    moved = replace(new, application=application)
    revisions = tuple(moved if each is new else each for each in record.revisions)
    return replace(record, revisions=revisions, update=replace(_update(record), **changes))


def _wrong(record: AppRecord, state: Seen, wanted: int, now: float) -> str | None:
    """Why the coming revision cannot take over; None while it may."""
    update, new = _update(record), _coming(record)
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
    if state.requests >= FEWEST_REQUESTS and state.errors > most * state.requests:
        return f"{state.errors} of its {state.requests} requests failed (at most {most:.0%} may)"
    return None


def _turn(record: AppRecord, why: str, now: float, *, broken: bool) -> AppRecord:
    update = replace(_update(record), back=True, broken=broken, reason=why, progress_at=now)
    outcome = record.outcome
    assert outcome is not None
    rejected = tuple(dict.fromkeys((*record.rejected, outcome.to_version)))
    return replace(record, update=update, outcome=replace(outcome, reason=why), rejected=rejected)


def _note_progress(record: AppRecord, seen: Mapping[int, Seen], now: float) -> AppRecord:
    update = _update(record)
    ready = seen[update.number].ready
    if ready <= update.ready or update.strategy == "in_place":
        return record
    return replace(record, update=replace(update, ready=ready, progress_at=now))


def _finished(record: AppRecord, now: float) -> AppRecord:
    """The record once the update has ended, in or out."""
    update, new, outcome = _update(record), _coming(record), record.outcome
    assert outcome is not None
    seconds = now - update.began_at
    if update.back:
        status: Literal["failed", "rolled_back"] = "failed" if update.broken else "rolled_back"
        outcome = replace(outcome, status=status, seconds=seconds)
        return replace(record.without(new.number), update=None, outcome=outcome)
    old = record.serving
    rest = record if old is None else record.without(old.number)
    return replace(
        rest,
        active=new.number,
        update=None,
        previous=record.previous if old is None else old.spec,
        outcome=replace(outcome, status="succeeded", seconds=seconds),
        watch_until=0.0 if old is None else now + new.spec.config.update.watch_s,
        rejected=tuple(each for each in record.rejected if each != new.spec.model_version),
    )


def _told(record: AppRecord) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    outcome = record.outcome
    assert outcome is not None
    facts: dict[str, Any] = {"revision": outcome.number, "strategy": outcome.strategy}
    facts |= {"version": outcome.to_version, "seconds": round(outcome.seconds, 3)}
    if outcome.reason:
        facts["reason"] = outcome.reason
    return ((outcome.status, facts),)


def _numbers(record: AppRecord) -> frozenset[int]:
    return frozenset(revision.number for revision in record.revisions)


def _update(record: AppRecord) -> Update:
    assert record.update is not None
    return record.update


def _active(record: AppRecord) -> Revision:
    assert record.serving is not None
    return record.serving


def _coming(record: AppRecord) -> Revision:
    assert record.coming is not None
    return record.coming
