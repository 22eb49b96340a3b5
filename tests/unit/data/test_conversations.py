"""Rows to learn from: kept, left out, held out, mixed, and given in the same order after a resume."""

import json
import logging
from datetime import datetime

import datasets
import pytest

from tests.helpers import TINY_QWEN3
from torchtitan.grpo.config.job_config import Data, Sft
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.data.conversations import ConversationSource
from torchtitan.grpo.data.load import load_held_out, load_training
from torchtitan.grpo.data.tokenizer import load_tokenizer
from torchtitan.grpo.errors import UserError

TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
MARKED = """{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<eos>{% endgeneration %}
{%- else %}{{ m.content }}{% endif %}{% endfor %}"""


@pytest.fixture
def tokenizer():
    tokenizer = load_tokenizer(str(TINY_QWEN3))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


SAYS_W = {"role": "assistant", "content": "W"}
HALF = {"role": "assistant", "content": "\ud83d"}


def talk(a: int, b: int) -> list[dict]:
    return [{"role": "user", "content": f"{a}+{b}="}, {"role": "assistant", "content": f"{a + b}"}]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def source_of(tokenizer, path, seq_len=64, sft=None, **keys):
    data = Data(source="jsonl", path=path, **keys)
    own = {"sft": sft or Sft(), "seq_len": seq_len, "end_ids": [tokenizer.eos_token_id], "vocab_size": 60}
    return ConversationSource(data, tokenizer, 0, **own)


def text(tokenizer, conversation):
    (document,) = conversation.documents
    return tokenizer.decode(document.token_ids.tolist()), tokenizer.decode(
        document.token_ids[document.trained].tolist()
    )


def test_long_conversations_are_counted_and_left_out_or_refused(tokenizer, tmp_path, caplog):
    path = write(
        tmp_path / "a.jsonl", [{"messages": talk(1, 2)}, {"messages": talk(10**9, 1) * 9}, {"messages": talk(3, 4)}]
    )
    source = source_of(tokenizer, path, messages_column="messages")
    assert "1 of 3 conversations are over [training] seq_len = 64 and are left out, as " in caplog.text
    assert "a.jsonl:2 with " in caplog.text
    assert sorted(text(tokenizer, each) for each in source.next(2)) == [
        ("1+2=3<eos>", "3<eos>"),
        ("3+4=7<eos>", "7<eos>"),
    ]


def test_the_order_goes_on_where_the_state_was_taken(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"messages": talk(i, 1)} for i in range(10)])
    source, again = (source_of(tokenizer, path, messages_column="messages") for _ in range(2))
    source.next(13)
    again.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert again.epochs() == {"data/epoch": 1.3}
    rest = [text(tokenizer, each) for each in source.next(27)]
    assert [text(tokenizer, each) for each in again.next(27)] == rest
    assert len(set(rest[-20:-10])) == len(set(rest[-10:])) == 10 and rest[-20:-10] != rest[-10:], "each epoch its order"
    other = source_of(tokenizer, path, messages_column="messages", sft=Sft(train_on="last"))
    with pytest.raises(UserError, match="not those that the checkpoint was trained on"):
        other.load_state_dict(source.state_dict())


def test_pairs_are_what_the_warm_start_learns(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"question": "1+1=", "steps": "1 1"}])
    source = source_of(tokenizer, path, chat_template=False, sft=Sft(target_column="steps"))
    assert text(tokenizer, source.next(1)[0]) == ("<bos>1+1=1 1<eos>", "1 1<eos>")


def test_a_column_without_a_name_has_no_tools(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"": "0", "messages": talk(1, 1)}])  # as of a CSV file with row numbers
    assert text(tokenizer, source_of(tokenizer, path, messages_column="messages").next(1)[0])[1] == "2<eos>"


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["plain", "marked"])
def test_messages_may_hold_what_json_does_not(tokenizer, tmp_path, monkeypatch, template):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / "data"
    path.mkdir()
    tokenizer.chat_template = template
    rows = [{"messages": [message | {"at": datetime(2026, 1, 1)} for message in talk(1, 1)]}]
    datasets.Dataset.from_list(rows).to_parquet(path / "train.parquet")
    data = Data(source="hf", path=str(path), messages_column="messages")
    source = ConversationSource(data, tokenizer, 0, sft=Sft(), seq_len=64, end_ids=[tokenizer.eos_token_id])
    assert text(tokenizer, source.next(1)[0])[1] == "2<eos>"


