"""How many copies of the model a run on several nodes has, if `[parallelism] data_parallel_replicate_degree` is 0."""

import dataclasses
import os

from torchtitan.config import JobConfig
from torchtitan.grpo.config.frozen import changed
from torchtitan.grpo.config.jobs import Job
from torchtitan.grpo.config.target import Target
from torchtitan.grpo.dry_run.memory import memory_bytes

TIGHT = 0.9
"""Share of the device's memory from which on what is not counted may no longer fit."""


@dataclasses.dataclass(frozen=True)
class Copies:
    """How the model is spread.

    Attributes:
        degree: `data_parallel_replicate_degree`, at least 1.
        why: In a few words.
    """

    degree: int
    why: str

    def describe(self, world_size: int) -> str:
        """One sentence."""
        ranks = world_size // self.degree
        many = f"{self.degree} copies of the model, each" if self.degree > 1 else "One copy of the model,"
        return f"{many} on {ranks} rank{'s' * (ranks > 1)}: {self.why}"


def ranks_of_node(world_size: int) -> int:
    """How many of `world_size` ranks the first node has, by torchrun's LOCAL_WORLD_SIZE; all without it."""
    return min(int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or world_size, world_size)


def node_count(world_size: int) -> int:
    """Nodes of `world_size` ranks; 1 if nodes differ."""
    here = ranks_of_node(world_size)
    return 1 if world_size % here else world_size // here


def choose_copies(
    config: JobConfig, world_size: int, nodes: int, target: Target, even: bool = True, job: Job = "grpo"
) -> Copies:
    """One copy for each node if it fits there, else one over all ranks.

    FSDP2 gathers every parameter and reduces every gradient within a copy. With a copy on each node, that traffic stays
    on the node's own links, and only the sum of each rank's gradient shards crosses the network (HSDP).

    Args:
        target: The machine of a rank. All ranks of a node share a CPU's memory.
        even: All nodes have the same number of ranks.
        job: What runs.

    Raises:
        UserError: The model folder cannot be read.
    """
    parallel = config.parallelism
    if parallel.data_parallel_replicate_degree:
        return Copies(parallel.data_parallel_replicate_degree, "[parallelism] data_parallel_replicate_degree is set")
    if nodes == 1:
        return Copies(1, "there is one node")
    if parallel.data_parallel_shard_degree != -1:
        return Copies(1, "[parallelism] data_parallel_shard_degree is set")
    if not even or world_size % nodes:
        return Copies(1, "the nodes have different numbers of ranks")
    ranks_here = world_size // nodes
    for key in ("tensor_parallel_degree", "context_parallel_degree"):
        if ranks_here % getattr(parallel, key):
            return Copies(1, f"{key} = {getattr(parallel, key)} does not divide a node's ranks")
    if ranks_here % parallel.expert_parallel_degree:  # without tensor parallelism, which does not go with it
        return Copies(1, f"expert_parallel_degree = {parallel.expert_parallel_degree} does not divide a node's ranks")
    tried = changed(config, {"parallelism.data_parallel_replicate_degree": nodes})
    memory = memory_bytes(tried, world_size, target, job)
    share = memory.total(memory.peak) * (1 if target.cuda else ranks_here) / target.memory_bytes
    device = "a GPU" if target.cuda else "a node"
    if share > TIGHT:
        return Copies(1, f"a copy for each node would take {share:.0%} of the memory of {device}, over {TIGHT:.0%}")
    return Copies(nodes, f"a copy for each node takes {share:.0%} of the memory of {device}")
