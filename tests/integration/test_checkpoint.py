"""A resumed run equals an uninterrupted one, and a killed save leaves the checkpoint before it complete."""

import dataclasses
import errno
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from tests.helpers import ROOT
from tests.helpers.checkpoint_worker import TINY, TinyTrainer, saved_at, slow_disk
from tests.helpers.ranks import Ranks
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.grpo.checkpoint import checkpointer, parallel_writer
from torchtitan.grpo.checkpoint.marker import complete_steps, read_marker
from torchtitan.grpo.checkpoint.parallel_writer import FILES
from torchtitan.grpo.checkpoint.random_states import random_states, set_random_states
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model.rounded_weights import round_weights, rounded, scale_of

WORKER = ROOT / "tests" / "helpers" / "checkpoint_worker.py"


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path):
    straight = TinyTrainer(tmp_path)
    digests = {}
    while straight.step < 6:
        straight.train_step()
        digests[straight.step] = straight.digest()
        if straight.step == 3:
            straight.checkpointer.save(3)
    assert len(set(digests.values())) == 6 and len(set(straight.losses)) == 6

    resumed = TinyTrainer(tmp_path, resume=True)
    assert resumed.checkpointer.load_latest() == 3
    assert resumed.step == 3 and resumed.digest() == digests[3]
    for _ in range(3):
        resumed.train_step()
    assert resumed.losses == straight.losses
    assert resumed.digest() == digests[6]


def contents(dump: Path, step: int) -> dict[str, str]:
    """Checksums of a checkpoint's files, but of DCP's index: a save has an identity there."""
    checksums = read_marker(dump / "checkpoint" / f"step-{step}").checksums
    del checksums["dcp/.metadata"]
    return checksums


def test_a_checkpoint_written_in_the_background_is_that_of_its_step(tmp_path, monkeypatch):
    """Steps that are trained before it is written change nothing in it, nor in themselves. It has several files."""
    monkeypatch.setattr(parallel_writer, "FILE_BYTES", 64 << 10)
    keys = dict(reference=True, export_dtype="float32")
    straight = TinyTrainer(tmp_path / "sync", **keys)
    behind = TinyTrainer(tmp_path / "async", async_mode="async_with_pinned_mem", **keys)
    behind.checkpointer.cfg.keep_latest_k = straight.checkpointer.cfg.keep_latest_k = 0
    drawn = random_states(torch.device("cpu"))
    for trainer in (straight, behind):
        set_random_states(drawn, torch.device("cpu"))
        checkpointer = trainer.checkpointer
        with slow_disk() as may_write:
            if trainer is straight:
                may_write.set()
            for step in range(1, 6):
                trainer.train_step()
                if step == 2:
                    checkpointer.validated(2, {"validation/greedy_reward": 0.5})
                    checkpointer.save(2)
                    checkpointer.validated(3, {"validation/greedy_reward": 0.6})
                if step == 4:
                    assert (complete_steps(checkpointer.folder) == []) == (trainer is behind)
                    threading.Timer(0.2, may_write.set).start()
                    checkpointer.save(4)
            checkpointer.finish()
            metrics = checkpointer.metrics()  # of step 4
            checkpointer.save(5, last=True)
        assert (metrics["checkpoint/waited_s"] > 0.1) == (trainer is behind)
        assert metrics["checkpoint/exposed_s"] >= metrics["checkpoint/waited_s"]
        assert complete_steps(checkpointer.folder) == [2, 4, 5], "the last one is complete without another call"
    assert straight.losses == behind.losses and straight.digest() == behind.digest()
    for step in (2, 4, 5):
        assert contents(tmp_path / "async", step) == contents(tmp_path / "sync", step)
        assert {f"dcp/__0_{number}_0.distcp" for number in range(FILES)} < contents(tmp_path / "async", step).keys()
    resumed = TinyTrainer(tmp_path / "async", load_step=2, resume=True, async_mode="async", **keys)
    assert resumed.checkpointer.load_latest() == 2
    for _ in range(3):
        resumed.train_step()
    assert resumed.losses == straight.losses and resumed.digest() == straight.digest()


