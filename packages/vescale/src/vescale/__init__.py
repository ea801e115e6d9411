"""veScale in one import: the public names of its packages, under one name."""

from vescale_checkpoint import CheckpointError as CheckpointError
from vescale_checkpoint import Retention as Retention
from vescale_checkpoint import export_huggingface as export_huggingface
from vescale_checkpoint import load as load
from vescale_checkpoint import reshard as reshard
from vescale_checkpoint import save as save
from vescale_dtensor import DTensor as DTensor
from vescale_dtensor import InterleavedShard as InterleavedShard
from vescale_dtensor import Partial as Partial
from vescale_dtensor import RaggedShard as RaggedShard
from vescale_dtensor import Replicate as Replicate
from vescale_dtensor import Shard as Shard
from vescale_dtensor import ReproducibleError as ReproducibleError
from vescale_dtensor import VescaleError as VescaleError
from vescale_dtensor import breakpoint as breakpoint
from vescale_dtensor import check_premise as check_premise
from vescale_dtensor import comm_trace as comm_trace
from vescale_dtensor import distribute_tensor as distribute_tensor
from vescale_dtensor import local_map as local_map
from vescale_dtensor import register_rule as register_rule
from vescale_dtensor import reproducible as reproducible
from vescale_dtensor import strict as strict
from vescale_pipeline import balanced_cuts as balanced_cuts
from vescale_plans import Boundary as Boundary
from vescale_plans import GlobalBatchSampler as GlobalBatchSampler
from vescale_plans import InfeasibleError as InfeasibleError
from vescale_plans import Pipeline as Pipeline
from vescale_plans import Plan as Plan
from vescale_plans import PlanError as PlanError
from vescale_plans import Precision as Precision
from vescale_plans import SeededSamples as SeededSamples
from vescale_plans import StaticWarning as StaticWarning
from vescale_plans import DryRun as DryRun
from vescale_plans import adopt as adopt
from vescale_plans import dry_run as dry_run
from vescale_plans import expert_drops as expert_drops
from vescale_plans import expert_load as expert_load
from vescale_plans import explain_static as explain_static
from vescale_plans import generate_plan as generate_plan
from vescale_plans import loader as loader
from vescale_plans import no_sync as no_sync
from vescale_plans import register_elementwise as register_elementwise
from vescale_plans import static as static
from vescale_rng import RandomStateError as RandomStateError
from vescale_rng import RandomStreamError as RandomStreamError
from vescale_rng import deferred_init as deferred_init
from vescale_rng import is_deferred as is_deferred
from vescale_rng import manual_seed as manual_seed
from vescale_rng import materialize as materialize
from vescale_rng import rand as rand
from vescale_rng import randint as randint
from vescale_rng import randn as randn
from vescale_rng import randperm as randperm
from vescale_rng import state as _state
from vescale_rng import use_stream as _use_stream

from ._predict import predict as predict
from ._stages import parallelize as parallelize
from ._version import __version__ as __version__
from .compare import compare as compare
from .record import record as record
from .simulate import simulate as simulate
from .timeline import merge_timeline as merge_timeline
from .timeline import timeline as timeline

# Under the names that torch has for its own.
get_rng_state, set_rng_state, fork_rng = _state.get_state, _state.set_state, _state.fork
check_rng_in_step, use_rng_stream = _state.check_in_step, _use_stream
