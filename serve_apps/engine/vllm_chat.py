"""vLLM's own serving layer: how it renders conversations, and reads calls of tools and reasoning in answers.

What vLLM knows of a model (its tokenizers, its renderers, its parsers) holds for an app with engine: vllm.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, get_args

from serve_apps.engine.protocol import PromptError, UnsupportedError
from serve_apps.parsing.answer_parser import AnswerParser, Told
from serve_apps.parsing.json_calls import CallList, NamedCall


class VllmChat:
    """The conversations of one model.

    Args:
        vllm: an `AsyncLLM` that has started.
        tools, reasoning: names of vLLM's parsers; None for no parser.

    Raises:
        UnsupportedError: vLLM has no such parser, or the model's tokenizer lacks what it needs.
    """

    def __init__(self, vllm: Any, tools: str | None, reasoning: str | None) -> None:
        from vllm.renderers.online_renderer import OnlineRenderer

        self._model_config = vllm.vllm_config.model_config
        try:
            self._renderer = OnlineRenderer(
                self._model_config,
                vllm.renderer,
                request_logger=None,
                chat_template=None,
                chat_template_content_format="auto",
                enable_auto_tools=tools is not None,
                tool_parser=tools,
                reasoning_parser=reasoning,
            )
        except (TypeError, KeyError) as error:
            raise UnsupportedError(f"vLLM cannot read this model's answers: {error}") from error
        self._parser_class = self._renderer.parser
        self._tokenizer = vllm.renderer.tokenizer

    @property
    def reads_tools(self) -> bool:
        """Whether it has a parser for calls that the model makes by itself."""
        found = self._parser_class
        return found is not None and (found.tool_parser_cls is not None or self._renderer.use_harmony)

    async def render(self, messages: Sequence[Mapping[str, Any]], asked: Mapping[str, Any]) -> list[int]:
        """The token ids of a conversation, up to where the model's answer begins.

        Args:
            asked: what the request says of it, see `ChatRequest.template`; and `special_tokens`, `cut` and
                `cut_side` of `Request.prompt_options`: vLLM refuses what is too long, unless it is to cut
                it.

        Raises:
            PromptError: vLLM refuses it, with what it says.
        """
        goes_on = asked.get("continue_final_message", False)
        said = {
            "messages": [_with_texts(message) for message in messages],
            "tools": asked.get("tools") or None,
            # Calls that are forced are forced here, and no parser of vLLM's reads them.
            "tool_choice": "auto" if asked.get("tools") and self.reads_tools else "none",
            "add_generation_prompt": not (goes_on or asked.get("no_generation_prompt", False)),
            "continue_final_message": goes_on,
            **self._arguments(asked),
            "add_special_tokens": asked.get("special_tokens"),
            "truncate_prompt_tokens": asked.get("cut"),
            "truncation_side": asked.get("cut_side"),
        }
        try:
            rendered = await self._renderer.render_chat(self._request(said))
        except Exception as error:
            raise PromptError(f"vLLM cannot render the messages: {error}") from error
        if not isinstance(rendered, tuple):
            raise PromptError(f"vLLM cannot render the messages: {rendered.error.message}")
        (prompt,) = rendered[1]
        return list(prompt["prompt_token_ids"])

    def reader(self, asked: Mapping[str, Any], prompt_ids: Sequence[int]) -> VllmReader | None:
        """What reads one answer; None where all of it is words.

        Args:
            asked: see `ChatRequest.reading`.

        Raises:
            UnsupportedError: the request leaves calls to the model, and vLLM was given no parser for them.
        """
        mode = asked.get("mode", "none")
        if mode == "auto" and not self.reads_tools:
            raise UnsupportedError("this model's calls of tools cannot be read: set `tools` of the app")
        forced = NamedCall(asked["name"]) if mode == "named" else CallList() if mode == "required" else None
        if self._parser_class is None and forced is None:
            return None
        functions = [{"type": "function", "function": _said(one)} for one in asked.get("functions", ())]
        request = self._request(
            {
                "messages": [{"role": "user", "content": ""}],
                "tools": functions if mode == "auto" else None,
                "tool_choice": "auto" if mode == "auto" else "none",
                **self._arguments(asked),
            }
        )
        parser = None
        if self._parser_class is not None:
            parser = self._parser_class(
                self._tokenizer,
                request.tools,
                model_config=self._model_config,
                chat_template_kwargs=asked.get("arguments") or {},
            )
            request = _adjusted(parser, request)
        return VllmReader(
            self._tokenizer,
            parser,
            request,
            prompt_ids,
            forced,
            parallel=asked.get("parallel", True),
            hide_reasoning=asked.get("hide_reasoning", False),
            takes_structures=not self._renderer.use_harmony,
        )

    def _arguments(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The template's arguments; gpt-oss has no template, and takes its effort from a field of its own."""
        arguments = asked.get("arguments") or {}
        effort = arguments.get("reasoning_effort")
        # Other templates may know other efforts than vLLM's field does.
        known = self._renderer.use_harmony or (isinstance(effort, str) and effort in _efforts())
        return {
            "chat_template_kwargs": arguments or None,
            "reasoning_effort": effort if known else None,
        }

    def _request(self, said: Mapping[str, Any]) -> Any:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        return ChatCompletionRequest(**_said(said))


