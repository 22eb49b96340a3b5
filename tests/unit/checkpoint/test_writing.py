"""With `async_mode` the trainer's state is captured by training's thread, and made to text and written by the other."""

import json
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.helpers.checkpoint_worker import TinyTrainer, slow_disk
from torchtitan.grpo.checkpoint.writing import json_pieces
from torchtitan.grpo.data.samples import Prompt, Sample
from torchtitan.grpo.rollouts.buffer import StalenessBuffer


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


ODD = [
    None,
    1.5,
    '\n\u00e9"',
    [],
    {},
    [[]],
    {"a": {}},
    [1, (2, "x")],
    {'a"': [1, {"b": None}], "c": [], "d": [1e999]},
    [0.1] * 2500,
    [1] * 1000,
]


@pytest.mark.parametrize("value", ODD)
def test_the_pieces_are_the_text(value):
    assert "".join(json_pieces(value)) == json.dumps(value)


def test_pieces_are_small_where_groups_are_many_or_answers_long():
    longest = max(map(len, json_pieces({"entries": [{"samples": [{"ids": [1] * 100, "text": "x"}] * 8}] * 64})))
    assert longest < 1000
    assert max(map(len, json_pieces({"ids": [1] * 100_000}))) < 3100


class WithGroups(TinyTrainer):
    """Complete groups wait for their step: some 9 MiB as text."""

    def __init__(self, *arguments, **keys) -> None:
        super().__init__(*arguments, **keys)
        self.buffer = StalenessBuffer(16, 4, 64)
        for number in range(16):
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
        return super().state_dict() | {"buffer": self.buffer.state_dict()}


def test_a_save_takes_training_no_time_for_the_text_of_its_state_and_holds_the_state_as_it_was(tmp_path):
    trainer = WithGroups(tmp_path, async_mode="async")
    trainer.checkpointer.save(1)
    trainer.checkpointer.finish()  # it has allocated the copy's memory
    trainer.train_step()
    began = time.thread_time()
    expected = json.dumps(trainer.state_dict())
    text_s = time.thread_time() - began
    with slow_disk() as may_write:
        began = time.thread_time()
        trainer.checkpointer.save(2)
        save_s = time.thread_time() - began
        for entry in trainer.buffer.entries.values():  # a program that still has its sample
            entry.group[0].token_ids.append(7)
        trainer.train_step()
        may_write.set()
        trainer.checkpointer.finish()
    assert (trainer.checkpointer.folder / "step-2" / "trainer.json").read_text() == expected
    assert save_s < text_s / 2
