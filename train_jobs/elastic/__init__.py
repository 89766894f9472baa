"""Replica groups of one job: they join, leave and are lost while the others go on."""
