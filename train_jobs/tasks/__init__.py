"""What is trained."""

from __future__ import annotations

from train_jobs.tasks.causal_lm import CausalLM

TASKS = {"causal_lm": CausalLM}
"""From the config's `task` to the class that builds the model and its loss."""
