"""The section `cluster.ssh`: how hosts are reached, and what Shoal runs with there."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cluster.config.sections.section import Argument, Section


class SshConfig(Section):
    """How OpenSSH's client reaches the hosts; what your ~/.ssh/config says of them counts too."""

    user: Argument | None = Field(default=None, min_length=1)
    """Who logs in, where a node names nobody. Default: as OpenSSH has it."""
    identity_file: str | None = Field(default=None, min_length=1)
    """File (relative to the config file) with the private key. Default: those that OpenSSH tries."""
    python: Argument = Field(default="python3", min_length=1)
    """The Python on each host: one with this version of Shoal; with `install: wheel`, the one that a virtual
    environment is made with."""
    install: Literal["none", "wheel"] = "none"
    """What is installed on the hosts at `up`: nothing; or `wheel`, this very Shoal with its dependencies, in
    a virtual environment of its own (~/.local/share/shoal)."""
    options: dict[str, str] = Field(default={})
    """Further options of OpenSSH's client, as in ssh_config(5) (ProxyJump, StrictHostKeyChecking)."""
