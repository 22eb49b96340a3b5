"""Environments are found by their names, get their arguments, and refuse others before anything starts."""

import asyncio
import functools
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import TINY_QWEN3, Unspeakable
from tests.helpers.openenv_server import served_wire
from torchtitan.config import JobConfig
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.data.load import load_held_out, load_training
from torchtitan.grpo.data.samples import Prompt, Sample
from torchtitan.grpo.data.tokenizer import load_tokenizer
from torchtitan.grpo.environments.load import load_environment, loaded_environments
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.rollouts.environment import Environment, RolloutClient, single_turn


def load(name: str, **arguments: Any) -> Environment:
    return load_environment(name, arguments, {})


async def accepted(client: RolloutClient, prompt: Prompt, depth: int = 1) -> list[Sample]:
    return [Sample(prompt, [depth], [0.0], [0], "stop")]


def wrong_parameters(prompt: Prompt) -> list[Sample]:
    raise AssertionError("is never called")


class Exits:
    def __init__(self) -> None:
        raise SystemExit("please set MY_DATA")


class Silent:
    def __init__(self) -> None:
        raise Unspeakable


class Sums:
    """An environment with rows of its own, and something to close."""

    closed = 0

    def __init__(self, largest: int, sign: str = "+", copies: int = 1) -> None:
        if sign != "+":
            raise OSError(f"no table of {sign}")
        rows = [{"question": f"{i}+{i}=", "answer": str(2 * i), "i": i} for i in range(largest)]
        self.rows = [row | {"copy": copy} for copy in range(copies) for row in rows]

    async def __call__(self, client: RolloutClient, prompt: Prompt) -> list[Sample]:
        return []

    def close(self) -> None:
        Sums.closed += 1


class Guess:
    """A game whose rows all ask the same: each secret is listed `copies` times."""

    def __init__(self, secrets: int, copies: int = 1) -> None:
        self.rows = [{"question": "Guess my number.", "secret": secret} for secret in range(secrets)] * copies

    async def __call__(self, client: RolloutClient, prompt: Prompt) -> list[Sample]:
        return []


def test_a_function_is_found_by_its_name_and_gets_its_arguments() -> None:
    assert load("") is single_turn
    assert load(f"{__name__}:accepted").__code__ is accepted.__code__
    assert load("torchtitan.grpo.environments.calculator:rollout").__name__ == "rollout"
    [sample] = asyncio.run(load(f"{__name__}:accepted", depth=3)(None, Prompt(0, [1], "")))
    assert sample.token_ids == [3]


