"""The table from the config's `engine` to what runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from serve_apps.engine.protocol import Engine, EngineConfig

StartEngine = Callable[[EngineConfig, str, int], Engine]
"""(config, master address, master port) → the engine of rank 0."""
Follow = Callable[[EngineConfig, int, str, int], None]
"""(config, rank, master address, master port): what ranks 1… do until rank 0 says stop."""

ENGINES = {
    "torch": (
        "serve_apps.engine.torch_engine.engine:TorchEngine",
        "serve_apps.engine.torch_engine.follower:follow",
        "",
    ),
    "vllm": ("serve_apps.engine.vllm_engine:VllmEngine", None, "vllm"),
}
"""name → (engine of rank 0, what the other ranks run), each as `module:attribute`, None: the engine has
processes of its own for them; and the kind of its processes, see cluster.node.node_agent."""


@dataclass(frozen=True)
class EngineEntry:
    """Where an engine's two halves are; loaded only in the processes that run them."""

    engine: str
    follow: str | None
    kind: str = ""

    def load_engine(self) -> StartEngine:
        return _load(self.engine)  # type: ignore[return-value]

    @property
    def has_own_ranks(self) -> bool:
        """Whether the engine itself starts its other ranks, beside rank 0's process and on its devices."""
        return self.follow is None

    def load_follow(self) -> Follow:
        assert self.follow is not None
        return _load(self.follow)  # type: ignore[return-value]


def find_engine(name: str) -> EngineEntry:
    """The entry of a name of the table, or of `module:Class` whose module also has `follow`."""
    if name in ENGINES:
        return EngineEntry(*ENGINES[name])
    return EngineEntry(name, name.partition(":")[0] + ":follow")


def _load(path: str) -> object:
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)
