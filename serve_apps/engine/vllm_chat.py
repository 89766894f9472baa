"""vLLM's own serving layer: how it renders conversations, and reads calls of tools and reasoning in answers.

What vLLM knows of a model (its tokenizers, its renderers, its parsers) holds for an app with engine: vllm.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

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
            "chat_template_kwargs": asked.get("arguments") or None,
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
                "include_reasoning": not asked.get("hide_reasoning", False),
                "chat_template_kwargs": asked.get("arguments") or None,
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
            request = parser.adjust_request(request)
        parallel = asked.get("parallel", True)
        return VllmReader(self._tokenizer, parser, request, prompt_ids, forced, parallel=parallel)

    def _request(self, said: Mapping[str, Any]) -> Any:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        return ChatCompletionRequest(**_said(said))


class VllmReader:
    """Reads one answer with vLLM's parsers; what it takes for words may be calls that the request forces.

    Args:
        parser: vLLM's `Parser`, of this answer alone; None for none.
        request: vLLM's request, as the parser has adjusted it.
        forced: reads the calls of an answer that is nothing but calls.
        parallel: see AnswerParser.
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
    ) -> None:
        from vllm.renderers.chat_utils import make_tool_call_id

        self._tokenizer = tokenizer
        self._parser = parser
        self._request = request
        self._prompt_ids = list(prompt_ids)
        self._forced = None if forced is None else AnswerParser(None, forced, make_tool_call_id)
        self._parallel = parallel
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
        if self._forced is not None:
            words = self._forced.read(told.text, token_ids, finished=finished)
            told.text, told.calls, self.num_calls = words.text, words.calls, self._forced.num_calls
        return told

    def _told(self, delta: Any) -> Told:
        told = Told()
        if delta is None:
            return told
        told.text, told.reasoning = delta.content or "", delta.reasoning or ""
        told.thought = bool(told.reasoning)
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
