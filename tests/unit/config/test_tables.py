"""`[[data.mixture]]` and `[[validation.sets]]`: what tables inherit, and errors that name table and key."""

import pytest

from tests.helpers import TINY_QWEN3
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.config.resolved import toml_lines
from torchtitan.grpo.config.tables import held_out_rows, longest_tokens
from torchtitan.grpo.dry_run.describe import batch_lines
from torchtitan.grpo.errors import UserError

TABLES = """
[training]
seq_len = 128
[data]
max_prompt_tokens = 100
system_prompt = "add"
[rollout]
max_answer_tokens = 16
[reward]
functions = ["exact_match", "numeric_match"]
[[data.mixture]]
name = "gsm8k"
weight = 3
source = "hf"
path = "~/gsm8k"
split = "train"
functions = ["numeric_match"]
[[data.mixture]]
name = "sums"
[validation]
enable = true
prompts = 20
[[validation.sets]]
name = "sums"
samples_per_prompt = 8
[[validation.sets]]
name = "gsm8k"
split = "test"
prompts = 7
max_answer_tokens = 300
"""


def load(tmp_path, text, *flags):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return load_config(["--job.config_file", str(path), "--model.hf_assets_path", str(TINY_QWEN3), *flags])


def test_a_table_inherits_what_it_leaves_out(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = load(tmp_path, TABLES)
    gsm8k, sums = config.data.mixture
    assert (gsm8k.weight, gsm8k.functions, gsm8k.data.path) == (3.0, ["numeric_match"], "/home/me/gsm8k")
    assert (sums.weight, sums.functions, sums.data.source, sums.data.path) == (1.0, [], "arithmetic", "")
    assert {table.data.system_prompt for table in config.data.mixture} == {"add"}
    of_sums, of_gsm8k = config.validation.sets
    assert (of_sums.prompts, of_sums.samples_per_prompt, of_sums.max_answer_tokens) == (20, 8, 16)
    assert (of_gsm8k.prompts, of_gsm8k.samples_per_prompt, of_gsm8k.max_answer_tokens) == (7, 1, 300)
    assert (of_gsm8k.data.path, of_gsm8k.data.split, of_gsm8k.functions) == (gsm8k.data.path, "test", ["numeric_match"])
    assert (held_out_rows(config, "sums"), held_out_rows(config, "gsm8k")) == (20, 0), "the test split is its own"
    assert longest_tokens(config) == 400


def test_the_dry_run_prints_tables_that_make_the_same_run(tmp_path):
    config = load(tmp_path, TABLES)
    text = "\n".join(toml_lines(config))
    assert list(toml_lines(load(tmp_path, text))) == list(toml_lines(config))
    said = "\n".join(batch_lines(config, 1))
    assert "mixture          gsm8k 75%, sums 25%" in said
    assert f"{20 * 9 + 7 * 2:,} answers every" in said


MIXTURE = '[[data.mixture]]\nname = "a"\n'
SET = '[[validation.sets]]\nname = "b"\n'
RUNS = '[data]\nsource = "environment"\n[rollout]\nenvironment = "verifiers:sums-v1"\n'
BAD = {
    "unknown key": (MIXTURE + "wieght = 2", '[[data.mixture]] "a" wieght', 'did you mean "weight"?'),
    "key of [data] only": (MIXTURE + 'curriculum = "a:b"', "unknown key", '"a" curriculum'),
    "one tokenizer, one template": (SET + 'chat_template_file = "t.jinja"', "unknown key", '"b" chat_template_file'),
    "key of an earlier version": (SET + "min_p = 0.1", '"b" min_p is a key of an earlier version', "top_p"),
    "type": (MIXTURE + "weight = '2'", '[[data.mixture]] "a" weight = "2"', "write 2, without quotes"),
    "range": (MIXTURE + "weight = 0", '"a" weight = 0.0 must be over 0'),
    "no end of a range": (SET + "max_answer_tokens = 10000000000", "= 10000000000 must be at most 1000000000"),
    "weights whose sum is no number": (MIXTURE + "weight = 1e308", '"a" weight = 1e+308 must be at most 1000000000'),
    "range of [data]": (MIXTURE + "max_prompt_tokens = 0", '"a" max_prompt_tokens = 0 must be at least 1'),
    "argument of a source": (MIXTURE + "source_args = { size = 0 }", '"a" source_args size = 0 must be at least 1'),
    "key of [data] of an earlier version": (
        MIXTURE + "size = 9",
        '"a" size is a key of an earlier version: write [[data.mixture]] "a" source_args',
    ),
    "one table": ('[data.mixture]\nname = "a"', "[[data.mixture]] is a list of tables", "two brackets"),
    "a value": ("[data]\nmixture = 3", "[[data.mixture]] is a list of tables"),
    "no name": ("[[data.mixture]]\nweight = 1", "[[data.mixture]] 1 has no name"),
    "a name that is no metric": ('[[data.mixture]]\nname = "a/b"', "letters, digits"),
    "two of a name": (MIXTURE + MIXTURE, '"a" is there 2 times'),
    "rows": (MIXTURE + 'source = "jsonl"', '[[data.mixture]] "a" path is missing'),
    "function": (
        MIXTURE + 'functions = ["exact_mtch"]',
        '"exact_mtch"',
        'did you mean "exact_match"?',
        "list it there",
    ),
    "function of other rows": (
        MIXTURE + '[reward]\nfunctions = ["reasoning_gym"]',
        '[[data.mixture]] "a" source = "reasoning_gym"',
        "name others in",
    ),
    "prompts longer than [data]'s": (MIXTURE + "max_prompt_tokens = 600", "over [data] max_prompt_tokens = 512"),
    "a set of nothing": (MIXTURE + '[[validation.sets]]\nname = "b"', "neither rows of its own", "['a']"),
    "rows of a set": ('[[validation.sets]]\nname = "b"\npath = "x"', '[[validation.sets]] "b" path = "x" is read with'),
    "environment without a function": (SET + 'environment = "a"', '"b" environment: "a" must be "module:function"'),
    "environment without a name": (SET + 'environment = "openenv:"', '"b" environment = "openenv:": put the address'),
    "environment as nothing": (SET + 'environment = ""', '"b" environment = "": leave it out', '"none" for one answer'),
    "a harness": (SET + 'environment = "endpoint"', '"b" environment = "endpoint" is for [rollout] only', '"none"'),
    "arguments alone": (SET + "environment_args = { a = 1 }", '"b" environment_args = { "a" = 1 } is read with'),
    "arguments of none": (
        SET + 'environment = "none"\nenvironment_args = { a = 1 }',
        '"b" environment_args = { "a" = 1 } with environment = "none"',
    ),
    "arguments without names": (SET + 'environment_args = ["a"]', '"b" environment_args = ["a"] is a list, not table'),
    "tasks of a set's environment": (
        SET + 'environment = "verifiers:gsm8k-v1"',
        '"b" source = "arithmetic" has no tasks of verifiers, which [[validation.sets]] "b" environment',
    ),
    "tasks of the run's environment": (
        RUNS + SET + 'environment = "verifiers:gsm8k-v1"',
        '"b" asks rows that [rollout] environment holds out',
        'set source = "environment"',
    ),
    "rows of no environment": (
        RUNS + SET + 'environment = "none"\nsource = "environment"',
        '"b" source = "environment" are the rows of [[validation.sets]] "b" environment, and there is none',
    ),
    "no rewards": (
        RUNS + SET + 'environment = "none"\n[reward]\nfunctions = []',
        '"b" environment = "none" gives no rewards, and [reward] functions is empty',
    ),
    "concurrency": (
        SET + 'environment = "none"\n[rollout]\nenvironment_concurrency = 2',
        "[rollout] environment_concurrency = 2 is read with",
    ),
    "temperature": ('[[validation.sets]]\nname = "b"\ntemperature = 0', "at least 0.01", "greedy answers are measured"),
}


@pytest.mark.parametrize(("text", "words"), [(row[0], row[1:]) for row in BAD.values()], ids=BAD)
def test_bad_tables_are_named_with_what_to_change(tmp_path, text, words):
    with pytest.raises(UserError) as caught:
        load(tmp_path, text)
    for word in words:
        assert word in str(caught.value)


def test_a_set_takes_what_environment_it_likes(tmp_path):
    own = (
        'source = "environment"\nenvironment = "verifiers:sums-v1"\nenvironment_args = { taskset = { split = "test" } }'
    )
    config = load(
        tmp_path,
        f"{SET}{own}\n[rollout]\nenvironment_concurrency = 2\n[reward]\nfunctions = ['reasoning_gym']"
        "\n[data]\nsource = 'reasoning_gym'\nsource_args = { tasks = ['chain_sum'] }",
    )
    (held_out,) = config.validation.sets
    assert held_out.environment_args == {"taskset": {"split": "test"}}
    assert 'environment_args = { "taskset" = { "split" = "test" } }' in list(toml_lines(config))
    for name in ("none", "a:b", "openenv:http://a:1"):
        config = load(
            tmp_path, f'{RUNS}{SET}source = "{"environment" if ":" in name else "arithmetic"}"\nenvironment = "{name}"'
        )
        assert config.validation.sets[0].environment == name
    with pytest.raises(UserError, match=r'"b" source = "arithmetic" has no tasks of verifiers, which \[rollout\]'):
        load(tmp_path, RUNS + SET + 'source = "arithmetic"')


def test_tables_are_no_flags(tmp_path):
    with pytest.raises(UserError, match=r"--data\.mixture: write \[\[data\.mixture\]\] tables into the TOML file"):
        load(tmp_path, "", "--data.mixture", "a,b")
