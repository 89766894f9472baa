"""What a job cannot do about steps that go wrong."""

from __future__ import annotations

from cluster.config.checks.ground import MistakeReport
from cluster.config.sections.train import TrainJobConfig


def check_recovery(job: TrainJobConfig, report: MistakeReport) -> None:
    """Report every policy that the job's task, engine or strategy cannot carry out."""
    recovery = job.recovery
    policies = {
        "recovery.non_finite_loss": recovery.non_finite_loss,
        "recovery.loss_spike.policy": recovery.loss_spike.policy,
    }
    for key, policy in policies.items():
        if policy in ("skip", "go_back") and job.parallel.engine == "deepspeed":
            instead = "stop" if key == "recovery.non_finite_loss" else "warn or null"
            message = f"should be {instead} under parallel.engine deepspeed, which makes its own updates"
            report(key, policy, f"{message}; was {policy}", "parallel.engine")
        elif policy == "skip" and job.parallel.ddp.compression == "powersgd":
            message = (
                "should not be skip under parallel.ddp.compression powersgd, which adds what is lost of a "
                "step's gradients to the next one's"
            )
            report(key, policy, message, "parallel.ddp.compression")
