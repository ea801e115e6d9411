"""Wrong ways to write a plan, each with what is said to it, in full. Messages are API. Nothing here needs a process."""

import pytest
import torch
from torch import nn

from vescale_dtensor import InterleavedShard, Partial, RaggedShard, Replicate, Shard
from vescale_plans import Boundary, Pipeline, Plan, PlanError, Precision


class Attention(nn.Module):
    head_dim = 4

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(12, 12)
        self.o_proj = nn.Linear(12, 12)

    def forward(self, x, mask=None):
        return self.o_proj(self.q_proj(x))


class Model(nn.Module):
    """Three heads of 4, a tied embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 12)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"attention": Attention(), "norm": nn.LayerNorm(12)}) for _ in range(2)
        )
        self.head = nn.Linear(12, 10, bias=False)
        self.head.weight = self.embed.weight


def plan(**given):
    return Plan(**{"mesh": {"dp": 2, "tp": 2}, "parameters": {"*": {}}} | given)


def fits(even=False, **given):
    plan(**given).validate(Model(), even=even)


def places(*parameters):
    return dict((*parameters, ("*", {})))


SCHEDULE = {"name": "mine", "ranks": 2, "microbatches": 4, "stages": 2}
STAGES = {"pp": 2, "dp": 2}

# Name -> a call that must fail.
WRONG = {
    # One value, by itself
    "a mesh axis without ranks": lambda: plan(mesh={"dp": 0}),
    "a mesh axis named by number": lambda: plan(mesh={0: 2}, data_axis=None),
    "an unknown axis of a parameter": lambda: plan(parameters=places(("*.weight", {"pp": Shard(0)}))),
    "an unknown axis of a boundary": lambda: plan(boundaries={"head": Boundary(output={"sp": Shard(1)})}),
    "a placement for no axis": lambda: plan(parameters={"*": Shard(0)}),
    "a dim in place of a placement": lambda: plan(parameters={"*": {"tp": 0}}),
    "placements in place of a boundary": lambda: plan(boundaries={"head": {"tp": Shard(0)}}),
    "an unknown data axis": lambda: plan(data_axis="data"),
    "an unknown data axis of two": lambda: plan(data_axis=("dp", "dq")),
    "data axes out of order": lambda: plan(data_axis=("tp", "dp")),
    "a data axis twice": lambda: plan(data_axis=("dp", "dp")),
    "no such stage of ZeRO": lambda: plan(zero=4),
    "a whole parameter under ZeRO-3": lambda: plan(zero=3, parameters={"head.*": {"dp": Replicate()}, "*": {}}),
    "a style of others": lambda: plan(parameters={"head.*": {"tp": "colwise"}, "*": {}}),
    "a style without an axis": lambda: plan(parameters={"head.*": "colwise", "*": {}}),
    "ZeRO as a flag": lambda: plan(zero=True),
    "ZeRO without a data axis": lambda: plan(mesh={"tp": 4}, zero=1),
    "an unknown expert axis": lambda: plan(expert_axis="ep"),
    "a capacity of nothing": lambda: plan(expert_axis="tp", capacity_factor=0),
    "a capacity without experts": lambda: plan(capacity_factor=1.25),
    "experts without an axis": lambda: plan(experts={"*.moe": "counts"}),
    "experts told by nothing": lambda: plan(expert_axis="tp", experts={"*.moe": True}),
    "checkpointing as a flag": lambda: plan(checkpointing=True),
    "checkpointing by number": lambda: plan(checkpointing={"layers.*": 2}),
    "regather as a list": lambda: plan(regather=["layers.*"]),
    "activations offloaded by a word": lambda: plan(offload_activations={"layers.*": "host"}),
    "sums by a word": lambda: plan(sums="fast"),
    "one sum of parts": lambda: plan(sums="all_reduce", zero=2),
    "one sum in fewer bits": lambda: plan(sums="all_reduce", precision=Precision(sent=torch.int8)),
    "blocks of nothing": lambda: plan(blocks={"*.weight": 0}),
    "a dtype in place of a precision": lambda: plan(precision=torch.bfloat16),
    "a dtype by name": lambda: Precision(compute="bf16"),
    "sums in integers": lambda: Precision(reduce=torch.int8),
    "products in eight bits": lambda: Precision(torch.float8_e4m3fn),
    "accumulation of nothing": lambda: Plan(mesh={"dp": 2}, parameters={"*": {}}, accumulation=0),
    "accumulation twice": lambda: Plan(
        mesh={"pp": 2}, parameters={"*": {}}, accumulation=2, pipeline=Pipeline(cuts=("1",), microbatches=2)
    ),
    "sent as long integers": lambda: Precision(sent=torch.int64),
    "offload to a device": lambda: plan(offload="cpu"),
    # The pipeline
    "a schedule in place of a pipeline": lambda: plan(pipeline="1f1b"),
    "an unknown pipeline axis": lambda: plan(pipeline=Pipeline(cuts=("layers.1",))),
    "a pipeline over the data axis": lambda: plan(pipeline=Pipeline(axis="dp", cuts=("layers.1",))),
    "too few cuts": lambda: plan(mesh=STAGES, pipeline=Pipeline(virtual=2, cuts=("layers.1",))),
    "a tensor spread over stages": lambda: plan(
        mesh=STAGES, pipeline=Pipeline(cuts=("layers.1",)), parameters={"*": {"pp": Shard(0)}}
    ),
    "a schedule for other numbers": lambda: plan(
        mesh=STAGES, pipeline=Pipeline(cuts=("layers.1",), schedule=SCHEDULE, microbatches=2)
    ),
    "one cut as text": lambda: Pipeline(cuts="layers.1"),
    "two stages that begin alike": lambda: Pipeline(cuts=("layers.1", "layers.1")),
    "a cut by number": lambda: Pipeline(cuts=(1,)),
    "no schedule": lambda: Pipeline(schedule=None),
    "no microbatches": lambda: Pipeline(microbatches=0),
    "a loss of no kind": lambda: Pipeline(loss="max"),
    # The plan against the model
    "a pattern below what is on top": lambda: fits(parameters=places(("*.hed.weight", {"tp": Shard(0)}))),
    "a pattern that matches nothing": lambda: fits(parameters=places(("*.q_porj.weight", {"tp": Shard(0)}))),
    "a parameter that nothing decides": lambda: fits(parameters={"layers.*": {}, "embed.weight": {}}),
    "a pattern after one that covers it": lambda: fits(parameters={"*": {}, "*.q_proj.weight": {"tp": Shard(0)}}),
    "a dim that is not there": lambda: fits(parameters=places(("*.norm.*", {"tp": Shard(1)}))),
    "groups that do not divide": lambda: fits(parameters=places(("*.q_proj.*", {"tp": InterleavedShard(0, 5)}))),
    "units for other ranks": lambda: fits(parameters=places(("*.q_proj.*", {"tp": RaggedShard((0,), (1, 2, 3))}))),
    "a parameter that is a partial sum": lambda: fits(parameters=places(("*.norm.*", {"tp": Partial()}))),
    "a tied parameter in two places": lambda: fits(parameters=places(("embed.weight", {"tp": Shard(0)}))),
    "a boundary of no module": lambda: fits(boundaries={"*.atention": Boundary(input={"tp": Replicate()})}),
    "a boundary of a list": lambda: fits(boundaries={"layers": Boundary(output={"tp": Replicate()})}),
    "an argument that is not taken": lambda: fits(
        boundaries={"*.attention": Boundary(arguments={"attention_mask": {"tp": Replicate()}})}
    ),
    "a cut at no module": lambda: fits(mesh=STAGES, pipeline=Pipeline(cuts=("layer.1",))),
    "a cut at a list": lambda: fits(mesh=STAGES, pipeline=Pipeline(cuts=("layers",))),
    "a cut inside a checkpoint": lambda: fits(
        mesh=STAGES, pipeline=Pipeline(cuts=("layers.1.attention.o_proj",)), checkpointing={"layers.*": True}
    ),
    "checkpointing of nothing": lambda: fits(checkpointing={"blocks.*": True}),
    "regather of nothing": lambda: fits(regather={"*.mlp": True}),
    "blocks of no parameter": lambda: fits(blocks={"*.experts": 128}),
    "heads that do not divide": lambda: fits(even=True, parameters=places(("*.q_proj.*", {"tp": Shard(0)}))),
    "rows that do not divide": lambda: fits(
        even=True,
        mesh={"tp": 4},
        parameters={"embed.weight": {"tp": Shard(0)}, "head.weight": {"tp": Shard(0)}, "*": {}},
    ),
}

# Name -> what the error says.
TEXTS = {
    "a mesh axis without ranks": (
        "Plan: mesh axis 'dp' has size 0, which is not a positive number\nfix: mesh={\"dp\": 2}  # so many ranks"
    ),
    "a mesh axis named by number": ('Plan: a mesh axis is named 0, not by a word\nfix: mesh={"dp": 2}'),
    "an unknown axis of a parameter": (
        "Plan: parameters['*.weight'] names axis 'pp', which the mesh does not have\n"
        "  mesh  {'dp': 2, 'tp': 2}\n"
        "fix: use one of 'dp', 'tp'"
    ),
    "an unknown axis of a boundary": (
        "Plan: boundaries['head'].output names axis 'sp', which the mesh does not have\n"
        "  mesh  {'dp': 2, 'tp': 2}\n"
        "fix: use one of 'dp', 'tp'"
    ),
    "a placement for no axis": (
        "Plan: parameters['*'] is Shard(dim=0), not a mapping from axis names to placements\n"
        "  mesh  {'dp': 2, 'tp': 2}\n"
        'fix: {"tp": Shard(dim=0)}  # names the axis'
    ),
    "a dim in place of a placement": (
        "Plan: parameters['*'] places axis 'tp' as 0, which is not a placement\n"
        "  mesh  {'dp': 2, 'tp': 2}\n"
        'fix one of: {"tp": Shard(0)}  # others\' colwise: of weight [out, in] and bias\n'
        '            {"tp": Shard(1)}  # others\' rowwise: of the weight alone\n'
        "            {}                # whole on each rank"
    ),
    "placements in place of a boundary": (
        "Plan: boundaries['head'] is {'tp': Shard(dim=0)}, not a Boundary\nfix: Boundary(input={...}, output={...})"
    ),
    "an unknown data axis": (
        "Plan: data_axis 'data' is not an axis of the mesh {'dp': 2, 'tp': 2}\n"
        "fix one of: data_axis='dp'\n"
        "            data_axis=None  # no data parallelism"
    ),
    "an unknown data axis of two": (
        "Plan: data_axis ('dp', 'dq') names 'dq', which is not an axis of the mesh {'dp': 2, 'tp': 2}\n"
        "fix one of: data_axis='dp'\n"
        "            data_axis=None  # no data parallelism"
    ),
    "data axes out of order": (
        "Plan: data_axis ('tp', 'dp') is not in the order of the mesh {'dp': 2, 'tp': 2}, outermost first\n"
        "fix: data_axis=('dp', 'tp')  # ZeRO shards over the last one, and replicates over the others"
    ),
    "a data axis twice": ("Plan: data_axis ('dp', 'dp') names an axis twice\nfix: name it once"),
    "no such stage of ZeRO": (
        "Plan: zero is 4, which is not a stage\n"
        "fix one of: zero=1  # optimizer states are sharded over the data axis\n"
        "            zero=2  # and gradients\n"
        "            zero=3  # and parameters"
    ),
    "ZeRO as a flag": (
        "Plan: zero is True, which is not a stage\n"
        "fix one of: zero=1  # optimizer states are sharded over the data axis\n"
        "            zero=2  # and gradients\n"
        "            zero=3  # and parameters"
    ),
    "ZeRO without a data axis": (
        "Plan: zero=1 shards over the data axis, and the plan has none\n"
        "  mesh  {'tp': 4}\n"
        "fix one of: data_axis=...  # names an axis of the mesh\n"
        "            zero=0         # nothing is sharded over data parallel ranks"
    ),
    "an unknown expert axis": (
        "Plan: expert_axis names axis 'ep', which the mesh does not have\n"
        "  mesh  {'dp': 2, 'tp': 2}\n"
        "fix: use one of 'dp', 'tp'"
    ),
    "a capacity of nothing": (
        "Plan: capacity_factor is 0, not a positive number\n"
        "fix one of: capacity_factor=1.25  # a quarter more than an even load\n"
        "            capacity_factor=None  # no limit"
    ),
    "a capacity without experts": (
        "Plan: capacity_factor=1.25 without an expert axis limits nothing\n"
        'fix one of: expert_axis="ep"      # of one rank, be it\n'
        "            capacity_factor=None  # no limit"
    ),
    "checkpointing as a flag": ('Plan: checkpointing is True, not a mapping from globs\nfix: checkpointing={"*": ...}'),
    "checkpointing by number": (
        "Plan: checkpointing['layers.*'] is 2, neither True nor False\n"
        'fix one of: {"layers.*": True}\n'
        '            {"layers.*": False}  # an exception to later globs'
    ),
    "regather as a list": ("Plan: regather is ['layers.*'], not a mapping from globs\nfix: regather={\"*\": ...}"),
    "activations offloaded by a word": (
        "Plan: offload_activations['layers.*'] is 'host', neither True nor False\n"
        'fix one of: {"layers.*": True}\n'
        '            {"layers.*": False}  # an exception to later globs'
    ),
    "sums by a word": (
        "Plan: sums is 'fast', neither 'ordered' nor 'all_reduce'\n"
        'fix one of: sums="ordered"     # in the order of ranks\n'
        '            sums="all_reduce"  # by one collective'
    ),
    "one sum of parts": (
        "Plan: sums='all_reduce' where each rank keeps a part (zero=2)\n"
        "fix one of: zero=0          # every rank keeps all gradients\n"
        '            sums="ordered"'
    ),
    "one sum in fewer bits": (
        "Plan: an all-reduce sums in the dtype in which gradients travel\n"
        "fix one of: Precision(sent=None)  # what travels is what is summed\n"
        '            sums="ordered"'
    ),
    "experts without an axis": (
        "Plan: experts['*.moe'] without an expert axis says nothing\n"
        'fix one of: expert_axis="ep"   # the axis over which they are spread\n'
        "            leave experts out"
    ),
    "experts told by nothing": (
        "Plan: experts['*.moe'] is True, neither 'indices' nor 'counts'\n"
        'fix one of: {"*.moe": "indices"}  # forward takes tokens [T, hidden], and the indices and weights [T, k] '
        "of the experts of each\n"
        '            {"*.moe": "counts"}   # forward takes rows [N, hidden], sorted by expert, and how many rows '
        "each expert has"
    ),
    "blocks of nothing": ("Plan: blocks['*.weight'] is 0, not a positive number\nfix: blocks['*.weight']=1"),
    "a dtype in place of a precision": (
        "Plan: precision is torch.bfloat16, not a Precision\n"
        "fix: precision=Precision(compute=torch.bfloat16, reduce=torch.float32)"
    ),
    "a dtype by name": (
        "Precision: compute is 'bf16', not one of torch.float64, torch.float32, torch.bfloat16, torch.float16: in "
        "others torch has no sums and products\n"
        "fix one of: compute=torch.bfloat16\n"
        "            compute=torch.float32"
    ),
    "products in eight bits": (
        "Precision: compute is torch.float8_e4m3fn, not one of torch.float64, torch.float32, torch.bfloat16, "
        "torch.float16: in others torch has no sums and products\n"
        "fix one of: compute=torch.bfloat16\n"
        "            compute=torch.float32"
    ),
    "accumulation of nothing": ("Plan: accumulation is 0, not a positive number\nfix: accumulation=1"),
    "accumulation twice": (
        "Plan: a plan with a pipeline accumulates over its microbatches\n"
        "fix: Pipeline(microbatches=...)  # a call of the model adds up their gradients"
    ),
    "sums in integers": (
        "Precision: reduce is torch.int8, not one of torch.float64, torch.float32, torch.bfloat16, torch.float16: in "
        "others torch has no sums and products\n"
        "fix one of: reduce=torch.bfloat16\n"
        "            reduce=torch.float32"
    ),
    "sent as long integers": (
        "Precision: sent is torch.int64, not one of torch.float64, torch.float32, torch.bfloat16, torch.float16, "
        "torch.int8 or None\n"
        "fix one of: sent=torch.int8  # a quarter of float32's bytes\n"
        "            sent=None        # exact"
    ),
    "offload to a device": (
        "Plan: offload is 'cpu', neither True nor False\nfix: offload=True  # optimizer states live in host memory"
    ),
    "a schedule in place of a pipeline": ("Plan: pipeline is '1f1b', not a Pipeline\nfix: pipeline=Pipeline(...)"),
    "an unknown pipeline axis": (
        "Plan: pipeline names axis 'pp', which the mesh does not have\n"
        "  mesh  {'dp': 2, 'tp': 2}\n"
        "fix: use one of 'dp', 'tp'"
    ),
    "a pipeline over the data axis": (
        "Plan: axis 'dp' is both the pipeline's and a data axis\n"
        "  mesh  {'dp': 2, 'tp': 2}\n"
        'fix: mesh={"pp": 2, "dp": 2}  # an axis for each'
    ),
    "too few cuts": (
        "Plan: 1 cuts make 2 stages, and 2 ranks of axis 'pp' with virtual=2 hold 4\n"
        "  cuts  layers.1\n"
        "fix: cuts=(3 module names)  # the modules that begin stages 1, 2, ..."
    ),
    "a tensor spread over stages": (
        "Plan: parameters['*'] places a tensor on axis 'pp', whose ranks hold different stages\n"
        "  mesh  {'pp': 2, 'dp': 2}\n"
        "fix: leave 'pp' out  # a tensor lies on the ranks of its stage alone"
    ),
    "a schedule for other numbers": (
        "Plan: the schedule is written for microbatches=4, and the plan has 2\n"
        "fix: generate the schedule for the plan's numbers"
    ),
    "one cut as text": ("Pipeline: cuts is 'layers.1', not names\nfix: cuts=('layers.1',)"),
    "two stages that begin alike": ("Pipeline: two stages begin with the module 'layers.1'\nfix: name it once"),
    "a cut by number": (
        "Pipeline: cuts holds 1, which is not the name of a module\n"
        'fix: cuts=("layers.4",)  # names, as in model.named_modules()'
    ),
    "no schedule": ('Pipeline: schedule is None, neither a name nor a schedule\'s JSON dict\nfix: schedule="1f1b"'),
    "no microbatches": ("Pipeline: microbatches is 0, not a positive number\nfix: microbatches=1"),
    "a loss of no kind": (
        "Pipeline: loss is 'max', not one of 'mean', 'sum', None\n"
        'fix one of: loss="mean"  # the mean of the microbatches\' losses\n'
        '            loss="sum"   # their sum'
    ),
    "a whole parameter under ZeRO-3": (
        "Plan: parameters['head.*'] is replicated over 'dp', over which zero=3 shards every parameter\n"
        "  mesh  {'dp': 2, 'tp': 2}\n"
        "fix one of: leave 'dp' out  # ZeRO's shards are no placement: blocks compute with whole parameters\n"
        "            zero=2          # parameters are whole on each rank"
    ),
    "a style of others": (
        "Plan: parameters['head.*'] places axis 'tp' as 'colwise', which is not a placement\n"
        "  mesh  {'dp': 2, 'tp': 2}\n"
        'fix one of: {"tp": Shard(0)}                        # others\' colwise: of weight [out, in] and bias\n'
        '            {"tp": Shard(1)}                        # others\' rowwise: of the weight alone\n'
        "            {}                                      # whole on each rank\n"
        "            Plan.from_huggingface(model, mesh=...)  # reads styles in model.tp_plan"
    ),
    "a style without an axis": (
        "Plan: parameters['head.*'] is 'colwise', not a mapping from axis names to placements\n"
        "  mesh  {'dp': 2, 'tp': 2}\n"
        'fix one of: {"tp": Shard(0)}                        # others\' colwise: of weight [out, in] and bias\n'
        '            {"tp": Shard(1)}                        # others\' rowwise: of the weight alone\n'
        "            {}                                      # whole on each rank\n"
        "            Plan.from_huggingface(model, mesh=...)  # reads styles in model.tp_plan"
    ),
    "a pattern below what is on top": (
        "Plan: the pattern '*.hed.weight' matches no parameter of the model\n"
        "  nearest  head.weight, embed.weight, *.norm.weight\n"
        "fix: use 'head.weight'"
    ),
    "a pattern that matches nothing": (
        "Plan: the pattern '*.q_porj.weight' matches no parameter of the model\n"
        "  nearest  *.q_proj.weight, *.o_proj.weight, *.norm.weight\n"
        "fix: use '*.q_proj.weight'"
    ),
    "a parameter that nothing decides": (
        "Plan: no pattern decides the parameter 'head.weight'\n"
        "  nearest pattern  'embed.weight'\n"
        'fix one of: add "head.weight": {...}  # places it\n'
        '            end with "*": {}          # replicates the rest'
    ),
    "a pattern after one that covers it": (
        "Plan: the pattern '*.q_proj.weight' decides no parameter: all its names match earlier patterns, "
        "'*', and the first match decides\n"
        "fix one of: write '*.q_proj.weight' first\n"
        "            remove it"
    ),
    "a dim that is not there": (
        "Plan: parameters['*.norm.*'] places 'layers.0.norm.weight': Shard(dim=1) on axis 'tp' names dim "
        "1 of a tensor with 1 dims\n"
        "  tensor  [12] on (dp=2, tp=2)\n"
        "fix: use a dim in 0..0"
    ),
    "groups that do not divide": (
        "Plan: parameters['*.q_proj.*'] places 'layers.0.attention.q_proj.weight': dim 0 of size 12 does "
        "not divide into 5 groups on axis 'tp' (2)\n"
        "  tensor  [12, 12] on (dp=2, tp=2)\n"
        "fix: use Shard(0)  # uneven sizes are allowed there"
    ),
    "units for other ranks": (
        "Plan: parameters['*.q_proj.*'] places 'layers.0.attention.q_proj.weight': RaggedShard has 3 "
        "units (1, 2, 3) for the 2 ranks of axis 'tp'\n"
        "  tensor  [12, 12] on (dp=2, tp=2)\n"
        "fix: give 2 units, none negative"
    ),
    "a parameter that is a partial sum": (
        "Plan: parameters['*.norm.*'] places 'layers.0.norm.weight' as a sum not yet reduced over axis 'tp', but "
        "a parameter is a value\n"
        "  layers.0.norm.weight  [12]\n"
        "fix one of: Replicate()  # alike on all ranks\n"
        "            Shard(dim)   # a part on each"
    ),
    "a tied parameter in two places": (
        "Plan: 'embed.weight' and 'head.weight' are one tied parameter, and the plan places them differently\n"
        "  embed.weight  {'tp': Shard(dim=0)}\n"
        "  head.weight  {}\n"
        "fix: place both alike"
    ),
    "a boundary of no module": (
        "Plan: the pattern '*.atention' matches no module of the model\n"
        "  nearest  *.attention, *.norm\n"
        "fix: use '*.attention'"
    ),
    "a boundary of a list": (
        "Plan: boundaries['layers'] is 'layers', a ModuleList, which is never called\n"
        "fix: use 'layers.*'  # the modules in it, and those inside them"
    ),
    "an argument that is not taken": (
        "Plan: the boundary of 'layers.0.attention' converts an argument 'attention_mask', which its "
        "forward does not take\n"
        "  Attention.forward  (x, mask)\n"
        "fix: use 'mask'"
    ),
    "a cut at no module": (
        "Plan: the pipeline is cut at 'layer.1', which is not a module of the model\n"
        "  nearest  layers.1, layers, layers.1.norm\n"
        "fix: use 'layers.1'"
    ),
    "a cut at a list": (
        "Plan: the pipeline is cut at 'layers', a ModuleList, which is never called\n"
        "fix: use 'layers.1'  # a module in it"
    ),
    "a cut inside a checkpoint": (
        "Plan: the pipeline is cut at 'layers.1.attention.o_proj', inside 'layers.1.attention', which is checkpointed "
        "as a whole\n"
        "fix one of: cut at 'layers.1.attention'\n"
        '            checkpointing={"layers.1.attention": False, ...}'
    ),
    "checkpointing of nothing": (
        "Plan: the pattern 'blocks.*' matches no module of the model\n  nearest  layers.0\nfix: use 'layers.0'"
    ),
    "regather of nothing": (
        "Plan: the pattern '*.mlp' matches no module of the model\n  nearest  *.norm, *.0, *.q_proj\nfix: use '*.norm'"
    ),
    "blocks of no parameter": (
        "Plan: the pattern '*.experts' matches no parameter of the model\n"
        "  nearest  *.weight, *.bias\n"
        "fix: use '*.weight'"
    ),
    "heads that do not divide": (
        "Plan: the 3 heads that 'layers.0.attention.q_proj' computes do not divide by the 2 ranks of axis 'tp'\n"
        "  layers.0.attention.q_proj.weight  [12, 12], heads of 4\n"
        "fix one of: a size of 'tp' that divides 3\n"
        "            even=False                     # a head that is cut is right, and costs more communication"
    ),
    "rows that do not divide": (
        "Plan: parameters['embed.weight'] places 'embed.weight': dim 0 of size 10 does not divide by 4\n"
        "  embed.weight  [10, 12]\n"
        "  tp  4 ranks, Shard(dim=0)\n"
        "fix: even=False  # uneven shards are right, and cost a little more communication"
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_plan_says_what_to_do(case):
    with pytest.raises(PlanError) as caught:
        WRONG[case]()
    assert str(caught.value) == TEXTS[case]
    assert caught.value.remedies


def test_there_are_thirty_and_more():
    assert len(WRONG) >= 30 and len(set(TEXTS.values())) == len(WRONG)


def test_what_is_right_passes():
    fits(
        even=True,
        parameters={"layers.0.attention.o_proj.weight": {"tp": Shard(1)}, "*": {}},
        boundaries={"*.attention": Boundary(arguments={"mask": {"tp": Replicate()}})},
        checkpointing={"layers": True},
        regather={"layers.*": True},
        blocks={"*.weight": 4},
        zero=3,
    )
