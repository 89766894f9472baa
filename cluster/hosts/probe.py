"""Looks at nodes from within, and says which of them do not fit."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.hosts import probe_agent
from cluster.hosts.misfits import Seen, misfits, notes

ANSWER_S = 60.0
"""Longest that a node may take for an answer: a worker process has to start there."""
_SEE_S = 5.0
"""A file server's clients may look at what they have kept for so long."""
_CLOCK_ROUNDS = 3

cloudpickle.register_pickle_by_value(probe_agent)


@dataclass(frozen=True)
class ProbedNode:
    """A node to be looked at."""

    node_id: str
    name: str
    address: str
    gpus: float


@dataclass(frozen=True)
class Findings:
    """What a probe found.

    Attributes:
        misfits: why nodes cannot be used, by node id; empty for each that can.
        notes: what else people should know.
        seen: of each node, by node id.
    """

    misfits: dict[str, list[str]]
    notes: list[str]
    seen: dict[str, Seen]


class _Conversation:
    """Asks all nodes at once; who fails once is asked no more."""

    def __init__(self, nodes: Sequence[ProbedNode]) -> None:
        self.silent: dict[str, str] = {}
        kind: Any = ray.remote(num_cpus=0, max_restarts=0)(probe_agent.ProbeAgent)
        self._agents = {
            node.node_id: kind.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
            ).remote()
            for node in nodes
        }

    def ask(
        self, method: str, arguments: Callable[[str], Sequence[Any]], *, of: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """The answers by node id."""
        asked = {
            node: getattr(agent, method).remote(*arguments(node))
            for node, agent in self._agents.items()
            if node not in self.silent and (of is None or node in of)
        }
        ready, _ = (
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S) if asked else ([], [])
        )
        answers = {}
        for node, answer in asked.items():
            if answer not in ready:
                self.silent[node] = f"no answer within {ANSWER_S:.0f} s"
                continue
            try:
                answers[node] = ray.get(answer)
            except ray.exceptions.RayError as error:
                self.silent[node] = str(error).strip().splitlines()[0]
        return answers

    def clocks(self) -> dict[str, float]:
        """How far each clock is ahead of this process's, where the time of the question cannot explain it."""
        off = {}
        for node in [each for each in self._agents if each not in self.silent]:
            bounds = []
            for _ in range(_CLOCK_ROUNDS):
                before = time.time()
                answer = self.ask("clock", lambda _: (), of=[node]).get(node)
                if answer is not None:
                    bounds.append((answer - time.time(), answer - before))
            if bounds:
                least, most = max(low for low, _ in bounds), min(high for _, high in bounds)
                off[node] = least if least > 0 else most if most < 0 else 0.0
        return off

    def end(self) -> None:
        for agent in self._agents.values():
            ray.kill(agent)


def probe(nodes: Sequence[ProbedNode], head: str, storage: str) -> Findings:
    """Look at these nodes; needs a connection to the cluster.

    Args:
        head: the node id of the head, which is one of them.
        storage: the cluster's.
    """
    talk = _Conversation(nodes)
    names = {node.node_id: node.name for node in nodes}
    try:
        facts = talk.ask("facts", lambda _: ())
        clocks = talk.clocks()
        with_shoal = [node for node, fact in facts.items() if fact["packages"]["shoal"] is not None]
        unwritable, unseen = _storage_of(talk, with_shoal, head, storage, names)
        unreached = _reach(talk, nodes, head)
        by_id = {node.node_id: node for node in nodes}
        lookups = talk.ask("name_lookup_s", lambda node: (by_id[node].address,))
    finally:
        talk.end()
    head_clock = clocks.get(head, 0.0)
    seen = {
        node.node_id: Seen(
            name=node.name,
            silent=talk.silent.get(node.node_id),
            facts=facts.get(node.node_id, {}),
            clock_off_s=clocks.get(node.node_id, 0.0) - head_clock,
            unwritable=unwritable.get(node.node_id),
            unseen=tuple(unseen.get(node.node_id, ())),
            unreached=tuple(unreached.get(node.node_id, ())),
            address=node.address,
            ray_gpus=node.gpus,
            name_lookup_s=lookups.get(node.node_id, 0.0),
        )
        for node in nodes
    }
    if seen[head].silent is not None:
        return Findings({node: misfits(seen[head], seen[head], storage) for node in seen}, [], seen)
    return Findings(
        {node: misfits(each, seen[head], storage) for node, each in seen.items()},
        notes(list(seen.values())),
        seen,
    )


def _storage_of(
    talk: _Conversation, nodes: Sequence[str], head: str, storage: str, names: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Why each cannot write there, and whose files it does not see."""
    mark = uuid.uuid4().hex
    files = {node: f".shoal-probe-{mark}-{node[:12]}" for node in nodes}
    # The head first, which may have to make the place.
    first = [head] if head in files else []
    said = talk.ask("write", lambda node: (storage, files[node], True), of=first)
    said |= talk.ask("write", lambda node: (storage, files[node], False), of=[n for n in nodes if n != head])
    writers = [node for node, problem in said.items() if problem is None]
    # Each sees the head's, and the head sees everybody's: what is one place for two of them is for all.
    seen_by = {
        node: [head] if node != head else [each for each in writers if each != head] for node in writers
    }
    asked = {node: [files[each] for each in wanted if each in writers] for node, wanted in seen_by.items()}
    unseen = talk.ask("reads", lambda node: (storage, asked[node], _SEE_S), of=writers)
    talk.ask("delete", lambda node: (storage, files[node]), of=writers)
    by_file = {file: node for node, file in files.items()}
    blind: dict[str, list[str]] = {}
    for node, missing in unseen.items():
        for file in missing:
            # What the head does not see is not the head's fault: the others see it.
            blamed, other = (node, by_file[file]) if node != head else (by_file[file], head)
            if names[other] not in blind.setdefault(blamed, []):
                blind[blamed].append(names[other])
    return {node: problem for node, problem in said.items() if problem is not None}, blind


def _reach(talk: _Conversation, nodes: Sequence[ProbedNode], head: str) -> dict[str, list[tuple[str, str]]]:
    """Whom each cannot connect to: each tries the head and the next one, and the head tries all."""
    by_id = {node.node_id: node for node in nodes}
    ports = talk.ask("listen", lambda node: (by_id[node].address,))
    there = list(ports)
    tries: dict[str, list[str]] = {}
    for place, node in enumerate(there):
        following = there[(place + 1) % len(there)]
        wanted = {following, head} if node != head else set(there)
        tries[node] = sorted(wanted & set(there) - {node})
    answers = talk.ask(
        "reach", lambda node: ([(by_id[each].address, ports[each]) for each in tries[node]],), of=there
    )
    return {
        node: [
            (by_id[other].name, reason)
            for other, reason in zip(tries[node], found, strict=True)
            if reason is not None
        ]
        for node, found in answers.items()
    }
