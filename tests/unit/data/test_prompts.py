"""Prompt sources: real files in, rendered prompts out, exact continuation, and errors that say what to change."""

import codecs
import copy
import gzip
import json
import logging
import shutil
from dataclasses import asdict, fields, replace

import datasets
import numpy as np
import pytest

from tests.helpers import TINY_QWEN3
from torchtitan.grpo.config.job_config import Data
from torchtitan.grpo.data.prompts import PromptSource, sft_pairs
from torchtitan.grpo.data.tokenizer import end_token_ids, load_tokenizer
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.sources.rows import always_json, as_json


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(TINY_QWEN3))


@pytest.fixture
def plain_tokenizer(tmp_path):
    """The tiny tokenizer without a chat template."""
    folder = tmp_path / "plain"
    shutil.copytree(TINY_QWEN3, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(str(folder))


@pytest.fixture(autouse=True)
def dataset_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def questions(n, start=0):
    return [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(start, start + n)]


@pytest.fixture
def gsm8k(tmp_path):
    """A folder like a downloaded `openai/gsm8k`: a folder per subset, a parquet file per split."""
    for subset in ("main", "socratic"):
        (tmp_path / "gsm8k" / subset).mkdir(parents=True)
        for split, n, start in (("train", 20, 0), ("test", 5, 100)):
            rows = [
                {"question": f"What is {i}+1? ({subset})", "answer": f"add\n<<{i}+1>>\n#### {i + 1:,} "}
                for i in range(start, start + n)
            ]
            path = tmp_path / "gsm8k" / subset / f"{split}-00000-of-00001.parquet"
            datasets.Dataset.from_list(rows).to_parquet(str(path))
    return tmp_path / "gsm8k"


HUGE = "9" * 10**6
README = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
"""


# Tokenizer


def test_end_tokens_come_from_the_tokenizer_and_the_generation_config(tokenizer, tmp_path):
    assert end_token_ids(tokenizer, str(TINY_QWEN3)) == [2]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    assert end_token_ids(tokenizer, str(tmp_path)) == [2, 5]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert end_token_ids(tokenizer, str(tmp_path)) == [2, 7]
    for wrong in ("[7]", '{"eos_token_id": "7"}', '{"eos_token_id": [null]}', "{"):
        (tmp_path / "generation_config.json").write_text(wrong)
        with pytest.raises(UserError, match=r"generation_config\.json is no generation config \(.*: download it again"):
            end_token_ids(tokenizer, str(tmp_path))


def test_missing_tokenizer(tmp_path):
    with pytest.raises(UserError, match=r"\[model\] hf_assets_path = .*nowhere.* is not a folder"):
        load_tokenizer(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_tiny_tokenizer_has_a_token_for_every_row_of_the_embedding(tokenizer):
    config = json.loads((TINY_QWEN3 / "config.json").read_text())
    assert len(tokenizer) == config["vocab_size"] == 64
    text = "What is 12+34-5*6=?\nthe quick brown fox jumps over the lazy dog"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert tokenizer("A%")["input_ids"][0] == tokenizer.bos_token_id


# Sources


def test_arithmetic_is_right_distinct_and_held_out(tokenizer):
    data = Data(source_args={"max": 9, "operators": ["+", "-", "*"]})
    train = PromptSource(data, tokenizer, 0, validation_prompts=30)
    held_out = PromptSource(data, tokenizer, 1, held_out=True, validation_prompts=30)
    assert len(train) == 270 and len(held_out) == 30
    asked = [prompt.columns["question"] for prompt in train.next(270)]
    kept = [prompt.columns["question"] for prompt in held_out.first(30)]
    assert len(set(asked)) == 270 and not set(asked) & set(kept)
    for prompt in train.next(300):
        assert prompt.answer == str(eval(prompt.columns["question"].rstrip("=")))


def test_arithmetic_asks_in_words(tokenizer):
    data = Data(source_args={"max": 2, "operators": ["-"], "question": "What is {left} less {right}?"})
    asked = {prompt.columns["question"]: prompt.answer for prompt in PromptSource(data, tokenizer, 0).next(9)}
    assert len(asked) == 9 and asked["What is 1 less 2?"] == "-1"


def test_arithmetic_size_limits_the_training_prompts(tokenizer):
    assert len(PromptSource(Data(source_args={"size": 50}), tokenizer, 0, validation_prompts=8)) == 50


def test_reasoning_gym_never_trains_on_held_out_questions(tokenizer):
    """coin_flip has few distinct questions, so the generator repeats itself."""
    pytest.importorskip("reasoning_gym")
    data = Data(
        source="reasoning_gym", source_args={"tasks": ["coin_flip", "chain_sum"], "size": 300}, max_prompt_tokens=2000
    )
    train = PromptSource(data, tokenizer, 0, validation_prompts=41)
    held_out = PromptSource(data, tokenizer, 0, held_out=True, validation_prompts=41)
    assert len(held_out) == 41 and 0 < len(train) < 2 * (300 + 21) - 41 + 1
    kept = {prompt.columns["question"] for prompt in held_out.first(41)}
    assert not kept & {prompt.columns["question"] for prompt in train.next(len(train))}
    assert {prompt.columns["task"] for prompt in held_out.first(41)} == {"coin_flip", "chain_sum"}
    json.dumps(train.next(1)[0].columns)


def test_jsonl_rows_are_held_out_from_the_end_with_their_repeats(tokenizer, tmp_path):
    rows = [*questions(10), {"question": "1+1=", "answer": "2"}]
    data = Data(source="jsonl", path=write_jsonl(tmp_path / "a.jsonl", rows))
    train = PromptSource(data, tokenizer, 0, validation_prompts=2)
    held_out = PromptSource(data, tokenizer, 0, held_out=True, validation_prompts=2)
    assert [prompt.columns["question"] for prompt in held_out.first(99)] == ["9+1=", "1+1="]
    assert sorted(prompt.index for prompt in train.next(8)) == [0, 2, 3, 4, 5, 6, 7, 8]


def test_jsonl_validation_file_leaves_training_whole(tokenizer, tmp_path):
    data = Data(
        source="jsonl",
        path=write_jsonl(tmp_path / "a.jsonl", questions(10)),
        validation_path=write_jsonl(tmp_path / "b.jsonl", questions(5, 50)),
    )
    assert len(PromptSource(data, tokenizer, 0, validation_prompts=3)) == 10
    held_out = PromptSource(data, tokenizer, 0, held_out=True, validation_prompts=3)
    assert (
        [prompt.answer for prompt in held_out.first(3)] == ["51", "52", "53"] == [p.answer for p in held_out.first(3)]
    )


def test_a_list_of_rows_and_packed_rows_are_read_too(tokenizer, tmp_path):
    rows = questions(3)
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    forms = {"a.json": json.dumps(rows, indent=2).encode(), "b.json": codecs.BOM_UTF8 + json.dumps(rows).encode()}
    forms |= {"c.jsonl.gz": gzip.compress(lines), "d.json.gz": gzip.compress(forms["a.json"])}
    for name, content in forms.items():
        (tmp_path / name).write_bytes(content)
        prompts = PromptSource(Data(source="jsonl", path=str(tmp_path / name)), tokenizer, 0)
        assert [prompt.columns for prompt in prompts.first(9)] == rows, name


def test_content_in_text_parts_is_joined(tokenizer, tmp_path):
    def text(content):
        path = write_jsonl(tmp_path / "a.jsonl", [{"question": [{"role": "user", "content": content}], "answer": "2"}])
        return PromptSource(Data(source="jsonl", path=path), tokenizer, 0).first(1)[0].text

    assert text([{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]) == text("1+1=")
    with pytest.raises(UserError, match=r'a.jsonl:1: .*"content": text'):
        text([{"type": "text", "text": "1+"}, {"type": "image_url", "image_url": "x"}])


def test_answers_that_say_nothing_are_counted(tokenizer, tmp_path, caplog):
    rows = [{"question": f"{i}", "answer": answer} for i, answer in enumerate([None, float("nan"), "", 0, "2"])]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    answers = [prompt.answer for prompt in PromptSource(Data(source="jsonl", path=path), tokenizer, 0).first(9)]
    assert answers == ["", "", "", "0", "2"]
    assert "the answer of 3 prompts is null, NaN or empty text" in caplog.text
    PromptSource(Data(source="jsonl", path=path, answer_column=""), tokenizer, 0)
    assert caplog.text.count("null, NaN") == 1


@pytest.mark.parametrize("column", ["question", "answer"])
def test_half_of_a_character_is_refused_with_its_row(tokenizer, tmp_path, column):
    write_jsonl(tmp_path / "rows.jsonl", [{"question": "1+1=", "answer": "2"} | {column: "a \ud83d b"}])
    data = Data(source="jsonl", path=str(tmp_path / "rows.jsonl"), chat_template=False)
    with pytest.raises(UserError, match=r"rows.jsonl:1 holds half of a surrogate pair"):
        PromptSource(data, tokenizer, 0)


@pytest.mark.parametrize("convert", [lambda row: as_json(row, "row 0"), always_json])
def test_the_columns_of_a_row_are_converted_together(convert, monkeypatch):
    """One call for each takes four times as long: a second for 60,000 rows of six."""
    row = {"b": np.float64(0.5), 1: (2, {3}), None: [], "1": "last", "a": {True: None}, "c": float("inf")}
    expected, calls, dumps = json.loads(json.dumps(row, default=str)), [], json.dumps
    monkeypatch.setattr("json.dumps", lambda *given, **settings: calls.append(0) or dumps(*given, **settings))
    read = convert(row)
    assert list(read.items()) == list(expected.items()) and len(calls) == 1


@pytest.mark.parametrize("readme", [False, True])
def test_gsm8k_folder(tokenizer, gsm8k, readme):
    if readme:
        (gsm8k / "README.md").write_text(README)
    pattern = r"#### (.+)"
    data = Data(source="hf", path=str(gsm8k), subset="main", validation_split="test", answer_pattern=pattern)
    train = PromptSource(data, tokenizer, 0)
    held_out = PromptSource(data, tokenizer, 0, held_out=True)
    assert len(train) == 20 and len(held_out) == 5
    first = held_out.first(1)[0]
    assert first.columns["question"] == "What is 100+1? (main)" and first.answer == "101"
    assert first.columns["answer"].startswith("add")


def test_hf_folder_of_jsonl_files(tokenizer, tmp_path):
    (tmp_path / "d").mkdir()
    write_jsonl(tmp_path / "d" / "train.jsonl", questions(6))
    write_jsonl(tmp_path / "d" / "test.jsonl", questions(2, 50))
    data = Data(source="hf", path=str(tmp_path / "d"), validation_split="test")
    assert len(PromptSource(data, tokenizer, 0)) == 6
    assert PromptSource(data, tokenizer, 0, held_out=True).first(9)[1].answer == "52"


@pytest.mark.parametrize("with_splits", [False, True])
def test_hf_saved_to_disk(tokenizer, tmp_path, with_splits):
    saved = datasets.Dataset.from_list(questions(6))
    if with_splits:
        saved = datasets.DatasetDict(train=saved, test=datasets.Dataset.from_list(questions(2, 50)))
    saved.save_to_disk(str(tmp_path / "d"))
    data = Data(source="hf", path=str(tmp_path / "d"))
    train = PromptSource(data, tokenizer, 0, validation_prompts=2)
    assert sorted(prompt.index for prompt in train.next(4)) == [0, 1, 2, 3]


# Rendering


def test_chat_rendering_is_the_tokenizers_own(tokenizer, tmp_path):
    messages = [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2="},
    ]
    data = Data(
        source="jsonl",
        path=write_jsonl(tmp_path / "a.jsonl", [{"question": messages, "answer": 4}]),
        system_prompt="add",
        prompt_template="say {prompt}",
    )
    prompt = PromptSource(data, tokenizer, 0).next(1)[0]
    assert prompt.text == "<bos>add\n1+1=2<eos>say 2+2="
    rendered = [{"role": "system", "content": "add"}, *messages[:2], {"role": "user", "content": "say 2+2="}]
    expected = tokenizer.apply_chat_template(rendered, add_generation_prompt=True, return_dict=False)
    assert prompt.token_ids == expected and expected.count(tokenizer.bos_token_id) == 1
    assert prompt.answer == "4"
    assert prompt.columns == {"question": messages, "answer": 4}


def test_plain_text_gets_the_tokenizers_begin_token(plain_tokenizer):
    prompt = PromptSource(Data(chat_template=False, prompt_template="{a} {prompt}"), plain_tokenizer, 0).next(1)[0]
    assert prompt.text == "{a} " + prompt.columns["question"]
    assert prompt.token_ids == plain_tokenizer(prompt.text)["input_ids"]
    assert prompt.token_ids[0] == plain_tokenizer.bos_token_id


def test_long_prompts_are_dropped_and_counted(tokenizer, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    tokenizer = copy.deepcopy(tokenizer)  # which warns once
    rows = [*questions(3), {"question": "1+" * 300, "answer": "x"}, *questions(2, 20)]
    data = Data(source="jsonl", path=write_jsonl(tmp_path / "a.jsonl", rows), max_prompt_tokens=20)
    source = PromptSource(data, tokenizer, 0)
    assert len(source) == 5
    assert 3 not in {prompt.index for prompt in source.next(20)}
    assert "1 of 6 prompts are over [data] max_prompt_tokens = 20 and are left out" in caplog.text
    assert "a.jsonl:4 with 601 tokens" in caplog.text
    assert "indexing errors" not in caplog.text, "transformers' own words about a row that is left out"
    data.max_prompt_tokens = 2
    with pytest.raises(UserError, match=r"Every prompt .*max_prompt_tokens = 2"):
        PromptSource(data, tokenizer, 0)


def test_characters_without_a_token_are_reported(tokenizer, tmp_path, caplog):
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "ÄÖ", "answer": "1"}])
    PromptSource(Data(source="jsonl", path=path), tokenizer, 0)
    assert "1 prompts hold characters" in caplog.text


def test_no_answer_column(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "1"}])
    assert PromptSource(Data(source="jsonl", path=path, answer_column=""), tokenizer, 0).next(1)[0].answer == ""
    with pytest.raises(UserError, match=r"a\.jsonl:1 has no column 'answer': set \[data\] answer_column .*\"\""):
        PromptSource(Data(source="jsonl", path=path), tokenizer, 0)


# Order


def test_every_epoch_has_every_prompt_in_a_new_order(tokenizer):
    source = PromptSource(Data(source_args={"max": 4}), tokenizer, 3)
    epochs = [[prompt.index for prompt in source.next(25)] for _ in range(3)]
    assert all(sorted(epoch) == list(range(25)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != list(range(25))
    again = PromptSource(Data(source_args={"max": 4}), tokenizer, 3)
    assert [prompt.index for prompt in again.next(75)] == [index for epoch in epochs for index in epoch]
    other = PromptSource(Data(source_args={"max": 4}), tokenizer, 4)
    assert [prompt.index for prompt in other.next(25)] != epochs[0]
    fixed = PromptSource(Data(source_args={"max": 4}, shuffle=False), tokenizer, 3)
    assert [prompt.index for prompt in fixed.next(30)] == [*range(25), *range(5)]


@pytest.mark.parametrize("taken", [0, 7, 25, 33, 50])
def test_resume_continues_exactly(tokenizer, taken):
    data = Data(source_args={"max": 4})
    source = PromptSource(data, tokenizer, 3)
    source.next(taken)
    state = json.loads(json.dumps(source.state_dict()))
    expected = source.next(60)
    resumed = PromptSource(data, tokenizer, 99)
    resumed.next(11)
    resumed.load_state_dict(state)
    assert resumed.next(60) == expected


def test_resume_refuses_other_prompts(tokenizer):
    state = PromptSource(Data(source_args={"max": 4}), tokenizer, 3).state_dict()
    other = PromptSource(Data(source_args={"max": 4}, prompt_template="{prompt} "), tokenizer, 3)
    with pytest.raises(
        UserError, match=r"not those that the checkpoint was trained on.*\[job\] dump_folder.* folder hf as"
    ):
        other.load_state_dict(state)


def test_resume_refuses_a_tokenizer_that_gives_other_tokens(tokenizer):
    data, other = Data(source_args={"max": 4}), copy.deepcopy(tokenizer)
    other.add_tokens(["1+"])
    state = PromptSource(data, tokenizer, 3).state_dict()
    with pytest.raises(UserError, match=r"^The tokenizer of .* other tokens than .*\[model\] hf_assets_path"):
        PromptSource(data, other, 3).load_state_dict(state)


def test_prompts_by_index_leave_the_position_alone(tokenizer):
    source, untouched = (PromptSource(Data(source_args={"max": 4}), tokenizer, 3) for _ in range(2))
    taken = source.next(7)
    assert source.at([prompt.index for prompt in reversed(taken)]) == taken[::-1]
    assert source.at([]) == []
    assert taken + source.next(60) == untouched.next(67)


# Curriculum

UNSOLVED = "torchtitan.grpo.data.curricula:unsolved"


def refuse_odd_answers(prompt, pass_rate):
    return int(prompt.answer) % 2 == 0


def refuse_all_but_one(prompt, pass_rate):
    return prompt.index == 7


def return_an_array(prompt, pass_rate):
    return np.array([True, True])


def fail_on_five(prompt, pass_rate):
    return 1 / (prompt.index - 5) != 0


SEEN = []


def look_at_all(prompt, pass_rate):
    SEEN.append({field.name: getattr(prompt, field.name) for field in fields(prompt)})
    return True


async def accept_later(prompt, pass_rate):
    return True


def forget_to_return(prompt, pass_rate):
    pass


def hook(function):
    return f"{__name__}:{function.__name__}"


def test_a_curriculum_skips_and_keeps_the_order_of_what_it_asks(tokenizer):
    plain = PromptSource(Data(source_args={"max": 4}), tokenizer, 3)
    source = PromptSource(Data(source_args={"max": 4}, curriculum=hook(refuse_odd_answers)), tokenizer, 3)
    expected = [prompt for prompt in plain.next(75) if int(prompt.answer) % 2 == 0]
    assert 30 <= len(expected) < 75
    assert [prompt for _ in range(10) for prompt in source.next(3)] == expected[:30]


def test_a_curriculum_sees_the_whole_prompt(tokenizer):
    source = PromptSource(Data(source_args={"max": 4}, curriculum=hook(look_at_all)), tokenizer, 3)
    SEEN.clear()
    asked = source.next(5)
    assert [asdict(prompt) for prompt in asked] == SEEN


def test_solved_prompts_are_not_asked_again(tokenizer):
    source = PromptSource(Data(source_args={"max": 1}, curriculum=UNSOLVED), tokenizer, 0)
    first = source.next(4)
    for prompt, mean_reward in zip(first, (1.0, 0.99, 1.0, 0.0), strict=True):
        source.record(prompt.index, mean_reward)
    left = {first[1].index, first[3].index}
    assert {prompt.index for prompt in source.next(20)} == left
    for index in left:
        source.record(index, 1.0)
    with pytest.raises(UserError, match=r'\[data\] curriculum = ".*unsolved" refuses every one of the 4 prompts'):
        source.next(1)
    source.record(first[0].index, 0.5)
    assert [prompt.index for prompt in source.next(2)] == [first[0].index] * 2


def test_one_accepted_prompt_is_found_however_epochs_are_ordered(tokenizer):
    """It may come first in one epoch and last in the next, with nearly two epochs of refused prompts in between."""
    source = PromptSource(Data(source_args={"max": 4}, curriculum=hook(refuse_all_but_one)), tokenizer, 0)
    assert [prompt.index for _ in range(50) for prompt in source.next(1)] == [7] * 50


def test_resume_with_a_curriculum_continues_exactly(tokenizer):
    data = Data(source_args={"max": 4}, curriculum=UNSOLVED)

    def go_on(source, steps):
        asked = []
        for _ in range(steps):
            prompts = source.next(4)
            for prompt in prompts:
                source.record(prompt.index, float(prompt.index % 3 == 0))
            asked += prompts
        return asked

    source = PromptSource(data, tokenizer, 3)
    go_on(source, 9)
    state = json.loads(json.dumps(source.state_dict()))
    expected = go_on(source, 20)
    resumed = PromptSource(data, tokenizer, 99)
    go_on(resumed, 2)
    resumed.load_state_dict(state)
    assert go_on(resumed, 20) == expected
    assert len({prompt.index for prompt in expected}) < 25


def test_a_curriculum_may_come_and_go_between_runs(tokenizer):
    with_hook, without = Data(source_args={"max": 1}, curriculum=UNSOLVED), Data(source_args={"max": 1})
    source = PromptSource(without, tokenizer, 3)
    source.record(source.next(1)[0].index, 1.0)
    assert "pass_rates" not in source.state_dict()
    resumed = PromptSource(with_hook, tokenizer, 3)
    resumed.load_state_dict(source.state_dict())
    assert resumed.next(8) == source.next(8)
    for prompt in resumed.at([0, 1, 2]):
        resumed.record(prompt.index, 1.0)
    source.load_state_dict(resumed.state_dict())
    assert {prompt.index for prompt in source.next(8)} == {0, 1, 2, 3}


def test_held_out_prompts_have_no_curriculum(tokenizer):
    data = Data(source_args={"max": 4}, curriculum=hook(forget_to_return))
    assert len(PromptSource(data, tokenizer, 0, held_out=True, validation_prompts=5).first(5)) == 5


@pytest.mark.parametrize(
    ("curriculum", "words"),
    [
        ("torchtitan.grpo.data.curricula", ["module:function"]),
        ("torchtitan.grpo.data.curricula:unsloved", ["[data] curriculum", '"unsolved"']),
        ("builtins:exit", ["[data] curriculum", "must take 2 arguments (prompt, pass_rate)"]),
        (hook(accept_later), ["[data] curriculum", "test_prompts.py:", "gives a coroutine: write it as `def`"]),
        (hook(fail_on_five), ["[data] curriculum", "failed on prompt 5: ZeroDivisionError"]),
        (hook(forget_to_return), ["[data] curriculum", "returned None for prompt", "True or False"]),
        (hook(return_an_array), ["[data] curriculum", "failed on prompt", "truth value of an array"]),
    ],
)
def test_bad_curriculum(tokenizer, curriculum, words):
    with pytest.raises(UserError) as caught:
        PromptSource(Data(source_args={"max": 4}, curriculum=curriculum), tokenizer, 0).next(25)
    for word in words:
        assert word in str(caught.value)


# Supervised pairs


def test_sft_targets_end_with_the_end_token(tokenizer, tmp_path):
    rows = [{"question": "1+1=", "answer": "so #### 2", "steps": "1 1"}]
    data = Data(source="jsonl", path=write_jsonl(tmp_path / "a.jsonl", rows), answer_pattern="#### (.+)")
    prompts = PromptSource(data, tokenizer, 0).next(2)
    assert prompts[0].answer == "2"
    pair, _ = sft_pairs(prompts, data, "", tokenizer)
    assert pair.token_ids[~pair.trained].tolist() == prompts[0].token_ids
    assert tokenizer.decode(pair.token_ids[pair.trained].tolist()) == "so #### 2<eos>"
    other = sft_pairs(prompts, data, "steps", tokenizer)[0]
    assert tokenizer.decode(other.token_ids[other.trained].tolist()) == "1 1<eos>"
    with pytest.raises(UserError, match=r"no column 'stpes': set \[sft\] target_column to one of .*'steps'"):
        sft_pairs(prompts, data, "stpes", tokenizer)
    cut = [replace(prompts[0], columns={"answer": "2 \ud83d"})]
    with pytest.raises(UserError, match="The target of prompt 0 holds half of a surrogate pair"):
        sft_pairs(cut, data, "", tokenizer)
    length = len(pair.token_ids)
    assert len(sft_pairs(prompts[:1], data, "", tokenizer, longest=length)) == 1
    with pytest.raises(UserError, match=rf"have {length} tokens, over \[training\] seq_len = {length - 1}: raise it"):
        sft_pairs(prompts[:1], data, "", tokenizer, longest=length - 1)


def test_tokens_without_an_embedding_may_be_there_if_no_text_has_them(tokenizer, tmp_path, caplog):
    assert len(load_tokenizer(str(TINY_QWEN3), vocab_size=64)) == 64 and not caplog.text
    load_tokenizer(str(TINY_QWEN3), vocab_size=60)
    assert "ids up to 63, and the model embeddings for 60" in caplog.text
    data = Data(source_args={"max": 3})
    prompts = PromptSource(data, tokenizer, 0, vocab_size=60).next(2)
    assert end_token_ids(tokenizer, str(TINY_QWEN3), 60) == [2]
    assert len(sft_pairs(prompts, data, "", tokenizer, 60)) == 2
    prompts = [replace(prompts[0], columns={"answer": "S"})]
    with pytest.raises(UserError, match=rf"target of prompt {prompts[0].index} has id 63 \('S'\)"):
        sft_pairs(prompts, data, "", tokenizer, 60)


# Bad input


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (None, ["[data] path", "is not a file"]),
        ("", ["a.jsonl", "no rows"]),
        ('{"question": "1", "answer": "1"}\n\n{"question": \n', ["a.jsonl:3", "JSON"]),
        ('{"question": "1", "answer": "\xff"}'.encode("latin-1"), ["a.jsonl:1", "JSON"]),
        ("[1, 2]\n", ["a.jsonl, row 0", "int", "one JSON object per line, or one list"]),
        ('[{"question": "1", "answer": "1"},\n {"question"\n', ["a.jsonl:2", "JSON"]),
        ("[" * 100_000, ["a.jsonl:1", "JSON"]),
        ('{"question": "1", "answer": "1"}\n[1, 2]\n', ["a.jsonl:2", "list", "one JSON object per line"]),
        (gzip.compress(b'{"question": "1", "answer": "1"}\n' * 9, mtime=0)[:-9], ["[data] path", "torn gzip file"]),
        ('{"q": "1", "answer": "1"}\n', ["a.jsonl:1", "[data] prompt_column", "['q', 'answer']"]),
        ('{"question": "1", "answer": "1"}\n{"question": "1"}\n', ["a.jsonl:2", "[data] answer_column"]),
        ('{"question": 5, "answer": "1"}\n', ["a.jsonl:1", "'question'", "text or a list of chat messages"]),
        ('{"question": " ", "answer": "1"}\n', ["a.jsonl:1", "must end with what a user asks"]),
        ('{"question": [], "answer": "1"}\n', ["a.jsonl:1", "chat messages"]),
        ('{"question": [{"role": "user"}], "answer": "1"}\n', ["a.jsonl:1", '"content": text']),
        ('{"question": [{"role": "assistant", "content": "1"}], "answer": "1"}\n', ["a.jsonl:1", "a user asks"]),
        ('{"question": "1", "answer": ["1"]}\n', ["a.jsonl:1", "'answer'", "text or a number"]),
        (f'{{"question": {{"a": "{HUGE}"}}}}', ["a.jsonl:1", "chat messages"]),
        (f'{{"question": [{{"role": 1, "content": "{HUGE}"}}]}}', ["a.jsonl:1", '"content": text']),
        (f'{{"question": [{{"role": "tool", "content": "{HUGE}"}}]}}', ["a.jsonl:1", "a user asks"]),
        (f'{{"question": "1", "answer": ["{HUGE}"]}}', ["a.jsonl:1", "(1,000,004 characters): change it"]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bad_jsonl(tokenizer, tmp_path, rows, words):
    path = tmp_path / "a.jsonl"
    if rows is not None:
        path.write_bytes(rows if isinstance(rows, bytes) else rows.encode())
    with pytest.raises(UserError) as caught:
        PromptSource(Data(source="jsonl", path=str(path)), tokenizer, 0)
    for word in words:
        assert word in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz"])
def test_a_csv_file_is_read_as_a_folder(tokenizer, tmp_path, name):
    folder = tmp_path / "folder"
    folder.mkdir()
    with (gzip.open if name.endswith(".gz") else open)(folder / name, "wt") as file:
        file.write("question,answer\n1+1=,2\n")
    with pytest.raises(UserError, match=r"it is CSV: put it into a folder of its own, set \[data\] source = \"hf\""):
        PromptSource(Data(source="jsonl", path=str(folder / name)), tokenizer, 0)
    [prompt] = PromptSource(Data(source="hf", path=str(folder)), tokenizer, 0).first(9)
    assert prompt.columns["question"] == "1+1=" and prompt.answer == "2"


def test_an_empty_cell_of_csv_does_not_make_fractions_of_integers(tokenizer, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "rows.csv").write_text("question,answer\n1+1=,2\n1+2=,\n1+3=,4\n")
    prompts = PromptSource(Data(source="hf", path=str(tmp_path / "folder")), tokenizer, 0).first(9)
    assert [prompt.answer for prompt in prompts] == ["2", "", "4"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"source": "hf", "path": "nowhere"}, ["[data] path = 'nowhere'", "not a folder", "openai/gsm8k"]),
        ({"answer_pattern": "#### (.+)"}, ["[data] answer_pattern", "does not match", "row "]),
        (
            {"source": "reasoning_gym", "source_args": {"tasks": ["chain_sun"]}},
            ["[data] source_args tasks", '"chain_sum"'],
        ),
    ],
)
def test_bad_settings_say_what_to_change(tokenizer, settings, words):
    with pytest.raises(UserError) as caught:
        PromptSource(Data(**settings), tokenizer, 0)
    for word in words:
        assert word in str(caught.value)


def test_missing_chat_template(plain_tokenizer):
    with pytest.raises(UserError, match=r"\[data\] chat_template = false"):
        PromptSource(Data(), plain_tokenizer, 0)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}x", "no system"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_chat_template_that_refuses_messages(tokenizer, template, said, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(UserError, match=f"row [0-9]+: the tokenizer's chat template refuses these messages: {said}"):
        PromptSource(Data(system_prompt="add"), tokenizer, 0)


def test_messages_and_plain_text_or_two_system_messages_contradict(tokenizer, tmp_path):
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "1"}]
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": messages, "answer": "1"}])
    with pytest.raises(UserError, match=r"a\.jsonl:1: .*empty \[data\] system_prompt"):
        PromptSource(Data(source="jsonl", path=path, system_prompt="add"), tokenizer, 0)
    with pytest.raises(UserError, match=r"a\.jsonl:1: .*\[data\] chat_template = true"):
        PromptSource(Data(source="jsonl", path=path, chat_template=False), tokenizer, 0)


def test_bad_hf_folder(tokenizer, gsm8k, tmp_path):
    def error(held_out=False, **settings):
        with pytest.raises(UserError) as caught:
            PromptSource(Data(source="hf", **settings), tokenizer, 0, held_out=held_out)
        return str(caught.value)

    message = error(path=str(gsm8k), subset="main", split="validation")
    assert "'validation'" in message and "['train', 'test']" in message and "[data] split" in message
    message = error(path=str(gsm8k), subset="main", prompt_column="problem")
    assert "row 0" in message and "['question', 'answer']" in message
    (gsm8k / "README.md").write_text(README)
    assert "[data] subset to one of ['main', 'socratic']" in error(path=str(gsm8k))
    assert '"main"' in error(path=str(gsm8k), subset="mian")
    (tmp_path / "empty").mkdir()
    assert f"[data] path = '{tmp_path}/empty'" in error(path=str(tmp_path / "empty"))
    assert "[data] path = 'no' is not" in error(path="no", validation_split="test", held_out=True)
    assert "[data] validation_path = 'no' is not" in error(path=str(gsm8k), validation_path="no", held_out=True)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"a.jsonl": '{"question": "1"}\n', "b.jsonl": '{"other": 1}\n'}, "because column names don't match"),
        ({"a.jsonl": "{}", "README.md": "---\nconfigs: [a: b: c\n---\n"}, "ParserError: while parsing a flow sequence"),
        ({"a.zip": "torn"}, "BadZipFile: File is not a zip file"),
        ({"dataset_dict.json": "{}"}, "KeyError: 'splits'"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_bad_hf_folder_says_what_is_wrong_with_its_files(tokenizer, tmp_path, files, words):
    (folder := tmp_path / "folder").mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    with pytest.raises(UserError, match=rf"\[data\] path = '{folder}' cannot be read as a dataset: ") as caught:
        PromptSource(Data(source="hf", path=str(folder)), tokenizer, 0)
    assert words in str(caught.value)


def test_too_few_rows_to_hold_any_out(tokenizer, tmp_path):
    data = Data(source="jsonl", path=write_jsonl(tmp_path / "a.jsonl", questions(4)))
    with pytest.raises(UserError, match="has 4 rows, and 4 are held out, which leaves no row to train on"):
        PromptSource(data, tokenizer, 0, validation_prompts=4)
    data = Data(source="jsonl", path=write_jsonl(tmp_path / "b.jsonl", questions(1) * 4))
    with pytest.raises(UserError, match="repeats a held-out question"):
        PromptSource(data, tokenizer, 0, validation_prompts=1)
