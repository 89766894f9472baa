"""A job shown to whoever waits for it: what its events say in words, and its figures."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from cluster.wording import counted, step_of
from train_jobs.records.run_log import RunSummary

if TYPE_CHECKING:
    from rich.progress import TaskID

_PLAIN_EVERY_S = 5.0


def sentence(event: dict[str, Any]) -> str | None:
    """What an event says to a person; None for those that say nothing new."""
    kind = event["kind"]
    if kind == "preparing":
        if event.get("workers"):
            return f"tokenizing {event['source']} on {counted(event['workers'], 'worker')}"
        return f"reading {event['source']}" if event.get("source") else None
    if kind == "prepares":
        return str(event["said"])
    if kind == "waiting":
        least = f"{event['min']} to " if event["min"] < event["max"] else ""
        why = f": {event['reason']}" if event.get("reason") else ""
        return f"waiting for a lease of {least}{counted(event['max'], 'worker')}{why}"
    if kind == "leased":
        return f"leased {counted(event['workers'], 'worker')} on {', '.join(event['nodes'])}; starting"
    if kind == "started":
        workers = counted(event["world_size"], "worker")
        whose = f"group {event['group']}" if "group" in event else f"attempt {event['attempt']}"
        all_of_them = f", {event['workers']} in all" if event.get("workers", 0) > event["world_size"] else ""
        first = f"{whose}: {workers} from step {event['step']} on{all_of_them}"
        return "\n".join([first, *event.get("notes", [])])
    if kind == "resized":
        changes = [("joined", "joined"), ("left", "left"), ("lost", "is lost")]
        what = [f"group {name} {word}" for key, word in changes for name in event[key]]
        return f"{counted(event['world_size'], 'worker')} from step {event['step']} on: {', '.join(what)}"
    if kind == "leaving":
        why = event.get("reason") or ", ".join(event["for_whom"])
        return f"group {event['group']} has to leave{f', for {why}' if why else ''}"
    if kind == "reclaimed":
        return f"group {event['group']} did not leave within {event['after_s']:g} s, and is taken down"
    if kind == "rebuilding":
        return f"saving, to go on with {counted(event['to'], 'worker')} instead of {event['workers']}"
    if kind == "checkpointed":
        return f"checkpoint at step {event['step']}"
    if kind == "evaluated":
        unit = "tokens" if "tokens" in event else "samples"
        means = ", ".join(f"{name} {value:.4f}" for name, value in event.items() if isinstance(value, float))
        return f"evaluation at step {event['step']}: {means} over {event[unit]} held-out {unit}"
    if kind == "measured":
        return totals(event)
    if kind == "checkpoint_rejected":
        return f"the checkpoint of step {event['step']} is damaged and passed over: {event['reason']}"
    if kind == "begun_anew":
        return f"it begins at step 0 again: {event['reason']}"
    if kind in ("optimizer_state_missing", "data_begun_anew"):
        return f"from step {event['step']} on: {event['reason']}"
    if kind == "checkpoint_failed":
        return f"the checkpoint of step {event['step']} could not be saved: {event['reason']}"
    if kind == "retention_failed":
        return f"older checkpoints could not be deleted: {event['reason']}"
    if kind == "loss_spike":
        return f"step {event['step']}: {event['reason']}"
    if kind == "step_skipped":
        return f"step {event['step']} is skipped: {event['reason']}"
    if kind == "went_back":
        return f"back from step {event['step']} to step {event['to']}: {event['reason']}"
    if kind == "straggler":
        slower = f"is {event['times_slower']:.1f} times slower than the other ranks"
        return f"{_rank(event)} {slower}, over {event['steps']} steps"
    if kind == "straggler_over":
        how = "is gone" if event["times_slower"] is None else "is as fast as the other ranks again"
        return f"{_rank(event)} {how}"
    if kind == "failed":
        where = f" (rank {event['rank']} on {event['node']})" if event.get("node") else ""
        reason = event["reason"].splitlines()[0]
        whose = f"group {event['group']}" if event.get("goes_on") else f"attempt {event['attempt']}"
        return f"{whose} failed: {event['failure_class']}{where}: {reason}"
    if kind == "recovered":
        return f"going on with {counted(event['workers'], 'worker')} after a {event['after']} failure"
    if kind == "published":
        return f"published {event['model']}"
    if kind == "finished":
        return f"{event['status']} at step {event['step']}"
    return None


def _rank(event: dict[str, Any]) -> str:
    of = f" of group {event['group']}" if "group" in event else ""
    on = f" on {event['node']}" if event.get("node") else ""
    return f"rank {event['rank']}{of}{on}"


class JobView:
    """Shows a job on standard error: a progress bar on a terminal, plain lines elsewhere."""

    def __init__(self, title: str, steps: int) -> None:
        self.title = title
        self.steps = steps
        self._shown = 0.0

    def __enter__(self) -> JobView:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def event(self, event: dict[str, Any], summary: RunSummary) -> None:
        text = sentence(event)
        if text is not None:
            self.line(text)

    def metric(self, line: dict[str, Any], summary: RunSummary) -> None:
        if time.monotonic() - self._shown >= _PLAIN_EVERY_S:
            self._shown = time.monotonic()
            self.line(f"step {step_of(line['step'], summary.steps)}  {figures(line)}")

    def line(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class JobBar(JobView):
    """The view on a terminal."""

    def __init__(self, title: str, steps: int) -> None:
        super().__init__(title, steps)
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[doing]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True, highlight=False),
        )
        self.task: TaskID = self.progress.add_task(title, total=steps or None, doing="submitted")

    def __enter__(self) -> JobView:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def event(self, event: dict[str, Any], summary: RunSummary) -> None:
        super().event(event, summary)
        self.progress.update(self.task, doing=summary.status, completed=summary.step)

    def metric(self, line: dict[str, Any], summary: RunSummary) -> None:
        doing = f"{figures(line)}  {counted(summary.workers, 'worker')}"
        total = summary.steps or None
        self.progress.update(self.task, completed=line["step"], total=total, doing=doing)

    def line(self, text: str) -> None:
        self.progress.console.print(text, markup=False)


def figures(line: dict[str, Any]) -> str:
    """Loss and speed of one step."""
    if "tokens" not in line:  # of a script
        parts = [] if line["loss"] is None else [f"loss {line['loss']:.4f}"]
        return "  ".join([*parts, f"{1 / line['step_s']:,.2f} steps/s"] if line["step_s"] else parts)
    unit = "tokens" if line["tokens"] is not None else "samples"
    mfu = f"  MFU {line['mfu']:.1%}" if line.get("mfu") is not None else ""
    loss = "none" if line["loss"] is None else f"{line['loss']:.4f}"
    return f"loss {loss}  {line[unit] / line['step_s']:,.0f} {unit}/s{mfu}"


def totals(event: dict[str, Any]) -> str:
    """The figures of merit of an attempt, at its end."""
    unit = "tokens" if event["tokens_per_s"] is not None else "samples"
    parts = [f"{event[f'{unit}_per_s']:,.0f} {unit}/s (median of {event['steps']} steps)"]
    if event["mfu"] is not None:
        peak = f"{event['peak_flops'] / 1e12:,.2f} TFLOP/s, {event['peak_flops_from']}"
        parts.append(f"MFU {event['mfu']:.1%} of {peak}")
    parts.append(f"waiting for data {event['data_wait']:.1%}")
    if event["communication"] is not None:
        parts.append(f"exposed communication {event['communication']:.1%}")
    parts.append(f"peak memory {event['peak_memory_bytes'] / 1e9:.2f} GB")
    return ", ".join(parts)


def view_for(title: str, steps: int) -> JobView:
    return JobBar(title, steps) if sys.stderr.isatty() else JobView(title, steps)
