"""Logs from the command line: `logs`, of a job or of an app."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Annotated, Any
from urllib.parse import quote

import typer

from cluster.errors import ShoalError
from infra.api.client import ApiClient, NoAnswerError
from infra.cli.common import FileOption, load, say
from infra.cli.target import cluster_name, target_if_up

_OF_WORKERS = ("worker-", "python-core-", "runtime_env_setup-")
"""How Ray names the many logs that a node has of its workers."""
Write = Callable[[dict[str, Any]], None]


def register(app: typer.Typer) -> None:
    """Add the commands of this noun."""
    app.command("logs")(logs)


def logs(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="An app, or a job: its id, or a name for its newest one."),
    ] = None,
    file: FileOption = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with what comes: until the job ends, or Ctrl-C.")
    ] = False,
    tail: Annotated[
        int | None,
        typer.Option(
            "--tail", "-n", min=0, metavar="N", help="The last lines only (of an app: of each process)."
        ),
    ] = None,
    replica: Annotated[
        str | None, typer.Option("--replica", metavar="ID", help="Of this replica of an app only.")
    ] = None,
    request: Annotated[
        str | None,
        typer.Option(
            "--request", metavar="ID", help="Only what is about this request (x-request-id) to an app."
        ),
    ] = None,
    rank: Annotated[
        str | None,
        typer.Option(
            "--rank", metavar="K", help="Only what this rank of a script printed, or `all` of them."
        ),
    ] = None,
    of_app: Annotated[bool, typer.Option("--app", help="NAME is an app, where a job has it too.")] = False,
    of_job: Annotated[bool, typer.Option("--job", help="NAME is a job, where an app has it too.")] = False,
    node: Annotated[
        str | None,
        typer.Option(
            "--node", metavar="NODE", help="Of a node, what Ray's own processes there wrote; NAME is a file."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON document for each line instead of text.")
    ] = False,
) -> None:
    """Print what a job (rank 0 of a script too), or an app's gateway and replicas printed, ended ones too;
    or a node."""
    from cluster.errors import RequestError

    if node is not None:
        if follow or replica or request or rank or of_app or of_job:
            raise RequestError("--node goes with the name of a file, --tail and --json only")
        _of_node(file, node, name, tail, as_json=as_json)
        return
    if name is None:
        raise RequestError("NAME is needed: an app or a job; or --node NODE")
    if of_app and of_job:
        raise RequestError("--app and --job exclude each other")
    only_app = of_app or replica is not None or request is not None

    def write(line: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(line) + "\n" if as_json else _shown(line, named=rank == "all"))
        if follow:
            sys.stdout.flush()

    target = target_if_up(file)
    try:
        if target is not None:
            wanted = {
                "of": "app" if of_app else "job" if of_job else None,
                "follow": str(follow).lower(),
                "tail": tail,
                "replica": replica,
                "request": request,
                "rank": rank,
            }
            _of_cluster(target.api, name, wanted, write)
            return
    except NoAnswerError as error:
        if target is None or not target.is_here or only_app:
            raise
        say(str(error))
    except KeyboardInterrupt:
        return  # how following ends
    _of_files(file, name, rank, tail, write, only_app=only_app, only_job=of_job)


def _of_node(file: str | None, node: str, log: str | None, tail: int | None, *, as_json: bool) -> None:
    """Write what Ray's processes on a node wrote; on a host of ours whether the cluster answers or not."""
    from cluster.errors import RequestError
    from infra.cli.target import find_target

    try:
        target = find_target(file)
        document = target.api.get(f"/nodes/{quote(node, safe='')}/logs", file=log, tail=tail)
    except (NoAnswerError, RequestError) as error:
        document = _of_host(cluster_name(file), node, log, tail, error)
    for row in document["lines"]:
        sys.stdout.write(json.dumps(row) + "\n" if as_json else f"[{row['file']}] {row['line']}\n")
    sys.stdout.flush()
    if not as_json:
        names = [name for name in document["files"] if not name.startswith(_OF_WORKERS)]
        more = len(document["files"]) - len(names)
        of_workers = f", and {more} of its workers" if more else ""
        say(f"other files, by their names after --node {node}: {', '.join(names)}{of_workers}")


