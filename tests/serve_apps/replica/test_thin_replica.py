"""A replica stands by for nothing: what it needs of memory and time is that of a small process."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "transformers", "tokenizers", "safetensors", "pyarrow.dataset", "vllm")


def test_the_process_of_a_replica_imports_nothing_heavy() -> None:
    code = (
        "import sys; import serve_apps.replica.deployment; "
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
