"""One chain of steps per module: what veScale does in its calls, in the order of one table."""
