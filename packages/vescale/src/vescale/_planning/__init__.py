"""Pipelines for the planner: run dry and simulated."""
