"""Where Shoal is measured: loads, faults, long runs, and a simulator."""
