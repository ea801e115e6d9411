"""Per-rank copies of this package's module-level state, for ranks simulated in one process.

Data, read by `vescale.simulate` of whatever release is beside this one. Of every module-level name that changes while a
program runs it is said here whether each rank has its own or all share it, and why; a test finds one that is not here.
Names are of modules within the package, and after a dot those of attributes of objects that all import.
"""

PER_RANK = {
    "_job": ("_in_flight", "_staging"),
    "sync._sync": ("_finished", "_numbers", "_presence", "_world", "_world_store"),
    "plan._outline": ("_kept",),
}

SHARED = {
    "sync._presence": ("_living",),  # by object, and objects are a rank's own
    "io._node": ("_held",),  # a lock is its process's
}
