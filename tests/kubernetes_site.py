"""Kubernetes as far as Shoal sees it: an API server for the real kubectl, and behind it an operator that
makes pods of a RayCluster on hosts of their own."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import yaml

from infra.lab.hosts import lan as lans
from infra.lab.hosts.lan import REPOSITORY
from tests.api_server import Answer, ApiServer, Object, api_server
from tests.kubernetes_pods import Pod, Pods, pods_of
from tests.port_forward import shim
from tests.ssh_hosts import HEALTH

LEAST_KUBECTL = (1, 27)
"""From here on the server checks fields, and not kubectl."""
AGENT_PORT = 52365


def _lacks() -> str | None:
    if (missing := lans.missing()) is not None:
        return missing
    if shutil.which("kubectl") is None:
        return "there is no `kubectl`"
    done = subprocess.run(["kubectl", "version", "--client"], capture_output=True, text=True)
    found = re.search(r"v(\d+)\.(\d+)", done.stdout)
    if found is None or (int(found[1]), int(found[2])) < LEAST_KUBECTL:
        return f"kubectl is older than {LEAST_KUBECTL[0]}.{LEAST_KUBECTL[1]}"
    return None


needs_kubectl = pytest.mark.skipif(_lacks() is not None, reason=str(_lacks()))


class Operator:
    """Makes the pods of a RayCluster, as KubeRay's does, and says how they stand, as a kubelet does.

    Args:
        spare: machines for pods that are made later.
        beside: names of hosts that are no pods, with what each runs as root.
    """

    def __init__(
        self,
        server: ApiServer,
        directory: Path,
        share: Path,
        networks: Path,
        spare: int = 0,
        beside: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._server, self._directory, self._share, self._networks = server, directory, share, networks
        self._spare, self._beside = spare, dict(beside or {})
        self._ends = ExitStack()
        self._number = 0
        self.pods: Pods | None = None
        self.executed: list[tuple[str, list[str]]] = []
        """The commands that were run in pods."""
        self.works = True
        """Otherwise nothing happens."""
        self._ended = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()
        server.on_change = self.take
        server.execute = self.execute

    def take(self, what: str, plural: str, value: Object) -> None:
        """Hear of a change."""
        if plural != "rayclusters" or not self.works:
            return
        if what == "made":
            threading.Thread(target=self._make, args=(value,), daemon=True).start()
        elif what == "deleted":
            self._delete()

    def execute(self, pod: str, command: list[str]) -> Answer:
        """A command in a pod."""
        self.executed.append((pod, command))
        done = self.pod(pod).execute(*command, timeout_s=600)
        return done.returncode, done.stdout.encode(), done.stderr.encode()

    def pod(self, name: str) -> Pod:
        """A pod that there is."""
        assert self.pods is not None, "there are pods"
        return next(each for each in self.pods.pods if each.name == name)

    def replace(self, pod: Pod) -> Pod:
        """Do what follows once a machine is gone for good; see `Pods.replace`."""
        assert self.pods is not None, "there are pods"
        self._server.take("pods", self.pods.namespace, pod.name)
        made = self.pods.replace(pod)
        self._tell_of(made, self.pods)
        return made

    def end(self) -> None:
        """End everything."""
        self._ended.set()
        self._ends.close()

    def _make(self, ray: Object) -> None:
        objects = [each for each in self._server.objects.values() if each.get("kind") == "Secret"]
        self._number += 1
        directory = self._directory / f"pods-{self._number}"
        directory.mkdir()
        claims = {"data": self._share}
        made = pods_of([*objects, ray], directory, claims, spare=self._spare, beside=list(self._beside))
        pods = self._ends.enter_context(made)
        for name, program in self._beside.items():
            pods.lan.host(name).start(*program)
        for pod in pods.pods:
            self._tell_of(pod, pods)
        self.pods = pods
        for pod in list(pods.pods):
            with suppress(AssertionError, subprocess.SubprocessError):  # it was deleted meanwhile
                pods.start(pod)

    def _tell_of(self, pod: Pod, pods: Pods) -> None:
        """Have a pod be among the objects, and its network be found."""
        namespace = pods.lan.network.namespace
        names = {each.name: namespace(pods.lan.hosts.index(each.host) + 1) for each in pods.pods}
        self._networks.write_text(json.dumps(names))
        self._server.put("pods", _object_of(pod, pods.ray, pods.namespace, ready=False))

    def _delete(self) -> None:
        pods, self.pods = self.pods, None
        if pods is None:
            return
        started = [pod for pod in pods.pods if pod.process is not None]
        with ThreadPoolExecutor(len(pods.pods)) as side_by_side:
            list(side_by_side.map(Pod.delete, started))
        for pod in pods.pods:
            self._server.take("pods", pods.namespace, pod.name)
        self._ends.close()

    def _look(self) -> None:
        """The kubelets: a container that ends is started again; a pod is ready when its raylet says so."""
        while not self._ended.wait(0.3):
            pods = self.pods
            for pod in () if pods is None else list(pods.pods):
                if pod.has_crashed:
                    pod.start()
                found = self._server.objects.get(("pods", pods.namespace, pod.name)) if pods else None
                if found is None or found["status"]["conditions"][0]["status"] == "True":
                    continue
                with suppress(OSError, URLError):
                    address = f"http://{pod.host.address}:{AGENT_PORT}/api/local_raylet_healthz"
                    with urlopen(address, timeout=2) as answer:
                        if answer.status == 200:
                            found["status"]["conditions"][0]["status"] = "True"


def _object_of(pod: Pod, ray: Object, namespace: str, *, ready: bool) -> Object:
    head = pod.group is ray["spec"]["headGroupSpec"]
    labels = {
        "ray.io/cluster": ray["metadata"]["name"],
        "ray.io/node-type": "head" if head else "worker",
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": pod.name, "namespace": namespace, "labels": labels},
        "spec": pod.spec,
        "status": {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


class KubernetesUser:
    """Somebody with a kubeconfig, on this machine."""

    def __init__(self, directory: Path, kubeconfig: Path, programs: Path) -> None:
        self.home = directory
        self.environment = {
            "KUBECONFIG": str(kubeconfig),
            "PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(directory),
            "PYTHONPATH": str(REPOSITORY),
            "XDG_STATE_HOME": str(directory / "state"),
        }

    def write(self, cluster: dict[str, Any] | None = None, **more: Any) -> Path:
        """Write the config, of a head and two nodes if nothing else is said."""
        section = {
            "name": "lab",
            "provider": "kubernetes",
            "nodes": [{"name": "head", "cpus": 0}, {"name": "node", "count": 2, "cpus": 2}],
            "storage": "/data/shoal",
            "env": dict(HEALTH),
            "kubernetes": {"image": "shoal:1", "namespace": "ml", "storage_claim": "data", "notice_s": 60},
            **(cluster or {}),
        }
        file = self.home / "shoal.yaml"
        file.write_text(yaml.safe_dump({"cluster": section, **more}))
        return file

    def shoal(self, *arguments: str, timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
        """Run a command of `shoal`; the result is not checked."""
        return subprocess.run(
            [sys.executable, "-m", "infra.cli.main", *arguments, "-f", str(self.home / "shoal.yaml")],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=self.home,
        )

    def document(self, *arguments: str, timeout_s: float = 240.0) -> Any:
        """What a command prints with `--json`; it must work."""
        done = self.shoal(*arguments, "--json", timeout_s=timeout_s)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@contextmanager
def kubernetes_site(
    directory: Path, *, spare: int = 0, beside: Mapping[str, Sequence[str]] | None = None
) -> Iterator[tuple[ApiServer, Operator, KubernetesUser]]:
    """All of it; the arguments are the operator's."""
    share = directory / "share"
    share.mkdir()
    share.chmod(0o777)
    networks = directory / "networks.json"
    home = directory / "ann"
    home.mkdir()
    with api_server(directory) as (server, kubeconfig):
        operator = Operator(server, directory, share, networks, spare, beside)
        try:
            yield server, operator, KubernetesUser(home, kubeconfig, shim(directory, networks))
        finally:
            operator.end()
