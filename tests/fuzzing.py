"""schemathesis: what the document of an API allows and forbids is sent to the real server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

SEED = 1


def fuzz(
    folder: Path,
    url: str,
    schema: dict[str, Any],
    examples: int,
    checks: Sequence[str],
    headers: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Run schemathesis' command over a document; fails with what it says.

    Args:
        folder: its files go there.
        examples: most requests to an operation, of each kind.
        headers: of every request.
    """
    path = folder / "openapi.json"
    path.write_text(json.dumps(schema))
    # Headers and parameters that nobody knows are no mistake in HTTP.
    (folder / "schemathesis.toml").write_text("[generation]\nallow-extra-parameters = false\n")
    command = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run"]
    command += [str(path), "--url", url, "--checks", ",".join(checks), "--phases", "coverage,fuzzing"]
    command += ["--seed", str(SEED), "--max-examples", str(examples), "--no-color", "--request-timeout", "20"]
    command += ["--continue-on-failure", "--output-truncate", "false", "--generation-database", "none"]
    for name, value in headers.items():
        command += ["--header", f"{name}: {value}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
