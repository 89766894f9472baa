"""`shoal explain`, `shoal status` and `shoal status --watch` against a cluster where somebody has a lease."""

from __future__ import annotations

import json
import signal
import subprocess

from tests.clusters import LiveCluster, shoal, shoal_command

HOLDER = """
import logging, sys
import ray
ray.init(namespace="shoal", log_to_driver=False, logging_level=logging.ERROR)
from cluster.sharing.client import BrokerClient
from cluster.sharing.demand import Demand
broker = BrokerClient()
grant = broker.wait(Demand("app/cli-test", "serving", {"CPU": 1}, 1, 3), timeout_s=20)
print(grant.units, flush=True)
sys.stdin.read()
broker.release("app/cli-test")
"""


def test_a_lease_is_explained_shown_and_watched(running_cluster: LiveCluster) -> None:
    config = str(running_cluster.config_path)
    watching = subprocess.Popen(
        shoal_command("status", "--watch", "--json", "-f", config),
        env=running_cluster.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert watching.stdout is not None
        assert watching.stderr is not None
        assert watching.stderr.readline() == "watching; Ctrl-C ends this\n"
        with running_cluster.running(HOLDER, "3"):
            explained = shoal("explain", "cli-test", "-f", config)
            assert explained.returncode == 0, explained.stderr
            assert explained.stdout.startswith("cli-test has all it asked for: 3 replicas on worker-")
            assert shoal("explain", "app/cli-test", "-f", config).stdout == explained.stdout
            status = json.loads(shoal("status", "--json", "-f", config).stdout)
        assert [row["granted"] for row in status["leases"] if row["holder"] == "app/cli-test"] == [3]
        assert [node["foreign"] for node in status["nodes"]] == [{}, {}, {}]
        causes = []
        while "released" not in causes:  # the test's own time limit ends it otherwise
            event = json.loads(watching.stdout.readline())
            causes += [event["cause"]] if event.get("holder") == "app/cli-test" else []
        assert causes == ["started", "released"]
        watching.send_signal(signal.SIGINT)
        assert watching.wait(timeout=30) == 0
    finally:
        watching.kill()
        watching.communicate()
