"""Why a host does not let us in, in a sentence: pure, from what OpenSSH's client says."""

from __future__ import annotations

import re

_SENTENCES = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key is another than the one in known_hosts: it was set up anew, or something stands"
        " between. `ssh-keygen -R HOST` forgets the old one",
    ),
    (
        r"Host key verification failed|No .* host key is known",
        "its host key is not known here: `ssh HOST` once shows it and asks, or ssh.options:"
        " {StrictHostKeyChecking: accept-new} takes it",
    ),
    (
        r"UNPROTECTED PRIVATE KEY FILE|bad permissions",
        "the key file is open to others, and so is not used: `chmod 600` it",
    ),
    (
        r"Permission denied",
        "it does not let us in: it takes none of our keys for this user (ssh.identity_file, ssh.user; a key"
        " with a passphrase has to be in ssh-agent)",
    ),
    (r"Could not resolve hostname", "there is no host of this name"),
    (r"Connection refused", "it answers, but no sshd listens there"),
    (
        r"timed out|No route to host|Network is unreachable|Host is down|not responding",
        "it does not answer",
    ),
    (
        r"Connection (reset|closed)|Broken pipe|kex_exchange_identification",
        "it closed the connection: its sshd may be starting, be full, or refuse us",
    ),
)
"""What OpenSSH says, and what we do."""


def why_refused(said: str) -> str:
    """The sentence; `said` is the client's standard error."""
    for pattern, sentence in _SENTENCES:
        if re.search(pattern, said):
            return sentence
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else "the connection was lost"
