"""Checks the arguments of `parallelize` before anything is changed, and keeps their objects valid."""
