"""What the processes of an engine are called, for people who look at processes."""

from __future__ import annotations

from cluster.node.surroundings import change_title

ENGINE = "shoal::Engine:"
PARKED = "shoal::ParkedEngine:"


def show_parked(parked: bool) -> None:
    """Let this process be called what it is; of one that is no engine's nothing changes."""
    if parked:
        change_title(ENGINE, PARKED)
    else:
        change_title(PARKED, ENGINE)
