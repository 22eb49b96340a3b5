"""The transports, one row each: `[weight_sync] transport`. Standard library only: configuration and servers read it.

`weight_sync.link` is the trainer's end of those with a process group, `weight_sync.disk` of those through a folder.
`receiver.py` is the server's end of both.
"""

from dataclasses import dataclass

_GROUPS = "torchtitan.grpo.weight_wire.transport"


@dataclass(frozen=True)
class Transport:
    """One transport.

    Attributes:
        join: "module:function" that joins a process group of trainer rank 0 and one server: (store, rank, size, device,
            timeout_s, address) -> what has torch's `broadcast` and `allreduce`. "": versions go through a folder.
        own_gpus: Both ends are on CUDA, each on GPUs of its own.
        shares_memory: Both ends are on one machine, on CUDA on one GPU: the server reads the trainer's own buckets.
        can_abort: The group can give up an operation that is under way. Else each ends by its own timeout.
    """

    join: str = ""
    own_gpus: bool = False
    shares_memory: bool = False
    can_abort: bool = True


TRANSPORTS = {
    "nccl": Transport(f"{_GROUPS}:join_nccl", own_gpus=True),
    "gloo": Transport(f"{_GROUPS}:join_gloo", can_abort=False),
    "ipc": Transport(f"{_GROUPS}:join_memory", shares_memory=True),
    "disk": Transport(),
}
"""By name. To add one: a row here, and the function that it names."""

ABANDONED = "abandoned"
"""The key in a group's store with which rank 0 tells that it has given the group up."""


def needs_own_gpus(name: str) -> bool:
    """Whether a value of `[weight_sync] transport` names one with `own_gpus`; "auto" names none yet."""
    return name in TRANSPORTS and TRANSPORTS[name].own_gpus
