"""What the commands share: their common options, how they load the config, print results and fail."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.errors import ShoalError

if TYPE_CHECKING:
    from types import FrameType

    from cluster.config.loader import LoadedConfig
    from cluster.config.sections.cluster import ClusterConfig, NodeConfig

FileOption = Annotated[
    str | None,
    typer.Option(
        "--file",
        "-f",
        metavar="FILE",
        help="The config file. Default: $SHOAL_CONFIG, else shoal.yaml here or in a parent directory.",
        show_default=False,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a value of the config before it is checked; may be given several times.",
        show_default=False,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output instead of text.")
]

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, or a name: its newest job.")]

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


def load(
    file: str | None,
    overrides: Sequence[str] | None = None,
    scope: str | None = None,
    *,
    across: bool = True,
    offline: bool = False,
) -> LoadedConfig:
    """Find and load the config, as every command does that needs more of it than the cluster's name.

    `scope` is `train_jobs.NAME` or `serve_apps.NAME` for commands about one of them; `across=False` is for
    commands that must work although jobs or apps of the file do not fit (down, …). Where somebody else starts
    the nodes, jobs and apps are checked against those that are there, unless `offline`; and where the cluster
    is behind a context, it checks them itself: what they name lies there, and not here.

    Raises:
        ConfigError: with every mistake of the file and the overrides.
    """
    from cluster.config.find import find_config
    from cluster.config.loader import load_config

    path, ask = find_config(file), None
    if across and not offline:
        from infra.cli.target import chosen_context

        ask = _nodes_there
        across = chosen_context(path) is None
    return load_config(path, overrides or (), scope, across=across, ask_nodes=ask)


def _nodes_there(cluster: ClusterConfig) -> tuple[NodeConfig, ...] | None:
    """The nodes of a cluster that is up, as it says itself; None of one that is not, or that makes further
    ones when they are asked for."""
    from cluster.state.record import read_record
    from infra.api.client import NoAnswerError
    from infra.cli.target import target_of

    record = read_record(cluster.name)
    if record is None or cluster.kubernetes.autoscaler is not None:
        return None
    from cluster.state.nodes import kinds_of, states_of

    try:
        rows = target_of(record).api.get("/nodes")
    except NoAnswerError:
        return None
    return kinds_of(states_of(row for row in rows if not row["misfits"]))


def print_json(document: Any) -> None:
    """Print the command's result, the one JSON document on standard output."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
    sys.stdout.flush()


def say(text: str = "") -> None:
    """Tell the person something on standard error: progress, hints, warnings."""
    typer.echo(text, err=True)


def interrupt_at_sigterm() -> None:
    """Take SIGTERM as Ctrl-C from here on, so that what the command has started is stopped."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def run(command: Callable[[], Any]) -> int:
    """Run the command line and return its exit code; errors of the user's become sentences on stderr.

    0: it worked; 1: it failed; 2: the request was wrong; 130: interrupted. What is not a ShoalError is a
    mistake of ours and keeps its traceback.
    """
    try:
        command()
        sys.stdout.flush()
    except ShoalError as error:
        say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough (`shoal schema | head`); Python would complain again on
        # its own last flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    return 0
