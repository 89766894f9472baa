"""The provider of Ray clusters that somebody else has started: only what is Shoal's comes and goes there."""

from __future__ import annotations

import ipaddress
import logging
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from cluster.actors import NAMESPACE
from cluster.config.sections.cluster import ClusterConfig
from cluster.environment import passed_on
from cluster.errors import RequestError, ShoalError
from cluster.hosts.provider import Beside, Started, Tell, nothing_beside
from cluster.hosts.settings import JOB_STOP_WAIT, JOB_STOP_WAIT_S, SERVE_SETTINGS
from cluster.state import connection
from cluster.state.health import answers, listens, tls_variables
from cluster.state.record import SERVE_PORT, TOKEN_FILE, ClusterRecord, read_record, write_record
from cluster.state.state_directory import (
    locked,
    remove_state,
    require_private,
    state_directory,
    write_private,
)

_ASK_S = 10.0


class ExistingProvider:
    """A Ray cluster that somebody else has started, and that this machine is a node of; see Provider."""

    owns_nodes = False

    def up(
        self, cluster: ClusterConfig, config_path: Path, tell: Tell, beside: Beside = nothing_beside
    ) -> Started:
        config_path = config_path.absolute()
        with locked(cluster.name, lambda: tell(_waiting(cluster.name))), _joined(cluster) as ray_facts:
            from cluster.hosts.services import broker_facts

            there = broker_facts()
            if there is not None and there["name"] != cluster.name:
                raise RequestError(
                    f"this Ray cluster carries the Shoal cluster {there['name']} already; a Ray cluster has"
                    " room for one"
                )
            if there is not None and there["storage"] != cluster.storage:
                raise RequestError(
                    f"cluster {cluster.name} is up with the storage {there['storage']}; this config says"
                    f" {cluster.storage}. `shoal down` and `shoal up` change it"
                )
            record = read_record(cluster.name)
            if there is not None and record is not None and record.cluster_id == there["cluster_id"]:
                return Started(record, was_up=True)
            return Started(_start(cluster, config_path, ray_facts, there, tell, beside), was_up=False)

    def down(self, name: str, tell: Tell, config_path: Path | None = None) -> bool:
        with locked(name, lambda: tell(_waiting(name))):
            record = read_record(name)
            if record is None:
                return False
            if answers(record.gcs_address, environment=record.tls):
                from cluster.hosts.services import broker_facts, end_services

                connection.connect(record)
                try:
                    there = broker_facts()
                    if there is None or there["cluster_id"] == record.cluster_id:
                        end_services()
                    else:
                        tell(f"the Ray cluster carries another Shoal cluster by now ({there['name']})")
                finally:
                    connection.disconnect()
            elif listens(record.gcs_address):
                raise ShoalError(
                    f"what listens at {record.gcs_address} does not answer as Ray does, so nothing is ended:"
                    " is it frozen, or are its certificates others by now (RAY_TLS_*)? If Ray is gone from"
                    f" there, remove {state_directory(name)}"
                )
            else:
                tell(
                    f"the Ray cluster at {record.gcs_address} does not answer; what is known of it is removed"
                )
            remove_state(name)
            return True

    def silent(self, record: ClusterRecord) -> list[str]:
        return [] if answers(record.gcs_address, environment=record.tls) else ["the head"]


def _start(
    cluster: ClusterConfig,
    config_path: Path,
    found: Mapping[str, Any],
    there: Mapping[str, Any] | None,
    tell: Tell,
    beside: Beside,
) -> ClusterRecord:
    import ray

    from cluster.hosts.node_keeper import living_nodes
    from cluster.hosts.probe import probe
    from cluster.hosts.services import end_services, start_services
    from cluster.sharing.client import BrokerClient

    nodes, head = living_nodes()
    if head is None:
        raise ShoalError("Ray names no head node that is alive")
    tell(f"looking at {len(nodes)} nodes: " + ", ".join(sorted(node.name for node in nodes)))
    findings = probe(nodes, head, cluster.storage)
    if findings.misfits[head]:
        raise ShoalError("\n".join(findings.misfits[head]))
    for node in nodes:
        for sentence in findings.misfits[node.node_id]:
            tell(f"{sentence}; it is not used")
    for sentence in findings.notes:
        tell(sentence)
    try:
        token_path = _keep_token(cluster.name)
        if token_path is None:
            tell(
                "this Ray cluster asks for no token: whoever reaches it can run anything on its nodes"
                " (RAY_AUTH_MODE=token where Ray is started changes that)"
            )
        head_ip = next(node.address for node in nodes if node.node_id == head)
        record = ClusterRecord(
            name=cluster.name,
            cluster_id=str(uuid.uuid4()) if there is None else str(there["cluster_id"]),
            config_path=str(config_path),
            base_dir=str(config_path.parent),
            storage=cluster.storage,
            head_ip=head_ip,
            gcs_address=str(found["gcs_address"]),
            dashboard_url=f"http://{living_dashboard(found['dashboard'], head_ip, ray.nodes())}",
            gateway_host="",
            gateway_port=0,
            token_path=token_path,
            tls=tls_variables(os.environ),
            serve_host=cluster.serve_proxy.host,
            serve_port=cluster.serve_proxy.port or SERVE_PORT,
            provider="existing",
            api_certificate=cluster.api.certificate,
            gateway_certificate=cluster.gateway.certificate,
            python=str(findings.seen[head].facts["executable"]),
            env=_environment(cluster),
        )
        record = _with_endpoints(cluster, record, there)
        start_services(cluster, record, beside)
        BrokerClient().judge(findings.misfits)
        write_record(record)
    except BaseException:  # an interruption too must not leave half of it
        if there is None:
            end_services()
            remove_state(cluster.name)
        raise
    return record