def test_two_ranks_resume_exactly_and_one_rank_takes_over_their_weights(tmp_path):
    outs = {name: tmp_path / f"{name}.json" for name in ("straight", "resumed", "alone", "async")}
    dump, written_later = tmp_path / "dump", tmp_path / "written-later"
    log = tmp_path / "log"
    Ranks(2, WORKER, "train", dump, outs["straight"], 4, log=log).check()
    Ranks(2, WORKER, "train", written_later, outs["async"], 4, "async", log=log).check()
    assert contents(written_later, 2) == contents(dump, 2), "uneven shards, and the export, though training went on"
    assert outs["async"].read_text() == outs["straight"].read_text()
    Ranks(2, WORKER, "train", dump, outs["resumed"], 4, "resume", log=log).check()
    Ranks(1, WORKER, "train", dump, outs["alone"], 3, "resume", log=log).check()
    path = dump / "checkpoint" / "step-2"
    written = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    assert read_marker(path).checksums.keys() == written - {"complete.json"}, "each file has a checksum"
    straight, resumed, alone, _ = (json.loads(out.read_text()) for out in outs.values())
    assert (straight["loaded"], resumed["loaded"], alone["loaded"]) == (0, 2, 2)
    assert resumed["losses"] == straight["losses"]
    assert resumed["digests"] == {step: straight["digests"][step] for step in ("2", "3", "4")}
    # Weights, AdamW state and schedule are exact on one rank too. Its random numbers differ from the two ranks'.
    assert alone["digests"]["2"] == straight["digests"]["2"]
    assert len(alone["losses"]) == 3


def test_pythons_and_numpys_generators_are_seeded_at_the_start_of_a_run(tmp_path):
    """A curriculum may use them."""
    trainer, draws = TinyTrainer(tmp_path), []
    for _ in range(2):
        random.seed()
        np.random.seed()
        assert trainer.checkpointer.load_latest() == 0
        draws.append((random.random(), np.random.random()))
    assert draws[0] == draws[1]


def test_random_states_after_a_changed_number_of_ranks_are_derived_from_seed_and_step(tmp_path):
    saved_at(tmp_path, 1)
    path = tmp_path / "checkpoint" / "step-1"
    dataclasses.replace(read_marker(path), world_size=4).write(path)
    drawn = []
    for burn in (0, 5):
        trainer = TinyTrainer(tmp_path, resume=True)
        torch.rand(burn)
        trainer.checkpointer.load_latest()
        drawn.append(torch.rand(4))
    assert torch.equal(*drawn)


def test_keep_latest_k(tmp_path):
    trainer = saved_at(tmp_path, 1, 2, 3, 4, keep_latest_k=2)
    folder = tmp_path / "checkpoint"
    assert sorted(path.name for path in folder.iterdir()) == ["step-3", "step-4"]
    trainer.checkpointer.cfg.keep_latest_k = 0
    trainer.train_step()
    trainer.checkpointer.save(5)
    assert complete_steps(folder) == [3, 4, 5]


def test_an_error_behind_a_complete_save_ends_nothing(tmp_path, monkeypatch, caplog):
    def unreadable(folder: Path) -> list[int]:
        raise OSError(errno.EIO, "Input/output error", str(folder))

    trainer = saved_at(tmp_path, 1, keep_latest_k=1, async_mode="async")
    trainer.checkpointer.finish()
    trainer.train_step()
    with monkeypatch.context() as patched:
        patched.setattr(checkpointer, "complete_steps", unreadable)
        trainer.checkpointer.save(2)
        trainer.checkpointer.finish()
    assert "an old checkpoint cannot be deleted: [Errno 5] Input/output error" in caplog.text
    assert complete_steps(tmp_path / "checkpoint") == [1, 2]
    trainer.train_step()
    trainer.checkpointer.save(3, last=True)
    assert complete_steps(tmp_path / "checkpoint") == [3]


def test_a_clock_that_goes_back_changes_nothing(tmp_path, monkeypatch):
    trainer = saved_at(tmp_path, 1, 2)
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    for step in (3, 4):
        trainer.train_step()
        trainer.checkpointer.save(step)
        assert complete_steps(tmp_path / "checkpoint") == [step - 1, step]
    assert TinyTrainer(tmp_path, resume=True).checkpointer.load_latest() == 4


