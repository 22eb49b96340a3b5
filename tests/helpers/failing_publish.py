"""grpo_train.py whose step 2 fails while it is published: FAILS is "server" (killed before) or a rank's number."""

import os
import signal
import sys
import time

import torch.distributed as dist

import grpo_train
from torchtitan.grpo.process.stopping import run_and_exit

STEP = 2


class Trainer(grpo_train.Trainer):
    def publish(self, wait: bool = False) -> None:
        fails = os.environ["FAILS"]
        if self.step == STEP and fails == "server" and self.is_rank0:
            os.kill(int(os.environ["SERVER"]), signal.SIGKILL)
            while not self.rollouts.fleet.servers[0].lost:
                time.sleep(0.05)
        if self.step == STEP and fails == str(dist.get_rank()):
            raise RuntimeError("no memory is left")
        super().publish(wait)


if __name__ == "__main__":
    run_and_exit(lambda: grpo_train.main(sys.argv[1:], Trainer))
