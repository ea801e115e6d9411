"""A whole training step as one graph of the device: captured once, and run again at the cost of one launch.

graphed    the step: when it is eager, captured, run again
held       what a graph keeps of memory and of Python values, and whether that is still so
host       what a step does on the host, which no graph does
"""
