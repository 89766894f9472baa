"""Requests and their answers, between Shoal's words and vLLM's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from serve_apps.engine.answer import Answer
from serve_apps.engine.protocol import (
    AnswerError,
    Delta,
    PromptError,
    SamplingParams,
    StructureKind,
    TokenLogprob,
)
from serve_apps.engine.structure_compiler import NAMES

_STRUCTURES = {"json_schema": "json"}
"""Kinds of structures that vLLM knows by another name."""


def vllm_params(sampling: SamplingParams) -> Any:
    """vLLM's sampling parameters.

    Raises:
        PromptError: vLLM does not take a value.
    """
    from vllm import SamplingParams as VllmParams
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    structure = None
    if (form := sampling.structure) is not None:
        kind, text = form
        value = list(sampling.choice) if kind == "choice" else text
        structure = StructuredOutputsParams(**{_STRUCTURES.get(kind, kind): value})
    try:
        return VllmParams(
            # It has no request that generates nothing.
            max_tokens=max(1, sampling.max_tokens),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=dict(sampling.logit_bias) or None,
            stop_token_ids=list(sampling.stop_token_ids),
            min_tokens=sampling.min_tokens,
            ignore_eos=sampling.ignore_eos,
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            # Its own way takes a prompt whose end is no whole character for a part of the answer.
            detokenize=False,
            bad_words=list(sampling.bad_words),
            allowed_token_ids=list(sampling.allowed_token_ids) or None,
            structured_outputs=structure,
            output_kind=RequestOutputKind.DELTA,
        )
    except (ValueError, VLLMClientError) as error:
        raise PromptError(str(error)) from error


def delta_of(output: Any, sampling: SamplingParams, answer: Answer, *, first: bool) -> Delta:
    """One of vLLM's outputs as a delta.

    Args:
        answer: makes text of the tokens, and ends it at a stop string.

    Raises:
        AnswerError: vLLM could not go on, or has chosen a token that the request does not allow, since none
            was left.
    """
    gained = output.outputs[0]
    if gained.finish_reason == "error":
        form = sampling.structure
        if form is None:
            raise AnswerError("vLLM ended the answer with an error of its own", own_fault=False)
        raise not_held(form[0])
    known: dict[str, Any] = {}
    if first:
        scores = output.prompt_logprobs or [None]
        known["prompt_logprobs"] = tuple(
            _prompt_logprob(token_id, entry, sampling.prompt_logprobs or 0)
            for token_id, entry in zip(output.prompt_token_ids[1:], scores[1:], strict=False)
        )
        known["cached_tokens"] = output.num_cached_tokens
    if sampling.max_tokens == 0:
        reason = gained.finish_reason
        return Delta(finish_reason="length" if reason == "stop" else reason, **known)
    allowed = sampling.allowed_token_ids
    if allowed and not all(token in allowed for token in gained.token_ids):
        raise AnswerError("none of the allowed tokens may come next", own_fault=True)
    logprobs: tuple[TokenLogprob, ...] = ()
    if sampling.logprobs is not None and gained.logprobs:
        logprobs = tuple(
            _logprob(token_id, entry, sampling.logprobs)
            for token_id, entry in zip(gained.token_ids, gained.logprobs, strict=True)
        )
    return replace(answer.add(gained.token_ids, gained.finish_reason, logprobs), **known)


def not_held(kind: StructureKind) -> AnswerError:
    """An answer has outgrown what its structure's grammar can follow."""
    return AnswerError(f"the answer cannot be held to its {NAMES[kind]} any further", own_fault=True)


def end_of(delta: Delta) -> int | None:
    """The token that ends an answer here; None where none does, but a stop string, its length or nothing."""
    return delta.token_ids[-1] if delta.finish_reason == "stop" and delta.stop_string is None else None


def _logprob(token_id: int, entry: Any, num_top: int) -> TokenLogprob:
    return TokenLogprob(token_id, entry[token_id].logprob, _top(entry, num_top))


def _prompt_logprob(token_id: int, entry: Any, num_top: int) -> TokenLogprob:
    own = entry[token_id]
    return TokenLogprob(token_id, own.logprob, _top(entry, num_top), own.rank)


def _top(entry: Any, num_top: int) -> tuple[tuple[int, float], ...]:
    ranked = sorted(entry.items(), key=lambda item: item[1].rank)[:num_top]
    return tuple((other, one.logprob) for other, one in ranked)
