"""Elements of a plan: its values, its checks before and with a model, its text and JSON."""