@pytest.mark.parametrize(
    "name", ["calculator", "no_such_module:rollout", f"{__name__}:missing", f"{__name__}:wrong_parameters", ":", "a:"]
)
def test_a_name_that_is_no_environment_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"\[rollout\] environment"):
        load(name)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("accepted", {"depht": 3}, r'environment_args has "depht", which .*:accepted does not take.* "depth"'),
        ("accepted", {"prompt": 3}, r'has "prompt", which .*:accepted does not take: it takes depth'),
        ("openenv:http://a", {"url": "http://b"}, r'has "url", which openenv:http://a does not take: it takes prompt,'),
        ("openenv:http://a", {"api_key_env": "OF_A_FILE"}, r'api_key_env = "OF_A_FILE" holds what no HTTP header can'),
        ("Exits", {}, r"raised SystemExit: please set MY_DATA \(.*test_load.py:\d+ in __init__\)"),
        (
            "Silent",
            {},
            r"raised Unspeakable: \(what Unspeakable says cannot be read\) \(.*test_load.py:\d+ in __init__\)",
        ),
        ("Sums", {}, r"missing a required argument: 'largest'"),
        ("Sums", {"largest": 3, "sing": "-"}, r'has "sing", which .*:Sums does not take.* "sign"'),
        ("Sums", {"largest": 3, "sign": "-"}, r"raised OSError: no table of - \(.*test_load.py:\d+ in __init__\)"),
    ],
)
def test_arguments_that_it_does_not_take_are_refused(
    name: str, arguments: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_A_FILE", "secret\n")
    with pytest.raises(UserError, match=said):
        load(name if ":" in name else f"{__name__}:{name}", **arguments)


def config_of(folder: Path, text: str) -> JobConfig:
    path = folder / "run.toml"
    path.write_text(text.replace("HERE", __name__))
    return load_config(["--job.config_file", str(path), "--model.hf_assets_path", str(TINY_QWEN3)])


OWN_ROWS = """
[data]
source = "environment"
chat_template = false
shuffle = false
[rollout]
environment = "HERE:Sums"
environment_args = { largest = 5 }
environment_concurrency = 3
[validation]
enable = true
prompts = 2
"""
SETS = """
[[validation.sets]]
name = "usual"
[[validation.sets]]
name = "alone"
environment = "none"
[[validation.sets]]
name = "smaller"
source = "environment"
environment = "HERE:Sums"
environment_args = { largest = 2 }
prompts = 20
[[validation.sets]]
name = "tools"
environment = "HERE:accepted"
environment_args = { depth = 4 }
"""


def test_an_environment_may_bring_its_rows_and_is_closed(tmp_path: Path) -> None:
    Sums.closed = 0
    config, tokenizer = config_of(tmp_path, OWN_ROWS), load_tokenizer(str(TINY_QWEN3))
    with loaded_environments(config) as environments:
        held_out = load_held_out(config, tokenizer, rows=environments.rows)
        prompts = load_training(config, tokenizer, held_out, rows=environments.rows)
        assert [(p.text, p.answer, p.columns["i"]) for p in prompts.next(3)] == [
            ("0+0=", "0", 0),
            ("1+1=", "2", 1),
            ("2+2=", "4", 2),
        ]
        assert [prompt.text for prompt in held_out[0].prompts] == ["3+3=", "4+4="]
        assert not Sums.closed
    assert Sums.closed == 1
    config.rollout.environment, config.rollout.environment_args = f"{__name__}:accepted", {}
    with (
        pytest.raises(UserError, match=r'source = "environment": \[rollout\] environment brings no rows'),
        loaded_environments(config) as environments,
    ):
        load_held_out(config, tokenizer, rows=environments.rows)


def nested(levels: int) -> list:
    return functools.reduce(lambda inner, _: [inner], range(levels), [])


CIRCULAR: list = []
CIRCULAR.append(CIRCULAR)


class Fails:
    def __repr__(self) -> str:
        raise RuntimeError("not now")

    __str__ = __len__ = __repr__


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], r"brings an empty list of rows"),
        ((row for row in [{}]), r"its rows cannot be read: TypeError: .*generator.*has no len.*Give a list of dicts"),
        ({"question": ["1+1="]}, r"row 0 cannot be read: KeyError: 0"),
        ([{"question": "1+1="}, "2+2="], r"row 1 is '2\+2=': give a dict of columns"),
        ([Fails()], r"row 0 is \(a Fails that cannot be shown\): give a dict"),
        (
            [{"question": "1+1=", "state": Fails()}],
            r"row 0: column 'state' cannot be written as JSON .Runtime.*: not now.: ch",
        ),
        ([{(1, 2): "1+1="}], r"row 0: column \(1, 2\) cannot be written as JSON .TypeError: keys must be str"),
        ([{"question": "1+1="}, {"question": "1", "own": CIRCULAR}], r"row 1: column 'own' .*: Circular reference"),
        ([{"question": "1", "deep": nested(101)}], r"row 0: column 'deep' .*: over 100 lists or dicts in each other"),
        ([{"question": "1", "deep": nested(5000)}], r"row 0: column 'deep' cannot .*RecursionError: maximum"),
        (Fails(), r"its rows cannot be read: RuntimeError: not now"),
    ],
)
def test_rows_of_an_environment_that_cannot_be_trained_on_are_named(tmp_path: Path, monkeypatch, rows, words) -> None:
    monkeypatch.setattr(Sums, "rows", rows, raising=False)
    monkeypatch.setattr(Sums, "__init__", lambda self, **_: None)
    config, tokenizer = config_of(tmp_path, OWN_ROWS), load_tokenizer(str(TINY_QWEN3))
    with (
        pytest.raises(UserError, match=rf'source = "environment": \[rollout\] environment:? ?{words}'),
        loaded_environments(config) as environments,
    ):
        load_held_out(config, tokenizer, rows=environments.rows)


