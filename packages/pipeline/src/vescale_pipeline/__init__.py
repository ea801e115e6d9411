"""Pipeline parallelism without a graph: schedules as data, proofs of their correctness, their simulation, and a
runtime.
"""

from vescale_trace.arguments import typed_facade as _typed_facade

from ._errors import PipelineError as PipelineError
from ._errors import ScheduleError as ScheduleError
from ._transport.faults import PipelineFailure as PipelineFailure
from .schedules.proofs.communication import add_communication as add_communication
from .action import Action as Action
from .action import Schedule as Schedule
from .balance import balanced_cuts as balanced_cuts
from .draw import chrome_trace as chrome_trace
from .draw import draw as draw
from .recording import record_events as record_events
from .schedules import generate as generate
from .simulate import Costs as Costs
from .simulate import Event as Event
from .simulate import Simulation as Simulation
from .simulate import peak_memory as peak_memory
from .simulate import simulate as simulate
from .verify import Verdict as Verdict
from .verify import verify as verify
from ._version import __version__ as __version__

_typed_facade(globals(), ScheduleError, Costs, Schedule, Simulation)
