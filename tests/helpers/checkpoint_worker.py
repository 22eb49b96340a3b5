"""A tiny trainer for test_checkpoint, in-process or under torchrun. It uses AdamW, a schedule and every generator.

Usage: checkpoint_worker.py train DUMP OUT STEPS [resume] [async]   trains, saves at step 2, writes losses and digests;
                                                             with async, that is written after the last step
       checkpoint_worker.py save-forever DUMP                saves step 1, 2, ... whose weights all equal the step
       checkpoint_worker.py stop-in-save DUMP ASYNC_MODE     saves step 1, then hangs in the writing of step 2
       checkpoint_worker.py fail-in-save DUMP OUT            a rank fails on its own, then inside a collective
       checkpoint_worker.py fail-in-thread DUMP OUT          the same in the threads that write
"""

import hashlib
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerFast

import torchtitan  # noqa: F401  the overlay's shims come first
from torchtitan.components.optimizer import OptimizersContainer, build_optimizers
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.grpo.checkpoint.checkpointer import Checkpointer
from torchtitan.grpo.checkpoint.together import Together
from torchtitan.grpo.checkpoint.writing import Taken, Writer
from torchtitan.grpo.model.parallelize import build_model
from torchtitan.grpo.model.source import resolve_model
from torchtitan.grpo.policy.microbatch import Microbatch
from torchtitan.grpo.policy.packing import pack
from torchtitan.grpo.policy.rows import PackedSample
from torchtitan.grpo.run.policy import schedulers

WORKER = Path(__file__)
TINY = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    vocab_size=61,  # odd, so that shards are uneven
    hidden_size=32,
    intermediate_size=45,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)


def checkpoint_section(**changes) -> SimpleNamespace:
    keys = dict(enable=True, folder="checkpoint", interval=2, keep_latest_k=2, load_step=-1)
    return SimpleNamespace(
        **keys | {"resume": False, "export_dtype": "none", "keep_best": "", "async_mode": "disabled"} | changes
    )


class TinyTrainer:
    """The state of a run that grpo_train.py resumes."""

    def __init__(
        self, dump: Path, *, reference: bool = False, settings: Mapping[str, Any] = MappingProxyType({}), **checkpoint
    ) -> None:
        if dist.get_rank() == 0:
            dump.mkdir(parents=True, exist_ok=True)
            (dump / "config.json").write_text(json.dumps(TINY))
        dist.barrier()
        section = SimpleNamespace(hf_assets_path=str(dump), weights="random")
        self.source = resolve_model(section, TINY["max_position_embeddings"])
        config = JobConfig()
        config.training = SimpleNamespace(
            dtype="float32",
            mixed_precision_param="float32",
            mixed_precision_reduce="float32",
            seq_len=64,
            kept_logits_mib=1,
            logits_dtype="float32",
            flash_attention="auto",
        )
        config.activation_checkpoint.mode = "none"
        config.optimizer.lr = 0.01
        config.lr_scheduler.warmup_steps = 3
        for path, value in settings.items():
            section, _, key = path.partition(".")
            setattr(getattr(config, section), key, value)
        world = dist.get_world_size()
        dims = ParallelDims(1, world, 1, 1, 1, 1, 1, world)
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        self.model = build_model(self.source, config, dims, torch.device("cpu"))
        self.reference = build_model(self.source, config, dims, torch.device("cpu"), trainable=False)
        self.optimizers = build_optimizers([self.model], config.optimizer, dims)
        self.lr_schedulers = schedulers(self.optimizers, config.lr_scheduler, settings.get("training.steps", 8))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
        self.step = 0
        self.losses: list[float] = []
        self.drawn = b""
        config.checkpoint, config.lora = checkpoint_section(**checkpoint), SimpleNamespace(merge=False)
        config.job.dump_folder = str(dump)
        names = {"model": self.model, "optimizers": self.optimizers, "lr_schedulers": self.lr_schedulers}
        policy = SimpleNamespace(reference=self.reference if reference else None, **names)
        run_config = {"optimizer.lr": config.optimizer.lr}
        self.checkpointer = Checkpointer(config, policy, self, self.source, tokenizer, run_config)

    def state_dict(self) -> dict:
        return {"step": self.step, "losses": list(self.losses), "drawn": self.drawn}

    def load_state_dict(self, state: dict) -> None:
        self.step, self.losses = state["step"], state["losses"]
        assert (state["drawn"] is None) == (dist.get_rank() > 0), "rank 0 alone has what is large"
        self.drawn = state["drawn"] or b""

    def train_step(self) -> None:
        """One AdamW step on a sample that is drawn from the three random generators."""
        answer = torch.randint(3, 61, (20,)).tolist()
        self.drawn += bytes(answer)
        sample = PackedSample([random.randrange(3, 61)], answer, float(np.random.randn()), 0.05, [0.0] * 20)
        row = Microbatch.of(pack([sample], 64, 1)[0][0], "cpu")
        self.optimizers.zero_grad()
        logprobs, _ = self.model(row, 1.0)
        loss = -(row.weights * row.advantages) @ logprobs
        loss.backward()
        self.optimizers.step()
        self.lr_schedulers.step()
        self.step += 1
        self.losses.append(loss.item())

    def digest(self) -> str:
        """SHA-256 of every bit of weights, AdamW state and schedule."""
        tensors = self.model.state_dict() | self.optimizers.state_dict()
        digest = hashlib.sha256(repr(self.lr_schedulers.state_dict()).encode())
        for name in sorted(tensors):
            value = tensors[name].full_tensor() if isinstance(tensors[name], DTensor) else tensors[name]
            content = value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
            digest.update(name.encode() + content)
        return digest.hexdigest()


