"""`[offload]`, `[activation_checkpoint] offload` and `[checkpoint] async_mode`: state in pinned host memory.

    offloading.py          `Offloading`: the whole section as one object for the trainer; `HostedWeights`: the
                           reference model's weights on the host between uses
    optimizer_states.py    `OptimizerStateOffload`: the state leaves during log-probabilities and comes back
                           `HostOptimizerStates`: the state lives on the host and streams through each step
    block_inputs.py        `BlockInputs`: what activation checkpointing keeps, from forward to backward pass
    pinned.py              `CopyStream`: copies beside the compute stream, and their seconds; `PinnedTwin`: device
                           storages and their host memory
    host_copy.py           what an async checkpoint saves, in host memory while a thread writes it

grpo_train.py -> offloading -> optimizer_states -> pinned. Storages are emptied and filled again, so tensors stay the
same objects and results stay bitwise the same. Device events order the copies.
"""
