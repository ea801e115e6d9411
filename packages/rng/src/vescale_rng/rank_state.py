"""Per-rank copies of this package's module-level state, for ranks simulated in one process.

Data, read by `vescale.simulate` of whatever release is beside this one. Of every module-level name that changes while a
program runs it is said here whether each rank has its own or all share it, and why; a test finds one that is not here.
Names are of modules within the package, and after a dot those of attributes of objects that all import.
"""

PER_RANK = {
    "_cuda.recorded": ("_now", "moved"),
    "_journal": ("_count", "entries"),
    "_select": ("_current",),
}

SHARED = {
    "_cuda.fill": ("_named",),  # facts about functions
}
