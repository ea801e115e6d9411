"""Tests of programs on several ranks: ranks that answer within milliseconds, a second device, oracles, generators.

`ranks` tells what a test may rely on, `worker_pool` how it is so fast. Nothing that a training runs imports this.
"""

from ._version import __version__ as __version__
from .agreement import assert_ranks_agree as assert_ranks_agree
from .agreement import full_values as full_values
from .faults.calls import failing as failing
from .faults.calls import intercepted as intercepted
from .faults.calls import killed_at as killed_at
from .faults.calls import short_writes as short_writes
from .faults.world import World as World
from .fitting import fitting as fitting
from .fitting import unnamed as unnamed
from .generators.python_state import python_state_programs as python_state_programs
from .memory.allocations import Allocations as Allocations
from .memory.allocations import allocations as allocations
from .memory.live_bytes import LiveBytes as LiveBytes
from .ports import free_port as free_port
from .ranks import RankError as RankError
from .ranks import RankTimeout as RankTimeout
from .ranks import fake_world as fake_world
from .ranks import mesh_of as mesh_of
from .ranks import raises_on_all as raises_on_all
from .ranks import run_ranks as run_ranks
from .ranks import shutdown as shutdown
from .ranks import warm_up as warm_up
from .slices import in_turns as in_turns
from .slices import slice_of as slice_of
from .worker import dumps as dumps
from .worker import loads as loads
from .worker_pool import WorldStartError as WorldStartError
