"""One replica group: one Ray Train run, its workers, and the agents of its nodes."""
