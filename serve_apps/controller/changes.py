"""How a record of an app changes: a rollout begins, turns back, ends; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from cluster.errors import RequestError
from serve_apps.controller.record import AppRecord, Outcome, Revision, Strategy, Successor, Update
from serve_apps.spec import AppSpec


def change(record: AppRecord, spec: AppSpec, now: float) -> AppRecord:
    """Change an app into `spec`, whatever it is changing into now; nothing when that is what it becomes.

    An update that is under way goes back first, as far as it has come, without a request lost.
    """
    if record.wanted == spec:
        return record
    if record.update is None:
        return begin(replace(record, successor=None), spec, now)
    number = record.newest + 1
    superseded = replace(record, newest=number, successor=Successor(number, spec))
    if record.update.back or record.update.strategy == "start":
        return superseded  # it goes back already, or to nothing
    return turn_back(superseded, f"{spec.model_version} was asked for", now, broken=False, reject=False)


def succeed(record: AppRecord, now: float) -> AppRecord:
    """Begin what was asked for while an update was under way, now that none is."""
    successor = record.successor
    assert successor is not None
    number, spec = successor.number, successor.spec
    begun = begin(replace(record, successor=None), spec, now, number=number)
    if begun.update is not None:
        return begun
    # It is back at what was asked for.
    version = spec.model_version
    return replace(begun, outcome=Outcome(number, "rolling", version, version, status="succeeded"))


def began(record: AppRecord) -> tuple[str, dict[str, Any]]:
    """The event of an update that has begun."""
    outcome = record.outcome
    assert outcome is not None
    facts = {"revision": outcome.number, "strategy": outcome.strategy, "version": outcome.to_version}
    return "began", {**facts, "from": outcome.from_version}


def begin(
    record: AppRecord,
    spec: AppSpec,
    now: float,
    *,
    way: Strategy | None = None,
    reason: str = "",
    number: int | None = None,
) -> AppRecord:
    """Start to change an app, of which no update is under way, into `spec`; nothing when that is what it is.

    Args:
        way: how. Default: as the spec says.
        reason: why, where nobody has asked for it.
        number: the revision's, where it has been given out. Default: the next.
    """
    assert record.update is None
    active = record.serving
    if active is not None and active.spec == spec:
        return record
    number = record.newest + 1 if number is None else number
    strategy: Strategy = "start" if active is None else way or spec.config.rollout
    if strategy == "in_place" and active is not None and not same_but_weights(active.spec, spec):
        strategy = "rolling"
    application = record.application_of(number)
    holder = spec.holder
    if active is not None:
        if strategy == "in_place":
            application = active.application
        # A lease is for units of one size on one kind of node.
        same_size = (
            active.spec.replica_resources == spec.replica_resources
            and active.spec.config.accelerator == spec.config.accelerator
        )
        if same_size or active.holder != spec.holder:
            holder = active.holder if same_size else spec.holder
        else:
            holder = f"{spec.holder}:{number}"
    return replace(
        record,
        newest=max(record.newest, number),
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


def follow_model(record: AppRecord, newer: AppSpec, now: float) -> AppRecord:
    """Change an app into `newer`, what its model means now, unless that is what it is, or has failed."""
    spec = record.wanted
    if spec is None or newer.model_version in record.rejected:
        return record
    if newer.model_version != spec.model_version:
        record = begin(record, newer, now, reason=f"{spec.config.model} changed")
    # The name has come to mean something else: what failed may be tried again.
    return replace(record, rejected=())


def same_but_weights(old: AppSpec, new: AppSpec) -> bool:
    """Whether nothing but the model's version, and how it takes over, differs."""
    weights = {"model": "", "rollout": "rolling", "update": old.config.update}
    return replace(
        new,
        config=new.config.model_copy(update=weights),
        model_path=old.model_path,
        model_version=old.model_version,
    ) == replace(old, config=old.config.model_copy(update=weights))