def saved_at(dump: Path, *steps: int, **checkpoint) -> TinyTrainer:
    """A trainer that has trained to the last of `steps` and saved at each."""
    trainer = TinyTrainer(dump, **checkpoint)
    while trainer.step < steps[-1]:
        trainer.train_step()
        if trainer.step in steps:
            trainer.checkpointer.save(trainer.step)
    return trainer


@contextmanager
def slow_disk() -> Iterator[threading.Event]:
    """Nothing of a checkpoint is written until the event is set."""
    may_write = threading.Event()
    clear = Writer._clear

    def clear_later(self: Writer, unfinished: Path) -> None:
        assert may_write.wait(60)
        clear(self, unfinished)

    with patch.object(Writer, "_clear", clear_later):
        yield may_write


def train(dump: Path, out: str, steps: int, resume: bool, in_thread: bool) -> None:
    mode = "async" if in_thread else "disabled"
    trainer = TinyTrainer(dump, resume=resume, async_mode=mode, export_dtype="float32")
    loaded = trainer.checkpointer.load_latest()
    digests = {loaded: trainer.digest()}
    with slow_disk() as may_write:
        if not in_thread:
            may_write.set()
        while trainer.step < steps:
            trainer.train_step()
            digests[trainer.step] = trainer.digest()
            if trainer.step == 2:
                trainer.checkpointer.save(2)
        assert (dump / "checkpoint" / "step-2").exists() != in_thread
        may_write.set()
        trainer.checkpointer.finish()
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps({"loaded": loaded, "losses": trainer.losses, "digests": digests}))


def save_forever(dump: Path) -> None:
    trainer = TinyTrainer(dump)
    while True:
        trainer.step += 1
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.fill_(trainer.step)
        trainer.checkpointer.save(trainer.step)


def stop_in_save(dump: Path, async_mode: str) -> None:
    complete = Writer._complete

    def hang(self: Writer, unfinished: Path, path: Path, taken: Taken, *rest: Any) -> None:
        if taken.step == 2:
            print("in the save", flush=True)
            time.sleep(600)
        complete(self, unfinished, path, taken, *rest)

    trainer = TinyTrainer(dump, async_mode=async_mode)
    with patch.object(Writer, "_complete", hang):
        for step in (1, 2, 3):
            trainer.train_step()
            print(f"trained step {step}", flush=True)
            trainer.checkpointer.save(step)


def fail_in_save(dump: Path, out: str) -> None:
    """Saves step 1. In the save of step 2 the last rank's optimizer raises. Step 3 is saved. Then the last
    rank is late for a stage, and in the save of step 4 it raises while the model is gathered. Each rank writes what it
    learned each time, and after how long.
    """
    trainer = TinyTrainer(dump, export_dtype="float32")
    rank = dist.get_rank()
    last_rank = rank == dist.get_world_size() - 1
    learned = []

    def fail(*_: object) -> None:
        raise OSError("broken on purpose")

    def learn(action: Callable[..., object], *arguments: object) -> None:
        started, said = time.monotonic(), ""
        try:
            action(*arguments)
        except RuntimeError as error:
            said = str(error)
        learned.append((said, time.monotonic() - started))
        Path(f"{out}-{rank}").write_text(json.dumps(learned))

    def save(last: bool) -> None:
        trainer.train_step()
        trainer.checkpointer.save(trainer.step, last)

    learn(save, False)
    with patch.object(OptimizersContainer, "state_dict", fail) if last_rank else nullcontext():
        learn(save, True)
    learn(save, False)
    learn(Together(1.0).locally, "sleeping", lambda: time.sleep(2 * last_rank))
    with patch.object(DTensor, "full_tensor", fail) if last_rank else nullcontext():
        learn(save, False)
    os._exit(0)  # as a rank that failed: without the others


def fail_in_thread(dump: Path, out: str) -> None:
    """Step 1 is saved. The last rank's file of step 2 cannot be written; of step 3 it fails inside DCP's collective.
    Each rank writes how it learned.
    """
    trainer = TinyTrainer(dump, async_mode="async")
    rank = dist.get_rank()
    on_last_rank = rank == dist.get_world_size() - 1
    learned: list[Any] = []

    def fail(*_: object, **__: object) -> None:
        raise OSError("broken on purpose")

    def save_and_train() -> None:
        """Train until the step's save is over."""
        trainer.train_step()
        trainer.checkpointer.save(trainer.step)
        saved = trainer.step
        deadline = time.monotonic() + 30
        while trainer.checkpointer._pending is not None and time.monotonic() < deadline:
            time.sleep(0.01)
            metrics = trainer.checkpointer.metrics()
        learned.append([saved, metrics["checkpoint/failed"]])

    save_and_train()
    with patch.object(Path, "write_bytes", fail) if on_last_rank else nullcontext():
        save_and_train()
    try:
        with patch("torch.distributed.checkpoint.save", fail) if on_last_rank else nullcontext():
            save_and_train()
    except RuntimeError as error:
        learned.append(str(error))
    Path(f"{out}-{rank}").write_text(json.dumps(learned))
    os._exit(0)  # as a rank that failed: without the others


if __name__ == "__main__":
    dist_utils.init_distributed(JobConfig().comm, base_folder=".")
    if sys.argv[1] == "train":
        train(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), "resume" in sys.argv, "async" in sys.argv)
    elif sys.argv[1] == "save-forever":
        save_forever(Path(sys.argv[2]))
    elif sys.argv[1] == "fail-in-save":
        fail_in_save(Path(sys.argv[2]), sys.argv[3])
    elif sys.argv[1] == "fail-in-thread":
        fail_in_thread(Path(sys.argv[2]), sys.argv[3])
    else:
        stop_in_save(Path(sys.argv[2]), sys.argv[3])
    dist.destroy_process_group()
