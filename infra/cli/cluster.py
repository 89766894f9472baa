"""The cluster from the command line: `up`, `down`, `status`, `env`."""

from __future__ import annotations

import shlex
import sys
import time
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from cluster.wording import amounts, step_of
from infra.cli.common import FileOption, JsonOption, SetOption, load, print_json, say
from infra.cli.target import find_target

if TYPE_CHECKING:
    from rich.table import Table

    from cluster.state.record import ClusterRecord

SERVE_START_S = 120.0
KEPT_READY = ("ForkServer", "ParkedEngine")
"""Of a node's processes those that do nothing, so that others start or wake at once."""


def register(app: typer.Typer) -> None:
    """Add the commands of this noun."""
    app.command("up")(up)
    app.command("down")(down)
    app.command("status")(status)
    app.command("forgive")(forgive)
    app.command("env")(env)


def up(file: FileOption = None, settings: SetOption = None, as_json: JsonOption = False) -> None:
    """Start the cluster; when it is up already, say so."""
    from cluster.state.record import SERVE_PORT
    from infra.lifecycle import bring_up

    loaded = load(file, settings)
    cluster = loaded.resolved.cluster
    started, document = bring_up(cluster, loaded.path, say, serves=bool(loaded.config.serve_apps))
    if started.was_up and started.record.is_here:
        say(f"cluster {cluster.name} is up already")
    elif started.record.is_here and started.record.serve_port != SERVE_PORT:
        # Serve's tools would start it at its usual port: they cannot be told another.
        say(f"starting Ray Serve, whose proxy is to listen at {started.record.serve_url}")
        _start_serve(started.record)
    _show({"notes": [], **document}, as_json)


def _start_serve(record: ClusterRecord) -> None:
    from cluster.state.connection import connect, disconnect

    connect(record)
    try:
        from cluster.sharing.client import BrokerClient
        from serve_apps.commands import start_serve

        start_serve(BrokerClient().info(), time.monotonic() + SERVE_START_S, say)
    finally:
        disconnect()


def down(file: FileOption = None, settings: SetOption = None, as_json: JsonOption = False) -> None:
    """Stop every process of the cluster."""
    from infra.lifecycle import take_down

    loaded = load(file, settings, across=False)
    cluster = loaded.config.cluster
    stopped = take_down(cluster, loaded.path, say)
    if as_json:
        print_json({"name": cluster.name, "stopped": stopped})
    else:
        typer.echo(f"cluster {cluster.name} {'is down' if stopped else 'was not up'}")


def status(
    file: FileOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show what changes hands and why, as it happens, until Ctrl-C.")
    ] = False,
) -> None:
    """Show the nodes with what they have and use, the leases, the jobs, the apps and the URLs."""
    api = find_target(file, settings).api
    if watch:
        from infra.cli.watch import watch as follow_events

        follow_events(api, as_json)
    else:
        _show(api.get("/cluster"), as_json)


def forgive(
    node: Annotated[str, typer.Argument(metavar="NODE", help="A node that is avoided, by its name.")],
    file: FileOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Trust a node again that was avoided because jobs failed there."""
    document = find_target(file, settings).api.post(f"/nodes/{quote(node, safe='')}/forgive")
    if as_json:
        print_json(document)
    else:
        typer.echo(f"{node} is trusted again" if document["was_avoided"] else f"{node} was not avoided")


def env(file: FileOption = None, settings: SetOption = None) -> None:
    """Print the exports under which Ray's own tools work, SHOAL_BASE_URL (the gateway), SHOAL_SERVE_URL (Ray
    Serve's own proxy) and SHOAL_API_URL (the control API): eval "$(shoal env)"."""
    target = find_target(file, settings)
    if target.record is None:
        # Ray's tools need Ray's token, which is for the machines that are nodes.
        say(f"cluster {target.name} was not brought up from here: Ray's own tools work on its nodes")
        variables = {"SHOAL_BASE_URL": target.api.get("/cluster")["base_url"]}
        variables["SHOAL_API_URL"] = target.endpoint.url
    else:
        from cluster.state.connection import environment

        record = target.record
        if not target.is_here:
            say("this machine is no node: what asks Ray's API works here, all else on a node (`shoal ssh`)")
        urls = {"SHOAL_BASE_URL": record.gateway_url, "SHOAL_SERVE_URL": record.serve_url}
        variables = {**environment(record), **urls, "SHOAL_API_URL": record.api_url}
    for key, value in variables.items():
        typer.echo(f"export {key}={shlex.quote(value)}")


def _show(document: dict[str, Any], as_json: bool) -> None:
    notes = document.pop("notes")
    for note in notes:
        say(note)
    if as_json:
        print_json(document)
        return
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False)
    console.print(f"cluster [bold]{document['name']}[/bold] at {document['address']}")
    console.print(_nodes_table(document["nodes"]))
    for line in (*avoided_lines(document["nodes"]), *misfit_lines(document["nodes"])):
        console.print(line, soft_wrap=True, markup=False)
    for title, columns in (
        ("leases", ("holder", "kind", "min", "max", "granted", "wants")),
        ("jobs", ("job", "status", "step", "workers", "attempts")),
        ("apps", ("name", "model", "status", "replicas", "wanted", "granted", "tensor")),
    ):
        rows = document[title]
        if title == "jobs":
            rows = [{**row, "step": step_of(row["step"], row["steps"])} for row in rows]
        console.print(_table(title, columns, rows) if rows else f"no {title}")
    for app in document["apps"]:
        if rollout := rollout_line(app["rollout"]):
            console.print(f"{app['name']}: {rollout}", soft_wrap=True, markup=False)
    serve = document["serve"]
    if serve["note"]:
        console.print(serve["note"], soft_wrap=True, markup=False)
    console.print(f"dashboard  {document['dashboard_url']}", soft_wrap=True)
    if document["apps"]:
        console.print(f"OpenAI API {document['base_url']}", soft_wrap=True)
        for line in gateway_lines(serve):
            console.print(line, soft_wrap=True, markup=False)
    console.print(f"Ray Serve  {serve['url']} ({_of_serve(serve['proxies'])})", soft_wrap=True)
    console.print(f"storage    {document['storage']}", soft_wrap=True)


