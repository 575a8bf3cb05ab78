"""Chaos: a real service on a real Ray cluster, whose processes are killed and stopped."""
