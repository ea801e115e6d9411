"""What the other veScale packages build on: the engine's own vocabulary, not meant for users.

Plans convert at module borders, reduce gradients and open memo scopes; random
numbers and checkpoints read regions. Nothing here is a promise to anybody else.
"""

from ._collectives import PendingSum as PendingSum
from ._collectives import exchange_rows as exchange_rows
from ._collectives import gather_objects as gather_objects
from ._conversion import communicates as communicates
from ._convert import convert as convert
from ._convert import convert_plain as convert_plain
from ._convert import from_plain as from_plain
from ._copies import check_writable as check_writable
from ._events import current_cause as current_cause
from ._events import is_strict as is_strict
from ._events import is_users as is_users
from ._events import set_cause as set_cause
from ._events import set_watch as set_watch
from ._events import user_line as user_line
from ._fallback import gathered as gathered
from ._gradient import after_backward as after_backward
from ._gradient import in_backward as in_backward
from ._gradient import settled_layout as settled_layout
from ._layout import canonical_states as canonical_states
from ._layout import layout_of as layout_of
from ._memo import close_scope as close_scope
from ._memo import forget_all as forget_all
from ._memo import open_scope as open_scope
from ._mesh import Mesh as Mesh
from ._mesh import mesh_of as mesh_of
from ._region import Box as Box
from ._rules.attention import attention as attention
from ._rules.body import body_of as body_of
from ._rules.pointwise import elementwise as elementwise
from ._rules.registry import TABLE as TABLE
from ._rules.registry import handler as handler
from ._state import INVARIANT as INVARIANT
from ._state import PENDING as PENDING
from ._state import VARYING as VARYING
from ._state import State as State
from ._state import flat as flat
from ._state import sharded as sharded
from ._static_compare import Difference as Difference
from ._static_compare import Pairs as Pairs
from ._static_compare import first_difference as first_difference
from ._static_compare import graph_difference as graph_difference
from ._static_compare import same_bits as same_bits
from ._static_erase import convert_erased as convert_erased
from ._static_erase import erase as erase
from ._static_erase import restore as restore
from ._static_erase import route_between as route_between
from ._static_tape import Conversion as Conversion
from ._static_tape import Crossing as Crossing
from ._static_tape import Op as Op
from ._static_tape import Ref as Ref
from ._static_tape import Storages as Storages
from ._static_tape import Tape as Tape
from ._static_tape import Taping as Taping
from ._static_tape import grad_state as grad_state
from ._static_tape import refs_of as refs_of
from ._steps import Route as Route
from ._tensor import local_only as local_only
from ._tensor import requires_grad as requires_grad
from ._tensor import settle as settle
from ._tensor import stamp as stamp
from ._tensor import take_pending_grad as take_pending_grad
