"""Per-rank copies of this package's module-level state, for ranks simulated in one process.

Data, read by `vescale.simulate` of whatever release is beside this one. Of every module-level name that changes while a
program runs it is said here whether each rank has its own or all share it, and why; a test finds one that is not here.
Names are of modules within the package, and after a dot those of attributes of objects that all import.
"""

PER_RANK = {
    "_trace.placeholder": ("current.reader", "current.again", "current.halves"),
    "_runtime.runtime": ("_numbers",),
    "_runtime.other_stages.moment": ("_steps",),
    "_runtime.other_stages.total_norm": ("Chosen.last",),
    "recording": ("_under_way",),
}

SHARED = {
    "_trace.foreign": ("_functions",),  # facts about functions
    "_torch_private": ("checkpoint._checkpoint_hook", "clip_grad._get_total_norm"),  # replaced once, at import
}
