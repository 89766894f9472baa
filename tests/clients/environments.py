"""Where clients are installed: virtual environments, npm's packages and Debian's, made once and kept.

They lie in `SHOAL_CLIENTS_DIR`, or else in the user's cache. Each is made anew when its packages change.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.clients.catalogue import PYTHON_PACKAGES

INSTALL_TIMEOUT_S = 900.0


def clients_directory() -> Path:
    """Where environments are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("SHOAL_CLIENTS_DIR") or Path(cache) / "shoal-clients")


def python_of(environment: str) -> Path:
    """The interpreter of a virtual environment with the packages of its row in the catalogue."""
    packages = PYTHON_PACKAGES[environment]

    def make(folder: Path) -> None:
        _run(sys.executable, "-m", "venv", str(folder))
        _run(str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages)

    key = "\n".join((sys.version, *packages))
    return made_once(clients_directory() / f"py-{environment}", key, make) / "bin" / "python"


def node_modules() -> Path:
    """The `node_modules` folder with what `node/package.json` names; `.bin/node` in it is Node itself."""
    package = Path(__file__).parent / "node" / "package.json"

    def make(folder: Path) -> None:
        folder.mkdir(parents=True)
        shutil.copy(package, folder)
        # Scripts of these packages only fetch or move what other packages of the registry have.
        _run("npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts", cwd=folder)

    return made_once(clients_directory() / "node", package.read_text(), make) / "node_modules"


def nginx() -> Path:
    """The nginx of Debian's package, unpacked without installing it."""

    def make(folder: Path) -> None:
        folder.mkdir(parents=True)
        _run("apt-get", "download", "nginx", cwd=folder)
        (package,) = folder.glob("nginx_*.deb")
        _run("dpkg", "-x", str(package), str(folder))

    return made_once(clients_directory() / "nginx", "nginx", make) / "usr" / "sbin" / "nginx"


def made_once(folder: Path, key: str, make: Callable[[Path], object]) -> Path:
    """The folder, made if there is none or its key is another; one process makes it, others wait."""
    digest = hashlib.sha256(key.encode()).hexdigest()
    # Beside the folder, so that one that was made by half does not look whole.
    stamp = folder.with_name(f"{folder.name}.made")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f"{folder.name}.lock")):
        if not stamp.exists() or stamp.read_text() != digest:
            stamp.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            make(folder)
            stamp.write_text(digest)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(*command: str, cwd: Path | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