def _with_endpoints(
    cluster: ClusterConfig, record: ClusterRecord, there: Mapping[str, Any] | None
) -> ClusterRecord:
    """The record with where our servers are to listen, which the head chooses."""
    from cluster.hosts.services import choose_endpoints

    if there is None:
        gateway, api = choose_endpoints(cluster, record)
    else:
        gateway = there["gateway_host"], there["gateway_port"]
        api = there["api_host"], there["api_port"]
    return replace(record, gateway_host=gateway[0], gateway_port=gateway[1], api_host=api[0], api_port=api[1])


def _environment(cluster: ClusterConfig) -> dict[str, str]:
    """What all that is Shoal's gets beside the environment of its node, which is somebody else's."""
    settings = {**SERVE_SETTINGS, JOB_STOP_WAIT: str(JOB_STOP_WAIT_S)}
    return {**settings, **passed_on(cluster.env, os.environ, "cluster.env")}


def _keep_token(name: str) -> str | None:
    """The file with the token that this process has for Ray, for later commands; None where there is none."""
    from cluster.ray_private import authentication_token

    token = authentication_token()
    directory = state_directory(name)
    require_private(directory)
    if token is None:
        return None
    write_private(directory / TOKEN_FILE, token)
    return str(directory / TOKEN_FILE)


def _address(wanted: str | None) -> str:
    """HOST:PORT of the Ray cluster that the config means.

    Raises:
        ShoalError: there is none.
    """
    from cluster.ray_private import address_here

    address = address_here() if wanted in (None, "auto") else wanted
    if address is None:
        raise ShoalError(
            "there is no Ray cluster here: this machine is a node of none (`ray start`), and neither"
            " cluster.address nor RAY_ADDRESS names one"
        )
    if not answers(address):
        why = ""
        if listens(address):
            why = ", though something listens there: does it use TLS, and RAY_USE_TLS does not say so?"
        raise ShoalError(f"no Ray cluster answers at {address}{why}")
    return address


def _require_node(address: str) -> None:
    """See that this machine can join the cluster at this address, before Ray tries that for minutes.

    Raises:
        ShoalError: it is no node of it, or has not its token.
    """
    import ray

    from cluster.ray_private import node_ids_by_address

    try:
        theirs = set(node_ids_by_address(address, _ASK_S))
    except ray.exceptions.AuthenticationError as error:
        raise ShoalError(
            f"the Ray cluster at {address} asks for its token: it is missing or another in RAY_AUTH_TOKEN, in"
            " the file that RAY_AUTH_TOKEN_PATH names, and in ~/.ray/auth_token"
        ) from error
    except (RuntimeError, ray.exceptions.RayError) as error:
        raise ShoalError(f"the Ray cluster at {address} cannot be asked: {_first_line(error)}") from error
    ours = {end.address for ends in psutil.net_if_addrs().values() for end in ends}
    # The whole of the loopback network is this machine's, though it has but one address of it.
    if not any(each in ours or ipaddress.ip_address(each).is_loopback for each in theirs):
        raise ShoalError(
            f"this machine is no node of the Ray cluster at {address}, whose nodes are at"
            f" {', '.join(sorted(theirs)[:8])}: run the command on one of them"
        )


@contextmanager
def _joined(cluster: ClusterConfig) -> Iterator[dict[str, str]]:
    """Be a driver of the Ray cluster that the config names, and know its addresses.

    Raises:
        ShoalError: there is none, this machine is no node of it, or it takes another token.
    """
    import ray

    if ray.is_initialized():
        raise ShoalError("this process is connected to a Ray cluster; disconnect it first")
    address = _address(cluster.address)
    _require_node(address)
    try:
        context = ray.init(
            address=address,
            namespace=NAMESPACE,
            runtime_env={"env_vars": _environment(cluster)},
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError, TimeoutError, ValueError, ray.exceptions.RayError) as error:
        raise ShoalError(f"the Ray cluster at {address} cannot be joined: {_first_line(error)}") from error
    try:
        gcs = str(ray.get_runtime_context().gcs_address)
        yield {"gcs_address": gcs, "dashboard": str(context.dashboard_url)}
    finally:
        connection.disconnect()


def living_dashboard(said: str, head_ip: str, rows: Iterable[Mapping[str, Any]]) -> str:
    """Where Ray's dashboard is. Where the control store outlives the head, Ray goes on to say where that of
    the first head was.

    Args:
        said: HOST:PORT, as Ray says.
        rows: Ray's list of nodes.
    """
    host, _, port = said.rpartition(":")
    alive: dict[str, bool] = {}
    for row in rows:
        address = row["NodeManagerAddress"]
        alive[address] = alive.get(address, False) or row["Alive"]
    if alive.get(host.strip("[]"), True):
        return said
    return f"[{head_ip}]:{port}" if ":" in head_ip else f"{head_ip}:{port}"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _waiting(name: str) -> str:
    return f"another command is starting or stopping cluster {name}; waiting for it"
