"""What the facade adds to the planner: pipelines, run dry and simulated."""
