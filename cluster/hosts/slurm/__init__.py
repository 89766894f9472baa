"""A cluster on the nodes of one batch job of Slurm."""
