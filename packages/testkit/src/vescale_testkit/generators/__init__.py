"""Generators of programs: functions of torch, and changes of Python's state."""
