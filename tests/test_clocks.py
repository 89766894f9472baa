"""No lease, heartbeat, hang, backoff or deadline goes by the wall clock, which jumps."""

from __future__ import annotations

import ast

from tests.test_floors import ROOT, attributes

WALL_CLOCKS = {"time.time", "time.time_ns", "time.localtime", "time.gmtime"}
WALL_CLOCKS |= {"datetime.now", "datetime.utcnow", "datetime.today"}
WALL_CLOCK_IS_RIGHT = {
    # What people read, and names.
    "cluster/models/registry.py": "when a version was made",
    "cluster/models/aliases.py": "when an alias was moved",
    "cluster/sharing/journal.py": "times of events; their order is by number",
    "train_jobs/records/run_log.py": "times of events",
    "train_jobs/records/listing.py": "how long a job has run, beside the times of its events",
    "train_jobs/records/job_table.py": "how long a job has run, beside the times of its events",
    "train_jobs/driver/submission.py": "names of jobs",
    "serve_apps/http/request_record.py": "times of requests",
    "serve_apps/gateway/call.py": "`created` of an answer",
    "serve_apps/gateway/embedding_call.py": "`created` of an answer",
    "serve_apps/batch/run.py": "when a run began",
    "serve_apps/controller/store.py": "times of events",
    "serve_apps/replica/engine_process.py": "times of what a rank prints",
    "serve_apps/replica/deployment.py": "when a replica started and was ready, as events have it",
    # What is told across restarts and machines, which share no other clock. A jump may let a node
    # be trusted an hour early or late; a rollout's trial or the hold on a checkpoint may end so too.
    "cluster/sharing/broker.py": "when failures of nodes were, which outlive the broker",
    "train_jobs/checkpoint/store.py": "whether who reads a checkpoint may be dead, after an hour",
    "train_jobs/records/workspace.py": "whether copies on a node are nobody's any more, after days",
    "cluster/hosts/probe_agent.py": "how far the clocks of nodes are apart",
    "cluster/hosts/probe.py": "how far the clocks of nodes are apart",
    "train_jobs/data/made_before.py": "whether files have changed a moment ago, as their times have it",
    "cluster/node/cache.py": "which copies on a node were used last, as the times of files have it",
    "serve_apps/controller/actor.py": "when a rollout began, which outlives the controller",
    "serve_apps/controller/app.py": "when a rollout began, which outlives the controller",
    "serve_apps/controller/model_names.py": "when a rollout began, which outlives the controller",
}
FLOORS = ("cluster", "train_jobs", "serve_apps")


def processor_clocks(source: str) -> set[str]:
    """Which clocks of the processor a file reads."""
    tree = ast.parse(source)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    named = {name.name for node in imports for name in node.names}
    named |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {"process_time", "thread_time", "cpu_times", "getrusage"} & named


def wall_clocks(source: str) -> set[str]:
    """Which wall clocks a file reads."""
    return WALL_CLOCKS & set(attributes(ast.parse(source)))


def test_the_wall_clock_is_read_only_where_it_is_right() -> None:
    sources = [path for floor in FLOORS for path in (ROOT / floor).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): wall_clocks(path.read_text()) for path in sources}
    wrong = {name: names for name, names in found.items() if names and name not in WALL_CLOCK_IS_RIGHT}
    assert len(found) > 100
    assert wrong == {}, "durations need time.monotonic"


def test_the_exceptions_are_needed() -> None:
    unneeded = [name for name in WALL_CLOCK_IS_RIGHT if not wall_clocks((ROOT / name).read_text())]
    assert unneeded == []


def test_no_test_holds_the_processor_to_seconds_which_not_every_machine_has() -> None:
    own = {"tests/pace.py", "tests/benchmarks"}
    sources = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")]
    judged = [name for name in sources if not name.startswith(tuple(own))]
    found = [name for name in judged if processor_clocks((ROOT / name).read_text())]
    assert len(judged) > 100
    assert found == [], "compare with a loop of the same machine: tests.pace"
    assert processor_clocks((ROOT / "tests/pace.py").read_text())
    assert processor_clocks("from time import process_time as now")
    assert processor_clocks("import psutil\nused = psutil.Process(1).cpu_times().user")


def test_the_rule_sees_what_it_forbids() -> None:
    assert wall_clocks("import time\ndeadline = time.time() + 3")
    assert wall_clocks("def f(clock=time.time): ...")
    assert wall_clocks("from datetime import datetime\nx = datetime.now(UTC)")
    assert not wall_clocks("import time\ndeadline = time.monotonic() + time.perf_counter()")
