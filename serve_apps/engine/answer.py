"""What one request has gained so far, as its reader sees it: text, log probabilities, the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from serve_apps.engine.detokenize import Detokenizer, StopMatcher
from serve_apps.engine.protocol import Delta, FinishReason, SamplingParams, TokenLogprob


class Answer:
    """Turns the tokens of one request into deltas.

    Args:
        tokenizer: the model's.
        prompt_ids: the tokens before the answer.
        sampling: what the request asked for.
        piece: the bytes of a token id.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        piece: Callable[[int], bytes],
    ) -> None:
        decode = _decoder(tokenizer, skip_special_tokens=sampling.skip_special_tokens)
        self._detokenizer = Detokenizer(decode, prompt_ids, piece)
        self._matcher = StopMatcher(sampling.stop, keep=sampling.include_stop)
        self._include_stop = sampling.include_stop

    def add(
        self,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> Delta:
        """The delta of the tokens that came together.

        Where they complete a stop string, the rest of them is left out and `finish_reason` becomes "stop".

        Args:
            finish_reason: "stop" where the last token ends the answer.
            logprobs: of each token; empty where none are asked for.
        """
        text = ""
        for count, token_id in enumerate(token_ids, 1):
            ends = finish_reason == "stop" and count == len(token_ids)
            if not ends or self._include_stop:
                text += self._matcher.add(self._detokenizer.add(token_id))
            if self._matcher.matched is not None:
                token_ids, logprobs = token_ids[:count], logprobs[:count]
                break
        if finish_reason is not None:
            text += self._matcher.add(self._detokenizer.finish())
        if self._matcher.matched is not None:
            finish_reason = "stop"
        elif finish_reason is not None:
            text += self._matcher.flush()
        stop_string = self._matcher.matched
        return Delta(text, tuple(token_ids), tuple(logprobs), finish_reason, stop_string=stop_string)


def _decoder(tokenizer: Any, *, skip_special_tokens: bool) -> Callable[[Sequence[int]], str]:
    """From token ids to text, as directly as the tokenizer allows."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    decode = tokenizer.decode if fast is None else fast.decode
    return lambda ids: str(decode(ids, skip_special_tokens=skip_special_tokens))
