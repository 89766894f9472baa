"""Machines below a cluster in pods that lose their power, while a job trains and an app is asked."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator

import pytest

from tests.kubernetes_load import ON_REDIS, BusySite, busy_site, wait_for
from tests.kubernetes_site import needs_kubectl

pytestmark = [
    needs_kubectl,
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

QUICKER_S = 10.0
"""No replica starts in so short a time, and no answer takes as long."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BusySite]:
    with busy_site(tmp_path_factory.mktemp("site"), ON_REDIS) as site:
        yield site


def test_planned_changes_lose_no_step_and_no_request(site: BusySite) -> None:
    """A new version of the model, and a pod that is deleted, with the app's one replica on it."""
    asked, began = time.monotonic(), site.version
    promoted = site.user.shoal("promote", "stdlib-lm@2", "production")
    assert promoted.returncode == 0, promoted.stderr
    waited = wait_for(lambda: site.version != began, "the app does not change to the new version")
    print(f"the new version answered {waited:.1f} s after it was promoted")
    pod = site.operator.pod(site.node_of_app())
    deleted = time.monotonic()
    assert pod.delete() == 0
    print(f"{pod.name} left within {time.monotonic() - deleted:.1f} s")
    made = site.operator.replace(pod)
    waited = wait_for(lambda: site.is_used(made), "the new pod is not used")
    print(f"{made.name} is used {waited:.1f} s after its container was started")
    done = len(site.steps())
    wait_for(lambda: len(site.steps()) > done + 20, "the job does not go on")
    print(f"the slowest answer took {site.longest_s(asked):.1f} s")
    assert set(site.said(asked)) == {200}, "a request was lost"
    assert site.longest_s(asked) < QUICKER_S, "for a while no replica answered"
    logged = site.steps()
    assert logged == list(range(1, len(logged) + 1)), "a step was lost, or done twice"
    print(f"none of {len(logged)} steps lost, none of {len(site.said(asked))} requests")


def test_a_worker_pods_machine_loses_its_power(site: BusySite) -> None:
    assert site.operator.pods is not None
    name = site.node_of_app()
    pod = site.operator.pod(name)
    cut = time.monotonic()
    done = len(site.steps())
    pod.host.cut_power()
    back_s = wait_for(lambda: 200 in site.said(cut + 0.1), "the app does not answer again")
    print(f"{name} lost its power: the app answered again after {back_s:.1f} s")
    wait_for(lambda: len(site.steps()) > done + 20, "the job does not go on")
    print(f"{name} lost its power: twenty steps more after {time.monotonic() - cut:.1f} s")
    given_up = time.monotonic()
    made = site.operator.replace(pod)
    assert (made.name, made.host.address) != (pod.name, pod.host.address)
    wait_for(lambda: site.is_used(made), "the new pod is not used")
    print(f"{made.name} is used {time.monotonic() - given_up:.1f} s after it was made")
    asked = time.monotonic()
    wait_for(lambda: len(site.said(asked)) > 10, "nobody asks any more")
    assert set(site.said(asked)) == {200}
