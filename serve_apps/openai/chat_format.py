"""From what the choices of a conversation's answer gain to what OpenAI's clients read."""

from __future__ import annotations

from collections.abc import Sequence

from serve_apps.openai.answers import (
    CallDelta,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    ToolCall,
    TopLogprob,
    Usage,
)
from serve_apps.openai.format import (
    ChoiceEvent,
    Gathered,
    Heading,
    Logprob,
    OpenAIFormat,
    number,
    prompt_logprobs,
)
from serve_apps.parsing.answer_parser import CallPiece


class ChatFormat(OpenAIFormat):
    """Answers of /v1/chat/completions."""

    def __init__(self, heading: Heading) -> None:
        self._heading = heading
        self._id = f"chatcmpl-{heading.id}"
        self._opened: set[int] = set()

    def answer(self, gathered: Gathered, used: Usage) -> ChatAnswer:
        """The whole answer."""
        heading = self._heading
        answer: ChatAnswer = {
            "id": self._id,
            "object": "chat.completion",
            "created": heading.created,
            "model": heading.model,
            "choices": [self._choice(index, gathered) for index in range(heading.num_choices)],
            "usage": used,
        }
        # All choices answer the same messages.
        if heading.with_prompt_logprobs:
            answer["prompt_logprobs"] = prompt_logprobs(gathered.prompt[0])
        if heading.with_token_ids:
            answer["prompt_token_ids"] = list(gathered.prompt[0]["token_ids"])
        return answer

    def chunks(self, event: ChoiceEvent) -> list[ChatChunk]:
        """The parts of a stream that tell of one event; the first of a choice says whose turn it is."""
        item, index = event.item, event.index
        choices: list[ChatChunkChoice] = []
        if index not in self._opened:
            self._opened.add(index)
            choices.append(_delta(index, {"role": "assistant", "content": "", "refusal": None}))
        if item.get("reasoning"):
            choices.append(_delta(index, {"reasoning_content": item["reasoning"]}))
        if item["text"] or item.get("logprobs"):
            logprobs = self._logprobs(item.get("logprobs", ()))
            choices.append(_delta(index, {"content": item["text"]}, logprobs))
        if item.get("calls"):
            choices.append(_delta(index, {"tool_calls": _call_pieces(item["calls"])}))
        if item.get("finish_reason") is not None:
            choices.append(_delta(index, {}, finish_reason=item["finish_reason"]))
        if self._heading.with_token_ids and item["token_ids"]:
            if not choices:
                choices.append(_delta(index, {}))
            choices[0]["token_ids"] = list(item["token_ids"])
        chunks = [self._chunk([choice]) for choice in choices]
        if self._heading.with_token_ids and "prompt" in item:
            chunks[0]["prompt_token_ids"] = list(item["prompt"]["token_ids"])
        return chunks

    def ending(self, used: Usage) -> list[ChatChunk]:
        """The part of a stream that says what it took, where that was asked for."""
        return [{**self._chunk([]), "usage": used}] if self._heading.with_usage else []

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        heading = self._heading
        chunk: ChatChunk = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": heading.created,
            "model": heading.model,
            "choices": choices,
        }
        if heading.with_usage:
            chunk["usage"] = None
        return chunk

    def _choice(self, index: int, gathered: Gathered) -> ChatChoice:
        choice: ChatChoice = {
            "index": index,
            "message": self._message(index, gathered),
            "logprobs": self._logprobs(gathered.logprobs[index]),
            "finish_reason": gathered.finish_reason[index],
        }
        if self._heading.with_token_ids:
            choice["token_ids"] = gathered.token_ids[index]
        return choice

    def _message(self, index: int, gathered: Gathered) -> ChatMessage:
        calls = whole_calls(gathered.calls[index])
        message: ChatMessage = {
            "role": "assistant",
            "content": gathered.text[index] or (None if calls else ""),
            "refusal": None,
        }
        if gathered.reasoning[index]:
            message["reasoning_content"] = gathered.reasoning[index]
        if calls:
            message["tool_calls"] = calls
        return message

    def _logprobs(self, logprobs: Sequence[Logprob]) -> ChatLogprobs | None:
        if not self._heading.with_logprobs:
            return None
        return {"content": token_logprobs(logprobs), "refusal": None}


def token_logprobs(logprobs: Sequence[Logprob]) -> list[ChatLogprob]:
    """Tokens, each with its alternatives."""
    return [
        {**_token(token, piece, value), "top_logprobs": [_token(t, p, v) for t, p, _, v in top]}
        for token, piece, value, top in logprobs
    ]


def whole_calls(pieces: Sequence[CallPiece]) -> list[ToolCall]:
    """The calls that pieces of them make, in their order."""
    calls: list[ToolCall] = []
    for _, call_id, name, arguments in pieces:
        if call_id is not None and name is not None:
            calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}})
        calls[-1]["function"]["arguments"] += arguments
    return calls


def _call_pieces(pieces: Sequence[CallPiece]) -> list[CallDelta]:
    """What calls gained, one entry for each."""
    deltas: list[CallDelta] = []
    for index, call_id, name, arguments in pieces:
        if call_id is not None and name is not None:
            function: dict[str, str] = {"name": name, "arguments": ""}
            deltas.append({"index": index, "id": call_id, "type": "function", "function": function})
        elif not deltas or deltas[-1]["index"] != index:
            deltas.append({"index": index, "function": {"arguments": ""}})
        deltas[-1]["function"]["arguments"] += arguments
    return deltas


def _delta(
    index: int, delta: ChatDelta, logprobs: ChatLogprobs | None = None, finish_reason: str | None = None
) -> ChatChunkChoice:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _token(token: str, piece: bytes, value: float) -> TopLogprob:
    return {"token": token, "logprob": number(value), "bytes": list(piece)}
