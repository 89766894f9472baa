"""Offline inference from the command line: `batch`."""

from __future__ import annotations

from typing import Annotated

import typer

from infra.cli.common import FileOption, JsonOption, SetOption, load, print_json

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

    from cluster.state.connection import connect, require_record

    connect(require_record(loaded.config.cluster.name))

    from infra.cli.batch_view import view_for
    from serve_apps.batch.run import BatchRequest, run_and_leave

    options = {field: value for field, value in given.items() if value is not None}
    request = BatchRequest(input_path, output, options, replicas, rows_per_shard)
    result = run_and_leave(loaded.resolved, name, request, view_for(name))
    if as_json:
        print_json(result)
    else:
        failed = f", {result['failed']:,} of them with an error" if result["failed"] else ""
        typer.echo(f"{result['rows']:,} rows{failed}, {result['completion_tokens']:,} tokens of answers")
        typer.echo(f"files: {result['output']}")
