"""Makes a virtual environment with a wheel on a host. Its text is sent to the host's Python, which has
nothing of ours: nothing but the standard library is imported."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

COMPLETE = "complete"
KEPT_LINES = 12


def make(asked: "dict[str, Any]") -> "dict[str, Any]":
    """{"python": its interpreter, "made": whether it was not there}.

    Args:
        asked: `name` of the environment, `wheel` (file name), `content` (base64), `constraints` (of pip).
    """
    share = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local/share")
    root = Path(share, "shoal", "environments")
    root.mkdir(parents=True, exist_ok=True)
    environment = root / asked["name"]
    python = environment / "bin/python"
    with (root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # hosts may have one home
        if (environment / COMPLETE).exists():
            return {"python": str(python), "made": False}
        shutil.rmtree(environment, ignore_errors=True)
        try:
            run([sys.executable, "-m", "venv", str(environment)])
            wheel = environment / asked["wheel"]
            wheel.write_bytes(base64.b64decode(asked["content"]))
            constraints = environment / "constraints.txt"
            constraints.write_text("\n".join(asked["constraints"]) + "\n")
            pip = [str(python), "-m", "pip", "install", "--progress-bar=off", "--no-input"]
            run([*pip, "--constraint", str(constraints), str(wheel)])
            (environment / COMPLETE).touch()
        except BaseException:
            shutil.rmtree(environment, ignore_errors=True)
            raise
    return {"python": str(python), "made": True}


def run(command: "list[str]") -> None:
    """Run a command; what it says last is the error where it fails."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        lines = done.stdout.decode("utf-8", "replace").strip().splitlines()[-KEPT_LINES:]
        what = "pip" if "pip" in command else "venv"
        sys.exit("\n".join([f"{what} cannot make the environment there:", *lines]))


if __name__ == "__main__":
    try:
        answer = make(json.loads(ASKED))  # type: ignore[name-defined]  # noqa: F821
    except OSError as error:
        sys.exit(f"the environment cannot be made there: {error}")
    print("shoal-result " + json.dumps(answer))