def test_a_template_without_end_tokens_is_named(tokenizer, tmp_path, caplog):
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    source_of(tokenizer, write(tmp_path / "a.jsonl", [{"messages": talk(1, 1)}]), messages_column="messages")
    assert "1 of 1 documents end without one of the model's end tokens" in caplog.text


def test_missing_columns_and_bad_rows_are_named(tokenizer, tmp_path):
    path = write(tmp_path / "b.jsonl", [{"messages": talk(1, 1), "fn": []}, {"messages": talk(1, 1)}])
    source_of(tokenizer, path, messages_column="messages", tools_column="fn")  # not all rows need have tools
    path = write(tmp_path / "a.jsonl", [{"messages": talk(1, 1)}, {"messages": talk(1, 1)[:1]}])
    with pytest.raises(UserError, match=r"a\.jsonl:1 has no column 'chat': set \[data\] messages_column to one of"):
        source_of(tokenizer, path, messages_column="chat")
    with pytest.raises(UserError, match=r"a\.jsonl has no column 'fn': set \[data\] tools_column to one of"):
        source_of(tokenizer, path, messages_column="messages", tools_column="fn")
    with pytest.raises(UserError, match=r"a\.jsonl:2: column 'messages' has no message of the assistant"):
        source_of(tokenizer, path, messages_column="messages")
    write(tmp_path / "a.jsonl", [{"messages": talk(1, 1)}, {"messages": [*talk(1, 1), *talk(1, 1)[:1], HALF]}])
    with pytest.raises(UserError, match=r"a\.jsonl:2 holds half of a surrogate pair"):
        source_of(tokenizer, path, messages_column="messages")
    write(tmp_path / "a.jsonl", [{"messages": talk(1, 1)}, {"messages": [*talk(1, 1), *talk(1, 1)[:1], SAYS_W]}])
    with pytest.raises(UserError, match=r"a\.jsonl:2 has id 62 \('W'\).*embeddings for 60"):
        source_of(tokenizer, path, messages_column="messages")


def test_a_mixture_of_conversations_and_pairs_holds_out_its_own_rows(tokenizer, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    chats = write(tmp_path / "chats.jsonl", [{"messages": talk(i % 15, 1)} for i in range(20)])
    (tmp_path / "run.toml").write_text(
        "[optimizer]\nlr = 1e-5\n[validation]\nenable = true\nprompts = 5\nsamples_per_prompt = 3\n"
        '[rollout]\nengine = "vllm"\n[reward]\nfunctions = ["exact_match"]\n'
        f'[[data.mixture]]\nname = "chats"\nsource = "jsonl"\npath = "{chats}"\nmessages_column = "messages"\n'
        'functions = ["exact_match"]\n'
        '[[data.mixture]]\nname = "sums"\nchat_template = false\nsource_args = { max = 9 }\nweight = 3.0\n'
    )
    flags = ["--job.config_file", str(tmp_path / "run.toml"), "--model.hf_assets_path", str(TINY_QWEN3)]
    config = load_config(flags, job="sft")
    assert "sft_train.py does not read [rollout], [validation] samples_per_prompt" in caplog.text

    def make(*arguments, **split):
        return ConversationSource(*arguments, sft=config.sft, seq_len=64, end_ids=[tokenizer.eos_token_id], **split)

    held_out = load_held_out(config, tokenizer, make)
    mixture = load_training(config, tokenizer, held_out, make)
    asked = {text(tokenizer, each) for own in held_out for each in own.prompts}
    assert [(own.name, len(own.prompts)) for own in held_out] == [("chats", 5), ("sums", 5)]
    taken = mixture.next(400)
    assert not asked & {text(tokenizer, each) for each in taken}, "held-out rows, and those that repeat them"
    assert sum(each.source == "sums" for each in taken) == pytest.approx(300, abs=5)
    again = load_training(config, tokenizer, held_out, make)
    again.load_state_dict(json.loads(json.dumps(mixture.state_dict())))
    assert [text(tokenizer, each) for each in again.next(40)] == [text(tokenizer, each) for each in mixture.next(40)]