def test_everything_is_on_the_disk_before_a_checkpoint_gets_its_name(tmp_path, monkeypatch):
    flushed = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    saved_at(tmp_path, 1, export_dtype="float32")
    folder = tmp_path / "checkpoint"
    unfinished = folder / "step-1.tmp"
    files = [unfinished / path.relative_to(folder / "step-1") for path in (folder / "step-1").rglob("*")]
    last_flush = {path: len(flushed) - 1 - flushed[::-1].index(path) for path in (*files, unfinished, folder)}
    assert max(last_flush, key=last_flush.get) == folder, "after the rename"
    assert last_flush[unfinished] > max(last_flush[path] for path in files if path.parent == unfinished)


def test_load_step_goes_back_and_a_new_branch_replaces_the_old(tmp_path):
    old = saved_at(tmp_path, 1, 2, 3, keep_latest_k=3)
    branch = TinyTrainer(tmp_path, resume=True, load_step=1, keep_latest_k=3)
    assert branch.checkpointer.load_latest() == 1
    assert branch.losses == old.losses[:1]
    torch.rand(1)  # other random numbers than the first time
    branch.train_step()
    branch.checkpointer.save(2)
    assert complete_steps(tmp_path / "checkpoint") == [1, 3, 2]
    again = TinyTrainer(tmp_path, resume=True)
    assert again.checkpointer.load_latest() == 2  # the last one written, not the higher step of the old branch
    assert again.losses == branch.losses != old.losses[:2]


def test_saving_a_step_twice_writes_once(tmp_path):
    trainer = saved_at(tmp_path, 1)
    marker = tmp_path / "checkpoint" / "step-1" / "complete.json"
    before = marker.stat().st_mtime_ns
    trainer.checkpointer.save(1)
    resumed = TinyTrainer(tmp_path, resume=True)
    resumed.checkpointer.load_latest()
    resumed.checkpointer.save(1)
    assert marker.stat().st_mtime_ns == before


def test_unfinished_folders_are_ignored_and_cleared(tmp_path):
    trainer = saved_at(tmp_path, 1, 2)
    folder = tmp_path / "checkpoint"
    (folder / "step-2" / "complete.json").unlink()
    (folder / "step-1").rename(folder / "step-7.tmp")
    assert TinyTrainer(tmp_path, resume=True).checkpointer.load_latest() == 0
    trainer.train_step()
    trainer.checkpointer.save(3)
    assert not (folder / "step-7.tmp").exists()
    assert TinyTrainer(tmp_path, resume=True).checkpointer.load_latest() == 3


