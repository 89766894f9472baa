"""The embedded provider: every node of the cluster is a raylet of its own on this machine."""

from __future__ import annotations

import os
import shutil
import socket
import uuid
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from cluster.config.sections.cluster import ClusterConfig
from cluster.environment import passed_on
from cluster.errors import RequestError, ShoalError
from cluster.hosts import processes
from cluster.hosts.embedded.addresses import (
    choose_subnet,
    node_addresses,
    serve_proxy_address,
    subnets_of,
)
from cluster.hosts.embedded.gpus import divide, machine_gpus
from cluster.hosts.embedded.identity import Identity, other_identities, read_identity, write_identity
from cluster.hosts.embedded.node_command import (
    TEMPORARY,
    HeadPorts,
    NodeStart,
)
from cluster.hosts.embedded.node_starts import LOGS, START_TIMEOUT_S, NodeStarts
from cluster.hosts.embedded.session_directory import session_directory
from cluster.hosts.embedded.sockets import addresses_in_use
from cluster.hosts.endpoints import (
    API_PORT,
    DASHBOARD_PORT,
    EVERY_HOST,
    GATEWAY_PORT,
    choose_endpoint,
    free_ports,
)
from cluster.hosts.provider import Beside, Started, Tell, nothing_beside
from cluster.state import connection
from cluster.state.health import answers, listens, silent, tls_variables, wait_until
from cluster.state.nodes import NODE_LABEL
from cluster.state.record import (
    SERVE_PORT,
    TOKEN_FILE,
    ClusterRecord,
    NodeRecord,
    http_url,
    new_token,
    read_record,
    write_record,
)
from cluster.state.state_directory import locked, require_private, state_directory, write_private


class EmbeddedProvider:
    """Raylets on this machine, each at an address of its own; see Provider for the contract."""

    owns_nodes = True

    def up(
        self, cluster: ClusterConfig, config_path: Path, tell: Tell, beside: Beside = nothing_beside
    ) -> Started:
        config_path = config_path.absolute()
        with locked(cluster.name, lambda: tell(_waiting(cluster.name))):
            _require_here(cluster.name)
            record = self._found_up(cluster, config_path, tell)
            if record is not None:
                return Started(record, was_up=True)
            return Started(_start(cluster, config_path, tell, beside), was_up=False)

    def down(self, name: str, tell: Tell, config_path: Path | None = None) -> bool:
        with locked(name, lambda: tell(_waiting(name))):
            _require_here(name)
            identity = read_identity(name)
            if identity is not None and config_path is not None:
                other = Path(identity.config_path)
                if other != config_path.absolute() and other.exists():
                    raise RequestError(
                        f"cluster {name} was started from {other}, not from {config_path}:"
                        f" `shoal down -f {other}` takes it down"
                    )
            return _clean(name)

    def silent(self, record: ClusterRecord) -> list[str]:
        head = record.nodes[0].name
        found = silent({node.name: node.raylet_address for node in record.nodes}, environment=record.tls)
        if head not in found and not answers(record.gcs_address, environment=record.tls):
            found.insert(0, head)
        return found

    def _found_up(self, cluster: ClusterConfig, config_path: Path, tell: Tell) -> ClusterRecord | None:
        """The record when the cluster is up; what is left of a dead one is cleaned away."""
        record, identity = read_record(cluster.name), read_identity(cluster.name)
        gone = self.silent(record) if record is not None else []
        if record is not None and record.nodes[0].name in gone and _head_listens(record):
            raise ShoalError(
                f"the head of cluster {cluster.name} is there and does not answer: is this machine"
                " overloaded, or are Ray's processes stopped? `shoal up` when it answers again;"
                " `shoal down` ends it"
            )
        if record is None or identity is None or record.nodes[0].name in gone:
            why = "its start was not finished" if record is None else "its head was dead"
            if _clean(cluster.name):
                tell(f"cleaned up what was left of cluster {cluster.name}: {why}")
            return None
        if record.config_path != str(config_path):
            raise RequestError(
                f"cluster {cluster.name} is up already, from {record.config_path}: give this one"
                " another cluster.name, or take that one down first (`shoal down`)"
            )
        if gone:
            tell(f"not answering: {', '.join(gone)}; `shoal down` and `shoal up` bring all nodes back")
        if dict(identity.cluster) != cluster.model_dump(mode="json"):
            tell("the cluster section of the config has changed since; `shoal down` and `shoal up` apply it")
        return record


