"""Per-rank copies of this package's module-level state, for ranks simulated in one process.

Data, read by `vescale.simulate` of whatever release is beside this one. Of every module-level name that changes while a
program runs it is said here whether each rank has its own or all share it, and why; a test finds one that is not here.
Names are of modules within the package, and after a dot those of attributes of objects that all import.
"""

PER_RANK = {
    "_reproducible.mode": ("_current",),
    "_conversions.convert": ("about_to_move", "each_use"),
    "_debugger.ide": ("_refuses",),
    "_debugger.prompt": ("state",),
    "_debugger.quiet": ("_doing",),
    "_dispatch.dispatch": ("_table",),
    "_communication.events": (
        *("_current", "_direction", "listeners", "module_path", "finishers", "copying", "strict_depth"),
        *("told_of", "watch"),
    ),
    "_communication.flight_recorder": ("note", "ring", "transfers", "waited_s"),
    "_tensor.backward": ("_after_backward", "_backwards", "_before_backward", "_depth", "_keeps"),
    "_context.mixing": ("_running",),
    "_conversions.memo": ("_scopes",),
    "_flex.kernel": ("_formulas", "_without_data"),
    "_rules.products.attention": ("stand_in",),
    "_conversions.steps": ("whole_on_first",),
    "_tensor.tensor": ("_prints_global",),
}

ANEW = (("_debugger.prompt", "state"),)
"""Names for which a rank begins with a new object of the class, not with what stands there."""

UNCOPIED = (("_dispatch.dispatch", "_table"),)
"""Containers whose contents all ranks share; which of them is in use is each rank's own."""

SHARED = {
    # by object, and objects are a rank's own
    "_communication.collectives": ("_ENGINES",),
    "_communication.flight_recorder": ("rank_groups",),
    "_communication.in_flight": ("left_to_readers",),
    "_communication.namespace": ("_words",),
    "_context.lazy": ("_met",),
    "_context.pins": ("pins",),
    "_context.transfer": ("_greeted",),
    "_dispatch.copies": ("_base_of", "_copies_of", "_sweep_at"),
    "_layouts.layout": ("_interned",),
    "_layouts.mesh": ("_meshes",),
    "_tensor.nodes": ("_known",),
    # facts about functions and shapes
    "_reproducible.forms": ("FORMS",),
    "_reproducible.functions.product": ("_memory",),
    "_rules.registry": ("TABLE", "_late"),
    "_tensor.constructors": ("Tensor.data", "Tensor.grad"),
    "_tensor.module_hooks": ("TorchsFunction.apply",),
    "_torch_private": ("distributed_c10d._check_tensor_list",),
    "_layouts.state": ("_flat", "_sharded"),
    "_tensor.tensor": ("is_global", "_shape", "_plain_size", "_plain_dim", "_plain_numel"),
    # the simulation itself
    "_debugger.session": ("simulation",),
    # said once per process
    "_dispatch.fallback": ("reported",),
    "_tensor.compiled": ("_told",),
    # of processes, which simulated ranks are not
    "_communication.collective_check": ("_boards",),
    "_communication.endings": ("_before", "_known", "_raised", "_told"),
    "_communication.deaths": ("_entries",),
    "_communication.hangs.hang": ("_watch",),
    "extend": ("_shown",),  # by package
}
