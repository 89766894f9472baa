"""Runs one step on one rank: token ids in, logits of every row's next token out."""

from __future__ import annotations

from typing import Any

import torch

from serve_apps.engine.protocol import EngineConfig
from serve_apps.engine.torch_engine.kv_cache import SlotCache
from serve_apps.engine.torch_engine.model import PRECISIONS, ModelFacts, load_model
from serve_apps.engine.torch_engine.ranks import Ranks
from serve_apps.engine.torch_engine.step import Step


class Runner:
    """A loaded model with the KV cache of its requests; every rank has one and runs the same steps."""

    def __init__(self, config: EngineConfig, facts: ModelFacts, device: torch.device) -> None:
        self.device = device
        self.facts = facts
        self.model: Any = load_model(config, device)
        self.cache = SlotCache(facts.num_layers, config.max_batch, facts.context_length)
        self._dtype = PRECISIONS[config.precision]
        self._last: torch.Tensor | None = None
        self.model.get_output_embeddings().register_forward_pre_hook(self._keep_last)

    @torch.inference_mode()
    def run(self, step: Step) -> torch.Tensor:
        """One forward pass; logits of the token that follows each row, [rows, vocabulary]."""
        return self._prefill(step) if step.is_prefill else self._decode(step)

    def _prefill(self, step: Step) -> torch.Tensor:
        lengths = torch.tensor([len(tokens) for tokens in step.tokens])
        longest = int(lengths.max())
        # Padding goes to the right: the causal mask hides it from every real token, and the cache positions
        # that it fills are written again, one by one, by the tokens that follow.
        ids = torch.zeros(len(step.tokens), longest, dtype=torch.long)
        for row, tokens in zip(ids, step.tokens, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        positions = torch.arange(longest).expand(len(step.tokens), -1).to(self.device)
        self._last = (lengths - 1).to(self.device)
        return self._forward(step, ids.to(self.device), positions, mask=None)

    def _decode(self, step: Step) -> torch.Tensor:
        ids = torch.tensor(step.tokens, device=self.device)
        positions = torch.tensor(step.starts, device=self.device)[:, None]
        self.cache.open(step, positions)
        mask = None if self.cache.window.same_position is not None else self._masks(positions)
        self._last = None
        return self._forward(step, ids, positions, mask)

    def _forward(self, step: Step, ids: torch.Tensor, positions: torch.Tensor, mask: Any) -> torch.Tensor:
        if step.is_prefill:
            self.cache.open(step, positions)
        output = self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.logits[:, -1]

    def _keep_last(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> Any:
        # Only the last token of a prompt needs logits, and prompts of one prefill end at different places.
        if self._last is None:
            return None
        hidden = inputs[0]
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        return (hidden[rows, self._last][:, None], *inputs[1:])

    def _masks(self, positions: torch.Tensor) -> Any:
        """What is added to the attention scores of a decode over rows of different lengths.

        [rows, 1, 1, cached tokens], or one such tensor for each kind of layer where a model has several;
        transformers takes masks of this form as they are.
        """
        cached = torch.arange(self.cache.window.length, device=self.device)
        visible = cached <= positions
        masks = {}
        if "full_attention" in self.facts.layer_types:
            masks["full_attention"] = self._additive(visible)
        if "sliding_attention" in self.facts.layer_types:
            if self.facts.sliding_window is not None:
                visible = visible & (cached > positions - self.facts.sliding_window)
            masks["sliding_attention"] = self._additive(visible)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _additive(self, visible: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(visible.shape, dtype=self._dtype, device=self.device)
        return mask.masked_fill_(~visible, float("-inf"))[:, None, None, :]


def load_runner(config: EngineConfig, facts: ModelFacts, device: torch.device, ranks: Ranks | None) -> Runner:
    """Load this rank's runner, and return when the other ranks have theirs."""
    succeeded = False
    try:
        runner = Runner(config, facts, device)
        succeeded = True
    finally:
        if ranks is not None:
            ranks.loaded(succeeded)
    return runner
