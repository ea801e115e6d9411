"""vescale_rng: random numbers on sharded tensors that are bitwise those of one device.

Importing it registers its rules with vescale_dtensor. They replace the rules that draw the whole tensor on every rank.
"""

from vescale_trace import VescaleError as _VescaleError
from vescale_trace.arguments import typed_facade as _typed_facade
from vescale_trace.arguments import typed_methods as _typed_methods

from ._draws import attention as _attention
from ._draws import choices as _choices
from ._draws import dropout as _dropout
from ._draws import fills as _fills
from ._draws import rrelu as _rrelu
from ._cuda.fill import use_geometry as use_geometry
from ._cuda.launch import Geometry as Geometry
from ._deferred.deferred import attributes_of as attributes_of
from ._deferred.deferred import deferred_init as deferred_init
from ._deferred.deferred import is_deferred as is_deferred
from ._draws.factories import rand as rand
from ._draws.factories import randint as randint
from ._draws.factories import randn as randn
from ._draws.factories import randperm as randperm
from ._deferred.materialize import distribute as distribute
from ._deferred.materialize import materialize as materialize
from ._deferred.materialize import is_unwritten as is_unwritten
from ._deferred.materialize import materialize_shard as materialize_shard
from ._deferred.materialize import recorded as recorded
from ._select import RandomStreamError as RandomStreamError
from ._select import current_stream as current_stream
from ._select import manual_seed as manual_seed
from ._select import use_stream as use_stream
from ._version import __version__ as __version__
from .state import RandomStateError as RandomStateError
from .state import check_in_step as check_in_step
from .state import fork as fork
from .state import get_state as get_state
from .state import set_state as set_state

_typed_facade(globals(), _VescaleError, Geometry, use_geometry)
_typed_methods(use_stream, RandomStreamError)
del _attention, _choices, _dropout, _fills, _rrelu
