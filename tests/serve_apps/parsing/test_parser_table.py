"""Which parser a model gets by its own chat template, and what the config knows of them."""

from __future__ import annotations

import pytest

from cluster.config.checks import app_checks
from serve_apps.parsing.parser_table import REASONING_PARSERS, TOOL_PARSERS, reasoning_of, tools_of

# As models have them, cut down to what says how a call is written.
TEMPLATES = {
    "hermes": """{%- if tools %}{{- "For each function call, return a json object with function name and \
arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>, \
\\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>\\n" }}{%- endif %}""",
    "qwen3_coder": """{%- if tools %}{{- '<tool_call>\\n<function=example_function_name>\\n\
<parameter=example_parameter_1>\\nvalue_1\\n</parameter>\\n</function>\\n</tool_call>' }}{%- endif %}""",
    "llama3_json": """{%- if tools is not none %}{{- 'Respond in the format {"name": function name, \
"parameters": dictionary of argument name and its value}.' }}{%- endif %}""",
    "pythonic": """{%- if tools %}{{- "[func_name1(params_name1=params_value1, params_name2=params_value2), \
func_name2(params)]\\n" }}{%- endif %}""",
    "mistral": """{%- if tools %}{{- "[AVAILABLE_TOOLS]" }}{%- endif %}{{- "[TOOL_CALLS]" }}""",
}
OTHERS = [
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{% if tools %}{{ tools }}{% endif %}",
    "{% if tools %}<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>{% endif %}",
    "{% if tools %}<｜tool▁calls▁begin｜>{% endif %}",
    "<tool_call> name arguments, of a template that takes none",
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_model_gets_the_parser_that_its_template_teaches(name: str) -> None:
    assert tools_of(TEMPLATES[name]) == name


@pytest.mark.parametrize("template", OTHERS)
def test_nothing_is_guessed(template: str) -> None:
    assert tools_of(template) is None


def test_reasoning_is_read_where_the_template_knows_it() -> None:
    assert reasoning_of("{%- set content = content.split('</think>')[-1] %}") == "qwen3"
    assert reasoning_of(TEMPLATES["hermes"]) is None


def test_the_config_knows_the_parsers() -> None:
    assert sorted(app_checks.TOOL_PARSERS) == sorted(TOOL_PARSERS)
    assert sorted(app_checks.REASONING_PARSERS) == sorted(REASONING_PARSERS)