def _of_host(
    cluster: str, node: str, log: str | None, tail: int | None, silent: ShoalError
) -> dict[str, Any]:
    """The same as the host itself tells it, where it is one of ours.

    Raises:
        ShoalError: it is not (`silent` again), does not answer, or has no such file.
    """
    from cluster.hosts.slurm.batch_job import read_batch_job
    from cluster.hosts.ssh.fleet import read_fleet

    fleet, job = read_fleet(cluster), read_batch_job(cluster)
    if fleet is None and job is None:
        raise silent
    say(f"{silent}; asking the host itself")
    if fleet is not None:
        from cluster.hosts.ssh.nodes import read_logs

        return read_logs(fleet.host(node), cluster, log, tail)
    from cluster.hosts.slurm.slurm_provider import ask_node

    assert job is not None, "one of both"
    found: dict[str, Any] = ask_node(job, node, "logs", {"cluster": cluster, "file": log, "tail": tail})
    return found


def _of_cluster(api: ApiClient, name: str, wanted: dict[str, Any], write: Write) -> None:
    """Write what a cluster's control API tells.

    Raises:
        RequestError: nothing has this name.
        ShoalError: it cannot be read.
    """
    from cluster.errors import RequestError

    seen: dict[str, int] = {}
    for told in api.stream(f"/logs/{quote(name, safe='')}", **wanted):
        if told.kind == "line":
            log, number = told.data["log"], told.data["number"]
            if number > seen.get(log, 0):
                seen[log] = number
                write(told.data["line"])
        elif told.kind == "note":
            say(told.data["text"])
        elif told.kind == "failed":
            raise (RequestError if told.data["request"] else ShoalError)(told.data["message"])
        else:
            sys.stdout.flush()
            for sentence in told.data["sentences"]:
                say(sentence)


def _of_files(
    file: str | None,
    name: str,
    rank: str | None,
    tail: int | None,
    write: Write,
    *,
    only_app: bool,
    only_job: bool,
) -> None:
    """Write what a job's files hold, where the cluster is not up.

    Raises:
        RequestError: no job has this name.
        ShoalError: what is wanted is not in its files.
    """
    from cluster.errors import RequestError
    from cluster.files.storage import Storage
    from infra.job_output import JobOutput
    from train_jobs.records.job_status import job_ids
    from train_jobs.records.listing import find_job

    cluster = cluster_name(file)
    storage = Storage(load(file, across=False).resolved.cluster.storage)
    try:
        if only_app:
            raise RequestError("an app has no files")
        job = find_job(storage, name)
    except RequestError:
        what = "no app" if only_app else "no job" if only_job else "neither an app nor a job"
        jobs = job_ids(storage)[-10:]
        there = [] if only_job else [f"cluster {cluster} is not up"]
        if not only_app:
            there.append(f"the last jobs are {', '.join(jobs)}" if jobs else "there are no jobs yet")
        raise RequestError(f"there is {what} {name!r}; {'; '.join(there)}") from None
    output = JobOutput(storage, job, rank, None, cluster)
    for note in output.notes:
        say(note)
    lines = output.new(last=True)
    for _, line in lines if tail is None else lines[len(lines) - min(tail, len(lines)) :]:
        write(line)
    sys.stdout.flush()
    for sentence in output.closing():
        say(sentence)


def _shown(line: dict[str, Any], *, named: bool) -> str:
    """A line for people, with its end.

    Args:
        named: that of a rank begins with it.
    """
    from infra.log_lines import LogLine, Origin

    said = line["line"]
    if line["source"] == "job":
        return f"{said}\n"
    if "attempt" in line:
        return f"rank {line['rank']}: {said}\n" if named else f"{said}\n"
    prefix = Origin(line["source"], line["replica"], line["rank"]).prefix
    read = LogLine(said, None) if isinstance(said, str) else LogLine(json.dumps(said), said)
    return "".join(f"{prefix} {part}\n" for part in read.shown().splitlines())
