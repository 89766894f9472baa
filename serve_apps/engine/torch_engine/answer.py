"""What one request has gained so far, as its reader sees it: text, log probabilities, the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from serve_apps.engine.protocol import Delta, FinishReason, SamplingParams, TokenLogprob
from serve_apps.engine.torch_engine.detokenize import Detokenizer, StopMatcher
from serve_apps.engine.torch_engine.sampling import Logprobs


class Answer:
    """Turns the tokens of one request into deltas.

    Args:
        decode: from token ids to text.
        prompt_ids: the tokens before the answer.
        sampling: what the request asked for.
        piece: the bytes of a token id.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        piece: Callable[[int], bytes],
    ) -> None:
        self._detokenizer = Detokenizer(decode, prompt_ids, piece)
        self._matcher = StopMatcher(sampling.stop, keep=sampling.include_stop)
        self._include_stop = sampling.include_stop

    def add(self, token_id: int, finish_reason: FinishReason | None, logprobs: Logprobs | None) -> Delta:
        """The delta of one token; `finish_reason` becomes "stop" when a stop string is complete."""
        hidden = finish_reason == "stop" and not self._include_stop
        text = "" if hidden else self._detokenizer.add(token_id)
        text = self._matcher.add(text)
        if finish_reason is not None and self._matcher.matched is None:
            text += self._matcher.add(self._detokenizer.finish())
        if self._matcher.matched is not None:
            finish_reason = "stop"
        elif finish_reason is not None:
            text += self._matcher.flush()
        return Delta(
            text=text,
            token_ids=(token_id,),
            logprobs=() if logprobs is None else (TokenLogprob(token_id, logprobs.chosen, logprobs.top),),
            finish_reason=finish_reason,
            stop_string=self._matcher.matched,
        )

    def abort(self) -> Delta:
        """The last delta of an answer that is ended from outside."""
        text = self._matcher.add(self._detokenizer.finish())
        return Delta(text=text + self._matcher.flush(), finish_reason="abort")
