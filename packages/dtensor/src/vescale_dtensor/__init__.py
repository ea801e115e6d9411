"""vescale_dtensor: tensors sharded over a device mesh, programmed as if on one device."""

from . import _constructors as _constructors
from . import _methods as _methods
from . import _number as _number
from ._canonical.grid import ReproducibleError as ReproducibleError
from ._canonical.mode import reproducible as reproducible
from ._canonical.premise import check_premise as check_premise
from ._construct import arange as arange
from ._construct import distribute_tensor as distribute_tensor
from ._construct import empty as empty
from ._construct import from_local as from_local
from ._construct import full as full
from ._construct import ones as ones
from ._construct import rand as rand
from ._construct import randn as randn
from ._construct import redistribute as redistribute
from ._construct import zeros as zeros
from ._errors import CommunicationError as CommunicationError
from ._errors import GradientError as GradientError
from ._errors import ImplicitCommunicationError as ImplicitCommunicationError
from ._errors import InternalError as InternalError
from ._errors import MeshError as MeshError
from ._errors import OperatorError as OperatorError
from ._errors import PlacementError as PlacementError
from ._errors import PlainTensorError as PlainTensorError
from ._errors import ShapeError as ShapeError
from ._errors import VescaleError as VescaleError
from ._errors import ViewError as ViewError
from ._fallback import FallbackWarning as FallbackWarning
from ._layout import Layout as Layout
from ._module_hooks import see_globally as _see_globally
from ._recomputation import keep_layouts as _keep_layouts
from ._rules import families as _families
from ._rules.communication import GlobalValueWarning as GlobalValueWarning
from ._tensor import DTensor as DTensor
from ._version import __version__ as __version__
from .debug import Event as Event
from .debug import Trace as Trace
from .debug import breakpoint as breakpoint
from .debug import comm_trace as comm_trace
from .debug import strict as strict
from .extend import from_torch as from_torch
from .extend import local_map as local_map
from .extend import register_function as register_function
from .extend import register_rule as register_rule
from .extend import to_torch as to_torch
from .placement import InterleavedShard as InterleavedShard
from .placement import Partial as Partial
from .placement import Placement as Placement
from .placement import RaggedShard as RaggedShard
from .placement import Replicate as Replicate
from .placement import Shard as Shard

_keep_layouts()
_see_globally()
del _families, _keep_layouts, _see_globally
