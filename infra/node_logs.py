"""What Ray's own processes on a node wrote: the node's logs, as its agent reads them there."""

from __future__ import annotations

from typing import Any

from cluster.errors import RequestError, ShoalError
from cluster.state.nodes import node_states

USUAL = ("gcs_server.out", "gcs_server.err", "raylet.out", "raylet.err")
"""What is shown where no file is named: what a node stands and falls with."""
USUAL_LINES = 100
MOST_LINES = 100_000


def node_logs(address: str, node: str, file: str | None, tail: int) -> dict[str, Any]:
    """{"node", "files": the names of all of them, "lines": [{"file", "line"}]}; needs a connection.

    Args:
        address: HOST:PORT of Ray's control store.
        node: its name.
        file: one of them; None for the usual ones.
        tail: so many lines of each, the last ones.

    Raises:
        RequestError: there is no such node that is alive, or no such file.
        ShoalError: its agent does not answer.
    """
    from ray.util.state import get_log, list_logs
    from ray.util.state.exception import RayStateApiException

    ids = {state.name: state.node_id for state in node_states() if state.alive}
    if node not in ids:
        raise RequestError(f"no node {node!r} is alive; there are {', '.join(ids)}")
    try:
        found = list_logs(address=address, node_id=ids[node], glob_filter="*")
        names = sorted({name for names in found.values() for name in names})
        if file is not None and file not in names:
            those = ", ".join(names[:50])
            raise RequestError(f"{file!r} is no file of Ray's on node {node}; those are {those}")
        wanted = [file] if file is not None else [name for name in USUAL if name in names]
        lines = [
            {"file": name, "line": line}
            for name in wanted
            for line in "".join(
                get_log(address=address, node_id=ids[node], filename=name, tail=tail, errors="replace")
            ).splitlines()
        ]
    except (RayStateApiException, OSError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ShoalError(f"what Ray wrote on node {node} cannot be read: {reason}") from error
    return {"node": node, "files": names, "lines": lines}
