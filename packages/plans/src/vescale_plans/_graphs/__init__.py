"""A whole training step as one graph of the device: captured once, and run again at the cost of one launch.

graphed    the step: when it is eager, captured, run again
held       what a graph keeps of memory, and whether that is still so
reads      what Python tells a step: numbers, hooks, submodules, what its names stand for
host       what a step does on the host, which no graph does
"""
