"""The order of a module's call: the table that chains are made by, and that `explain_calls` prints.

Of a module on which every step there is stood, a call would be, from above to below:

    hooks of all modules, and the module's own that were put first (`prepend=True`)
    OUTER_BEFORE    of this library
    hooks that the module had before `parallelize`
    INNER_BEFORE
    hooks that it was given since
    the forward; compile mode, where it stands, before it
    INNER_AFTER, and so on outwards: OUTER_AFTER stands before the hooks given since `parallelize`

So users' hooks see what they would on one device, as global tensors. A step takes part under the name of its phase
(`Chain.add`), and where it comes is said here alone.
"""

from __future__ import annotations

from dataclasses import dataclass

OUTER_BEFORE = ("traffic", "memory", "parameters", "inputs", "sharing", "saving")
INNER_BEFORE = (
    "checkpoint", "cache", "decoding", "boundary", "arguments", "beside", "experts", "list", "loss", "masks",
    "precision",
)  # fmt: skip
INNER_AFTER = ("precision", "list", "experts", "beside", "decoding", "checkpoint")
OUTER_AFTER = ("saving", "boundary", "sharing", "loss", "inputs", "masks", "parameters", "traffic")


@dataclass(frozen=True)
class Phase:
    """One place of a call, at which parts of this library run.

    Arguments:
        before: what it does before the forward, in words; "" where it does nothing then.
        after: what it does behind it.
        ends: whether what was begun before the forward is ended in any case, also where the call raises.
        converts: whether what it hands on are the arguments that it was given, converted: what the forward writes to
            them, its caller sees in its own.
    """

    before: str = ""
    after: str = ""
    ends: bool = False
    converts: bool = False


PHASES = {
    "traffic": Phase("counts the collectives of this call", "the counting of this call ends", ends=True),
    "memory": Phase("parameters that were given other memory are taken back into their flat buffers"),
    "parameters": Phase(
        "ZeRO: the block's parameters are gathered, and those of the next block start to be",
        "ZeRO: parameters are freed, and gathered again when a gradient comes",
    ),
    "inputs": Phase(
        "plain tensors become DTensors: the batch is sharded over the data axes",
        "a loss that is a sum of the ranks' parts is reduced",
        converts=True,
    ),
    "sharing": Phase(
        "conversions are kept from here on, for all modules inside",
        "the conversions that were kept are dropped",
        ends=True,
    ),
    "saving": Phase(
        "activations are gathered again in backward, or wait on the host, from here on",
        "activations are kept on the device from here on",
        ends=True,
    ),
    "checkpoint": Phase(
        "activation checkpointing: what is computed from here on is not kept",
        "activation checkpointing: what is computed from here on is kept",
        ends=True,
    ),
    "cache": Phase("a cache of keys and values is left out while gradients are recorded"),
    "decoding": Phase(
        "a call that trains is made without a cache for decoding",
        "what stands for the cache in the output says that it was not filled",
    ),
    "boundary": Phase(
        "the first input is redistributed, as the plan's boundary says",
        "the output is redistributed, as the plan's boundary says",
        converts=True,
    ),
    "arguments": Phase("arguments are redistributed, as the plan's boundary says", converts=True),
    "beside": Phase(
        "what does not need the experts may run while tokens travel", "the block's modules are its own again", ends=True
    ),
    "experts": Phase(
        "tokens travel to the ranks that hold their experts", "what the experts gave travels back", ends=True
    ),
    "list": Phase(
        "experts in a list: stand-ins take their calls, for one rank each",
        "the list is the block's again, and ranks tell each other what experts wrote",
        ends=True,
    ),
    "loss": Phase("arguments of loss_fn alone are put aside", "loss_fn takes the output"),
    "masks": Phase(
        "attention masks are made of this rank's rows from here on", "attention masks are made in full again", ends=True
    ),
    "precision": Phase(
        "floating inputs are cast to the precision's dtype",
        "floating outputs are cast to its output dtype",
        converts=True,
    ),
}

STANDS_APART: dict[str, dict[str, str]] = {
    "vescale_plans._capture.front": {"Captured": "compile mode: runs the forward as a compiled graph, or as it is"},
    "vescale_plans.installed._traffic": {"_count": "counts the calls of modules"},
    "vescale_pipeline._runtime.runtime": {
        "Runtime": "the pipeline: splits the batch, and runs this rank's actions of the schedule",
        "_reveal": "hooks behind this one see the real output, on the stage that has it",
    },
    "vescale_pipeline._runtime.skeleton": {
        "Station": "the pipeline: runs the module on the stage that has it, elsewhere its record",
    },
    "vescale_pipeline.balance": {
        "_enter": "what the module computes is measured from here on",
        "_leave": "the measurement of the module ends",
    },
    "vescale_dtensor.debug": {
        "enter": "communication is counted as this module's",
        "leave": "communication is counted as the module's around it",
    },
    "vescale.record": {
        "after_forward": "vescale.record notes the outputs",
        "_note_inputs": "vescale.record notes the inputs",
    },
    "vescale.metrics": {
        "_entered": "metrics count the call's tokens",
        "counted": "metrics count the call's tokens; then the pipeline",
    },
    "vescale.timeline": {
        "enter": "the timeline's span of the module begins",
        "leave": "the timeline's span of the module ends",
    },
}
"""What is no step of a chain: module of ours -> function or class in it -> what it does in a call. Watchers are hooks
around or behind everybody's, wherever whoever opens them comes; others stand in place of a forward or, in a pipeline,
of a call."""
