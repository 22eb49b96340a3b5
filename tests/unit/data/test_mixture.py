"""Several sources as one: shares, exact continuation, held-out sets, rewards by source and by row."""

import json
from collections import Counter

import pytest

from tests.helpers import TINY_QWEN3
from torchtitan.grpo.config.job_config import Data
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.data.load import load_held_out, load_training
from torchtitan.grpo.data.mixture import source_of_draw
from torchtitan.grpo.data.overview import overview, visible
from torchtitan.grpo.data.prompts import PromptSource, sft_pairs
from torchtitan.grpo.data.tokenizer import load_tokenizer
from torchtitan.grpo.errors import UserError

TWO = """
[data]
chat_template = false
[[data.mixture]]
name = "small"
weight = 3
source_args = { max = 4 }
[[data.mixture]]
name = "large"
source_args = { max = 9 }
functions = ["numeric_match"]
[reward]
functions = ["exact_match", "numeric_match"]
"""


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(TINY_QWEN3))


@pytest.fixture
def prompts_of(tokenizer, tmp_path):
    """Training prompts and held-out sets of a TOML text."""

    def load(text: str, seed: int = 0):
        path = tmp_path / "run.toml"
        path.write_text(text)
        flags = ["--model.hf_assets_path", str(TINY_QWEN3), "--debug.seed", str(seed)]
        config = load_config(["--job.config_file", str(path), *flags])
        held_out = load_held_out(config, tokenizer) if config.validation.enable else []
        return load_training(config, tokenizer, held_out), held_out

    return load


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("weights", [[1.0], [3.0, 1.0], [1.0, 1e-3], [5.0, 3.0, 2.0], [0.1] * 7])
def test_every_stretch_of_draws_has_each_sources_share(weights):
    drawn = [source_of_draw(draw, weights, 7) for draw in range(4000)]
    for start, length in ((0, 4000), (0, 64), (1111, 64), (3000, 500)):
        counts = Counter(drawn[start : start + length])
        for source, weight in enumerate(weights):
            assert abs(counts[source] - length * weight / sum(weights)) < 4, (start, length, source)


def test_a_draw_depends_on_its_number_the_weights_and_the_seed_alone():
    one, other = ([source_of_draw(draw, [2.0, 1.0], seed) for draw in range(100)] for seed in (1, 2))
    assert one != other
    assert one[50:] == [source_of_draw(draw, [4.0, 2.0], 1) for draw in range(50, 100)]
    assert source_of_draw(10**15, [2.0, 1.0], 1) in (0, 1)


def test_prompts_say_their_source_their_functions_and_a_number_of_their_own(prompts_of):
    mixture, _ = prompts_of(TWO)
    assert len(mixture) == 25 + 100
    prompts = mixture.next(400)
    assert Counter(prompt.source for prompt in prompts)["small"] == pytest.approx(300, abs=3)
    assert {(prompt.source, prompt.functions) for prompt in prompts} == {("small", ()), ("large", ("numeric_match",))}
    assert {prompt.index for prompt in prompts if prompt.source == "small"} == set(range(25))
    assert {prompt.index for prompt in prompts if prompt.source == "large"} <= set(range(25, 125))
    assert mixture.at([prompt.index for prompt in prompts]) == prompts
    assert [prompt.source for prompt in mixture.first(2)] == ["small", "small", "large", "large"]


@pytest.mark.parametrize("taken", [0, 33, 150])
def test_resume_continues_exactly(prompts_of, taken):
    mixture, _ = prompts_of(TWO)
    mixture.next(taken)
    state = json.loads(json.dumps(mixture.state_dict()))
    expected = mixture.next(100)
    resumed, _ = prompts_of(TWO, seed=9)
    resumed.next(11)
    resumed.load_state_dict(state)
    assert resumed.next(100) == expected


