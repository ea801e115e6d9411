"""The planner: a model's structure found without names, and plans made from it."""

from .probe_sample import Sample as Sample
from .probe_sample import sample_of as sample_of
from .probe_structure import structure_of as structure_of
from .structure import Blocks as Blocks
from .structure import Experts as Experts
from .structure import Group as Group
from .structure import Source as Source
from .structure import Structure as Structure
from .structure import Vocabulary as Vocabulary
from .tensor_plan import TensorPlan as TensorPlan
from .tensor_plan import tensor_parallel_plan as tensor_parallel_plan
