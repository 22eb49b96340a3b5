"""grpo_train.py whose step 3 leaves a NaN in a weight, on the last rank only."""

import sys
from typing import Any

import torch
import torch.distributed as dist

import grpo_train
from torchtitan.grpo.host_memory.pinned import local_tensor
from torchtitan.grpo.process.stopping import run_and_exit

STEP = 3


class Trainer(grpo_train.Trainer):
    def update(self, batch: grpo_train.Batch) -> Any:
        learned = super().update(batch)
        if self.step == STEP and dist.get_rank() == dist.get_world_size() - 1:
            with torch.no_grad():
                local_tensor(next(self.policy.model.parameters())).view(-1)[-1] = torch.nan
        return learned


if __name__ == "__main__":
    run_and_exit(lambda: grpo_train.main(sys.argv[1:], Trainer))
