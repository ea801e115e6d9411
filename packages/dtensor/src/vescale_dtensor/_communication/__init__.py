"""Sends between ranks, waits for what was sent, and tells observers."""
