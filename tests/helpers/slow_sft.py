"""sft_train.py whose steps take longer: a test that hits a run needs time to do so."""

import sys
import time

import sft_train
from torchtitan.grpo.process.stopping import run_and_exit

PAUSE_S = 0.1


class Trainer(sft_train.SftTrainer):
    def train_step(self) -> None:
        super().train_step()
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    run_and_exit(lambda: sft_train.run_job(sys.argv[1:], Trainer, "sft"))