def begin_back(record: AppRecord, spec: AppSpec, now: float, reason: str) -> AppRecord:
    """Start to change an app back into what it was, in a way that needs no devices that may not be there.

    What it is now is not followed to again, though a name of its model may still mean it.
    """
    active = active_of(record)
    rejected = record.rejected
    if active.spec.model_version != spec.model_version:
        rejected = tuple(dict.fromkeys((*rejected, active.spec.model_version)))
    record = replace(record, rejected=rejected)
    way: Strategy = "in_place" if active.spec.config.rollout == "in_place" else "rolling"
    return begin(record, spec, now, way=way, reason=reason)


def roll_back(record: AppRecord, now: float) -> AppRecord:
    """Go back to what the app was before.

    Raises:
        RequestError: there is nothing to go back to.
    """
    update = record.update
    record = replace(record, successor=None)  # the last word counts
    if update is not None:
        if update.strategy == "start":
            raise RequestError(f"{record.name} is being started for the first time; `unserve` takes it down")
        return record if update.back else turn_back(record, "asked for", now, broken=False)
    if record.previous is None:
        raise RequestError(f"{record.name} has had no other version on this cluster to go back to")
    return begin_back(record, record.previous, now, "asked for")


def turn_back(record: AppRecord, why: str, now: float, *, broken: bool, reject: bool = True) -> AppRecord:
    """Have an update go back; with `reject`, what it was to is not followed to again."""
    update = replace(update_of(record), back=True, broken=broken, reason=why, progress_at=now)
    outcome = record.outcome
    assert outcome is not None
    rejected = record.rejected
    if reject:
        rejected = tuple(dict.fromkeys((*rejected, outcome.to_version)))
    return replace(record, update=update, outcome=replace(outcome, reason=why), rejected=rejected)


def at_application(record: AppRecord, application: str, **changes: Any) -> AppRecord:
    """The record with the coming revision in another Serve application."""
    new = coming_of(record)
    moved = replace(new, application=application)
    revisions = tuple(moved if each is new else each for each in record.revisions)
    return replace(record, revisions=revisions, update=replace(update_of(record), **changes))


def finished(record: AppRecord, now: float) -> AppRecord:
    """The record once the update has ended, in or out."""
    update, new, outcome = update_of(record), coming_of(record), record.outcome
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


def way_back(record: AppRecord, now: float) -> AppSpec | None:
    """What the errors of the active revision lead back to; None: they are looked at no longer."""
    previous = record.previous
    known_bad = previous is not None and previous.model_version in record.rejected
    return None if known_bad or now >= record.watch_until else previous


def on_trial(record: AppRecord, now: float) -> frozenset[int]:
    """The revisions whose errors have them taken back, and those that are being taken back for theirs."""
    if record.removed:
        return frozenset()
    numbers = set()
    active, coming, update = record.serving, record.coming, record.update
    if update is not None and coming is not None and update.strategy != "start":
        numbers.add(coming.number)
    if active is not None:
        watched = update is None and way_back(record, now) is not None
        if watched or active.spec.model_version in record.rejected:
            numbers.add(active.number)
    return frozenset(numbers)


def told(record: AppRecord) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    outcome = record.outcome
    assert outcome is not None
    facts: dict[str, Any] = {"revision": outcome.number, "strategy": outcome.strategy}
    facts |= {"version": outcome.to_version, "seconds": round(outcome.seconds, 3)}
    if outcome.reason:
        facts["reason"] = outcome.reason
    return ((outcome.status, facts),)


def numbers(record: AppRecord) -> frozenset[int]:
    return frozenset(revision.number for revision in record.revisions)


def update_of(record: AppRecord) -> Update:
    assert record.update is not None
    return record.update


def active_of(record: AppRecord) -> Revision:
    assert record.serving is not None
    return record.serving


def coming_of(record: AppRecord) -> Revision:
    assert record.coming is not None
    return record.coming
