"""`python -m serve_apps.batch NAME --input … --output …`: offline inference from inside the cluster."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from cluster.errors import ShoalError

SAMPLING = {
    "max_tokens": int,
    "min_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "seed": int,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
}
"""Fields of a request that are options here; `stop` and `ignore_eos` beside them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer the rows and print what `shoal batch --json` prints."""
    parser = argparse.ArgumentParser(prog="python -m serve_apps.batch", description=__doc__)
    parser.add_argument("name", metavar="NAME", help="an app of the config")
    parser.add_argument("-f", "--file", help="the config file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--input", required=True, metavar="PARQUET")
    parser.add_argument("--output", required=True, metavar="DIRECTORY")
    parser.add_argument("--replicas", type=int)
    parser.add_argument("--rows-per-shard", type=int)
    for field, kind in SAMPLING.items():
        parser.add_argument(f"--{field.replace('_', '-')}", type=kind)
    parser.add_argument("--stop", action="append")
    parser.add_argument("--ignore-eos", action="store_true", default=None)
    options = parser.parse_args(arguments)
    try:
        return _run(options)
    except ShoalError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _run(options: argparse.Namespace) -> int:
    from cluster.config.find import find_config
    from cluster.config.loader import load_config

    loaded = load_config(find_config(options.file), options.settings, f"serve_apps.{options.name}")

    import ray

    from serve_apps.batch.progress import View
    from serve_apps.batch.request import BatchRequest
    from serve_apps.batch.run import run_and_leave

    ray.init(namespace="shoal", log_to_driver=False)
    given = {field: getattr(options, field) for field in (*SAMPLING, "stop", "ignore_eos")}
    request = BatchRequest(
        options.input,
        options.output,
        {field: value for field, value in given.items() if value is not None},
        options.replicas,
        options.rows_per_shard,
    )
    result = run_and_leave(loaded.resolved, options.name, request, View())
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
