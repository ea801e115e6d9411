"""Ports for servers that start later."""

from __future__ import annotations

import random
import socket

_NOT_HANDED_OUT = range(15000, 30000)
"""Below those that systems give to connections: another process cannot be given one of these meanwhile."""


def free_port() -> int:
    """Returns a port of this machine that nobody listens at."""
    for port in random.SystemRandom().sample(_NOT_HANDED_OUT, 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise RuntimeError("100 ports of this machine are all taken")
