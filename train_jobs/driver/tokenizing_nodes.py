"""Tokenizing on the nodes that a job has leased, side by side: Ray Data, in the calling process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import ray
import ray.data
from ray.util.annotations import RayDeprecationWarning
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.actors import NAMESPACE
from cluster.config.sections.data import DataConfig
from cluster.errors import RequestError, ShoalError
from cluster.state.nodes import NODE_LABEL
from train_jobs.data.documents import CorpusPart, corpus_parts
from train_jobs.data.token_streams import Encoded
from train_jobs.data.tokenizing import digest_of_parts, encode_part
from train_jobs.driver.data_errors import ERRORS, NotThereError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLACED_S = 60.0
_BLOCK_BYTES = 1 << 20
"""Documents travel when there is so much of them, not only at the end of their part."""


class NodesEncoder:
    """Encodes a corpus on some nodes, with one process on each place there.

    Args:
        nodes: node id of each place.
        cpus: CPUs that each place has.
        env: more variables of their processes.
    """

    def __init__(self, data: DataConfig, nodes: Sequence[str], cpus: int, env: dict[str, str]) -> None:
        self.data = data
        self.nodes = nodes
        self.cpus = cpus
        self.env = env

    def __call__(
        self, parts: Sequence[CorpusPart], tokenizer: PreTrainedTokenizerBase, first: int
    ) -> Iterator[Encoded]:
        """Encode the parts from one on, in their order.

        Raises:
            NotThereError: a node does not see the documents.
            RequestError: a part cannot be read or encoded.
            ShoalError: the nodes cannot be had.
        """
        if first >= len(parts):
            return  # only the arrays were not written yet
        if not ray.is_initialized():
            ray.init(namespace=NAMESPACE, log_to_driver=False)
        # With the end of this process Ray takes it back.
        places = placement_group(
            [{"CPU": float(self.cpus)}] * len(self.nodes),
            bundle_label_selector=[{"ray.io/node-id": node} for node in self.nodes],
        )
        if not places.wait(_PLACED_S):
            raise ShoalError(f"there is no room to tokenize on the nodes of the lease after {_PLACED_S:g} s")
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.target_max_block_size = _BLOCK_BYTES
        context.execution_options.preserve_order = True
        context.execution_options.resource_limits = ray.data.ExecutionResources(
            cpu=self.cpus * len(self.nodes)
        )
        indices = list(range(first, len(parts)))
        with warnings.catch_warnings():
            # Ray 2.64 is to have another way to say where processes stand; nothing says which.
            warnings.simplefilter("ignore", RayDeprecationWarning)
            encoded = ray.data.from_items(indices, override_num_blocks=len(indices)).map_batches(
                _PartEncoder,
                fn_constructor_args=(self.data, digest_of_parts(parts), tokenizer),
                batch_size=1,
                compute=ray.data.ActorPoolStrategy(size=len(self.nodes), max_tasks_in_flight_per_actor=2),
                num_cpus=self.cpus,
                runtime_env={"env_vars": {**self.env, "RAYON_NUM_THREADS": str(self.cpus)}},
                ray_remote_args_fn=lambda: {
                    "scheduling_strategy": PlacementGroupSchedulingStrategy(places),
                    # What ends for want of memory, or in a library, would do so for ever. Lost nodes the
                    # driver sees.
                    "max_restarts": 0,
                    "max_task_retries": 0,
                },
            )
        for batch in encoded.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
            for row in range(batch.num_rows):
                yield _from_row(batch, row)


class _PartEncoder:
    """One of the processes: reads parts and encodes them.

    Args:
        digest: of the parts that the driver sees.
    """

    def __init__(self, data: DataConfig, digest: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self._data = data
        self._digest = digest
        self._tokenizer = tokenizer
        self._parts: list[CorpusPart] = []

    def __call__(self, batch: dict[str, Any]) -> Iterator[pa.Table]:
        try:
            self._parts = self._parts or self._find_parts()
            for index in batch["item"].tolist():
                for encoded in encode_part(index, self._parts[index], self._tokenizer):
                    yield _as_row(encoded)
        except ShoalError as error:
            # As a value: Ray Data would wrap it, and tell of it in a page.
            yield _as_row(None, error)

    def _find_parts(self) -> list[CorpusPart]:
        here = f"node {ray.get_runtime_context().get_node_labels().get(NODE_LABEL, '')}"
        try:
            parts = corpus_parts(self._data)
        except RequestError as error:
            raise NotThereError(f"{here} does not see what the driver sees: {error}") from error
        if digest_of_parts(parts) != self._digest:
            raise NotThereError(f"{here} sees other files under {self._data.source!r} than the driver")
        return parts


def _as_row(encoded: Encoded | None, error: ShoalError | None = None) -> pa.Table:
    part, tokens, lengths, last = encoded or Encoded(-1, np.empty(0, np.uint16), np.empty(0, np.int64), True)
    columns = {
        "part": [part],
        "tokens": pa.array([tokens], pa.large_list(pa.from_numpy_dtype(tokens.dtype))),
        "lengths": pa.array([lengths], pa.large_list(pa.int64())),
        "last": [last],
        "error": pa.array([None if error is None else str(error)], pa.string()),
        "kind": pa.array([type(error).__name__]),
    }
    return pa.table(columns)


def _from_row(batch: pa.Table, row: int) -> Encoded:
    """What `_as_row` had; raises the error that it was told."""
    if (error := batch["error"][row].as_py()) is not None:
        raise ERRORS.get(batch["kind"][row].as_py(), ShoalError)(error)
    tokens, lengths = (batch[name][row].values.to_numpy() for name in ("tokens", "lengths"))
    return Encoded(batch["part"][row].as_py(), tokens, lengths, batch["last"][row].as_py())
