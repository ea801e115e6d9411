"""The planner: a model's structure found without names, and plans made from it."""

from .probing.sample import sample_of as sample_of
from .probing.find_structure import structure_of as structure_of
from .pricing.sizes import sizes_of as sizes_of
from .structure import Experts as Experts
from .structure import Structure as Structure
from .tensor_plan import split_parameters as split_parameters
from .tensor_plan import tensor_parallel_plan as tensor_parallel_plan
from .candidates import Candidate as Candidate
from .pricing.cost import cost_of as cost_of
from .explain import Explanation as Explanation
from .generate import generate_plan as generate_plan
from .generate import plan_of as plan_of
from .pricing.hardware import Curve as Curve
from .pricing.hardware import Hardware as Hardware
from .pricing.hardware import Link as Link
from .pricing.hardware import Product as Product
from .pricing.profiles import hardware_of as hardware_of
from .pricing.memory import memory_of as memory_of
from .pricing.predict import Prediction as Prediction
from .pricing.predict import predict as predict
from .pricer import Request as Request
from .ranking import rank as rank
from .refusals import InfeasibleError as InfeasibleError
from .stages import Cutter as Cutter
from .stages import Part as Part
from .generate import MOST as MOST
