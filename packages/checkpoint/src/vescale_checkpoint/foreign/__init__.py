"""Reads checkpoints of others: torch's pickles, as data."""
