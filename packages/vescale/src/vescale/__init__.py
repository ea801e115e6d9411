"""veScale in one import: the public names of its packages under one name."""

from vescale_checkpoint import CheckpointError as CheckpointError
from vescale_checkpoint import ConflictError as ConflictError
from vescale_checkpoint import CorruptError as CorruptError
from vescale_checkpoint import FormatError as FormatError
from vescale_checkpoint import MismatchError as MismatchError
from vescale_checkpoint import PeerError as PeerError
from vescale_checkpoint import Retention as Retention
from vescale_checkpoint import StorageError as StorageError
from vescale_checkpoint import UnsafeError as UnsafeError
from vescale_checkpoint import whole_state_dict as whole_state_dict
from vescale_checkpoint import latest as latest
from vescale_checkpoint import protect as protect
from vescale_checkpoint import reshard as reshard
from vescale_checkpoint import save as save
from vescale_dtensor import CommunicationError as CommunicationError
from vescale_dtensor import DTensor as DTensor
from vescale_dtensor import FallbackWarning as FallbackWarning
from vescale_dtensor import GlobalValueWarning as GlobalValueWarning
from vescale_dtensor import GradientError as GradientError
from vescale_dtensor import ImplicitCommunicationError as ImplicitCommunicationError
from vescale_dtensor import InterleavedShard as InterleavedShard
from vescale_dtensor import InternalError as InternalError
from vescale_dtensor import MeshError as MeshError
from vescale_dtensor import OperatorError as OperatorError
from vescale_dtensor import Partial as Partial
from vescale_dtensor import PlacementError as PlacementError
from vescale_dtensor import PlainTensorError as PlainTensorError
from vescale_dtensor import RaggedShard as RaggedShard
from vescale_dtensor import Replicate as Replicate
from vescale_dtensor import ReproducibleError as ReproducibleError
from vescale_dtensor import ShapeError as ShapeError
from vescale_dtensor import Shard as Shard
from vescale_dtensor import VescaleError as VescaleError
from vescale_dtensor import ViewError as ViewError
from vescale_dtensor import breakpoint as breakpoint
from vescale_dtensor import check_premise as check_premise
from vescale_dtensor import comm_trace as comm_trace
from vescale_dtensor import distribute_tensor as distribute_tensor
from vescale_dtensor import explain as explain
from vescale_dtensor import explaining as explaining
from vescale_dtensor import local_map as local_map
from vescale_dtensor import register_rule as register_rule
from vescale_dtensor import reproducible as reproducible
from vescale_dtensor import strict as strict
from vescale_dtensor import zigzag as zigzag
from vescale_pipeline import PipelineError as PipelineError
from vescale_pipeline import PipelineFailure as PipelineFailure
from vescale_pipeline import ScheduleError as ScheduleError
from vescale_pipeline import balanced_cuts as balanced_cuts
from vescale_plans import Boundary as Boundary
from vescale_plans import InfeasibleError as InfeasibleError
from vescale_plans import Pipeline as Pipeline
from vescale_plans import Plan as Plan
from vescale_plans import PlanError as PlanError
from vescale_plans import Precision as Precision
from vescale_plans import SharedMemoryWarning as SharedMemoryWarning
from vescale_plans import CompileWarning as CompileWarning
from vescale_plans import DryRun as DryRun
from vescale_plans import adopt as adopt
from vescale_plans import expert_drops as expert_drops
from vescale_plans import expert_load as expert_load
from vescale_plans import explain_calls as explain_calls
from vescale_plans import explain_compile as explain_compile
from vescale_plans import loader as loader
from vescale_plans import no_sync as no_sync
from vescale_plans import register_elementwise as register_elementwise
import vescale_rng as _rng
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

from vescale_trace.arguments import typed_facade as _typed_facade

from ._planning.dry_run import dry_run as dry_run
from ._planning.dry_run import generate_plan as generate_plan
from ._planning.from_config import plan_from_config as plan_from_config
from ._planning.predict import predict as predict
from ._reshape import reshape as reshape
from ._stages import parallelize as parallelize
from ._version import __version__ as __version__
from .compare import compare as compare
from .metrics import JSONLines as JSONLines
from .metrics import ProgressLine as ProgressLine
from .metrics import TensorBoard as TensorBoard
from .metrics import Values as Values
from .metrics import WandB as WandB
from .metrics import metrics as metrics
from .pretrained import export_huggingface as export_huggingface
from .pretrained import from_pretrained as from_pretrained
from .pretrained import load as load
from .record import record as record
from .simulate import simulate as simulate
from .timeline import merge_timeline as merge_timeline
from .timeline import timeline as timeline

# Under the names that torch has for its own.
get_rng_state, set_rng_state, fork_rng = _rng.get_state, _rng.set_state, _rng.fork
check_rng_in_step, use_rng_stream = _rng.check_in_step, _rng.use_stream
_typed_facade(globals(), VescaleError, JSONLines, ProgressLine, TensorBoard, Values, WandB)