def test_rows_that_fail_when_they_are_asked_for(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(Sums, "__init__", lambda self, **_: None)
    monkeypatch.setattr(Sums, "rows", property(lambda self: 1 / 0), raising=False)
    with (
        pytest.raises(UserError, match=r"\[rollout\] environment: its `rows` cannot be read: ZeroDivisionError"),
        loaded_environments(config_of(tmp_path, OWN_ROWS)),
    ):
        pass


def test_a_close_that_fails_hides_no_other_error(tmp_path: Path, monkeypatch, caplog) -> None:
    def fail(self: Sums) -> None:
        raise ConnectionError("closed already")

    monkeypatch.setattr(Sums, "close", fail)
    with pytest.raises(UserError, match="the first"), loaded_environments(config_of(tmp_path, OWN_ROWS)):
        raise UserError("the first")
    assert f"[rollout] environment = '{__name__}:Sums' cannot be closed: ConnectionError: closed already" in caplog.text


def held_out_and_trained(folder: Path, text: str, column: str) -> tuple[list[list[int]], list[int], int]:
    """A column of each held-out set and of the training data, and by how many keys its rows are known."""
    config, tokenizer = config_of(folder, text), load_tokenizer(str(TINY_QWEN3))
    with loaded_environments(config) as environments:
        sets = load_held_out(config, tokenizer, rows=environments.rows)
        trained = load_training(config, tokenizer, sets, rows=environments.rows)
    columns = [[prompt.columns[column] for prompt in each.prompts] for each in sets]
    return columns, [prompt.columns[column] for prompt in trained.first(99)], len(trained.keys())


@pytest.mark.parametrize(
    ("rows", "held_out", "trained"),
    [
        ("Guess: secrets = 5", [3, 4], [0, 1, 2]),
        ("Guess: secrets = 1", [0], [0]),
        ("Guess: secrets = 1, copies = 9", [0, 0], [0] * 9),
        ("Guess: secrets = 3, copies = 4", [1, 2], [0] * 4),
        ("Guess: secrets = 2, copies = 2", [0, 1], [0, 1] * 2),
        ("Sums: largest = 5, copies = 2", [3, 4], [0, 1, 2] * 2),
        ("Sums: largest = 2, copies = 3", [0, 1], [0, 1] * 2),
    ],
)
def test_rows_of_environments_are_held_out_by_what_tells_them_apart(
    rows: str, held_out: list[int], trained: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name, arguments = rows.split(": ")
    text = OWN_ROWS.replace("Sums", name).replace("largest = 5", arguments)
    column = "secret" if name == "Guess" else "i"
    *found, known = held_out_and_trained(tmp_path, text, column)
    assert found == [[held_out], trained]
    nothing_out = name == "Guess" and bool(set(held_out) & set(trained))
    assert ("every row is like a held-out one" in caplog.text) == nothing_out == (known == 0)


def test_an_openenv_server_has_held_out_seeds(tmp_path: Path) -> None:
    with served_wire() as url:
        text = OWN_ROWS.replace("HERE:Sums", f"openenv:{url}").replace("largest = 5", "episodes = 6")
        of_set = f'source = "environment"\nenvironment = "openenv:{url}"\nenvironment_args = {{ episodes = 2 }}'
        text = text.replace("chat_template = false\n", "") + '[[validation.sets]]\nname = "last"\n'
        found = held_out_and_trained(tmp_path, text + f'[[validation.sets]]\nname = "first"\n{of_set}', "seed")
    assert found == ([[4, 5], [0, 1]], [2, 3], 2)


def test_held_out_sets_may_have_environments_of_their_own(tmp_path: Path) -> None:
    Sums.closed = 0
    config, tokenizer = config_of(tmp_path, OWN_ROWS + SETS), load_tokenizer(str(TINY_QWEN3))
    with loaded_environments(config) as environments:
        sets = load_held_out(config, tokenizer, rows=environments.rows)
        trained = load_training(config, tokenizer, sets, rows=environments.rows).first(9)
        answering = {each.name: environments.answering(each.name) for each in sets}
    assert Sums.closed == 2
    assert answering["usual"] is environments.own is environments.answering()
    assert [each.is_single_turn for each in answering.values()] == [False, True, False, False]
    assert answering["tools"].key == '[[validation.sets]] "tools" environment'
    texts = {each.name: [prompt.text for prompt in each.prompts] for each in sets}
    held_out = ["3+3=", "4+4="]
    assert texts["usual"] == texts["alone"] == texts["tools"] == held_out, "rows of the run's environment"
    assert texts["smaller"] == ["0+0=", "1+1="], "rows of its own, all that there are"
    assert [prompt.text for prompt in trained] == ["2+2="], "what no set asks"


def test_sets_have_no_environments_in_a_run_that_does_not_validate(tmp_path: Path) -> None:
    config = config_of(tmp_path, OWN_ROWS.replace("enable = true", "enable = false") + SETS)
    with loaded_environments(config) as environments:
        assert environments.of_sets == {}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ('environment = "HERE:missing"', r'environment: .* has no function "missing"'),
        ('environment = "HERE:accepted"\nenvironment_args = { depht = 1 }', 'environment_args has "depht", .* "depth"'),
        ('environment = "HERE:Sums"', r"environment: .*:Sums\" with .* environment_args = \[\]: missing"),
        ('environment = "HERE:accepted"\nsource = "environment"', 'source = "environment": .* environment brings no'),
        ('environment = "openenv:http://127.0.0.1:9"\nsource = "environment"', 'environment = "openenv:.* no server'),
    ],
)
def test_what_a_set_names_wrong_is_refused_by_its_table_and_the_others_are_closed(
    wrong: str, said: str, tmp_path: Path
) -> None:
    Sums.closed = 0
    config = config_of(tmp_path, OWN_ROWS + f'[[validation.sets]]\nname = "b"\n{wrong}')
    with (
        pytest.raises(UserError, match=r'^\[\[validation.sets\]\] "b" ' + said) as caught,
        loaded_environments(config) as environments,
    ):
        load_held_out(config, load_tokenizer(str(TINY_QWEN3)), rows=environments.rows)
    assert "[rollout]" not in str(caught.value)
    assert Sums.closed == 1
