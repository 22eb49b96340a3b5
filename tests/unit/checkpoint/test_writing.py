"""With `async_mode` the trainer's state is captured by training's thread, and written by the other."""

import json
import time
from collections.abc import Iterator

import msgspec
import pytest
import torch.distributed as dist

from tests.helpers.checkpoint_worker import TinyTrainer, slow_disk
from torchtitan.grpo.data.group_arrays import to_bytes
from torchtitan.grpo.data.samples import Prompt, Sample
from torchtitan.grpo.rollouts.buffer import StalenessBuffer


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class WithGroups(TinyTrainer):
    """Complete groups wait for their step: some 9 MiB, so that all else that a save does is little beside them."""

    def __init__(self, *arguments, **keys) -> None:
        super().__init__(*arguments, **keys)
        self.buffer = StalenessBuffer(16, 4, 64)
        for number in range(48):
            entry = self.buffer.add(Prompt(number, [1], ""))
            self.buffer.begin(entry, 0)
            tokens = range(2048)
            samples = [
                Sample(entry.prompt, list(tokens), [-t / 7 for t in tokens], [0] * 2048, "stop") for _ in range(8)
            ]
            for sample in samples:
                sample.reward = 1.0
            self.buffer.finish(entry, samples)

    def state_dict(self) -> dict:
        return super().state_dict() | {"buffer": memoryview(msgspec.msgpack.encode(self.buffer.state_dict()))}

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self.loaded = state


def test_a_save_takes_training_no_time_for_groups_that_were_saved_before_and_holds_the_state_as_it_was(tmp_path):
    trainer = WithGroups(tmp_path, async_mode="async")
    trainer.checkpointer.save(1)
    trainer.checkpointer.finish()  # it has allocated the copy's memory
    trainer.train_step()
    began = time.thread_time()
    made = [to_bytes(entry.group) for entry in trainer.buffer.entries.values()]
    made_s = time.thread_time() - began
    expected = trainer.state_dict()
    with slow_disk() as may_write:
        began = time.thread_time()
        trainer.checkpointer.save(2)
        save_s = time.thread_time() - began
        for entry in trainer.buffer.entries.values():  # a program that still has its sample
            entry.group[0].token_ids.append(7)
        trainer.train_step()
        may_write.set()
        trainer.checkpointer.finish()
    path = trainer.checkpointer.folder / "step-2"
    rest = {key: expected[key] for key in ("step", "losses")}
    assert (path / "trainer.json").read_text() == json.dumps(rest)
    assert (path / "drawn.msgpack").read_bytes() == expected["drawn"]
    saved = (path / "buffer.msgpack").read_bytes()
    assert saved == bytes(expected["buffer"])
    assert [entry["group"] for entry in msgspec.msgpack.decode(saved)["entries"]] == made
    assert save_s < made_s / 2
    resumed = WithGroups(tmp_path, resume=True)
    assert resumed.checkpointer.load_latest() == 2
    assert resumed.loaded == rest | {"drawn": expected["drawn"], "buffer": saved}
