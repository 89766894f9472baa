"""Offline inference from the command line: `batch`."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from cluster.models.directory_here import is_uri
from infra.api.client import ApiClient
from infra.cli.common import FileOption, JsonOption, SetOption, load, print_json
from infra.cli.submitting import placed
from infra.cli.target import Target, find_target

_SAMPLING = "Sampling, as in the fields of an HTTP request; columns of the input stand for them row by row"


_PLAIN = typer.Option(show_default=False, rich_help_panel=_SAMPLING)
IntOption = Annotated[int | None, _PLAIN]
FloatOption = Annotated[float | None, _PLAIN]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("batch")(batch)


def batch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An app of the config; it need not be served.")],
    input_path: Annotated[
        str, typer.Option("--input", metavar="PARQUET", help="A Parquet file, a directory of them, or a URI.")
    ],
    output: Annotated[
        str, typer.Option("--output", metavar="DIRECTORY", help="Where the answers go: a directory or a URI.")
    ],
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Engines at work. Default: the app's replicas.min.")
    ] = None,
    rows_per_shard: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of one output file, done as a whole. Default: by the input's size."),
    ] = None,
    max_tokens: IntOption = None,
    min_tokens: IntOption = None,
    temperature: FloatOption = None,
    top_p: FloatOption = None,
    top_k: IntOption = None,
    min_p: FloatOption = None,
    seed: IntOption = None,
    presence_penalty: FloatOption = None,
    frequency_penalty: FloatOption = None,
    repetition_penalty: FloatOption = None,
    stop: Annotated[list[str] | None, _PLAIN] = None,
    ignore_eos: Annotated[bool | None, typer.Option("--ignore-eos", rich_help_panel=_SAMPLING)] = None,
    file: FileOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer the prompts of Parquet files with an app's model; run it again to go on where it ended."""
    given = {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "repetition_penalty": repetition_penalty,
        "stop": stop,
        "ignore_eos": ignore_eos,
    }
    loaded = load(file, settings, f"serve_apps.{name}")
    target = find_target(file)
    body = {
        "config": loaded.resolved.serve_apps[name].model_dump(mode="json", by_alias=True),
        "input": _absolute(input_path, target),
        "output": _absolute(output, target),
        "options": {field: value for field, value in given.items() if value is not None},
        "replicas": replicas,
        "rows_per_shard": rows_per_shard,
    }
    with placed(target, loaded, "serve_apps", name):
        result = _run(target.api, name, body)
    if as_json:
        print_json(result)
    else:
        failed = f", {result['failed']:,} of them with an error" if result["failed"] else ""
        typer.echo(f"{result['rows']:,} rows{failed}, {result['completion_tokens']:,} tokens of answers")
        typer.echo(f"files: {result['output']}")


def _absolute(path: str, target: Target) -> str:
    """A path from the root, where the nodes see what is seen here; anything else as it is."""
    return os.path.abspath(path) if target.is_here and not is_uri(path) else path


def _run(api: ApiClient, name: str, body: dict[str, Any]) -> dict[str, Any]:
    """Have a batch run, and show how it goes; the result.

    Raises:
        ConfigError, RequestError: something about the request is wrong; nothing was started or changed.
        ShoalError: there is no room, or it failed; the same command goes on from there.
    """
    from cluster.errors import RequestError, ShoalError
    from infra.cli.batch_view import view_for
    from serve_apps.batch.manifest import Totals
    from serve_apps.batch.progress import Progress

    with view_for(name) as view:
        for told in api.stream(f"/apps/{name}/batch", body=body):
            if told.kind == "progress":
                done, new = Totals(**told.data["done"]), Totals(**told.data["new"])
                view.show(Progress(told.data["rows"], done, new, told.data["seconds"]))
            elif told.kind == "note":
                view.say(told.data["text"])
            elif told.kind == "failed":
                raise (RequestError if told.data["request"] else ShoalError)(told.data["message"])
            else:
                result: dict[str, Any] = told.data
    return result
