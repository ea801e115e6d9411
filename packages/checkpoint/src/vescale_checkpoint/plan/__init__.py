"""Turns states into plans: who holds and writes what, which bytes a load needs, and where they go. Pure."""
