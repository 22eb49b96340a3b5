"""What each node of a run has: GPUs with their processes, and host memory."""

from collections.abc import Sequence

from torchtitan.config import JobConfig
from torchtitan.grpo.checkpoint.disk import mib
from torchtitan.grpo.config.machine import shares_gpu
from torchtitan.grpo.config.target import Target, host_bytes
from torchtitan.grpo.dry_run.memory import Memory, sent_bytes
from torchtitan.grpo.servers.plan import planned_servers, reads_files


def gpu_lines(config: JobConfig, world_size: int, ranks_here: int, target: Target, node_gpus: int) -> list[str]:
    """Which GPU each process has, and whether the nodes have them all.

    Args:
        ranks_here: Of a node.
        node_gpus: GPUs of a node; 0 for CPUs.
    """
    if not target.cuda:
        return ["GPUs: none"]
    servers = planned_servers(config, node_gpus, 0 if config.ray.enable else ranks_here)
    shares = config.rollout.colocate or shares_gpu(config, node_gpus, ranks_here)
    beside = 0 if shares else sum(len(server.gpus or ()) for server in servers)
    of_servers = f", {beside} of them for servers" if beside else ", which servers share" if servers else ""
    elsewhere = ", besides those of [rollout] urls" if config.rollout.urls or config.rollout.urls_file else ""
    lines = [f"GPUs: {world_size + beside} in all{of_servers}{elsewhere}"]
    if config.ray.enable:
        return [*lines, "  on the nodes that Ray chooses"]
    nodes = -(-world_size // ranks_here)
    each = " of each" if nodes > 1 else ""
    lines.append(f"  node {_span(range(nodes))}, GPU {_span(range(ranks_here))}{each}: rank {_span(range(world_size))}")
    if (needed := ranks_here + beside) > node_gpus:
        lines += [
            f"  does NOT fit: node 0 would need {needed} GPUs, and is taken to have {node_gpus}. Plan fewer ranks,",
            "  nodes of L ranks by WORLD_SIZE and LOCAL_WORLD_SIZE=L, or servers elsewhere by [rollout] urls",
        ]
    return lines


def host_lines(config: JobConfig, ranks_here: int, target: Target, memory: Memory, publishes: bool) -> list[str]:
    """Host memory of a node with so many ranks, of which one is rank 0."""
    rows = [(name, size, ranks_here) for name, size in memory.on_host.items() if size]
    rollout = config.rollout
    several = len(rollout.urls) > 1 or rollout.urls_file
    several = several or rollout.replicas > rollout.colocate  # one on the trainer's GPU does not fall behind
    if publishes and several and config.weight_sync.transport != "disk" and not reads_files(config):
        rows.append(("copy for servers behind", memory.trained * sent_bytes(config, target), 1))
    if not rows:
        return []
    total = sum(size * ranks for _, size, ranks in rows)
    share = f"{total / host_bytes():.0%} of this machine's" if target.here else ""
    return [
        f"host memory of a node with {ranks_here} rank{'s' * (ranks_here > 1)}, besides that of its processes",
        *(f"  {name:<28}{mib(size):>14}  of {'each rank' if ranks > 1 else 'rank 0'}" for name, size, ranks in rows),
        f"  {'the node':<28}{mib(total):>14}  {share}".rstrip(),
    ]


def _span(numbers: Sequence[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"
