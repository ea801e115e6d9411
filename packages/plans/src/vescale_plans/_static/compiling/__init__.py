"""Regions as graphs of a compiler."""
