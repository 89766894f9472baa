"""An API server of Kubernetes' for kubectl: objects in memory, checked as the real one checks them; commands
in pods are run by whoever makes the pods."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio.to_thread
import kubernetes_validate
import uvicorn
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from tests.cluster.hosts.kubernetes.crd import refusals

Object = dict[str, Any]
Answer = tuple[int, bytes, bytes]
"""Exit code, standard output and error of a command in a pod."""


@dataclass(frozen=True)
class Kind:
    """A kind of objects."""

    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool = True

    @property
    def root(self) -> str:
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    @property
    def group_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


KINDS = (
    Kind("", "v1", "Namespace", "namespaces", namespaced=False),
    Kind("", "v1", "Pod", "pods"),
    Kind("", "v1", "Secret", "secrets"),
    Kind("", "v1", "Service", "services"),
    Kind("", "v1", "Event", "events"),
    Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    Kind("monitoring.coreos.com", "v1", "ServiceMonitor", "servicemonitors"),
    Kind("ray.io", "v1", "RayCluster", "rayclusters"),
    Kind("apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions", False),
)
_VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]


class RefusalError(Exception):
    """What the server says no with.

    Args:
        reason: Kubernetes' word for it.
    """

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


@dataclass
class ApiServer:
    """The server.

    Attributes:
        on_change: called with the kind and the object when one was made, changed or deleted (then None of it
            is there any more).
        execute: runs a command in a pod.
        forbidden: (verb, plural) that the caller may not.
    """

    url: str = ""
    objects: dict[tuple[str, str, str], Object] = field(default_factory=dict)
    """By plural, namespace and name."""
    on_change: Callable[[str, str, Object], None] = lambda *_: None
    execute: Callable[[str, list[str]], Answer] = lambda *_: (1, b"", b"no such pod\n")
    forbidden: set[tuple[str, str]] = field(default_factory=set)
    known: tuple[Kind, ...] = KINDS
    asked: list[str] = field(default_factory=list)
    """The requests, as `VERB PATH`."""
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _version: int = 0

    def put(self, plural: str, value: Object) -> None:
        """Have an object there, without asking anybody."""
        metadata = value["metadata"]
        with self._lock:
            self._version += 1
            metadata["resourceVersion"] = str(self._version)
            metadata.setdefault("uid", f"uid-{self._version}")
            self.objects[plural, metadata.get("namespace", ""), metadata["name"]] = value

    def take(self, plural: str, namespace: str, name: str) -> None:
        """Have an object there no more."""
        with self._lock:
            self.objects.pop((plural, namespace, name), None)

    # -- what kubectl asks for --------------------------------------------------------------------------

    def discovery(self, path: str) -> Object | None:
        """The documents by which kubectl finds out what there is; None for another path."""
        if path == "/version":
            return {"major": "1", "minor": "33", "gitVersion": "v1.33.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            groups = sorted({(kind.group, kind.version) for kind in self.known if kind.group})
            return {
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": [
                    {"name": group, "versions": [version], "preferredVersion": version}
                    for group, version in (
                        (group, {"groupVersion": f"{group}/{version}", "version": version})
                        for group, version in groups
                    )
                ],
            }
        of_root = [kind for kind in self.known if kind.root == path]
        if of_root:
            return {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": of_root[0].group_version,
                "resources": [
                    {
                        "name": kind.plural,
                        "singularName": kind.kind.lower(),
                        "namespaced": kind.namespaced,
                        "kind": kind.kind,
                        "verbs": _VERBS,
                    }
                    for kind in of_root
                ],
            }
        if path == "/openapi/v3":
            roots = {kind.root.lstrip("/") for kind in self.known}
            return {"paths": {root: {"serverRelativeURL": f"/openapi/v3/{root}"} for root in roots}}
        if path.startswith("/openapi/v3/"):
            root = path.removeprefix("/openapi/v3")
            return {"openapi": "3.0.0", "info": {}, "paths": dict(map(_checked_by_server, self._at(root)))}
        return None

    def _at(self, root: str) -> Iterator[Kind]:
        return (kind for kind in self.known if kind.root == root)

    def answer(self, verb: str, path: str, query: Mapping[str, str], body: bytes) -> tuple[int, Object]:
        """Do what is asked; code and document.

        Raises:
            RefusalError: it is not done.
        """
        kind, namespace, name = self._place(path)
        what = {"GET": "get" if name else "list", "POST": "create", "DELETE": "delete"}.get(verb, "patch")
        if (what, kind.plural) in self.forbidden:
            at = f' in API group "{kind.group}" in the namespace "{namespace}"'
            message = f'{kind.plural} is forbidden: User "ann" cannot {what} resource "{kind.plural}"{at}'
            raise RefusalError(403, "Forbidden", message)
        with self._lock:
            if verb == "GET" and not name:
                return 200, self._list(kind, namespace, query)
            if verb == "POST":
                made: Object = json.loads(body)
                _check(kind, made, None)
                made["metadata"]["namespace"] = namespace
                self.put(kind.plural, made)
                self.on_change("made", kind.plural, made)
                return 201, made
            there = self.objects.get((kind.plural, namespace, name))
            if there is None:
                group = f".{kind.group}" if kind.group else ""
                raise RefusalError(404, "NotFound", f'{kind.plural}{group} "{name}" not found')
            if verb == "GET":
                return 200, there
            if verb == "DELETE":
                self.take(kind.plural, namespace, name)
                self.on_change("deleted", kind.plural, there)
                return 200, {"kind": "Status", "apiVersion": "v1", "status": "Success"}
            changed = _merged(there, json.loads(body))
            _check(kind, changed, there)
            self.put(kind.plural, changed)
            self.on_change("changed", kind.plural, changed)
            return 200, changed

    def _place(self, path: str) -> tuple[Kind, str, str]:
        for kind in self.known:
            if not path.startswith(f"{kind.root}/"):
                continue
            parts = path.removeprefix(f"{kind.root}/").split("/")
            namespace = ""
            if kind.namespaced and parts[0] == "namespaces":
                _, namespace, *parts = parts
            if parts[:1] == [kind.plural] and len(parts) <= 2:
                return kind, namespace, parts[1] if len(parts) > 1 else ""
        raise RefusalError(404, "NotFound", "the server could not find the requested resource")

    def _list(self, kind: Kind, namespace: str, query: Mapping[str, str]) -> Object:
        labels = [each.split("=", 1) for each in query.get("labelSelector", "").split(",") if each]
        fields = [each.split("=", 1) for each in query.get("fieldSelector", "").split(",") if each]
        found = [
            each
            for (plural, space, _), each in self.objects.items()
            if plural == kind.plural
            and space == namespace
            and all(each["metadata"].get("labels", {}).get(key) == value for key, value in labels)
            and all(_field(each, key) == value for key, value in fields)
        ]
        metadata = {"resourceVersion": str(self._version)}
        return {
            "kind": f"{kind.kind}List",
            "apiVersion": kind.group_version,
            "metadata": metadata,
            "items": found,
        }


def _checked_by_server(kind: Kind) -> tuple[str, Object]:
    """Says that this server checks fields, so that kubectl need not."""
    gvk = {"group": kind.group, "version": kind.version, "kind": kind.kind}
    operation = {
        "x-kubernetes-group-version-kind": gvk,
        "parameters": [{"name": "fieldValidation", "in": "query"}],
        "responses": {},
    }
    return f"{kind.root}/namespaces/{{namespace}}/{kind.plural}/{{name}}", {"patch": operation}


def _check(kind: Kind, new: Object, old: Object | None) -> None:
    if kind.kind == "RayCluster":
        said = refusals(
            {key: value for key, value in new.items() if key != "status"},
            None if old is None else {key: value for key, value in old.items() if key != "status"},
        )
        if said:
            raise RefusalError(
                422, "Invalid", f'RayCluster.ray.io "{new["metadata"]["name"]}" is invalid: {said[0]}'
            )
    elif kind.kind in ("Secret", "Service", "PodDisruptionBudget"):
        metadata = {
            key: value
            for key, value in new["metadata"].items()
            if key in ("name", "namespace", "labels", "annotations")
        }
        try:
            kubernetes_validate.validate({**new, "metadata": metadata}, "1.33", strict=True)
        except kubernetes_validate.ValidationError as error:
            raise RefusalError(422, "Invalid", f"{kind.kind} is invalid: {error.message}") from error


def _merged(there: Any, patch: Any) -> Any:
    """As a JSON merge patch has it (RFC 7386), which is what kubectl sends for custom resources."""
    if not isinstance(patch, dict):
        return patch
    result = dict(there) if isinstance(there, dict) else {}
    for key, value in patch.items():
        if key.startswith("$"):
            continue  # of a strategic merge: the order of what is there
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(result.get(key), value)
    return result


def _field(value: Any, path: str) -> str:
    for key in path.split("."):
        value = value.get(key, {}) if isinstance(value, dict) else {}
    return str(value)


def _application(server: ApiServer) -> Starlette:
    async def take(request: Request) -> Response:
        path, verb = request.url.path, request.method
        server.asked.append(f"{verb} {path}")
        found = server.discovery(path)
        if found is not None:
            return JSONResponse(found)
        body = await request.body()
        if request.headers.get("content-type", "").endswith("yaml"):
            body = json.dumps(yaml.safe_load(body)).encode()
        try:
            code, document = server.answer(verb, path, request.query_params, body)
        except RefusalError as refusal:
            status = {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "message": str(refusal),
                "reason": refusal.reason,
                "code": refusal.code,
            }
            return JSONResponse(status, refusal.code)
        return JSONResponse(document, code)

    async def execute(websocket: WebSocket) -> None:
        """`kubectl exec`, by v5.channel.k8s.io: the first byte of each message is its stream."""
        await websocket.accept(subprotocol="v5.channel.k8s.io")
        pod = websocket.path_params["pod"]
        words = websocket.query_params.getlist("command")
        code, output, errors = await anyio.to_thread.run_sync(server.execute, pod, words)
        for stream, content in ((1, output), (2, errors)):
            for start in range(0, len(content), 16_384):
                await websocket.send_bytes(bytes([stream]) + content[start : start + 16_384])
        status: Object = {"kind": "Status", "apiVersion": "v1", "status": "Success"}
        if code:
            causes = [{"reason": "ExitCode", "message": str(code)}]
            status |= {
                "status": "Failure",
                "reason": "NonZeroExitCode",
                "message": f"command terminated with non-zero exit code: exit status {code}",
                "details": {"causes": causes},
            }
        await websocket.send_bytes(bytes([3]) + json.dumps(status).encode())
        await websocket.close()

    exec_path = "/api/v1/namespaces/{namespace}/pods/{pod}/exec"
    methods = ["GET", "POST", "PATCH", "PUT", "DELETE"]
    return Starlette(
        routes=[WebSocketRoute(exec_path, execute), Route("/{rest:path}", take, methods=methods)]
    )


@contextmanager
def api_server(directory: Path) -> Iterator[tuple[ApiServer, Path]]:
    """A server, and a kubeconfig that leads there."""
    server = ApiServer()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            _application(server), log_level="warning", lifespan="off", ws="websockets-sansio"
        )
        running = uvicorn.Server(config)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        kubeconfig = directory / "kubeconfig"
        kubeconfig.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "test", "cluster": {"server": server.url}}],
                    "users": [{"name": "ann", "user": {"token": "of ann"}}],
                    "contexts": [{"name": "test", "context": {"cluster": "test", "user": "ann"}}],
                    "current-context": "test",
                }
            )
        )
        for kind in KINDS:
            if kind.group == "ray.io":
                name = f"{kind.plural}.{kind.group}"
                definition = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
                server.put("customresourcedefinitions", {**definition, "metadata": {"name": name}})
        server.put("namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "ml"}})
        try:
            yield server, kubeconfig
        finally:
            running.should_exit = True
            thread.join()
