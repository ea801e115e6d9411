"""Behind the planner: what `predicted.py` and `published.py` consist of, blind rows, choices, simulation, startup."""
