"""Training and serving together under faults and load, and an oracle that looks at what came of it."""
