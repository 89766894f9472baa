"""Certificates of one's own, by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_certificate(folder: Path, name: str, alternative: str) -> tuple[str, str]:
    """A certificate that is its own authority, and its key; their files.

    Args:
        alternative: whom it is for, as openssl says it: `IP:127.0.0.1`, `DNS:host.example`.
    """
    certificate, key = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        f"/CN={name}",
    ]
    command += ["-addext", f"subjectAltName={alternative}", "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return certificate, key
