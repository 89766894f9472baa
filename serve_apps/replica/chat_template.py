"""From messages to the text that a model was trained on, by the chat template in its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from serve_apps.openai.errors import bad_request

DEFAULT = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""For a tokenizer that brings none: one line a turn, `role: text`."""
_USUAL, _FOR_TOOLS = "default", "tool_use"
"""Names of transformers' convention, for tokenizers with several templates."""


class ChatTemplate:
    """The chat templates of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._templates: str | Mapping[str, str] | None = tokenizer.chat_template

    @property
    def writes_special_tokens(self) -> bool:
        """Whether the text has the special tokens already; our own template leaves them to the tokenizer."""
        return self._templates is not None

    @property
    def text(self) -> str:
        """What the template says, of several that for tools."""
        templates = self._templates or DEFAULT
        return (
            templates
            if isinstance(templates, str)
            else templates.get(_FOR_TOOLS, "".join(templates.values()))
        )

    def render(self, messages: Sequence[Mapping[str, Any]], asked: Mapping[str, Any]) -> str:
        """The text of a conversation, up to where the model's answer begins.

        Args:
            asked: what the request says of it, see `ChatRequest.template`.

        Raises:
            ApiError: 400, the template refuses them, or fails over them; with what it said.
        """
        tools, goes_on = asked.get("tools"), asked.get("continue_final_message", False)
        template = self._choose(tools)
        if (
            "developer" not in template
        ):  # OpenAI's newer word; a template that does not know it drops the turn
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=tools,
                    chat_template=template,
                    add_generation_prompt=not (goes_on or asked.get("no_generation_prompt", False)),
                    continue_final_message=goes_on,
                    tokenize=False,
                    **asked.get("arguments", {}),
                )
            )
        except Exception as error:
            said = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
            raise bad_request(
                f"The messages do not suit this model's chat template: {said.rstrip('.')}.",
                param="messages",
                code="chat_template_failed",
            ) from error

    @property
    def usual(self) -> str | None:
        """The tokenizer's own template for conversations without tools, where it has one."""
        templates = self._templates
        return templates.get(_USUAL) if isinstance(templates, Mapping) else templates or None

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        templates = self._templates
        if not templates:
            return DEFAULT
        if isinstance(templates, str):
            return templates
        name = _FOR_TOOLS if tools and _FOR_TOOLS in templates else _USUAL
        if name in templates:
            return templates[name]
        if len(templates) == 1:
            return next(iter(templates.values()))
        raise bad_request(
            f"The model's chat templates are {', '.join(sorted(templates))}, and none of them is"
            f" '{_USUAL}'; send a prompt to /v1/completions.",
            param="messages",
            code="chat_template_failed",
        )
