"""Canonical forms of single functions."""
