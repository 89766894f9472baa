"""An app under a load that steps up and back: how fast replicas come and go, and what requests see; by hand.

    python tests/benchmarks/load_step.py [--json] [--plot FILE.png] [--repeats 3] [--peak 8] [--max 12]
        [--standby 12]

One replica of a paced engine (`paced_engine.py`) answers `capacity` requests a second when its batch is
always full. Requests arrive at random (Poisson, open loop) at `--base` × that for `--before` seconds, then at
`--peak` × that for `--during` seconds, then at `--base` × that again until the app is back at one replica (or
`--after` seconds are over). The app has 1 to `--max` replicas of one CPU; the nodes declare as many CPUs as
that takes, since the engine sleeps where it would compute. With as many replicas as `--peak` the replicas
would be full to the last place, and a queue once there would never go: the default has a few more. `--base`
is so low that chance seldom asks one replica for more than it is to have, so that one is enough.

Nothing may be refused: `limits.queue` is a fifth more than the requests that arrive on average in the whole
of the peak, so that even if none of them were answered all had a place. A request that does not get its whole
answer counts as failed, and the benchmark then ends with 1.

The summary counts from the step up: seconds to the first new replica ready, to as many as the load is for
(`--peak`) and to the most there were, until the p99 of the time to first token (over `--window` seconds, by
when requests were due) stays under `--bound-s`; the peak has to last until then for that to say anything
(what waits when the last replica is ready goes at what `--max` replicas can do more than `--peak`). From the
step down: seconds until one replica runs. `never` is what did not happen in any repeat. Medians over the
repeats in which it did; the plot is of the first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from cluster.config.sections.serve import STANDBY, ServeAppConfig
from serve_apps.spec import AppSpec
from tests.benchmarks.http_load import Answer, Ask, arrivals, ask_once, percentile, session
from tests.benchmarks.paced_engine import ENGINE, Notes, Pace
from tests.benchmarks.serving_processes import GENERATOR, CpuShares, serving_processes
from tests.clusters import started
from tests.serve_apps import driver
from tests.serve_apps.driver import Driver
from tests.serve_apps.tiny_model import make_tokenizer

PACE = Pace(step_s=0.05, request_s=0.001)
BATCH = 4
PROMPT_TOKENS, ANSWER_TOKENS = 32, 32
TARGET_ONGOING = 3.0
"""Requests in flight for which the app wants one replica each: three of its four places."""
LOOK_EVERY_S = 0.5
SETTLED_S = 3.0
"""How long the app must have been back at one replica."""


@dataclass(frozen=True)
class Size:
    """How many replicas there were at a time (seconds from the start of the load)."""

    at_s: float
    ready: int
    wanted: int
    granted: int


@dataclass(frozen=True)
class Course:
    """One load from its beginning to its end."""

    answers: Sequence[Answer]
    sizes: Sequence[Size]
    up_s: float
    down_s: float
    end_s: float


def capacity() -> float:
    """Requests/s of one replica."""
    return 1 / PACE.busy_s(PROMPT_TOKENS, ANSWER_TOKENS, BATCH)


def make_load(options: argparse.Namespace, seed: int) -> list[Ask]:
    chance = random.Random(seed)

    def make(due_s: float) -> Ask:
        return Ask(due_s, [chance.randrange(1, 250) for _ in range(PROMPT_TOKENS)], ANSWER_TOKENS)

    up_s, down_s = options.before, options.before + options.during
    base, peak = options.base * capacity(), options.peak * capacity()
    return [
        *arrivals(base, options.before, chance, make),
        *arrivals(peak, options.during, chance, make, since=up_s),
        *arrivals(base, options.after, chance, make, since=down_s),
    ]


async def offer(url: str, asks: Sequence[Ask], began: float, over: Callable[[], bool]) -> list[Answer]:
    """Send each request when it is due, until it is `over`."""
    async with session() as http:
        running = []
        for ask in asks:
            while (wait_s := began + ask.due_s - time.perf_counter()) > 0:
                await asyncio.sleep(min(wait_s, LOOK_EVERY_S))
            if over():
                break
            running.append(asyncio.create_task(ask_once(http, url, "chat", ask, began)))
        return await asyncio.gather(*running)


def one_course(call: Driver, url: str, options: argparse.Namespace, seed: int) -> Course:
    """Put the load on the app and look at the app meanwhile."""
    asks = make_load(options, seed)
    up_s, down_s = options.before, options.before + options.during
    sizes: list[Size] = []
    stop, over = threading.Event(), threading.Event()
    began = time.perf_counter()

    def look() -> None:
        back_since = math.inf
        while not stop.is_set():
            row = call(driver.status, "chat")
            now = time.perf_counter() - began
            if row is not None:
                sizes.append(Size(now, row["replicas"], row["wanted"], row["granted"]))
                # What is granted for a replica that still drains counts as being there.
                back = now > down_s and max(row["replicas"], row["wanted"], row["granted"]) <= 1
                back_since = min(back_since, now) if back else math.inf
                if now - back_since > SETTLED_S:
                    over.set()
            stop.wait(LOOK_EVERY_S)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        answers = asyncio.run(offer(url, asks, began, over.is_set))
    finally:
        stop.set()
        looking.join()
    return Course(answers, sizes, up_s, down_s, time.perf_counter() - began)


def first_time(sizes: Sequence[Size], since: float, test: Callable[[Size], bool]) -> float:
    """Seconds from `since` until the replicas were so; nan if they never were."""
    return next((size.at_s - since for size in sizes if size.at_s > since and test(size)), math.nan)


def p99_over_time(course: Course, window_s: float) -> list[tuple[float, float]]:
    """(end of the window, p99 of the time to first token of the requests that were due in it) each second."""
    due = sorted((each.due_s, each.first_token_s) for each in course.answers if each.ok)
    points = []
    for end in range(math.ceil(window_s), math.floor(course.end_s) + 1):
        inside = [first for at, first in due if end - window_s <= at < end]
        if inside:
            points.append((float(end), percentile(inside, 0.99)))
    return points


def rates(times: Sequence[float], end_s: float, window_s: float) -> list[tuple[float, float]]:
    """(end of the window, events a second in it) each second."""
    counts = Counter(math.floor(at) for at in times)
    wide = math.ceil(window_s)
    return [
        (float(end), sum(counts[second] for second in range(end - wide, end)) / wide)
        for end in range(wide, math.floor(end_s) + 1)
    ]


def backlog(answers: Sequence[Answer]) -> int:
    """The most requests that were unanswered at one time."""
    events = [(each.sent_s, 1) for each in answers] + [(each.ended_s, -1) for each in answers]
    most = now = 0
    for _, change in sorted(events):
        now += change
        most = max(most, now)
    return most


def summary(course: Course, options: argparse.Namespace) -> dict[str, float]:
    up_s, down_s = course.up_s, course.down_s
    while_up = [size for size in course.sizes if up_s < size.at_s <= down_s]
    most = max((size.ready for size in while_up), default=0)
    slow = [end for end, p99 in p99_over_time(course, options.window) if end > up_s and p99 > options.bound_s]
    good = [each for each in course.answers if each.ok]
    refused = Counter(each.status for each in course.answers if each.status in (429, 503))
    peak = [each for each in good if up_s <= each.due_s < down_s]
    steady = [each for each in good if each.due_s < up_s]
    return {
        "requests": len(course.answers),
        "refused_429": refused[429],
        "refused_503": refused[503],
        "failed": len(course.answers) - len(good),
        "most_unanswered": backlog(course.answers),
        "first_wanted_s": first_time(course.sizes, up_s, lambda size: size.wanted > 1),
        "first_ready_s": first_time(while_up, up_s, lambda size: size.ready > 1),
        "peak_ready_s": first_time(while_up, up_s, lambda size: size.ready >= options.peak),
        "most_ready": most,
        "most_ready_s": first_time(while_up, up_s, lambda size: size.ready >= most),
        "p99_back_s": slow[-1] + 1 - up_s if slow else 0.0,
        "one_again_s": first_time(
            course.sizes, down_s, lambda size: max(size.ready, size.wanted, size.granted) <= 1
        ),
        "p99_before_s": percentile([each.first_token_s for each in steady], 0.99),
        "p99_peak_s": percentile([each.first_token_s for each in peak], 0.99),
        "worst_first_token_s": max(each.first_token_s for each in good),
        "lag_p99_ms": percentile([each.lag_s for each in course.answers], 0.99) * 1000,
    }


def median(values: Sequence[float]) -> float | None:
    """Of those that are numbers; None if there is none."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else None


