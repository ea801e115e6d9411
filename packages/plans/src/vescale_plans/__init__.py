"""vescale_plans: plans, which say how a model is sharded, and parallelize, which applies them."""

import vescale_rng as _vescale_rng  # registers its rules: random numbers are one device's, at the cost of a shard

from vescale_trace.arguments import typed_facade as _typed_facade

from ._apply.given.aliases import SharedMemoryWarning as SharedMemoryWarning
from ._apply.given.adopt import adopt as adopt
from ._apply.apply import expert_drops as expert_drops
from ._apply.apply import expert_load as expert_load
from ._apply.apply import no_sync as no_sync
from ._apply.apply import parallelize as parallelize
from ._apply.reshape import reshape as reshape
from ._zero.optim_kinds import register_elementwise as register_elementwise
from ._capture.explain import explain_compile as explain_compile
from ._capture.front import CompileWarning as CompileWarning
from ._graphs.graphed import GraphWarning as GraphWarning
from ._graphs.graphed import graphed as graphed
from ._version import __version__ as __version__
from .calls import Calls as Calls
from .calls import explain_calls as explain_calls
from .data import Loader as Loader
from .data import loader as loader
from .dry_run import DryRun as DryRun
from .dry_run import dry_run as dry_run
from .plan import Boundary as Boundary
from .plan import Pipeline as Pipeline
from .plan import Plan as Plan
from .plan import PlanError as PlanError
from .plan import Policy as Policy
from .plan import Precision as Precision
from .search import InfeasibleError as InfeasibleError
from .search import generate_plan as generate_plan

_typed_facade(globals(), PlanError, Boundary, Calls, Loader, Pipeline, Plan, Policy, Precision)
del _vescale_rng
