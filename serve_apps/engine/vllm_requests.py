"""Requests and their answers, between Shoal's words and vLLM's."""

from __future__ import annotations

import json
from typing import Any

from serve_apps.engine.protocol import AnswerError, Delta, PromptError, SamplingParams, TokenLogprob


def vllm_params(sampling: SamplingParams) -> Any:
    """vLLM's sampling parameters.

    Raises:
        PromptError: vLLM does not take a value.
    """
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    structure = None
    if sampling.json_schema is not None:
        structure = StructuredOutputsParams(json=sampling.json_schema, disable_any_whitespace=True)
    try:
        return VllmParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=dict(sampling.logit_bias) or None,
            stop=list(sampling.stop),
            stop_token_ids=list(sampling.stop_token_ids),
            min_tokens=sampling.min_tokens,
            ignore_eos=sampling.ignore_eos,
            logprobs=sampling.logprobs,
            structured_outputs=structure,
            output_kind=RequestOutputKind.DELTA,
        )
    except ValueError as error:
        raise PromptError(str(error)) from error


def delta_of(output: Any, sampling: SamplingParams) -> Delta:
    """One of vLLM's outputs as a delta."""
    gained = output.outputs[0]
    logprobs: tuple[TokenLogprob, ...] = ()
    if sampling.logprobs is not None and gained.logprobs:
        logprobs = tuple(
            _logprob(token_id, entry, sampling.logprobs)
            for token_id, entry in zip(gained.token_ids, gained.logprobs, strict=True)
        )
    # Of an answer that a token ends, it is the token's id.
    stop_string = gained.stop_reason if isinstance(gained.stop_reason, str) else None
    return Delta(gained.text, tuple(gained.token_ids), logprobs, gained.finish_reason, stop_string)


def check_whole(text: str, output: Any) -> None:
    """Check an answer that is to keep to a JSON schema, all its text so far, where it ends by itself.

    Raises:
        AnswerError: it is no JSON: its grammar has given up, and lets nothing but the end come then.
    """
    gained = output.outputs[0]
    if gained.finish_reason != "stop" or isinstance(gained.stop_reason, str):
        return
    try:
        json.loads(text)
    except ValueError as error:
        raise AnswerError(
            "the answer cannot be held to its JSON schema any further", own_fault=True
        ) from error


def _logprob(token_id: int, entry: Any, num_top: int) -> TokenLogprob:
    ranked = sorted(entry.items(), key=lambda item: item[1].rank)[:num_top]
    top = tuple((other, one.logprob) for other, one in ranked)
    return TokenLogprob(token_id, entry[token_id].logprob, top)