def _head_listens(record: ClusterRecord) -> bool:
    """Whether both servers of the head have not ended, though they may be stopped."""
    return listens(record.gcs_address) and listens(record.nodes[0].raylet_address)


def _start(cluster: ClusterConfig, config_path: Path, tell: Tell, beside: Beside) -> ClusterRecord:
    shapes = cluster.node_shapes()
    wanted = [shape.gpus for _, shape in shapes]
    gpus = divide(wanted, machine_gpus() if any(wanted) else ())
    state, directory = state_directory(cluster.name), session_directory(cluster.name)
    try:
        identity = _claim(cluster, config_path)
        ips = node_addresses(identity.subnet, len(shapes))
        nodes = [
            NodeStart(name, ip, shape, directory / f"n{index}", gpus[index])
            for index, ((name, shape), ip) in enumerate(zip(shapes, ips, strict=True))
        ]
        tell(f"starting {len(nodes)} nodes at {ips[0]} to {ips[-1]}")
        tls = tls_variables(passed_on(cluster.env, os.environ, "cluster.env"))
        ports = _head_ports(ips[0], identity)
        gcs_address = f"{ips[0]}:{ports.gcs}"
        record = ClusterRecord(
            name=cluster.name,
            cluster_id=identity.cluster_id,
            config_path=str(config_path),
            base_dir=str(config_path.parent),
            storage=cluster.storage,
            head_ip=ips[0],
            gcs_address=gcs_address,
            dashboard_url=http_url(identity.dashboard_host, identity.dashboard_port, ips[0]),
            gateway_host=identity.gateway_host,
            gateway_port=identity.gateway_port,
            serve_host=identity.serve_host,
            serve_port=identity.serve_port,
            api_host=identity.api_host,
            api_port=identity.api_port,
            api_certificate=cluster.api.certificate,
            gateway_certificate=cluster.gateway.certificate,
            token_path=str(state / TOKEN_FILE),
            tls=tls,
        )
        starts = NodeStarts(nodes, identity, ports, gcs_address, state, cluster.env, tls)
        with starts.reaped():
            starts.begin()
            record = _found(cluster, record, starts, beside)
    except BaseException:  # an interruption too must not leave a half cluster behind
        _clean(cluster.name)
        raise
    return record


def _claim(cluster: ClusterConfig, config_path: Path) -> Identity:
    """Choose addresses and ports that no other cluster has, and write them down before anything starts."""
    state, session = state_directory(cluster.name), session_directory(cluster.name)
    # One at a time, since a choice counts for others only once it is written.
    with locked(".addresses"):
        others = other_identities(cluster.name)
        taken = {other.subnet for other in others} | subnets_of(addresses_in_use())
        subnet = choose_subnet(cluster.name, taken)
        head_ip = node_addresses(subnet, len(cluster.node_shapes()))[0]
        reserved = {(other.gateway_host, other.gateway_port) for other in others}
        reserved |= {(other.dashboard_host, other.dashboard_port) for other in others}
        reserved |= {(other.api_host, other.api_port) for other in others}
        dashboard = choose_endpoint("dashboard", cluster.dashboard, head_ip, DASHBOARD_PORT, reserved)
        gateway = choose_endpoint("gateway", cluster.gateway, head_ip, GATEWAY_PORT, reserved | {dashboard})
        reserved |= {dashboard, gateway}
        api = choose_endpoint("api", cluster.api, head_ip, API_PORT, reserved)
        own = serve_proxy_address(subnet)
        others_at = {(other.serve_host, other.serve_port) for other in others} | {dashboard, api}
        if gateway[0] not in EVERY_HOST:  # such a one leaves it those who ask at its own address
            others_at.add(gateway)
        proxy = choose_endpoint("serve_proxy", cluster.serve_proxy, own, SERVE_PORT, others_at)
        for directory in (state, session.parent, session):
            require_private(directory)
        identity = Identity(
            name=cluster.name,
            cluster_id=str(uuid.uuid4()),
            config_path=str(config_path),
            machine=machine(),
            subnet=subnet,
            dashboard_host=dashboard[0],
            dashboard_port=dashboard[1],
            gateway_host=gateway[0],
            gateway_port=gateway[1],
            serve_host=proxy[0],
            serve_port=proxy[1],
            api_host=api[0],
            api_port=api[1],
            cluster=cluster.model_dump(mode="json"),
        )
        write_identity(identity)
    write_private(state / TOKEN_FILE, new_token())
    (state / LOGS).mkdir()
    (session / TEMPORARY).mkdir()
    return identity


