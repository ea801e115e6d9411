"""NCCL between ranks that share a GPU: each is a host of its own to it, and talks over the loopback's sockets.

NCCL refuses two ranks on one device of one host, and knows a host by the hash of its name, in whose place NCCL_HOSTID
may stand (`init.cc`, 2.28). From 2.30 on NCCL_MULTI_RANK_GPU_ENABLE allows it, with the transports within a host.
Two thread blocks of a collective leave the GPU to the other ranks' kernels, whose contexts take turns.
"""

from __future__ import annotations

import os

import torch

ALONE = {
    "NCCL_MAX_CTAS": "2", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NVLS_ENABLE": "0", "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET_PLUGIN": "none", "NCCL_NET_GDR_LEVEL": "LOC",
}  # fmt: skip
HOST_EACH = {
    "NCCL_NET": "Socket", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
}  # fmt: skip


def settings(rank: int, world: int) -> dict[str, str]:
    """Returns what NCCL reads in the environment of a rank; nothing where each rank has a GPU."""
    if torch.cuda.device_count() >= world:
        return {}
    if torch.cuda.nccl.version() >= (2, 30):
        return ALONE | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return ALONE | HOST_EACH | {"NCCL_HOSTID": f"rank-{rank}"}


def prepare(rank: int, world: int) -> None:
    """Makes this process, which has not used CUDA, a rank of such a world; `cpu:gloo,cuda:nccl` is its backend."""
    os.environ.update(settings(rank, world))
    torch.cuda.set_device(rank % torch.cuda.device_count())