def draw(course: Course, options: argparse.Namespace) -> None:
    """Write a PNG of two panels: requests/s over time, and replicas beside the time to first token."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    for name, times in (
        ("offered", [each.due_s for each in course.answers]),
        ("answered", [each.ended_s for each in course.answers if each.ok]),
    ):
        top.plot(*zip(*rates(times, course.end_s, 3.0), strict=True), label=name)
    at = [size.at_s for size in course.sizes]
    ready = [size.ready for size in course.sizes]
    top.step(at, [n * capacity() for n in ready], where="post", linestyle=":", label="capacity of the ready")
    top.set(ylabel="requests/s, over 3 s", title=f"load {options.base} → {options.peak} × one replica → back")
    bottom.plot(*zip(*p99_over_time(course, options.window), strict=True), color="tab:red", label="p99")
    bottom.axhline(options.bound_s, color="tab:red", linestyle=":", linewidth=1, label="bound")
    bottom.set(
        xlabel="seconds", ylabel=f"time to first token (s), p99 over {options.window:g} s", yscale="log"
    )
    replicas = bottom.twinx()
    for name, style in (("wanted", ":"), ("granted", "--"), ("ready", "-")):
        values = [getattr(size, name) for size in course.sizes]
        replicas.step(at, values, where="post", linestyle=style, color="tab:blue", label=name)
    replicas.set(ylabel="replicas", ylim=(0, options.max + 1))
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        for moment in (course.up_s, course.down_s):
            axes.axvline(moment, color="gray", linewidth=1)
    top.legend(loc="upper right")
    lines = [*bottom.get_legend_handles_labels()[0], *replicas.get_legend_handles_labels()[0]]
    bottom.legend(handles=lines, loc="upper right")
    figure.savefig(options.plot, format="png", dpi=150)


def app_of(model: Path, queue: int, options: argparse.Namespace) -> AppSpec:
    config = ServeAppConfig.model_validate(
        {
            "model": str(model),
            "engine_kwargs": PACE.kwargs(),
            "replicas": {"min": 1, "max": options.max, "standby": options.standby},
            "autoscale": {
                "target_ongoing_requests": TARGET_ONGOING,
                "downscale_delay_s": options.downscale_delay,
            },
            "limits": {"max_tokens": ANSWER_TOKENS, "queue": queue, "batch": BATCH},
        }
    )
    return AppSpec("chat", config, str(model), "paced@1", engine=ENGINE)


def measure(call: Driver, url: str, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    queue = math.ceil(1.2 * options.peak * capacity() * options.during)
    call(driver.deploy, app_of(model, queue, options))
    rows, first = [], None
    for repeat in range(options.repeats):
        time.sleep(2)  # what starting or ending replicas left to do is no part of the measurement
        Notes.take(model)
        shares = CpuShares(serving_processes(call))
        course = one_course(call, url, options, repeat + 1)
        cores = shares.cores()
        notes = Notes.take(model)
        around = {
            "gateway_cores": cores["gateway"],
            "load_generator_cores": cores[GENERATOR],
            "step_late_ms": notes.late_ms,
        }
        rows.append({**summary(course, options), **around})
        told = ", ".join(f"{key} {value:.4g}" for key, value in rows[-1].items())
        print(f"{repeat + 1}: {told}", file=sys.stderr, flush=True)
        for each in [each for each in course.answers if not each.ok][:3]:
            print(f"failed: {each}", file=sys.stderr)
        first = first or course
    assert first is not None
    if options.plot is not None:
        draw(first, options)
    medians = {key: median([row[key] for row in rows]) for key in rows[0]}
    for key in ("refused_429", "refused_503", "failed"):
        medians[key] = sum(row[key] for row in rows)
    return {
        "capacity_per_s": capacity(),
        "base": options.base,
        "peak": options.peak,
        "max_replicas": options.max,
        "queue": queue,
        "bound_s": options.bound_s,
        **medians,
        "course": {
            "sizes": [asdict(size) for size in first.sizes],
            "first_token_p99_s": p99_over_time(first, options.window),
            "offered_per_s": rates([each.due_s for each in first.answers], first.end_s, 3.0),
            "answered_per_s": rates([each.ended_s for each in first.answers if each.ok], first.end_s, 3.0),
        },
    }


def after(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.1f} s"


def print_table(found: dict[str, Any], options: argparse.Namespace) -> None:
    lines = {
        "one replica answers": f"{found['capacity_per_s']:.2f} requests/s; 1 to {options.max} replicas",
        "load": f"{options.base:g} → {options.peak:g} × that for {options.during:g} s → {options.base:g} ×",
        "requests": f"{found['requests']:.0f}, at most {found['most_unanswered']:.0f} unanswered at a time; "
        f"limits.queue {found['queue']}",
        "refused": f"{found['refused_429']} (429), {found['refused_503']} (503); failed: {found['failed']}",
        "more wanted, after": after(found["first_wanted_s"]),
        "first new replica, after": after(found["first_ready_s"]),
        f"{options.peak:g} replicas, after": after(found["peak_ready_s"]),
        f"{found['most_ready']:.0f} replicas, after": after(found["most_ready_s"]),
        f"p99 below {options.bound_s:g} s, after": after(found["p99_back_s"])
        + (", when the load had gone" if found["p99_back_s"] > options.during else ""),
        "one again, after the end": f"{after(found['one_again_s'])} "
        f"(downscale_delay_s {options.downscale_delay:g})",
        "p99 to first token": f"{found['p99_before_s']:.2f} s before, {found['p99_peak_s']:.2f} s of all "
        f"that came while it was up, at worst {found['worst_first_token_s']:.2f} s",
        "cores": f"gateway {found['gateway_cores']:.2f}, generator {found['load_generator_cores']:.2f}; "
        f"lag p99 {found['lag_p99_ms']:.0f} ms, steps late {found['step_late_ms']:.1f} ms",
    }
    for what, said in lines.items():
        print(f"{what:>26}: {said}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the first repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--base", type=float, default=0.25, help="load before and after, × one replica")
    parser.add_argument("--peak", type=float, default=8.0, help="load between, × one replica")
    parser.add_argument("--max", type=int, default=12, help="most replicas")
    parser.add_argument("--standby", type=int, default=STANDBY, help="the app's replicas.standby")
    parser.add_argument("--before", type=float, default=20.0, help="seconds before the step")
    parser.add_argument("--during", type=float, default=150.0, help="seconds of the peak")
    parser.add_argument("--after", type=float, default=240.0, help="most seconds after the peak")
    parser.add_argument("--window", type=float, default=5.0, help="seconds over which a p99 is taken")
    parser.add_argument(
        "--bound-s", type=float, default=1.0, help="p99 of the time to first token to be under"
    )
    parser.add_argument("--downscale-delay", type=float, default=30.0, help="the app's downscale_delay_s")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_tokenizer(directory / "model")
        workers = math.ceil(options.max / 2)
        nodes = f"nodes: [{{name: head, cpus: 0}}, {{name: worker, count: {workers}, cpus: 2}}]"
        storage = "storage: ./storage"
        with started(directory / "cluster", nodes, storage) as cluster, Driver(cluster.record) as call:
            found = measure(call, call(driver.start), directory / "model", options)
            call(driver.stop)
    if options.json:
        print(json.dumps(found))
    else:
        print_table(found, options)
    sys.exit(1 if found["failed"] else 0)


if __name__ == "__main__":
    main()
