"""What a plan is made of: its values, its checks before and with a model, its text and JSON."""
