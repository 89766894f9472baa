"""What is trained: one file a task, one table from name to task."""

from __future__ import annotations

from train_jobs.tasks.causal_lm import CausalLM

TASKS = {"causal_lm": CausalLM}
"""From the config's `task` to the class."""
