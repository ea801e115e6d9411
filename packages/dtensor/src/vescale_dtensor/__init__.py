"""vescale_dtensor: tensors sharded over a device mesh, programmed as if on one device."""

from vescale_trace.arguments import typed_facade as _typed_facade

from ._debugger.origins import explain as explain
from ._debugger.origins import explaining as explaining
from ._tensor import constructors as _constructors  # noqa: F401 - replaces functions of torch
from ._tensor import exchange as _exchange  # noqa: F401 - replaces a function of torch
from ._tensor import methods as _methods  # noqa: F401 - replaces functions of torch
from ._dispatch import number as _number  # noqa: F401 - replaces functions of torch
from ._reproducible.grid import ReproducibleError as ReproducibleError
from ._reproducible.mode import reproducible as reproducible
from ._reproducible.premise import check_premise as check_premise
from ._tensor.construct import arange as arange
from ._tensor.construct import distribute_tensor as distribute_tensor
from ._tensor.construct import empty as empty
from ._tensor.construct import from_local as from_local
from ._tensor.construct import full as full
from ._tensor.construct import ones as ones
from ._tensor.construct import rand as rand
from ._tensor.construct import randn as randn
from ._tensor.construct import redistribute as redistribute
from ._tensor.construct import zeros as zeros
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
from ._dispatch.fallback import FallbackWarning as FallbackWarning
from ._layouts.layout import Layout as Layout
from ._tensor.module_hooks import see_globally as _see_globally
from ._tensor.recomputation import keep_layouts as _keep_layouts
from ._rules import families as _families
from ._rules.doors.communication import GlobalValueWarning as GlobalValueWarning
from ._tensor.tensor import DTensor as DTensor
from ._torch_range import warn_if_unsupported as _warn_if_unsupported
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
from .placement import zigzag as zigzag

_warn_if_unsupported()
_keep_layouts()
_see_globally()
_typed_facade(globals(), VescaleError, InterleavedShard, RaggedShard)
del _families, _keep_layouts, _see_globally
