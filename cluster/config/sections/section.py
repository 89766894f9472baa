"""What every section of the config file is made of."""

from __future__ import annotations

from typing import Annotated, Any, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, StringConstraints, model_validator

NAME_PATTERN = r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$"

Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
"""Lower-case letters, digits, `-`, `_` and `.`; at most 63; it becomes part of paths and URLs."""


def _as_text(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value


Argument = Annotated[str, BeforeValidator(_as_text, json_schema_input_type=str | int | float | bool)]
"""A word of a command line."""

VARIABLE_PATTERN = r"^[A-Za-z_]\w*$"

VariableName = Annotated[str, StringConstraints(pattern=VARIABLE_PATTERN)]
"""Of an environment variable."""


class Section(BaseModel):
    """A frozen part of the config; an unknown key is an error, and no value changes its type silently.

    A section that is there but empty (`model:` with nothing under it, which YAML reads as null) means
    its defaults.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_means_defaults(cls, value: Any) -> Any:
        if value is None:
            return {}
        if isinstance(value, dict):
            return {key: item for key, item in value.items() if item is not None or not cls._is_table(key)}
        return value

    @classmethod
    def _is_table(cls, key: Any) -> bool:
        """Whether `key` is a section of named entries (train_jobs, serve_apps)."""
        field = cls.model_fields.get(key) if isinstance(key, str) else None
        return field is not None and get_origin(field.annotation) is dict
