"""Pods of a rendered manifest on hosts of their own: what KubeRay's operator makes of a RayCluster (its
controllers/ray/common/pod.go, 1.7), and what a kubelet does with it."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from infra.lab.hosts.host import Host
from infra.lab.hosts.lan import FIRST_USER, REPOSITORY, Lan

Manifest = Mapping[str, Any]

USER = "shoal"
"""As the image says; it is not root."""
IMAGE = {
    "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
    "PYTHONPATH": str(REPOSITORY),
    "HOME": f"/home/{USER}",
    "LANG": "C.UTF-8",
    # Names are in a file here: gRPC's own resolver asks the server of names, of which there is none, first.
    "GRPC_DNS_RESOLVER": "native",
}
"""The environment that comes with the image."""
READY_S = 120.0


def ray_start(group: Manifest, head: str | None) -> str:
    """The command with which KubeRay starts Ray.

    Args:
        head: the name under which workers find the head; None for that one.
    """
    parameters: dict[str, str] = {"metrics-export-port": "8080", "dashboard-agent-listen-port": "52365"}
    parameters |= {} if head is None else {"address": f"{head}:6379"}
    if labels := group.get("labels"):
        parameters["labels"] = ",".join(f"{key}={labels[key]}" for key in sorted(labels))
    parameters |= {**group["rayStartParams"], "block": "true"}
    words = [
        f"--{key} " if value == "true" else f"--{key}={value} " for key, value in sorted(parameters.items())
    ]
    return f"ray start {'--head ' if head is None else ''} {' '.join(words)}"


@dataclass
class Pod:
    """One, on a host that is its own network, files and processes.

    Attributes:
        group: of the RayCluster.
    """

    name: str
    host: Host
    group: Manifest
    spec: Manifest
    environment: dict[str, str]
    log: Path
    process: subprocess.Popen[str] | None = field(default=None, repr=False)

    @property
    def container(self) -> Manifest:
        first: Manifest = self.spec["containers"][0]
        return first

    def command(self, arguments: Sequence[str]) -> list[str]:
        """What runs a command in the pod's container, as `kubectl exec` does."""
        user = ["setpriv", f"--reuid={FIRST_USER}", f"--regid={FIRST_USER}", "--clear-groups"]
        settings = [f"{key}={value}" for key, value in self.environment.items()]
        return [*user, "env", "-i", f"--chdir=/home/{USER}", *settings, *arguments]

    def start(self) -> None:
        """Start its container: the first process of a process table of its own."""
        command = [*self.container["command"], *self.container["args"]]
        alone = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        with self.log.open("ab") as log:
            self.process = self.host.start(*alone, *self.command(command), output=log)

    def execute(self, *arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run a command in it; the result is not checked."""
        first = self._first()
        inside = ["nsenter", f"--target={first}", "--mount", "--uts", "--ipc", "--net", "--pid"]
        return subprocess.run(
            [*inside, "setpriv", "--pdeathsig=KILL", *self.command(arguments)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def delete(self) -> int:
        """SIGTERM, and SIGKILL at the end of the grace period; the exit code."""
        assert self.process is not None, "it runs"
        with suppress(psutil.NoSuchProcess):
            psutil.Process(self._first()).terminate()
        try:
            return self.process.wait(self.spec["terminationGracePeriodSeconds"])
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def _first(self) -> int:
        """The number of the container's first process on this machine."""
        for each in self.host.processes():
            with suppress(psutil.Error):
                if each.name() == "unshare":
                    return int(each.children()[0].pid)
        raise psutil.NoSuchProcess(0)


@dataclass
class Pods:
    """Those of one RayCluster, the head first."""

    lan: Lan
    namespace: str
    cluster: str
    pods: list[Pod]

    @property
    def head(self) -> Pod:
        return self.pods[0]

    def shoal(self, *arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run a command of `shoal` in the head's container; the result is not checked."""
        file = f"/home/{USER}/.local/state/shoal/pod.yaml"
        return self.head.execute(
            "python", "-m", "infra.cli.main", *arguments, "-f", file, timeout_s=timeout_s
        )

    def document(self, *arguments: str, timeout_s: float = 120.0) -> Any:
        """What a command prints with `--json`; it must work."""
        done = self.shoal(*arguments, "--json", timeout_s=timeout_s)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def start(self, pod: Pod) -> None:
        """Start a pod: a worker's own container when the head's control store answers."""
        if pod is not self.head:
            address = f"{self._service()}:6379"
            wait = f"until ray health-check --address {address} >/dev/null 2>&1; do sleep 1; done"
            done = pod.host.run(*pod.command(["bash", "-c", wait]), timeout_s=READY_S)
            assert done.returncode == 0, done.stderr
        pod.start()

    def until_ready(self, nodes: int) -> float:
        """Wait until the cluster says that so many nodes are alive; how long that took."""
        began = time.monotonic()
        while True:
            with suppress(psutil.NoSuchProcess, subprocess.TimeoutExpired):
                done = self.shoal("status", "--json")
                if done.returncode == 0:
                    alive = [node for node in json.loads(done.stdout)["nodes"] if node["alive"]]
                    if len(alive) == nodes:
                        return time.monotonic() - began
            logs = "".join(f"== {pod.name}\n{pod.log.read_text()[-3000:]}" for pod in self.pods)
            assert time.monotonic() - began < READY_S, logs
            threading.Event().wait(0.5)

    def _service(self) -> str:
        return f"{self.cluster}-head-svc.{self.namespace}.svc.cluster.local"


def _environment(
    objects: Sequence[Manifest], ray: Manifest, group_name: str, group: Manifest, pod: str, address: str
) -> dict[str, str]:
    """That of a container: the image's, the manifest's, and what the operator adds."""
    secrets = {
        each["metadata"]["name"]: {
            key: base64.b64decode(value).decode() for key, value in each["data"].items()
        }
        for each in objects
        if each["kind"] == "Secret"
    }
    container = group["template"]["spec"]["containers"][0]
    found = dict(IMAGE)
    for source in container.get("envFrom", ()):
        found |= secrets[source["secretRef"]["name"]]
    for variable in container["env"]:
        if "value" in variable:
            found[variable["name"]] = variable["value"]
        else:
            assert variable["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
            found[variable["name"]] = address
    name, namespace = ray["metadata"]["name"], ray["metadata"]["namespace"]
    service = f"{name}-head-svc.{namespace}.svc.cluster.local"
    is_head = group is ray["spec"]["headGroupSpec"]
    authentication = ray["spec"]["authOptions"]
    assert authentication["mode"] == "token"
    return {
        **found,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets[authentication["secretName"]]["auth_token"],
        **({} if is_head else {"FQ_RAY_IP": service, "RAY_IP": f"{name}-head-svc"}),
        "RAY_CLUSTER_NAME": name,
        "RAY_CLUSTER_NAMESPACE": namespace,
        "RAY_CLOUD_INSTANCE_ID": pod,
        "RAY_NODE_TYPE_NAME": group_name,
        "KUBERAY_GEN_RAY_START_CMD": ray_start(group, None if is_head else service),
        "RAY_PORT": "6379",
        "RAY_ADDRESS": f"{'127.0.0.1' if is_head else service}:6379",
        "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE": "1",
    }


def _mounts(spec: Manifest) -> Iterator[tuple[Manifest, Manifest]]:
    """What a pod's container mounts: the mount, and the volume."""
    volumes = {each["name"]: each for each in spec["volumes"]}
    for mount in spec["containers"][0]["volumeMounts"]:
        yield mount, volumes[mount["name"]]


def _mount_secrets(objects: Sequence[Manifest], pod: Pod) -> None:
    for mount, volume in _mounts(pod.spec):
        if "secret" in volume:
            (secret,) = [
                each
                for each in objects
                if each["kind"] == "Secret" and each["metadata"]["name"] == volume["secret"]["secretName"]
            ]
            directory = pod.host.file(mount["mountPath"])
            directory.mkdir(parents=True, exist_ok=True)
            for key, value in secret["data"].items():
                (directory / key).write_bytes(base64.b64decode(value))


@contextmanager
def pods_of(objects: Sequence[Manifest], directory: Path, claims: Mapping[str, Path]) -> Iterator[Pods]:
    """The pods of the RayCluster among objects; they are not started yet.

    Args:
        claims: the directory of this machine that each PersistentVolumeClaim is.
    """
    (ray,) = [each for each in objects if each["kind"] == "RayCluster"]
    assert ray["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
    cluster, namespace = ray["metadata"]["name"], ray["metadata"]["namespace"]
    head = ray["spec"]["headGroupSpec"]
    groups = [("headgroup", f"{cluster}-head", head)]
    for group in ray["spec"]["workerGroupSpecs"]:
        for number in range(group["replicas"]):
            groups.append((group["groupName"], f"{cluster}-{group['groupName']}-worker-{number}", group))
    names = [name for _, name, _ in groups]
    shared = {
        mount["mountPath"]: claims[volume["persistentVolumeClaim"]["claimName"]]
        for _, _, group in groups
        for mount, volume in _mounts(group["template"]["spec"])
        if "persistentVolumeClaim" in volume
    }
    with Lan(names, directory, shared=shared, users=[USER]) as lan:
        made = []
        for name, pod_name, group in groups:
            host = lan.host(pod_name)
            environment = _environment(objects, ray, name, group, pod_name, host.address)
            spec = group["template"]["spec"]
            pod = Pod(pod_name, host, group, spec, environment, directory / f"{pod_name}.log")
            _mount_secrets(objects, pod)
            service = f"{cluster}-head-svc.{namespace}.svc.cluster.local"
            # As a kubelet writes them: a pod's name is its own address.
            host.file("/etc/hosts").write_text(
                f"127.0.0.1 localhost\n{host.address} {pod_name}\n{lan.hosts[0].address} {service}\n"
            )
            made.append(pod)
        yield Pods(lan, namespace, cluster, made)
