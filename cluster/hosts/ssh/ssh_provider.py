"""The provider of hosts that OpenSSH's client reaches: Ray is started on each, and all else on the head."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.config.sections.cluster import ClusterConfig
from cluster.environment import passed_on
from cluster.errors import ShoalError
from cluster.hosts.endpoints import free_port
from cluster.hosts.on_host.head_config import section_on_head, wanted_servers
from cluster.hosts.on_host.node_start import CONFIG_FILE, NodeTask
from cluster.hosts.provider import RemoteStarted, Tell, require_own_file, require_same_file, waiting_for
from cluster.hosts.ssh import nodes
from cluster.hosts.ssh.fleet import Fleet, FleetHost, hosts_of, read_fleet, write_fleet
from cluster.hosts.ssh.install import install
from cluster.hosts.ssh.ssh_connection import Connection
from cluster.loopback import is_own, own_address
from cluster.state.record import (
    RECORD_FILE,
    TOKEN_FILE,
    ClusterRecord,
    made_of,
    read_record,
    token_of,
    write_record,
)
from cluster.state.state_directory import (
    locked,
    remove_state,
    require_private,
    state_directory,
)

STOP_S = 400.0
"""Longest that the head may take to stop jobs and apps."""


class SshProvider:
    """Hosts by SSH; see RemoteProvider.

    Args:
        shoal: what runs the command `shoal` with the Python of a host.
    """

    def __init__(self, shoal: Sequence[str]) -> None:
        self._shoal = tuple(shoal)

    def up(
        self,
        cluster: ClusterConfig,
        config_path: Path,
        tell: Tell,
        command: Sequence[str],
        *,
        stay: bool = True,
    ) -> RemoteStarted:
        config_path = config_path.absolute()
        with locked(cluster.name, lambda: tell(waiting_for(cluster.name))):
            before = read_fleet(cluster.name)
            if before is not None:
                require_same_file(cluster.name, before.config_path, config_path)
            fleet = before or Fleet(
                cluster.name,
                str(uuid.uuid4()),
                str(config_path),
                hosts_of(cluster),
                _section_of(cluster),
            )
            if before is not None and _but_nodes(before.cluster) != _but_nodes(_section_of(cluster)):
                tell("the cluster section of the config has changed; `shoal down` and `shoal up` apply it")
            hosts, added = self._fit(cluster, fleet, tell, known=before is not None)
            fleet = replace(fleet, hosts=tuple(hosts.get(host.node, host) for host in (*fleet.hosts, *added)))
            try:
                require_private(state_directory(cluster.name))
                write_fleet(fleet)
                fleet, was_up = self._start_nodes(cluster, fleet, hosts, tell, known=before is not None)
                document = self._on_head(cluster, fleet, command, tell)
                record = self._record(fleet, config_path) if stay else None
            except BaseException:  # an interruption too must not leave half of it
                if before is None:
                    self._end(fleet, tell)
                raise
            if not stay:
                self._end(fleet, tell)
            return RemoteStarted(record, was_up, document)

    def down(self, name: str, tell: Tell, command: Sequence[str], config_path: Path | None = None) -> bool:
        with locked(name, lambda: tell(waiting_for(name))):
            fleet = read_fleet(name)
            if fleet is None:
                return False
            require_own_file(name, fleet.config_path, config_path)
            if fleet.directory:
                try:
                    self._run(fleet, command, tell, STOP_S)
                except ShoalError as error:
                    tell(f"jobs and apps could not be ended first: {error}")
            self._end(fleet, tell)
            return True

    # -- nodes ------------------------------------------------------------------------------------------

    def _start_nodes(
        self,
        cluster: ClusterConfig,
        fleet: Fleet,
        hosts: Mapping[str, FleetHost],
        tell: Tell,
        *,
        known: bool,
    ) -> tuple[Fleet, bool]:
        """Start what does not run; the fleet, and whether its head ran before.

        Args:
            hosts: those on which Ray can be started, by node.
            known: the cluster was started before: what cannot be started now is told, and done without.
        """
        token = token_of(cluster.name)
        env = passed_on(cluster.env, os.environ, "cluster.env")

        def start(host: FleetHost, head: str | None) -> dict[str, Any]:
            task = NodeTask(
                *(cluster.name, fleet.mark, host.node, host.address, head),
                servers=wanted_servers(cluster),
                on_network=() if cluster.gateway.keys is None else ("gateway",),
                cpus=host.cpus,
                gpus=host.gpus,
                accelerator=host.accelerator,
                env=env,
            )
            return nodes.start(host, task, token)

        where = ", if it does not run there" if known else ""
        tell(f"starting Ray on {fleet.head.destination.words}{where}")
        told = start(fleet.head, None)
        was_up = bool(told["was_up"])
        fleet = replace(
            fleet,
            directory=told["directory"],
            state=told["state"],
            gcs_address=told["gcs_address"],
            servers=told["servers"],
        )
        write_fleet(fleet)
        others = [host for host in fleet.hosts[1:] if host.node in hosts]
        if known and not was_up:
            tell("its head did not run: all nodes are started anew")
            nodes.require_all(nodes.on_all(others, lambda host: nodes.stop(host, fleet.name, fleet.mark)))
        if others:
            tell(f"starting Ray on {', '.join(host.destination.words for host in others)}{where}")
        answers = nodes.on_all(others, lambda host: start(host, fleet.gcs_address))
        if not known:
            nodes.require_all(answers)
        for host, answer in zip(others, answers, strict=True):
            if isinstance(answer, ShoalError):
                tell(f"{answer}; the cluster does without it")
            elif was_up and not answer["was_up"]:
                tell(f"{host.destination.words} did not run; it does now")
        return fleet, was_up

    def _fit(
        self, cluster: ClusterConfig, fleet: Fleet, tell: Tell, *, known: bool
    ) -> tuple[dict[str, FleetHost], list[FleetHost]]:
        """The hosts on which Ray can be started, by node, with what is known of them then; and which the
        fleet has not yet.

        Raises:
            ShoalError: one cannot, or the head cannot; of a cluster that was started before the others are
                told.
        """
        names = {host.node for host in fleet.hosts}
        added = [host for host in hosts_of(cluster) if host.node not in names]
        if missing := sorted(names - {host.node for host in hosts_of(cluster)}):
            tell(f"no longer in the config, and still there until `shoal down`: {', '.join(missing)}")
        hosts = [*fleet.hosts, *added]
        head = hosts[0]
        tell(f"looking at {len(hosts)} hosts: " + ", ".join(host.destination.words for host in hosts))

        def look(host: FleetHost) -> tuple[FleetHost, dict[str, Any]]:
            is_head, wheel = host is head, cluster.ssh.install == "wheel"
            if wheel:  # what was installed before may be of another version, or gone
                host = replace(host, python=cluster.ssh.python)
            facts = nodes.look(host, head=is_head)
            if wheel and not nodes.disk_lacks(host, facts):
                nodes.require_python(host, facts)
                host = install(host, tell)
                facts = nodes.look(host, head=is_head)
            return host, facts

        looked = nodes.on_all(hosts, look)
        first = nodes.require_all(looked if not known else looked[:1])[0]
        found: dict[str, FleetHost] = {}
        problems: list[str] = []
        for answer in looked:
            if isinstance(answer, ShoalError):
                problems.append(str(answer))
                continue
            host, facts = answer
            if lacks := nodes.lacks(host, facts, first[1]):
                problems += lacks
            else:
                found[host.node] = replace(host, address=facts["address"])
        if problems and (not known or head.node not in found):
            raise ShoalError("\n".join(problems))
        for problem in problems:
            tell(f"{problem}; the cluster does without it")
        return found, added

    def _end(self, fleet: Fleet, tell: Tell) -> None:
        """End all nodes and forget the cluster; a host that does not answer is told."""
        for answer in nodes.on_all(fleet.hosts, lambda host: nodes.stop(host, fleet.name, fleet.mark)):
            if isinstance(answer, ShoalError):
                tell(f"{answer}; what runs there ends by itself, since its head is gone")
        for host in fleet.hosts:
            Connection(host.destination).close()
        fleet.api_socket().unlink(missing_ok=True)
        remove_state(fleet.name)

    # -- what runs on the head --------------------------------------------------------------------------

    def _on_head(
        self, cluster: ClusterConfig, fleet: Fleet, command: Sequence[str], tell: Tell
    ) -> dict[str, Any]:
        """Run a command of `shoal` on the head; the document that it prints.

        Raises:
            HostError: it failed.
        """
        env = passed_on(cluster.env, os.environ, "cluster.env")
        section = section_on_head(cluster, fleet.gcs_address, fleet.servers, env)
        connection = fleet.head_connection()
        file = f"{fleet.directory}/{CONFIG_FILE}"
        text = json.dumps({"cluster": section}, indent=2)  # JSON is YAML
        connection.run(["sh", "-c", 'umask 077; cat > "$1"', "sh", file], text)
        document: dict[str, Any] = json.loads(self._run(fleet, command, tell))
        return document

    def _run(self, fleet: Fleet, command: Sequence[str], tell: Tell, timeout_s: float | None = None) -> str:
        file = f"{fleet.directory}/{CONFIG_FILE}"
        there = [fleet.head.python, "-m", "cluster.hosts.on_host.node", "run", fleet.name]
        connection = fleet.head_connection()
        connection.open()
        return connection.run([*there, *self._shoal, *command, "-f", file], tell=tell, timeout_s=timeout_s)

    def _record(self, fleet: Fleet, config_path: Path) -> ClusterRecord:
        """What is known here of the cluster, as it is reached from here."""
        connection = fleet.head_connection()
        path = Path(fleet.state, "shoal", fleet.name, RECORD_FILE)
        there = made_of(ClusterRecord, json.loads(connection.run(["cat", str(path)])), path)
        known = read_record(fleet.name)
        if known is not None and known.cluster_id == there.cluster_id:
            fleet.open_way()
            return known
        forwards: dict[str, str] = {}

        def here(host: str, port: int) -> tuple[str, int]:
            if not is_own(host):
                return host, port
            for local in (port, free_port(own_address())):
                if connection.forward(None, local, f"{host}:{port}"):
                    forwards[str(local)] = f"{host}:{port}"
                    return own_address(), local
            return host, port

        gateway = here(there.gateway_host, there.gateway_port)
        dashboard_host, _, dashboard_port = there.dashboard_url.rpartition("/")[2].rpartition(":")
        dashboard = here(dashboard_host, int(dashboard_port))
        api = here(there.api_host or own_address(), there.api_port)
        serve = here(there.serve_host or own_address(), there.serve_port)
        record = replace(
            there,
            provider="ssh",
            nodes=(),
            config_path=str(config_path),
            base_dir=str(config_path.parent),
            token_path=str(state_directory(fleet.name) / TOKEN_FILE),
            gateway_host=gateway[0],
            gateway_port=gateway[1],
            dashboard_url=f"http://{dashboard[0]}:{dashboard[1]}",
            api_host=api[0],
            api_port=api[1],
            serve_host=serve[0],
            serve_port=serve[1],
            env={},
        )
        fleet = replace(fleet, api=f"{there.api_host or own_address()}:{there.api_port}", forwards=forwards)
        write_fleet(fleet)
        fleet.open_way()
        write_record(record)
        return record


def _section_of(cluster: ClusterConfig) -> dict[str, Any]:
    """The section as it is kept with the fleet."""
    return cluster.model_dump(mode="json")


def _but_nodes(section: Mapping[str, Any]) -> dict[str, Any]:
    """What of a section takes another start; nodes may be added."""
    return {key: value for key, value in section.items() if key != "nodes"}
