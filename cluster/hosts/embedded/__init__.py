"""The embedded provider: every node is a raylet of its own on this machine. Only here one machine is all."""
