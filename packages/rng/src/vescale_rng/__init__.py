"""vescale_rng: random numbers on sharded tensors that equal one device's, bit for bit.

Importing it registers its rules with vescale_dtensor, in place of those that draw the whole.
"""

from . import _attention as _attention
from . import _dropout as _dropout
from . import _fills as _fills
from ._factories import rand as rand
from ._factories import randint as randint
from ._factories import randn as randn
from ._factories import randperm as randperm
from ._version import __version__ as __version__

del _attention, _dropout, _fills