def test_resume_refuses_other_sources(prompts_of, tokenizer):
    mixture, _ = prompts_of(TWO)
    other, _ = prompts_of(TWO.replace("small", "tiny"))
    with pytest.raises(UserError, match=r"sources \['tiny', 'large'\].*\['small', 'large'\].*\[job\] dump_folder"):
        other.load_state_dict(mixture.state_dict())
    alone = PromptSource(Data(source_args={"max": 4}), tokenizer, 0)
    with pytest.raises(UserError, match=r"\[data\] alone"):
        mixture.load_state_dict(alone.state_dict())
    with pytest.raises(UserError, match="not those that the checkpoint was trained on"):
        alone.load_state_dict(mixture.state_dict())


def test_a_solved_source_leaves_the_others_until_all_are_solved(prompts_of):
    mixture, _ = prompts_of(TWO.replace("[data]", '[data]\ncurriculum = "torchtitan.grpo.data.curricula:unsolved"'))
    for index in range(25):
        mixture.record(index, 1.0)
    assert {prompt.source for prompt in mixture.next(40)} == {"large"}
    resumed, _ = prompts_of(TWO.replace("[data]", '[data]\ncurriculum = "torchtitan.grpo.data.curricula:unsolved"'))
    resumed.load_state_dict(json.loads(json.dumps(mixture.state_dict())))
    drawn = mixture.state_dict()["drawn"]
    assert resumed.next(40) == mixture.next(40)
    assert mixture.state_dict()["drawn"] == drawn + 40, "a source of small weight is not waited for"
    without, _ = prompts_of(TWO)
    without.load_state_dict(mixture.state_dict())
    assert {prompt.source for prompt in without.next(40)} == {"small", "large"}
    for index in range(25, 125):
        mixture.record(index, 1.0)
    with pytest.raises(UserError, match="refuses every one of the 100 prompts"):
        mixture.next(1)


def test_no_source_trains_on_what_any_held_out_set_asks(prompts_of, tmp_path):
    own = write_jsonl(tmp_path / "own.jsonl", [{"question": f"{i}+0=", "answer": str(i)} for i in range(5)])
    text = TWO + (
        "[validation]\nenable = true\nprompts = 6\ntemperature = 0.5\n"
        '[[validation.sets]]\nname = "large"\nsamples_per_prompt = 4\nprompts = 12\n'
        f'[[validation.sets]]\nname = "own"\nsource = "jsonl"\npath = "{own}"\nmax_answer_tokens = 9\n'
    )
    mixture, (large, named) = prompts_of(text)
    assert (large.name, len(large.prompts), large.samples, large.temperature) == ("large", 12, 4, 0.5)
    assert (named.name, len(named.prompts), named.samples, named.max_answer_tokens) == ("own", 5, 1, 9)
    assert {prompt.functions for prompt in large.prompts} == {("numeric_match",)}
    asked = {prompt.text for prompt in large.prompts + named.prompts}
    assert len(asked) >= 12 and not asked & {prompt.text for prompt in mixture.next(400)}


def test_without_sets_each_source_holds_out_its_own(prompts_of):
    _, sets = prompts_of(TWO + "[validation]\nenable = true\nprompts = 3\n")
    assert [(each.name, len(each.prompts)) for each in sets] == [("small", 3), ("large", 3)]
    plain, (unnamed,) = prompts_of("[data]\nsource_args = { max = 4 }\n[validation]\nenable = true\nprompts = 3\n")
    assert isinstance(plain, PromptSource)
    assert (unnamed.name, len(unnamed.prompts), unnamed.prompts[0].source) == ("", 3, "")