def wait_until(worker: Ranks, ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not ready():
        if worker.poll() is not None or time.monotonic() > deadline:
            worker.kill()
            pytest.fail(worker.log[-4000:])
        time.sleep(0.01)


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_kill_9_inside_a_save_leaves_the_checkpoint_before_it(tmp_path, async_mode):
    worker = Ranks(1, WORKER, "stop-in-save", tmp_path, async_mode, log=tmp_path / "log")
    last = "trained step 3" if async_mode == "async" else "trained step 2"
    wait_until(worker, lambda: "in the save" in worker.log and last in worker.log)
    worker.kill()
    assert (tmp_path / "checkpoint" / "step-2.tmp" / "dcp" / ".metadata").is_file()
    resumed = TinyTrainer(tmp_path, resume=True)
    assert resumed.checkpointer.load_latest() == 1
    resumed.train_step()
    resumed.checkpointer.save(2)
    assert complete_steps(tmp_path / "checkpoint") == [1, 2]
    assert not list((tmp_path / "checkpoint").glob("*.tmp"))


@pytest.mark.parametrize("delay_s", [0.15, 0.4])
def test_kill_9_at_any_time_leaves_a_whole_checkpoint(tmp_path, delay_s):
    worker = Ranks(1, WORKER, "save-forever", tmp_path, log=tmp_path / "log")
    wait_until(worker, (tmp_path / "checkpoint" / "step-2").is_dir)
    time.sleep(delay_s)
    worker.kill()
    resumed = TinyTrainer(tmp_path, resume=True)
    step = resumed.checkpointer.load_latest()
    assert step >= 1 and resumed.step == step  # killed while it replaced step 2, at the earliest
    assert all((parameter == step).all() for parameter in resumed.model.parameters())


def test_a_checkpoint_of_another_model_is_refused(tmp_path, monkeypatch):
    saved_at(tmp_path, 1)
    monkeypatch.setitem(TINY, "hidden_size", 64)
    with pytest.raises(UserError, match=r"step-1 cannot be loaded: it is of another model or optimizer"):
        TinyTrainer(tmp_path, resume=True).checkpointer.load_latest()


def test_the_reference_model_is_part_of_the_checkpoint(tmp_path):
    trainer = TinyTrainer(tmp_path / "with", reference=True)
    with torch.no_grad():
        trainer.reference.norm.weight.fill_(7)
    trainer.train_step()
    trainer.checkpointer.save(1)
    resumed = TinyTrainer(tmp_path / "with", reference=True, resume=True)
    resumed.checkpointer.load_latest()
    assert (resumed.reference.norm.weight == 7).all() and (resumed.model.norm.weight != 7).all()
    saved_at(tmp_path / "without", 1)
    with pytest.raises(UserError, match=r"no reference model: set \[grpo\] kl_coef = 0"):
        TinyTrainer(tmp_path / "without", reference=True, resume=True).checkpointer.load_latest()


def test_the_export_beside_a_checkpoint_is_its_model(tmp_path):
    trainer = saved_at(tmp_path, 2, export_dtype="bfloat16")
    folder = tmp_path / "checkpoint" / "step-2" / "hf"
    exported = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(exported.lm_head.weight, trainer.model.output.weight.bfloat16())
    card = ModelCard.load(folder / "README.md")
    assert card.data.library_name == "transformers" and "after 2 steps of GRPO" in card.text


def test_the_export_of_experts_that_is_written_in_the_background_is_that_of_the_run(tmp_path, monkeypatch):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    for key, value in {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **experts}.items():
        monkeypatch.setitem(TINY, key, value)
    exported = []
    for mode in ("disabled", "async"):
        trainer = TinyTrainer(tmp_path / mode, export_dtype="bfloat16", async_mode=mode)
        trainer.checkpointer.save(1)
        trainer.checkpointer.finish()
        folder = trainer.checkpointer.folder / "step-1" / "hf"
        exported.append(AutoModelForCausalLM.from_pretrained(folder).state_dict())
    assert all(torch.equal(value, exported[1][name]) for name, value in exported[0].items())


def test_an_export_names_the_weights_that_float16_does_not_hold(tmp_path, caplog):
    trainer = TinyTrainer(tmp_path, export_dtype="float16")
    trainer.checkpointer.save(1)
    assert "float16" not in caplog.text
    with torch.no_grad():
        trainer.model.layers["1"].feed_forward.w2.weight[3, 5] = 65_536
    trainer.checkpointer.save(2)
    assert "of step 2 are too large for float16 and infinite in its export hf: model.layers.1.mlp.down" in caplog.text
    assert '[checkpoint] export_dtype = "bfloat16" or "float32"' in caplog.text
    exact = trainer.digest()
    resumed = TinyTrainer(tmp_path, resume=True)
    assert resumed.checkpointer.load_latest() == 2 and resumed.digest() == exact


@pytest.mark.parametrize("async_mode, dtype", [("disabled", "bfloat16"), ("disabled", "float16"), ("async", "float16")])
def test_the_export_of_a_policy_with_rounded_weights_has_them(tmp_path, async_mode, dtype):
    trainer = TinyTrainer(tmp_path, export_dtype=dtype, async_mode=async_mode)
    round_weights(trainer.model)
    trainer.train_step()
    trainer.checkpointer.save(1)
    trainer.checkpointer.finish()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint" / "step-1" / "hf")
    weight = exported.model.layers[1].mlp.down_proj.weight
    exact = trainer.model.layers["1"].feed_forward.w2.weight.detach()
    assert torch.equal(weight, rounded(exact, scale_of(exact)).to(weight.dtype))
    assert weight.dtype == TORCH_DTYPE_MAP[dtype] and not torch.equal(weight, exact.to(weight.dtype))
    embedding = exported.model.embed_tokens.weight
    assert torch.equal(embedding, trainer.model.tok_embeddings.weight.to(weight.dtype))


def test_the_optimizer_settings_of_the_configuration_hold_after_a_resume(tmp_path, caplog):
    """Learning rate, betas and schedule; AdamW's moments and the position in the schedule are the checkpoint's."""
    old = saved_at(tmp_path, 4)
    changed = {"optimizer.lr": 0.002, "optimizer.beta1": 0.5, "optimizer.weight_decay": 0.3}
    resumed = TinyTrainer(tmp_path, resume=True, settings=changed | {"lr_scheduler.warmup_steps": 8})
    assert resumed.checkpointer.load_latest() == 4
    (group,) = resumed.optimizers.optimizers[0].param_groups
    assert (group["betas"], group["weight_decay"]) == ((0.5, 0.95), 0.3)
    assert group["lr"] == resumed.lr_schedulers.schedulers[0].get_last_lr()[0] == pytest.approx(0.002 * 5 / 8)
    resumed.lr_schedulers.step()
    assert group["lr"] == pytest.approx(0.002 * 6 / 8)
    assert "[optimizer] lr = 0.002, in the checkpoint 0.01: the new value is used" in caplog.text
    moments = [trainer.optimizers.state_dict()["state.tok_embeddings.weight.exp_avg"] for trainer in (old, resumed)]
    assert torch.equal(*moments)


def test_a_schedule_that_ends_before_the_checkpoint_does_not_keep_it_from_being_loaded(tmp_path):
    saved_at(tmp_path, 4)
    shorter = {"training.steps": 2, "lr_scheduler.warmup_steps": 0, "lr_scheduler.decay_ratio": 0.0}
    assert TinyTrainer(tmp_path, resume=True, settings=shorter).checkpointer.load_latest() == 4


def test_the_best_checkpoint_is_kept_also_after_a_resume(tmp_path, caplog):
    caplog.set_level("INFO")
    metric = "validation/greedy_reward"
    flags = {"keep_latest_k": 2, "keep_best": metric}
    trainer = TinyTrainer(tmp_path, **flags)
    for step, reward in enumerate((0.1, 0.8, 0.8, 0.3, 0.4, 0.5), 1):
        trainer.step = step
        if step == 5:
            trainer = TinyTrainer(tmp_path, resume=True, **flags)
            assert trainer.checkpointer.load_latest() == 4
            trainer.step = step
        if step != 4:  # as a checkpoint that a signal asked for: at no step of a validation
            trainer.checkpointer.validated(step, {metric: reward, "validation/pass_at_1": 1.0})
        trainer.checkpointer.save(step)
    folder = tmp_path / "checkpoint"
    assert complete_steps(folder) == [3, 5, 6], "of equal ones the last"
    trainer.checkpointer.report()
    assert (
        f"Checkpoints go to {folder}, every 2 steps and at the end; the newest 2 and the best by {metric}"
        in caplog.text
    )
    assert f"Newest checkpoint: {folder}/step-6\n" in caplog.text
    assert f"Best checkpoint by {metric}: {folder}/step-3, 0.8" in caplog.text


def test_the_best_checkpoint_is_named_before_an_earlier_steps_branch_replaces_it(tmp_path, caplog):
    saved_at(tmp_path, 1)
    trainer = TinyTrainer(tmp_path)
    trainer.checkpointer.validated(2, {"validation/greedy_reward": 0.75})
    trainer.checkpointer.save(2)
    for load_step, lines in ((1, 1), (2, 0)):
        caplog.clear()
        branch = TinyTrainer(tmp_path, resume=True, load_step=load_step, keep_best="validation/greedy_reward")
        branch.checkpointer.load_latest()
        said = "step-2 is the best by validation/greedy_reward (0.75), and of a later step than 1"
        assert caplog.text.count(said) == lines