def gateway_lines(serve: dict[str, Any]) -> list[str]:
    """Where the gateways are, if there are several, and what of them is not as it should be."""
    gateways, front = serve.get("gateways", []), serve.get("front")
    lines = []
    if front is not None and not front["runs"]:
        lines.append(f"the front of the gateways is away: {front['failure'] or 'it is being started'}")
    reached = [f"{each['url']} ({each['node']})" for each in gateways if each["url"] is not None]
    if len(gateways) > 1:
        lines.append(f"gateways   {', '.join(reached) or 'none is reached'}")
    lines += [f"{each['node']} has no gateway: {each['failure']}" for each in gateways if each["failure"]]
    return lines


def _of_serve(proxies: list[str]) -> str:
    others = "applications that are not Shoal's"
    return others if not proxies or "healthy" in proxies else f"{others}; its proxy is {proxies[0]}"


def rollout_line(rollout: dict[str, Any] | None) -> str:
    """How an app's last rollout stands or ended; nothing of a first start that went well."""
    if rollout is None or (rollout["strategy"] == "start" and rollout["status"] == "succeeded"):
        return ""
    before = f"{rollout['from_version']} " if rollout["from_version"] else ""
    change = f"{rollout['strategy']} {before}→ {rollout['to_version']}"
    status = rollout["status"].replace("_", " ")
    if rollout["status"] == "running":
        status = rollout.get("stage") or (
            "holding" if rollout.get("switched") else f"{rollout['ready']} ready"
        )
    reason = (rollout["reason"] or "").strip().splitlines()
    return f"{change}: {status}, {rollout['seconds']:.0f} s" + (f" ({reason[-1]})" if reason else "")


def avoided_lines(nodes: list[dict[str, Any]]) -> list[str]:
    """Why and until when nothing new starts on nodes that fail jobs."""
    lines = []
    for node in nodes:
        if node["avoided"]:
            until = datetime.fromisoformat(node["avoided"]["until"]).astimezone()
            lines.append(
                f"{node['name']} is avoided until {until:%d %b %H:%M}: {node['avoided']['reason']};"
                f" `shoal forgive {node['name']}` ends that"
            )
    return lines


def misfit_lines(nodes: list[dict[str, Any]]) -> list[str]:
    """Why nodes are not used that do not fit the others."""
    return [f"{sentence}; it is not used" for node in nodes if node["alive"] for sentence in node["misfits"]]


def _nodes_table(nodes: list[dict[str, Any]]) -> Table:
    kinds = [kind for kind in ("CPU", "GPU") if any(kind in node["resources"] for node in nodes)]
    rows = []
    for node in nodes:
        row = {"node": node["name"] + (" (head)" if node["head"] else "")}
        row["state"] = _state(node)
        for kind in kinds:
            total = node["resources"].get(kind, 0)
            row[f"{kind}s in use"] = f"{node['used'].get(kind, 0):g} of {total:g}"
        if any(node["foreign"] for node in nodes):
            row["strangers use"] = amounts(node["foreign"]) if node["foreign"] else ""
        used, total = (node[what].get("object_store_memory", 0) / 2**20 for what in ("used", "resources"))
        if (memory := node.get("memory_by_kind")) is not None:
            ready = sum(memory.get(kind, 0) for kind in KEPT_READY)
            row["kept ready"] = f"{ready / 2**20:,.0f} MiB"
        row["object store"] = f"{used:.0f} of {total:.0f} MiB"
        row["id"] = node["node_id"][:12]
        rows.append(row)
    columns = max(rows, key=len)
    return _table("nodes", tuple(columns), rows)


def _state(node: dict[str, Any]) -> str:
    if not node["alive"]:
        return "dead"
    return "does not fit" if node["misfits"] else "avoided" if node["avoided"] else "alive"


def _table(title: str, columns: tuple[str, ...], rows: list[dict[str, Any]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=column == columns[0])  # names are what people copy
    for row in rows:
        table.add_row(*(Text("" if row.get(column) is None else str(row[column])) for column in columns))
    return table
