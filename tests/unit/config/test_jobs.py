"""One TOML file for both jobs: what each reads, what it refuses, and what a dry run says of an SFT job."""

import logging

import pytest

from tests.helpers import TINY_QWEN3
from torchtitan.grpo.config.jobs import UNREAD, check_same_job
from torchtitan.grpo.config.keys import keys, sections
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.config.machine import check_machine
from torchtitan.grpo.dry_run.describe import describe
from torchtitan.grpo.errors import UserError

MODEL = ["--model.hf_assets_path", str(TINY_QWEN3)]
SFT = [*MODEL, "--optimizer.lr", "1e-5"]
JSONL = ["--data.source", "jsonl", "--data.path", "a.jsonl"]
CHAT = [*JSONL, "--data.messages_column", "messages"]


def test_what_a_job_does_not_read_are_keys_or_sections():
    for entry in (entry for entries in UNREAD.values() for entry in entries):
        assert entry in sections() or entry in keys(), entry


def test_keys_of_the_other_job_are_named_and_change_nothing(caplog):
    caplog.set_level(logging.INFO)
    of_grpo = ["--rollout.engine", "vllm", "--grpo.kl_coef", "0.1", "--data.max_prompt_tokens", "4096"]
    of_grpo += ["--rollout.replicas", "2", "--ray.expose_servers"]
    config = load_config([*SFT, *of_grpo, "--training.seq_len", "128"], job="sft")
    assert config.to_dict() == load_config([*SFT, "--training.seq_len", "128"], job="sft").to_dict()
    assert "sft_train.py does not read [grpo], [rollout], [data] max_prompt_tokens, [ray] expose_servers" in caplog.text
    caplog.clear()
    config = load_config([*MODEL, *CHAT, "--sft.train_on", "last"])
    assert (config.data.messages_column, config.sft.train_on) == ("", "all")
    assert "grpo_train.py does not read [data] messages_column, [sft] train_on" in caplog.text


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--sft.steps", "5"], r"\[sft\] steps = 5 is the length of GRPO's warm start: set \[training\] steps"),
        (["--sft.lr", "0.1"], r"\[sft\] lr = 0.1 is the learning rate of GRPO's warm start: set \[optimizer\] lr"),
        (["--data.messages_column", "m"], r"messages_column = \"m\" is read with .* only, not \"arithmetic\""),
        (
            [*CHAT, "--data.no-chat_template"],
            r"messages_column = \"messages\" is read with \[data\] chat_template = true only",
        ),
        ([*CHAT, "--data.prompt_template", "Q: {prompt}"], r"prompt_template = .* goes around the question"),
        (
            [*JSONL, "--data.tools_column", "tools"],
            r"tools_column = \"tools\" is read with \[data\] messages_column only",
        ),
        ([*JSONL, "--data.answer_column", ""], r"\[data\]: there is no column to learn"),
        (["--sft.train_on", "last"], r"train_on = \"last\" is read with \[data\] messages_column only"),
        (
            ["--validation.enable", "--checkpoint.keep_best", "validation/loss"],
            r"keep_best = \"validation/loss\" would keep the highest loss: use \"validation/token_accuracy\"",
        ),
    ],
)
def test_what_an_sft_job_refuses(flags, said):
    with pytest.raises(UserError, match=said):
        load_config([*SFT, *flags], job="sft")


def test_a_learning_rate_must_be_given():
    with pytest.raises(UserError, match=r"\[optimizer\] lr is missing: its default of 1e-06 is made for GRPO"):
        load_config(MODEL, job="sft")


def test_each_rank_needs_a_row():
    config = load_config([*SFT, "--sft.batch_size", "3", "--comm.init_timeout_seconds", "60"], job="sft")
    assert check_machine(config, 2, 0, job="sft") == []
    assert check_machine(config, 4, 0, job="sft") == [
        "[sft] batch_size = 3 for 4 data-parallel ranks: some would have nothing to train on, so raise it"
    ]


def test_a_dry_run_describes_the_job():
    flags = [*SFT, *CHAT, "--sft.batch_size", "32", "--training.seq_len", "512", "--training.steps", "10"]
    config = load_config([*flags, "--validation.enable", "--validation.prompts", "50"], job="sft")
    said = describe(config, 2, job="sft")
    for line in (
        "rows             32, of which it learns all turns of the assistant",
        "tokens           at most 32 x 512 = 16,384",
        "of 512 tokens on 2 data-parallel ranks; 16 for each rank, were all documents longest",
        "steps            10, 320 rows",
        "validation       50 held-out rows every 10 steps",
    ):
        assert line in said
    memory = said[said.index("AdamW state") :]
    assert " snapshots" not in memory and "buckets" not in memory


def test_checkpoints_of_the_other_job_are_refused():
    check_same_job({"step": 1, "conversations": None}, "sft")
    check_same_job({"step": 1, "rollouts": None}, "grpo")
    with pytest.raises(UserError, match=r"the checkpoint is of sft_train\.py: start in another \[job\] dump_folder"):
        check_same_job({"step": 1, "conversations": {}}, "grpo")
    with pytest.raises(UserError, match=r"the checkpoint is of grpo_train\.py"):
        check_same_job({"step": 1, "rollouts": {}}, "sft")
