"""What every torch engine makes first: made once where this is imported, in a node's fork server."""

from __future__ import annotations

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")
"""Transformers compiles a thousand patterns of the names of weights, of all families, at the first model."""
