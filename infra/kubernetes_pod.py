"""What runs in the container of a pod of KubeRay's: Ray; on the head, the cluster that is on it.

    python -m infra.kubernetes_pod head|worker

SIGTERM, which Kubernetes sends before it ends a pod, is the notice to leave. `end`, beside the head, is what
`shoal down` has run first.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cluster.config.sections.cluster import ClusterConfig
from cluster.errors import ShoalError
from cluster.hosts.kubernetes.pod import HEAD_FILE, RayInPod, section_of_pod, section_on_head_pod
from cluster.hosts.settings import TENANTS_VARIABLE
from cluster.state.connection import connect, disconnect, require_record
from cluster.state.state_directory import state_root, write_private
from infra.lifecycle import COMMAND, UP

MARGIN_S = 10.0
"""So long before the end of the notice Ray is ended, whoever has left by then."""
FINISH = 1 / 3
"""Of the time to leave, kept for requests to finish where no other replica has started in the rest of it."""
LOOK_S, LEFT_LOOK_S = 0.2, 1.0
_SELF, _TENANTS = ("-m", "infra.kubernetes_pod"), ("-m", "infra.tenants")


def worker(ray: RayInPod, cluster: ClusterConfig, notice: threading.Event) -> int:
    """Be a node until the pod has to go; then have those leave that run on it."""
    ray.start()
    while not ray.is_over and not notice.wait(LOOK_S):
        pass
    if ray.is_over:
        return ray.process.returncode or 1  # KubeRay makes another pod of it
    seconds = cluster.kubernetes.notice_s - MARGIN_S
    deadline = time.monotonic() + seconds
    try:
        # Once Serve knows a deadline, it stops replicas here that have less time than their longest request
        # may take, whether others run in their place or not.
        node = ray.drain(None)
        if not _left_by(ray, node, deadline - seconds * FINISH):
            ray.drain(deadline - time.monotonic())
            _left_by(ray, node, deadline)
    except ShoalError as error:
        print(error, file=sys.stderr)
    ray.end()
    return 0


def _left_by(ray: RayInPod, node: str, deadline: float) -> bool:
    """Whether nobody runs on this node any more; waits for that until a time of a steady clock."""
    while not ray.is_over and not ray.is_left(node):
        if time.monotonic() >= deadline:
            return False
        time.sleep(LEFT_LOOK_S)
    return True


def head(ray: RayInPod, cluster: ClusterConfig, notice: threading.Event) -> int:
    """Be the head: bring the cluster up, stay, and have all leave when the pod has to go.

    Raises:
        ShoalError: the cluster does not come up.
    """
    _keep_tenants(cluster)
    root = state_root()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = root / HEAD_FILE  # before Ray: whoever finds that ready wants to use it
    write_private(file, json.dumps({"cluster": section_on_head_pod(cluster, ray.address)}, indent=2))
    ray.start()
    try:
        ray.until_up(notice)
        if not notice.is_set():
            _run(COMMAND, UP, file)
        if cluster.kubernetes.autoscaler is not None and not notice.is_set():
            _run(_SELF, (tell_wants.__name__,), file)
        if not notice.is_set():
            with suppress(ShoalError):  # it has said so
                _run(_TENANTS, ("come-back",), file)
        while not ray.is_over and not notice.wait(LOOK_S):
            pass
        if ray.is_over:
            return ray.process.returncode or 1
        with suppress(ShoalError):
            _run(_TENANTS, ("leave",), file)
    finally:
        ray.end()
    return 0


def end(ray: RayInPod, cluster: ClusterConfig, notice: threading.Event) -> int:
    """End jobs and apps for good, beside what runs as the head: the cluster is taken down."""
    from infra.tenants import main

    _keep_tenants(cluster)
    return main(("end", "-f", str(state_root() / HEAD_FILE)))


def tell_wants(ray: RayInPod, cluster: ClusterConfig, notice: threading.Event) -> int:
    """Have KubeRay's autoscaler be told which pods are of use, for as long as the cluster is up.

    Raises:
        ShoalError: that does not start.
    """
    from cluster.hosts.kubernetes.pod_wants import start_pod_wants

    connect(require_record(cluster.name))
    try:
        start_pod_wants(cluster)
    finally:
        disconnect()
    return 0


def _keep_tenants(cluster: ClusterConfig) -> None:
    """Have what is kept of jobs and apps be in the storage, where it outlives the pod."""
    from cluster.files.storage import Storage  # which other pods, and the first process, do not load

    kept = ("control", "tenants", cluster.kubernetes.namespace, cluster.name)
    os.environ[TENANTS_VARIABLE] = Storage(cluster.storage).child(*kept).location


def _run(program: Sequence[str], arguments: Sequence[str], file: Path) -> None:
    """Run a command on the head; what it prints and says goes to the pod's log.

    Raises:
        ShoalError: it failed.
    """
    done = subprocess.run([sys.executable, *program, *arguments, "-f", str(file)], check=False)
    if done.returncode != 0:
        raise ShoalError(f"`{' '.join((*program, *arguments))}` failed with exit code {done.returncode}")


def _be_first(arguments: Sequence[str]) -> int:
    """Be the first process of a container: have another one do all, hand signals on to it, and wait for those
    whose parents have ended, which nobody else does."""
    child = subprocess.Popen([sys.executable, "-m", "infra.kubernetes_pod", *arguments])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda each, _: child.send_signal(each))
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == child.pid:
            return os.waitstatus_to_exitcode(status)


def main(arguments: Sequence[str]) -> int:
    """Be what the argument says."""
    if os.getpid() == 1:
        return _be_first(arguments)
    notice = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: notice.set())
    try:
        ray, cluster = RayInPod(os.environ), section_of_pod()
        return {each.__name__: each for each in (head, worker, end, tell_wants)}[arguments[0]](
            ray, cluster, notice
        )
    except ShoalError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
