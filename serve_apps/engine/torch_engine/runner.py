"""Runs one step on one rank: token ids in, what each row wants out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from serve_apps.engine.memory_check import check_device, memory_of
from serve_apps.engine.protocol import EngineConfig, EngineError, WeightsError
from serve_apps.engine.titles import show_parked
from serve_apps.engine.torch_engine.attention import Batch
from serve_apps.engine.torch_engine.cache_room import gpu_room
from serve_apps.engine.torch_engine.chunk import Chunk
from serve_apps.engine.torch_engine.first_passes import try_model
from serve_apps.engine.torch_engine.head import Head
from serve_apps.engine.torch_engine.kv_cache import KvCache, LayerShape, block_bytes
from serve_apps.engine.torch_engine.model import PRECISIONS, ModelFacts, load_model, read_facts
from serve_apps.engine.torch_engine.parked_weights import ParkedWeights
from serve_apps.engine.torch_engine.prompt_scores import ScoredToken
from serve_apps.engine.torch_engine.ranks import Ranks
from serve_apps.engine.torch_engine.step import Row, Step, Want
from serve_apps.engine.torch_engine.sweep import make_sweep
from serve_apps.engine.torch_engine.torch_options import TorchOptions
from serve_apps.engine.torch_engine.weights import architecture, check_weights, put_weights, take_ends

DEFAULT_CACHE_BYTES = 4 * 1024**3
"""Most memory that the KV cache of a rank takes on a CPU when the config does not say."""


NoteScores = Callable[[Sequence[ScoredToken], torch.Tensor], None]
"""Takes some tokens of prompts, and the logits of those that follow them, [tokens, vocabulary]."""


@dataclass(frozen=True)
class Outputs:
    """What one step gave; rows are numbered as in the step."""

    logits: torch.Tensor
    """Of the token that follows each row that wants it, in the order of the rows: [rows, vocabulary]."""
    hidden: dict[int, torch.Tensor]
    """By row: the sum of the last hidden states of its new tokens, [hidden size], fp32."""


class Runner:
    """A loaded model with the KV cache of its sequences; every rank has one and runs the same steps."""

    def __init__(
        self, config: EngineConfig, facts: ModelFacts, options: TorchOptions, device: torch.device
    ) -> None:
        self.config = config
        self.block_size = options.block_size
        self._batched_tokens = options.batched_tokens
        self.facts = facts
        self.device = device
        self._tables: list[list[int]] = [[] for _ in range(config.max_batch)]
        self._batch = Batch()
        self._shapes: dict[int, LayerShape] = {}
        self._picked: torch.Tensor | None = None
        self._sums: list[tuple[int, slice]] = []
        self._hidden: dict[int, torch.Tensor] = {}
        self._parked: ParkedWeights | None = None
        self._room = 0
        """Blocks that its KV cache had when it was parked."""
        self.model_path = config.model_path
        """Whose weights it has."""
        self._architecture = architecture(config.model_path)
        self.model = load_model(config, config.model_path, device)
        self.model.get_output_embeddings().register_forward_pre_hook(self._before_head)
        self._head = Head(self.model, facts.vocab_size)
        self._batch.bind(self.model)

    def check(self, model_path: str) -> Any:
        """See that a directory's weights can take the place of those that run; its model without weights.

        Raises:
            WeightsError: they cannot; nothing has changed.
        """
        if read_facts(self.config, model_path) != self.facts:
            raise WeightsError(f"{model_path} is a model of another shape than the one that runs")
        return check_weights(self.model, self._architecture, self.config, model_path)

    def put(self, model_path: str) -> None:
        """Load a directory's weights in place of those that run, tensor by tensor.

        Raises:
            WeightsError: it failed midway; the model has weights of both.
        """
        put_weights(self.model, model_path)

    def room(self) -> int:
        """Blocks that the KV cache of this rank may have.

        Raises:
            EngineError: too few for a single request of the context length; or the model is none that this
                engine can run.
        """
        size, context = self.block_size, self.facts.context_length
        self._shapes = try_model(self.model, self.model_path, self._forward, self.facts.vocab_size, context)
        dtype = PRECISIONS[self.config.precision]
        one = block_bytes(self._shapes, size, dtype)
        needed = -(-context // size)
        memory = self.config.kv_cache_bytes
        if memory is not None:
            blocks = memory // one
        elif self.device.type == "cuda":
            blocks = gpu_room(self.device, self.run_largest) // one
        else:
            memory = min(DEFAULT_CACHE_BYTES, psutil.virtual_memory().available // 2)
            blocks = min(self.config.max_batch * needed, max(needed, memory // one))
        if blocks < needed:
            raise EngineError(
                f"the KV cache has room for {blocks * size} tokens ({one / size / 1024:.1f} KiB each), "
                f"but one request may have {context}; give it more memory, or set a shorter context_length"
            )
        return blocks

    def run_largest(self) -> None:
        """One step as large as any: all answers that run at once, beside the end of the longest prompt.

        All its tokens lie in one block, whose cache is there for this step alone. That many answers of the
        longest context would need no more by themselves: they are read where they lie.
        """
        size, context = self.block_size, self.facts.context_length
        answers = self.config.max_batch - 1
        new = max(1, min(self._batched_tokens - answers, context))
        self.allocate(1)
        try:
            rows = [Row(slot, 0, (0,), 0, (0,)) for slot in range(answers)]
            rows.append(Row(answers, context - new, (0,) * new, 0, (0,) * -(-context // size)))
            self.run(Step(tuple(rows)))
        finally:
            self._batch.cache = None
            self._tables = [[] for _ in self._tables]

    def allocate(self, num_blocks: int) -> None:
        """Make the KV cache."""
        self._batch.cache = KvCache(
            self._shapes,
            num_blocks,
            self.block_size,
            PRECISIONS[self.config.precision],
            self.device,
        )

    def park(self) -> None:
        """Free the KV cache, and the weights' place on the device; they stay in host memory."""
        assert self._parked is None, "it is parked once"
        self._room = self.num_blocks
        self._batch.cache = None
        self._tables = [[] for _ in self._tables]
        self._parked = ParkedWeights(self.model, self.device)

    def wake(self) -> None:
        """Take requests again, with an empty KV cache as large as before.

        Raises:
            EngineError: the weights are not what they were, or there is no room.
        """
        assert self._parked is not None, "it was parked"
        try:
            if not self._parked.bring_back():
                raise EngineError("the weights that were parked are not what they were")
            self.allocate(self._room)
        except torch.OutOfMemoryError as error:
            raise EngineError(f"the model that was parked finds no room on its device: {error}") from error
        self._parked = None

    @property
    def num_blocks(self) -> int:
        return 0 if self._batch.cache is None else self._batch.cache.num_blocks

    @property
    def cache_bytes(self) -> int:
        return 0 if self._batch.cache is None else self._batch.cache.memory_bytes

    def run(self, step: Step, note: NoteScores | None = None) -> Outputs:
        """One forward pass.

        Args:
            note: called with the scored tokens of the rows, piece by piece.
        """
        for row in step.rows:
            table = self._tables[row.slot]
            del table[row.keep :]
            table.extend(row.blocks)
        # Single tokens stand in front, where attention takes them all together.
        order = sorted(range(len(step.rows)), key=lambda i: len(step.rows[i].tokens) > 1)
        rows = [step.rows[i] for i in order]
        ends = self._open(rows)
        wanted = [i for i, row in enumerate(step.rows) if row.want is Want.LOGITS]
        place = {index: ends[position] for position, index in enumerate(order)}
        self._sums = [
            (index, slice(ends[position] - len(row.tokens), ends[position]))
            for position, (index, row) in enumerate(zip(order, rows, strict=True))
            if row.want is Want.HIDDEN
        ]
        ids = torch.tensor([[token for row in rows for token in row.tokens]])
        positions = torch.tensor([[row.start + i for row in rows for i in range(len(row.tokens))]])
        # One row of logits is always computed: a model's head need not take none.
        picked = [place[index] - 1 for index in wanted] or [0]
        logits = self._forward(ids, positions, picked)
        self._score(
            step, {index: place[index] - len(row.tokens) for index, row in enumerate(step.rows)}, note
        )
        if self.device.type == "cuda" and not wanted:
            # Where there are logits, who chooses from them waits for the device: steps are measured by that.
            torch.cuda.synchronize(self.device)
        return Outputs(logits[: len(wanted)], self._hidden)

    def _score(self, step: Step, starts: dict[int, int], note: NoteScores | None) -> None:
        """Compute the logits of all scored tokens; `starts` says where each row begins in the flat batch."""
        places: list[ScoredToken] = []
        positions: list[int] = []
        for number, row in enumerate(step.rows):
            places += [ScoredToken(number, row.start + offset) for offset in range(row.scored)]
            positions += range(starts[number], starts[number] + row.scored)
        for part, logits in self._head.pieces(places, positions):
            if note is not None:
                note(part, logits)
        self._head.forget()

    def _open(self, rows: list[Row]) -> list[int]:
        """Say what the attention of the next pass works on; where each row ends in the flat batch."""
        size = self.block_size
        batch = self._batch
        batch.flat_slots.clear()
        slots: list[int] = []
        ends: list[int] = []
        chunks = []
        single = [row for row in rows if len(row.tokens) == 1]
        for row in rows:
            table = self._tables[row.slot]
            begin = len(slots)
            slots += [
                table[at // size] * size + at % size for at in range(row.start, row.start + len(row.tokens))
            ]
            ends.append(len(slots))
            if len(row.tokens) > 1:
                used = table[: -(-(row.start + len(row.tokens)) // size)]
                blocks = torch.tensor(used, device=self.device)
                chunks.append(Chunk(slice(begin, len(slots)), row.start, blocks))
        batch.slots = torch.tensor(slots, device=self.device)
        batch.chunks = tuple(chunks)
        batch.num_single = len(single)
        batch.sweep = None
        if single:
            tables = [self._tables[row.slot] for row in single]
            batch.sweep = make_sweep(tables, [row.start + 1 for row in single], size, self.device)
        return ends

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, picked: list[int]) -> torch.Tensor:
        """Logits at the picked places of the flat batch, [picked, vocabulary]."""
        self._picked = torch.tensor(picked, device=self.device)
        self._hidden = {}
        output = self.model(
            input_ids=ids.to(self.device),
            position_ids=positions.to(self.device),
            attention_mask=None,
            use_cache=False,
        )
        return output.logits[0]

    def _before_head(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> Any:
        if self._head.reading:
            return inputs
        # Logits are computed only where they are wanted; this is also where the last hidden states pass by.
        hidden = inputs[0][0]
        self._hidden = {index: hidden[tokens].float().sum(dim=0) for index, tokens in self._sums}
        return (hidden[self._picked][None], *inputs[1:])


def load_runner(
    config: EngineConfig,
    facts: ModelFacts,
    options: TorchOptions,
    device: torch.device,
    ranks: Ranks | None,
) -> Runner:
    """Load this rank's runner with its KV cache, and return when the other ranks have theirs."""
    room = 0
    try:
        if device.type == "cuda":
            free, name = torch.cuda.mem_get_info(device)[0], torch.cuda.get_device_name(device)
            check_device(config, memory_of(config, config.model_path), free, name)
        runner = Runner(config, facts, options, device)
        room = runner.room()
    except torch.OutOfMemoryError as error:
        raise EngineError(f"the model {config.model_path} does not fit in memory: {error}") from error
    finally:
        if ranks is not None:
            room = ranks.loaded(room)
    runner.allocate(room)
    return runner


def load_together(runner: Runner, model_path: str, ranks: Ranks | None) -> None:
    """Load other weights on all ranks, or on none.

    Raises:
        WeightsError: this rank or another could not; all have those that they had.
        EngineError: nor could those be loaded again, so that the replica has none that are whole.
    """
    empty: Any = None

    def check() -> None:
        nonlocal empty
        empty = runner.check(model_path)

    _everywhere(check, f"load the weights of {model_path}", ranks)
    try:
        _everywhere(lambda: runner.put(model_path), f"load the weights of {model_path}", ranks)
    except WeightsError as failure:
        try:
            _everywhere(lambda: runner.put(runner.model_path), "go back to the old weights", ranks)
        except WeightsError as error:
            raise EngineError(f"{failure}; and the old weights are not there any more: {error}") from error
        raise
    take_ends(runner.model, empty)
    runner.model_path = model_path


def park_together(runner: Runner, ranks: Ranks | None) -> None:
    """Park all ranks.

    Raises:
        EngineError: one could not.
    """
    _all_or_break(runner.park, "be parked", ranks)
    show_parked(True)


def wake_together(runner: Runner, ranks: Ranks | None) -> None:
    """Wake all ranks.

    Raises:
        EngineError: one could not, or has other weights than it had: the engine is of no use any more.
    """
    _all_or_break(runner.wake, "be woken", ranks)
    show_parked(False)


def _all_or_break(work: Callable[[], None], what: str, ranks: Ranks | None) -> None:
    try:
        _everywhere(work, what, ranks)
    except WeightsError as error:
        raise EngineError(str(error)) from error


def _everywhere(work: Callable[[], None], what: str, ranks: Ranks | None) -> None:
    """Do something on this rank, as all ranks do at this moment.

    Raises:
        WeightsError: it failed here or on another rank.
    """
    failure: Exception | None = None
    try:
        work()
    except Exception as error:  # noqa: BLE001 - whatever is wrong with the files, the other ranks must hear of it
        failure = error
    everywhere = failure is None if ranks is None else ranks.agree(failure is None)
    if failure is not None:
        # What we say ourselves names the model; what others say does not.
        named = isinstance(failure, EngineError | WeightsError)
        raise WeightsError(str(failure) if named else f"cannot {what}: {failure!r}") from failure
    if not everywhere:
        raise WeightsError(f"another rank could not {what}")
