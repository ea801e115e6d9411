"""Pipeline parallelism without a graph: schedules as data."""

from ._errors import PipelineError as PipelineError
from ._errors import ScheduleError as ScheduleError
from ._communication import add_communication as add_communication
from .action import Action as Action
from .action import Schedule as Schedule
from .schedules import generate as generate
from ._version import __version__ as __version__