def _head_ports(head_ip: str, identity: Identity) -> HeadPorts:
    """Of the head's servers, none of which the cluster gives out otherwise."""
    reserved = [
        (identity.dashboard_host, identity.dashboard_port),
        (identity.gateway_host, identity.gateway_port),
        (identity.serve_host, identity.serve_port),
        (identity.api_host, identity.api_port),
    ]
    gcs, client, raylet = free_ports(("0.0.0.0", head_ip, "0.0.0.0"), reserved)
    return HeadPorts(gcs=gcs, client=client, raylet=raylet)


def _found(
    cluster: ClusterConfig, record: ClusterRecord, starts: NodeStarts, beside: Beside
) -> ClusterRecord:
    """Join the new cluster, start the broker beside the nodes, wait for all of them; the record with the
    nodes' ids, which is written.

    The process stays a driver of it: whoever started it has questions, and to join costs time."""
    connection.connect(record)
    try:
        import ray

        from cluster.hosts.services import start_services

        names = [name for name, _ in cluster.node_shapes()]
        found: dict[str, NodeRecord] = {}

        def all_registered() -> bool:
            for row in ray.nodes():
                name = row["Labels"].get(NODE_LABEL)
                if row["Alive"] and name is not None:
                    raylet = f"{row['NodeManagerAddress']}:{row['NodeManagerPort']}"
                    found[name] = NodeRecord(name, row["NodeManagerAddress"], row["NodeID"], raylet)
            return found.keys() >= set(names)

        start_services(cluster, record, beside)
        starts.wait()
        if not wait_until(all_registered, START_TIMEOUT_S):
            missing = ", ".join(name for name in names if name not in found)
            raise ShoalError(f"these nodes started but did not join the cluster: {missing}")
        record = replace(record, nodes=tuple(found[name] for name in names))
        write_record(record)
    except BaseException:
        connection.disconnect()
        raise
    return record


def _require_here(name: str) -> None:
    """A home may be one of several machines', and each runs clusters of its own.

    Raises:
        RequestError: the cluster runs on another machine.
    """
    identity = read_identity(name)
    if identity is not None and identity.machine not in ("", machine()):
        raise RequestError(
            f"cluster {name} was started on {identity.machine}, whose home is this machine's too: run the"
            " command there, or give this cluster another cluster.name"
        )


def machine() -> str:
    """What this machine calls itself."""
    return socket.gethostname()


def _clean(name: str) -> bool:
    """End every process of the cluster and remove its state; False when there was neither."""
    state, session = state_directory(name), session_directory(name)
    # Also without the identity file: whoever removes old files knows nothing of clusters.
    ids = processes.cluster_ids(str(state))
    identity = read_identity(name)
    if identity is not None:
        ids.add(identity.cluster_id)
    for cluster_id in sorted(ids):
        processes.end_cluster(cluster_id)
    there = [directory for directory in (session, state) if directory.exists()]
    for directory in there:
        require_private(directory)
        shutil.rmtree(directory)
    with suppress(OSError):  # other clusters are there
        session.parent.rmdir()
    return bool(there or ids)


def _waiting(name: str) -> str:
    return f"another command is starting or stopping cluster {name}; waiting for it"
