"""`python -m serve_apps [NAME…]`: serve apps of the config from inside the cluster (`ray job submit`)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from cluster.errors import ShoalError


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the named apps and print what `shoal serve --json` prints; the apps outlive this process."""
    parser = argparse.ArgumentParser(prog="python -m serve_apps", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="apps of the config; all by default")
    parser.add_argument("-f", "--file", help="the config file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    options = parser.parse_args(arguments)
    try:
        return _serve(options)
    except ShoalError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _serve(options: argparse.Namespace) -> int:
    from cluster.config.find import find_config
    from cluster.config.loader import load_config

    scope = f"serve_apps.{options.names[0]}" if len(options.names) == 1 else None
    loaded = load_config(find_config(options.file), options.settings, scope)

    import ray

    from serve_apps.commands import deploy

    ray.init(namespace="shoal", log_to_driver=False)
    result = deploy(loaded.resolved, options.names, say=lambda text: print(text, file=sys.stderr))
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
