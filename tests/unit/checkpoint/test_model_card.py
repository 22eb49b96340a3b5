from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from scripts import make_tiny_model
from tests.helpers import TINY_QWEN3
from torchtitan.grpo.checkpoint.model_card import model_card
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.config.resolved import resolved

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ON_THE_HUB = {
    "model.hf_assets_path": f"Qwen/Qwen3-0.6B@{COMMIT}",
    "model.weights": "hf",
    "data.source": "hf",
    "data.path": f"openai/gsm8k@{COMMIT}",
    "data.subset": "main",
}


def card(kind: str = "hf", trainer: str = "grpo", held_out: dict | None = None, **sections: dict) -> ModelCard:
    values = {f"{section}.{key}": value for section, of in sections.items() for key, value in of.items()}
    return ModelCard(model_card(kind, 20, trainer, ON_THE_HUB | values, held_out or {}), ignore_metadata_errors=False)


def rows(of: ModelCard) -> dict[str, str]:
    return dict(line.removeprefix("- ").split(": ", 1) for line in of.text.splitlines() if line.startswith("- "))


def test_a_card_says_what_was_trained_on_what_and_how_well():
    held_out = {"greedy_reward": 0.75, "greedy_reward_se": 0.05, "answer_tokens_mean": 9.0, "hard/greedy_reward": 0.5}
    validation = {f"validation/{name}": value for name, value in held_out.items()}
    written = card(
        held_out=validation, grpo={"group_size": 16, "policy_loss": "mine:loss"}, reward={"functions": ["a:b"]}
    )
    assert written.data.to_dict() == {
        "base_model": "Qwen/Qwen3-0.6B",
        "datasets": ["openai/gsm8k"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["torchtitan", "grpo"],
    }
    assert "# Qwen/Qwen3-0.6B after 20 steps of GRPO" in written.text
    said = rows(written)
    assert said["data"] == f'hf, openai/gsm8k@{COMMIT}, subset = "main", split = "train"'
    assert said["reward"] == "a:b" and said["a step"] == "32 prompts, 16 answers each"
    assert said["held-out greedy_reward"] == "0.750 (standard error 0.050)"
    assert said["held-out hard/greedy_reward"] == "0.500"
    assert "answer_tokens" not in written.content and "torch " in said["versions"]
    assert 'grpo.group_size = 16\ngrpo.policy_loss = "mine:loss"\n```' in written.text
    assert 'AutoModelForCausalLM.from_pretrained("."' in written.text


def test_nothing_is_said_that_may_not_be_published():
    """Addresses, prompts, arguments, and the folders of a machine."""
    written = card(
        model={"hf_assets_path": "/home/secret/models/Mine"},
        job={"description": "secret", "dump_folder": "/home/secret/run"},
        data={
            "system_prompt": "secret",
            "prompt_template": "secret {prompt}",
            "mixture": [
                {"name": "secret", "path": "/home/secret/rows.jsonl", "source": "jsonl", "system_prompt": "secret"}
            ],
        },
        rollout={
            "environment": "openenv:http://secret:80/x",
            "environment_args": {"key": "secret"},
            "urls": ["http://secret:8000"],
            "api_key_env": "secret",
            "server_flags": ["secret"],
        },
        distill={"teacher_urls": ["http://secret:1"], "api_key_env": "secret"},
        reward={"functions": [], "secrets": ["secret"]},
        sft={"target_column": "secret"},
    )
    assert "secret" not in written.content
    assert "base_model" not in written.data.to_dict() and "datasets" not in written.data.to_dict()
    assert "# Mine after 20 steps of on-policy distillation" in written.text
    assert rows(written) | {"versions": ""} == {
        "base model": "Mine",
        "data": "jsonl, rows.jsonl",
        "environment": "openenv",
        "a step": "32 prompts, 8 answers each",
        "versions": "",
    }


def test_folders_that_the_configuration_names_relatively_stay():
    """An export of another run says more than "hf"; a folder is not taken for an id of the hub."""
    written = card(model={"hf_assets_path": "outputs/first/checkpoint/step-9/hf"}, data={"path": "data/gsm8k"})
    assert rows(written)["base model"] == "outputs/first/checkpoint/step-9/hf"
    assert rows(written)["data"].startswith("hf, data/gsm8k, ")
    assert "base_model" not in written.data.to_dict() and "datasets" not in written.data.to_dict()


def test_a_mixture_names_each_source_and_each_dataset_once():
    tables = [
        {"name": "a", "split": "x"},
        {"name": "b"},
        {"name": "c", "source": "arithmetic", "source_args": {"max": 9}},
    ]
    written = card(data={"mixture": tables, "subset": ""})
    gsm8k = f"hf, openai/gsm8k@{COMMIT}, split = "
    assert rows(written)["data"] == f'{gsm8k}"x"; {gsm8k}"train"; arithmetic, source_args = {{ "max" = 9 }}'
    assert written.data.datasets == ["openai/gsm8k"]


def test_a_card_says_how_prompts_were_asked():
    written = card(data={"chat_template": False, "max_prompt_tokens": 16}, reward={"weights": [0.5]})
    assert "data.chat_template = false\ndata.max_prompt_tokens = 16\n" in written.text
    assert "reward.weights = [0.5]\n" in written.text
    sums = {"name": "sums", "chat_template": False}
    assert all("apply_chat_template" not in each.text for each in (written, card(data={"mixture": [sums]})))
    assert "tokenizer.apply_chat_template(" in card().text


@pytest.mark.parametrize("has_chat", [True, False])
def test_the_code_of_a_card_answers_a_prompt(has_chat, tmp_path, monkeypatch, capsys):
    make_tiny_model.main([str(tmp_path), "--weights", "--dim", "16", "--heads", "2", "--layers", "1"])
    written = card(data={"chat_template": has_chat}, rollout={"max_answer_tokens": 4})
    code = written.text.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    variables: dict = {}
    exec(code, variables)
    assert variables["answer"].shape[1] <= variables["inputs"]["input_ids"].shape[1] + 4
    assert capsys.readouterr().out.endswith("\n")


@pytest.mark.parametrize("trainer", ["grpo", "sft"])
def test_adapters_are_loaded_by_peft_and_sft_has_no_rewards(trainer):
    written = card(
        "adapter", trainer, {"validation/loss": 1.25}, lora={"enable": True, "rank": 8}, grpo={"group_size": 16}
    )
    assert written.data.library_name == "peft" and written.data.base_model == "Qwen/Qwen3-0.6B"
    assert 'AutoPeftModelForCausalLM.from_pretrained("."' in written.text and "lora.rank = 8" in written.text
    assert rows(written)["held-out loss"] == "1.250"
    assert ("reward" in rows(written)) == ("grpo.group_size" in written.text) == (trainer == "grpo")


def test_a_real_configuration_makes_a_card(tmp_path):
    config = load_config(["--model.hf_assets_path", str(TINY_QWEN3), "--model.weights", "random"])
    text = model_card("hf", 1, "grpo", resolved(config), {})
    assert ModelCard(text).data.library_name == "transformers" and str(Path.home()) not in text
    assert rows(ModelCard(text))["base model"] == "tiny_qwen3, its shape with random weights"
