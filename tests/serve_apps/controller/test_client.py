"""Who asks a controller that runs imports no Ray Serve for it: that takes a second of each `shoal serve`."""

from __future__ import annotations

import subprocess
import sys

SERVES = """
import sys
from serve_apps import commands
from serve_apps.controller import client

class Runs(client.ControllerClient):
    def __init__(self):
        pass

    def describe(self):
        return {}

    def bring_up(self):
        pass

client.ControllerClient.find = classmethod(lambda cls: Runs())
commands.ControllerClient = Runs
commands.begin_to_serve({})
print([name for name in ("ray.serve", "torch", "transformers") if name in sys.modules])
"""


def test_a_command_that_finds_the_controller_running_imports_no_serve() -> None:
    done = subprocess.run([sys.executable, "-c", SERVES], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
