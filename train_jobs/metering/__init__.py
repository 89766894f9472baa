"""Figures of merit of a run, measured: throughput, memory, waiting, communication, arithmetic."""