def test_a_row_may_name_its_functions(prompts_of, tmp_path):
    rows = [
        {"question": str(i), "answer": "1", "by": by} for i, by in enumerate(["exact_match", None, ["math_verify"]])
    ]
    rows.append({"question": "4", "answer": "1"})
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    text = f'[data]\nsource = "jsonl"\npath = "{path}"\nreward_column = "by"\nshuffle = false\n[reward]\nfunctions = '
    prompts, _ = prompts_of(text + '["exact_match", "math_verify"]')
    assert [prompt.functions for prompt in prompts.next(4)] == [("exact_match",), (), ("math_verify",), ()]
    with pytest.raises(UserError, match=r"rows\.jsonl:3: column 'by' names 'math_verify', which is not in \[reward\]"):
        prompts_of(text + '["exact_match"]')
    with pytest.raises(UserError, match=r"has no column 'b': set \[data\] reward_column to one of"):
        prompts_of(text.replace('"by"', '"b"') + '["exact_match"]')


def test_errors_of_a_table_name_it(prompts_of, tmp_path):
    path = write_jsonl(tmp_path / "q.jsonl", [{"q": "1", "answer": "1"}])
    with pytest.raises(UserError, match=r'set \[\[data\.mixture\]\] "own" prompt_column to one of'):
        prompts_of(TWO + f'[[data.mixture]]\nname = "own"\nsource = "jsonl"\npath = "{path}"\n')


def test_supervised_targets_are_in_each_sources_own_column(prompts_of, tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "q.jsonl", [{"question": "1", "solution": "9"}])
    table = f'[[data.mixture]]\nname = "own"\nsource = "jsonl"\npath = "{path}"\nanswer_column = "solution"\n'
    mixture, _ = prompts_of(TWO + table)
    prompts = mixture.next(30)
    pairs = sft_pairs(prompts, Data(mixture=mixture.tables), "", tokenizer)
    for prompt, pair in zip(prompts, pairs, strict=True):
        assert tokenizer.decode(pair.token_ids[pair.trained].tolist(), skip_special_tokens=True) == prompt.answer


def test_reasoning_gym_tasks_are_told_apart(prompts_of):
    pytest.importorskip("reasoning_gym")
    text = '[data]\nsource = "reasoning_gym"\nsource_args = { tasks = ["chain_sum", "coin_flip"], size = 4 }\n'
    text += "max_prompt_tokens = 2000\n"
    prompts, _ = prompts_of(text + "[training]\nseq_len = 4000\n")
    assert Counter(prompt.source for prompt in prompts.next(8)) == {"chain_sum": 4, "coin_flip": 4}


def test_the_overview_counts_the_rows_of_each_source_and_shows_its_first_prompt(prompts_of, tokenizer, tmp_path):
    rows = [{"question": f"{i}+90=", "answer": str(i + 90)} for i in range(9)]
    path = write_jsonl(tmp_path / "apart.jsonl", rows[7:])
    own = f'[[data.mixture]]\nname = "rows"\nsource = "jsonl"\npath = "{write_jsonl(tmp_path / "a.jsonl", rows)}"\n'
    own += f'validation_path = "{path}"\n[validation]\nenable = true\nprompts = 5\n'
    prompts, held_out = prompts_of(TWO + own)
    lines = overview(prompts, held_out, tokenizer)
    assert lines[0] == "rows" and lines[3].startswith(f"  rows: {tmp_path / 'a.jsonl'}: 9 rows read, 0 held out, ")
    assert ", 2 with a held-out question, 0 too long " in lines[3] and lines[3].endswith(", 7 to train on")
    assert "5 held out" in lines[1] and lines[1].startswith("  small: [data] source")
    assert lines[4:7] == [f"  held-out set {name}: {n} rows" for name, n in (("small", 5), ("large", 5), ("rows", 2))]
    assert [line for line in lines if "first" in line][2] == 'first prompt of "rows", 6 tokens'
    assert lines[-1] == "  <bos>0+90="


def test_a_shown_prompt_has_visible_white_space_and_no_middle():
    assert visible("a b\t\n\\boxed{é}\u2028 \x1b") == ["  a b\\t\\n", "  \\boxed{é}\\u2028", "   \\x1b"]
    (line,) = visible("x" * 3000 + "end")
    assert len(line) < 2100 and "[... 1,003 characters ...]" in line and line.endswith("xend")