class VllmReader:
    """Reads one answer with vLLM's parsers; what it takes for words may be calls that the request forces.

    Args:
        parser: vLLM's `Parser`, of this answer alone; None for none.
        request: vLLM's request, as the parser has adjusted it.
        forced: reads the calls of an answer that is nothing but calls.
        parallel, hide_reasoning: see AnswerParser.
        takes_structures: see EngineReader.
    """

    def __init__(
        self,
        tokenizer: Any,
        parser: Any,
        request: Any,
        prompt_ids: Sequence[int],
        forced: NamedCall | CallList | None,
        *,
        parallel: bool,
        hide_reasoning: bool,
        takes_structures: bool,
    ) -> None:
        from vllm.renderers.chat_utils import make_tool_call_id

        self._tokenizer = tokenizer
        self._parser = parser
        self._request = request
        self._prompt_ids = list(prompt_ids)
        self._forced = None if forced is None else AnswerParser(None, forced, make_tool_call_id)
        self._parallel = parallel
        self._hide_reasoning = hide_reasoning
        self._phase = None if parser is None else _ReasoningPhase(parser, tokenizer, prompt_ids)
        self.takes_structures = takes_structures
        self.num_calls = 0
        self.complete = False

    @property
    def shows_special_tokens(self) -> bool:
        """The parser looks for special tokens in the text."""
        return not self._request.skip_special_tokens

    @property
    def reasoning_end(self) -> int | None:
        """The token that ends the reasoning that the answer begins with; None: it begins with none."""
        parser = None if self._parser is None else self._parser.reasoning_parser
        if parser is None or self._parser.is_reasoning_end(self._prompt_ids):
            return None
        token = self._tokenizer.get_vocab().get(parser.reasoning_end_str)
        return None if token is None else int(token)

    def read(self, text: str, token_ids: Sequence[int], *, finished: bool) -> Told:
        """What is certain now, see `AnswerParser.read`."""
        told = Told(text=text)
        if self._parser is not None:
            told = self._told(
                self._parser.parse_delta(
                    text, list(token_ids), self._request, self._prompt_ids, finished=finished
                )
            )
            assert self._phase is not None
            self._phase.note(told, token_ids)
            if self._hide_reasoning:
                told.reasoning = ""
        if self._forced is not None:
            words = self._forced.read(told.text, token_ids, finished=finished)
            told.text, told.calls, self.num_calls = words.text, words.calls, self._forced.num_calls
        return told

    def _told(self, delta: Any) -> Told:
        told = Told()
        if delta is None:
            return told
        told.text, told.reasoning = delta.content or "", delta.reasoning or ""
        for call in delta.tool_calls or ():
            if call.id is not None:
                if self.num_calls and not self._parallel:
                    self.complete = True
                    break
                self.num_calls += 1
            function = call.function
            name = None if function is None else function.name
            arguments = "" if function is None else function.arguments or ""
            told.calls.append((self.num_calls - 1, call.id, name, arguments))
        return told


class _ReasoningPhase:
    """Which tokens of an answer are its reasoning's.

    vLLM's parsers tell nothing of the marks of the reasoning, nor of what they hold back.

    Args:
        parser: vLLM's `Parser`, of this answer alone.
    """

    def __init__(self, parser: Any, tokenizer: Any, prompt_ids: Sequence[int]) -> None:
        self._parser = parser.reasoning_parser
        self._may_come = self._parser is not None and not parser.is_reasoning_end(list(prompt_ids))
        """The answer itself has not begun."""
        start = self._parser.reasoning_start_str if self._may_come else None
        self._thinks = start is not None and tokenizer.get_vocab().get(start) in prompt_ids
        self._ids: list[int] = []
        """The answer's, until it has begun."""

    def note(self, told: Told, token_ids: Sequence[int]) -> None:
        """Put into `told` whether these tokens, of which it is told, are the reasoning's."""
        told.thought = self._thinks or bool(told.reasoning)
        if told.thought:
            self._thinks = self._may_come = True
        if self._may_come:
            self._ids.extend(token_ids)
            if told.text or told.calls or self._has_ended(token_ids):
                self._thinks = self._may_come = False
        told.answers = not self._may_come

    def _has_ended(self, token_ids: Sequence[int]) -> bool:
        if self._parser is None:
            return False
        if self._parser.engine_based_streaming:
            return bool(self._parser.has_engine_confirmed_reasoning_end())
        return bool(self._parser.is_reasoning_end_streaming(self._ids, token_ids))


def _adjusted(parser: Any, request: Any) -> Any:
    """The request as the parser would have it.

    `skip_special_tokens` is what is used of that; no blanks come between special tokens here as it is. The
    forms to which some parsers would hold calls are left out: they are xgrammar's, or name special tokens,
    and a call that the model makes by itself is read, and held to nothing.

    Raises:
        UnsupportedError: it cannot read such answers.
    """
    from vllm.exceptions import VLLMClientError

    try:
        return parser.adjust_request(request)
    except (ValueError, VLLMClientError) as error:
        raise UnsupportedError(f"vLLM cannot read the answer that this asks for: {error}") from error


@cache
def _efforts() -> frozenset[str]:
    """What vLLM's own field takes."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    annotation = ChatCompletionRequest.model_fields["reasoning_effort"].annotation
    return frozenset(value for choice in get_args(annotation) for value in get_args(choice))


def _said(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _with_texts(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with the arguments of its calls as text, which is how vLLM takes them."""
    if "tool_calls" not in message:
        return dict(message)
    calls = [
        {
            **call,
            "type": "function",
            "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])},
        }
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}
