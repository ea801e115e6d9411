"""Loading under a plan: `loader` gives every rank its part of the batches of any DataLoader.

    _loader     what stands in the DataLoader's place: iterates, counts, is saved and goes on
    _cut        which rows of a batch are this rank's, and DTensors of what they became
    _indexed    datasets with indices: a batch sampler of this rank's indices, samples drawn by their place
    _streamed   iterable datasets: each batch's samples of this rank, the others read and left
"""

from ._loader import Loader as Loader
from ._loader import loader as loader
