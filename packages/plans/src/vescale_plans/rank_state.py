"""Per-rank copies of this package's module-level state, for ranks simulated in one process.

Data, read by `vescale.simulate` of whatever release is beside this one. Of every module-level name that changes while a
program runs it is said here whether each rank has its own or all share it, and why; a test finds one that is not here.
Names are of modules within the package, and after a dot those of attributes of objects that all import.
"""

PER_RANK = {
    "_apply.given.adopt": ("_hooks",),
    "_apply.join": ("_meshes", "_stages"),
    "_apply.masks": ("_running",),
    "_recompute.recompute": ("_active",),
}

SHARED = {
    # by object, and objects are a rank's own
    "_apply.given.adopt": ("_parallels",),
    "_apply.inputs": ("_calls_of",),
    "_apply.join": ("_chosen", "_ending", "_places"),  # the second: of a process that joined, not simulated
    "_zero.optim_kinds": ("_elementwise",),
}
