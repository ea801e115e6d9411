"""The debugger of all ranks: what is typed on one is executed by each, in its own frame, at the same time.

`breakpoint` is the door, `prompt` the debugger (Python's own, with other streams), `session` what ranks tell each
other through the store while they stand, `guard` lets them into a collective together or not at all, and `quiet` keeps
user code that runs on samples from stopping.
"""
