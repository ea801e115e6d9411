"""Imports every family, which fills the table."""

from . import attention as attention
from . import classes as classes
from . import conv as conv
from . import embedding as embedding
from . import extremum as extremum
from . import fresh as fresh
from . import gather as gather
from . import index as index
from . import index_tensor as index_tensor
from . import join as join
from . import loss as loss
from . import matmul as matmul
from . import metadata as metadata
from . import norm as norm
from . import optim as optim
from . import pad as pad
from . import pointwise as pointwise
from . import python as python
from . import random as random
from . import reduce as reduce
from . import search as search
from . import shape as shape
from . import softmax as softmax
from . import view as view
