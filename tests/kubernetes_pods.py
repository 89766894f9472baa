"""Pods of a rendered manifest on hosts of their own: what KubeRay's operator makes of a RayCluster (its
controllers/ray/common/pod.go, 1.7), and what a kubelet does with it."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
import time
from collections import Counter
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
MACHINE = "machine-"
"""How the machines are called on which there are pods, or may be."""


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
    group_name: str
    group: Manifest
    environment: dict[str, str]
    log: Path
    process: subprocess.Popen[str] | None = field(default=None, repr=False)
    leaves: bool = False
    """It was told to go."""

    @property
    def spec(self) -> Manifest:
        found: Manifest = self.group["template"]["spec"]
        return found

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
        """Start its container: the first process of a process table of its own, under the pod's name."""
        command = [*self.container["command"], *self.container["args"]]
        alone = ["unshare", "--pid", "--uts", "--fork", "--mount-proc", "--kill-child"]
        named = ["sh", "-c", 'hostname "$0" && exec "$@"', self.name]
        with self.log.open("ab") as log:
            self.process = self.host.start(*alone, *named, *self.command(command), output=log)

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

    @property
    def has_crashed(self) -> bool:
        """Whether its container has ended, and is to be started again."""
        ended = self.process is not None and self.process.poll() is not None
        return ended and self.host.is_up and not self.leaves

    def delete(self) -> int:
        """SIGTERM, and SIGKILL at the end of the grace period; the exit code."""
        assert self.process is not None, "it runs"
        self.leaves = True
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
    objects: Sequence[Manifest]
    directory: Path
    pods: list[Pod] = field(default_factory=list)
    spare: list[Host] = field(default_factory=list)
    """Machines that no pod was on yet."""
    _made: Counter[str] = field(default_factory=Counter)

    @property
    def ray(self) -> Manifest:
        """The RayCluster."""
        return _ray_cluster(self.objects)

    @property
    def namespace(self) -> str:
        return str(self.ray["metadata"]["namespace"])

    @property
    def cluster(self) -> str:
        return str(self.ray["metadata"]["name"])

    @property
    def head(self) -> Pod:
        return self.pods[0]

    def add(self, group_name: str, group: Manifest, host: Host) -> Pod:
        """Make a pod on a machine; it is not started yet."""
        is_head = group is self.ray["spec"]["headGroupSpec"]
        # The head's name is always the same, a worker's always another.
        name = f"{self.cluster}-{group_name}-worker-{self._made[group_name]}"
        name = f"{self.cluster}-head" if is_head else name
        environment = _environment(self.objects, self.ray, group_name, group, name, host.address)
        log = self.directory / f"{name}.{self._made[group_name]}.log"
        self._made[group_name] += 1
        pod = Pod(name, host, group_name, group, environment, log)
        _mount_secrets(self.objects, pod)
        self.pods.insert(0 if is_head else len(self.pods), pod)
        self.name_hosts()
        return pod

    def replace(self, pod: Pod) -> Pod:
        """Start another pod in place of one whose machine is gone for good: once Kubernetes has given the
        machine up and removed the pod, KubeRay's operator makes one of the same group elsewhere."""
        self.pods.remove(pod)
        made = self.add(pod.group_name, pod.group, self.spare.pop(0))
        self.start(made)
        return made

    def name_hosts(self) -> None:
        """Write what each pod knows by name: as a kubelet does, itself; as the servers of names do, the
        head's Service, and what is no pod."""
        others = [host for host in self.lan.hosts if not host.name.startswith(MACHINE)]
        names = {self._service(): self.head.host.address} | {host.name: host.address for host in others}
        for pod in self.pods:
            known = {"localhost": "127.0.0.1", pod.name: pod.host.address, **names}
            lines = [f"{address} {name}\n" for name, address in known.items()]
            pod.host.file("/etc/hosts").write_text("".join(lines))

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
        **_store(ray, is_head=is_head),
    }


def _store(ray: Manifest, *, is_head: bool) -> dict[str, str]:
    """What the operator adds where the control store outlives the head."""
    asked = ray["spec"].get("gcsFaultToleranceOptions")
    if asked is None:
        return {}
    if not is_head:
        return {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
    # The cluster's uid; here there is one cluster a store.
    return {"RAY_external_storage_namespace": "uid", "RAY_REDIS_ADDRESS": asked["redisAddress"]}


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


def _ray_cluster(objects: Sequence[Manifest]) -> Manifest:
    (ray,) = [each for each in objects if each["kind"] == "RayCluster"]
    return ray


@contextmanager
def pods_of(
    objects: Sequence[Manifest],
    directory: Path,
    claims: Mapping[str, Path],
    *,
    spare: int = 0,
    beside: Sequence[str] = (),
) -> Iterator[Pods]:
    """The pods of the RayCluster among objects; they are not started yet.

    Args:
        claims: the directory of this machine that each PersistentVolumeClaim is.
        spare: machines for pods that are made later.
        beside: names of hosts that are no pods.
    """
    ray = _ray_cluster(objects)
    assert ray["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
    groups = [("headgroup", ray["spec"]["headGroupSpec"])]
    for group in ray["spec"]["workerGroupSpecs"]:
        groups += [(group["groupName"], group)] * group["replicas"]
    shared = {
        mount["mountPath"]: claims[volume["persistentVolumeClaim"]["claimName"]]
        for _, group in groups
        for mount, volume in _mounts(group["template"]["spec"])
        if "persistentVolumeClaim" in volume
    }
    machines = [f"{MACHINE}{number}" for number in range(1, len(groups) + spare + 1)]
    with Lan([*machines, *beside], directory, shared=shared, users=[USER]) as lan:
        hosts = lan.hosts[: len(machines)]
        pods = Pods(lan, objects, directory, spare=hosts[len(groups) :])
        for (name, group), host in zip(groups, hosts, strict=False):
            pods.add(name, group, host)
        yield pods
