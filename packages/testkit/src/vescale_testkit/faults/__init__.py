"""Faults to order: worlds whose ranks may be killed, and system calls that fail."""
