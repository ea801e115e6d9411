"""A second device without hardware, for tests: what is right on it has a chance of being right on CUDA and NCCL.

    device.cpp, backend.cpp   the device `second` (torch's PrivateUse1) and the shell of its process group
    streams.cpp               what its streams have come after, and copies beside the host
    graphs.cpp                what a graph of it repeats, and what a capture may not do
    autocast.cpp              its autocast, which is CUDA's
    _build                    compiles them, once per machine
    _extension                loads what was compiled
    _device                   registers the device; which calls made the host wait for it
    _sites                    who asked, as host waits and errors name it
    _wire                     messages between the processes of a machine
    _queue                    what a communicator runs, one after the other, on its own stream
    _group                    the process group: NCCL's manners, at their worst
    _communicator, _collectives, _transfers, _work   its parts: what both have in common, and a call in flight
    _numbers                  which tensors it takes, and how it adds them up
    _memory                   what is in flight may be neither read, where it is output, nor written

Tensors of `second` lie in host memory and run the CPU's kernels. They refuse to be mixed with the CPU's, backward runs
on autograd's device thread, random numbers come from a generator of the device's own, and everything that would make
the host wait for a GPU is counted, by call site. The generator gives the CPU's sequence (mt19937), so that dropout on
`second` is dropout on the CPU from the same seed. `ranks.run_ranks(..., device="second")` runs a test on it.
"""

from ._build import BuildError as BuildError
from ._build import library as library
from ._communicator import check_at_rest as check_at_rest
from ._communicator import forget_undelivered as forget_undelivered
from ._device import HostWaits as HostWaits
from ._device import host_waits as host_waits
from ._device import register as register
