"""What OpenSSH's client says, and what we say of it."""

from __future__ import annotations

import pytest

from cluster.hosts.ssh.refusals import why_refused

CHANGED = """
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
Host key verification failed.
"""
OPEN_KEY = """
@         WARNING: UNPROTECTED PRIVATE KEY FILE!          @
Permissions 0644 for 'key' are too open.
Load key "key": bad permissions
ann@192.0.2.10: Permission denied (publickey).
"""


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (CHANGED, "its host key is another than the one in known_hosts"),
        ("Host key verification failed.\n", "its host key is not known here"),
        (
            "No ED25519 host key is known for h and you have requested strict checking.",
            "its host key is not known here",
        ),
        (OPEN_KEY, "the key file is open to others"),
        ("ann@192.0.2.10: Permission denied (publickey).", "it takes none of our keys"),
        ("ssh: Could not resolve hostname h: Name or service not known", "there is no host of this name"),
        ("ssh: connect to host h port 22: Connection refused", "no sshd listens there"),
        ("ssh: connect to host h port 22: Connection timed out", "it does not answer"),
        ("ssh: connect to host h port 22: No route to host", "it does not answer"),
        ("kex_exchange_identification: read: Connection reset by peer", "it closed the connection"),
        ("Connection closed by 192.0.2.10 port 22", "it closed the connection"),
        ("Welcome\n\ncommand-line: line 0: Bad configuration option: x\n", "Bad configuration option: x"),
        ("", "the connection was lost"),
    ],
)
def test_what_is_said(said: str, sentence: str) -> None:
    assert sentence in why_refused(said)
