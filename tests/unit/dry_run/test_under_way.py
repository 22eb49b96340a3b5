"""Answers under way, and the age that the longest one needs."""

import pytest

from tests.helpers import TINY_QWEN3
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.dry_run.under_way import answers_at_once, under_way_lines

FLAGS = ["--model.hf_assets_path", str(TINY_QWEN3), "--grpo.prompts_per_step", "32", "--grpo.group_size", "16"]
FLAGS += ["--rollout.max_answer_tokens", "2048", "--training.seq_len", "4096"]
IN_FLIGHT = ["--async_grpo.enabled", "--weight_sync.async_weight_update", "--async_grpo.max_trajectory_age_steps"]


def lines(*flags: str) -> list[str]:
    return under_way_lines(load_config([*FLAGS, *flags]))


def test_a_sync_step_has_its_own_groups_under_way_and_those_of_oversampling():
    assert lines() == [
        "  under way        at most 32 groups, 512 answers; one request for each group, 256 at once",
    ]
    assert "at most 40 groups, 640 answers" in lines("--grpo.oversampling", "0.25")[0]
    assert "at most 33 groups" in lines("--grpo.oversampling", "0.001")[0], "one at least"


def test_an_age_lets_later_steps_be_under_way_and_holds_for_so_many_answers_at_once():
    flags = [*IN_FLIGHT, "8", "--rollout.urls", "http://a:1,http://b:2", "--rollout.max_concurrent_requests", "64"]
    flags += ["--rollout.engine", "vllm"]
    first, second, third = lines(*flags)
    assert first == "  under way        at most 288 groups, 4,608 answers; one request for each group, 128 at once on 2"
    assert second.endswith("8: no step waits for an answer of 2,048 tokens while servers run at most 1,024")
    assert third.endswith("answers at once (for a mean of 512 tokens; in proportion for others)")


@pytest.mark.parametrize(("age", "expected"), [("1", 128), ("4", 512)])
def test_the_answers_at_once_meet_the_rule_of_the_docs(age, expected):
    config = load_config([*FLAGS, *IN_FLIGHT, age])
    running = answers_at_once(config)
    longest_over_mean, answers_of_a_step = 4, 512
    assert running == expected
    assert running / answers_of_a_step * longest_over_mean == int(age)


def test_without_in_flight_updates_servers_wait_for_the_longest_answer_whatever_the_age():
    assert len(lines(*IN_FLIGHT, "1", "--async_grpo.no-in_flight_weight_updates")) == 1


def test_an_environment_has_a_request_for_each_turn():
    (line,) = lines("--rollout.environment", "tests.helpers.environments:none")
    assert "one request for each turn of an answer, 512 at once" in line


def test_a_file_of_urls_has_a_number_of_servers_that_is_not_known(tmp_path):
    (tmp_path / "urls.txt").write_text("http://a:1\n")
    flags = ["--rollout.urls_file", str(tmp_path / "urls.txt"), "--rollout.engine", "vllm"]
    assert lines(*flags)[0].endswith("256 at once each")
