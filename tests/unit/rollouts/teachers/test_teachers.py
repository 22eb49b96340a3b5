"""Teachers on real embedded servers: what they answer, who is asked when one fails, and who is refused at the start."""

import asyncio
import base64
import json
import math
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers import ROOT, TINY_QWEN3
from tests.helpers.embedded_servers import ServerThread, tiny_model
from tests.helpers.ranks import free_port
from tests.helpers.served_logprobs import answer_logprobs
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.data.samples import Group, Prompt, Sample, TopTokens
from torchtitan.grpo.data.tokenizer import load_tokenizer
from torchtitan.grpo.dry_run.describe import describe
from torchtitan.grpo.engines.embedded.scoring import completions
from torchtitan.grpo.engines.protocol import EngineError
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.inside_vllm.flat_logprobs import LOWEST
from torchtitan.grpo.inside_vllm.prompt_scores import ARGUMENT
from torchtitan.grpo.rollouts.teachers.connect import check_top_k, connect_teachers
from torchtitan.grpo.rollouts.teachers.scorers import EmbeddedScorer, Scores, SglangScorer, VllmScorer
from torchtitan.grpo.rollouts.teachers.teachers import Teachers

PROMPTS = [[5, 9, 30, 17], [8, 6]]
ANSWERS = [[7, 3, 11, 60, 2], [14]]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ServerThread]]:
    servers = [ServerThread(0, folder=str(TINY_QWEN3)) for _ in range(2)]
    yield servers
    for server in servers:
        server.close()


def group_of(source: str = "") -> Group:
    prompt = Prompt(3, PROMPTS[0], "", source=source)
    return [Sample(prompt, ids, [-1.0] * len(ids), [0] * len(ids), "stop") for ids in (*ANSWERS, [])]


def scorer(url: str, temperature: float = 1.0, request_s: float = 20.0) -> EmbeddedScorer:
    return EmbeddedScorer(url, None, "tiny", request_s, temperature)


def scored(teachers: Teachers, *groups: Group, then: Callable[[], Group] | None = None) -> None:
    """Score groups whose rewards are there, all at once; after them the one of `then`."""

    async def rewarded(group: Group) -> Group:
        for sample in group:
            sample.reward = 1.0
        return group

    async def run() -> None:
        try:
            await asyncio.gather(*(teachers.scored(group, rewarded(group)) for group in groups))
            if then:
                group = then()
                await teachers.scored(group, rewarded(group))
        finally:
            await teachers.close()

    asyncio.run(run())


def likeliest(prompt: list[int], answer: list[int], temperature: float, k: int) -> torch.return_types.topk:
    """Of transformers, at each of the answer's tokens."""
    with torch.no_grad():
        logits = tiny_model()(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1).topk(k)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_scores_are_those_of_transformers_and_do_not_depend_on_what_else_is_asked(servers, temperature):
    asked = list(zip(PROMPTS, ANSWERS, strict=True))

    async def run() -> list[list[Scores]]:
        client = scorer(servers[0].url, temperature)
        alone = await client.score(asked, "alone")
        crowd = await asyncio.gather(*(client.score(asked[: i % 2 + 1], f"r{i}") for i in range(12)))
        await client.close()
        return [alone, *crowd]

    alone, *crowd = asyncio.run(run())
    for (prompt, answer), found in zip(asked, alone, strict=True):
        expected = answer_logprobs(tiny_model(), prompt, answer, temperature)
        torch.testing.assert_close(torch.tensor(found.logprobs), expected, atol=1e-5, rtol=0)
        assert found.top is None
    assert all(each == crowd[i % 2] for i, each in enumerate(crowd)) and crowd[1] == alone


@pytest.mark.parametrize(("vocab_size", "k"), [(64, 5), (64, 64), (20, 5)])
def test_the_likeliest_tokens_are_those_of_transformers(servers, vocab_size, k):
    """Those that the trained model does not have are none."""
    asked = list(zip(PROMPTS, ANSWERS, strict=True))

    async def run() -> list[Scores]:
        client = EmbeddedScorer(servers[0].url, None, "tiny", 20.0, 1.2, k, vocab_size)
        found = await client.score(asked, "r")
        await client.close()
        return found

    left_out = 0
    for (prompt, answer), found in zip(asked, asyncio.run(run()), strict=True):
        expected = likeliest(prompt, answer, 1.2, k)
        known = expected.indices < vocab_size
        left_out += int((~known).sum())
        assert found.top.ids.dtype == np.int32 and found.top.logprobs.dtype == np.float32
        assert np.array_equal(found.top.ids, expected.indices.where(known, -1).numpy())
        logprobs = torch.from_numpy(found.top.logprobs)
        torch.testing.assert_close(logprobs, expected.values.where(known, -torch.inf), atol=1e-5, rtol=0)
        alone = answer_logprobs(tiny_model(), prompt, answer, 1.2)
        torch.testing.assert_close(torch.tensor(found.logprobs), alone, atol=1e-5, rtol=0)
    assert (left_out > 0) == (vocab_size == 20)


def test_a_group_is_scored_by_the_teacher_of_its_source(servers):
    groups = [group_of("sums"), group_of("words")]
    nobody = scorer("http://127.0.0.1:1")
    scored(Teachers({"sums": [scorer(servers[0].url)], "": [scorer(servers[1].url)]}, 10.0), *groups)
    for group in groups:
        assert [len(sample.teacher_logprobs) for sample in group] == [5, 1, 0]
        assert [sample.reward for sample in group] == [1.0] * 3
    late = group_of("sums")
    scored(Teachers({"sums": [nobody], "": [scorer(servers[1].url)]}, 0.5), late)
    assert [sample.reward for sample in late] == [None] * 3 and late[0].teacher_logprobs is None


def test_another_teacher_answers_for_one_that_is_gone_or_hangs(servers):
    with socket.socket() as hangs:
        hangs.bind(("127.0.0.1", 0))
        hangs.listen()
        for url in (f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{hangs.getsockname()[1]}"):
            teachers = Teachers({"": [scorer(url, request_s=0.5), scorer(servers[0].url)]}, 10.0)
            groups, failed = [group_of() for _ in range(4)], []

            def later(teachers: Teachers = teachers, failed: list[int] = failed) -> Group:
                failed.append(teachers.failed_requests)
                return group_of()

            scored(teachers, *groups, then=later)
            assert all(sample.reward == 1.0 and sample.teacher_logprobs is not None for g in groups for sample in g)
            assert 1 <= failed[0] <= 4 and teachers.metrics()["distill/teacher_s"] > 0
            assert teachers.failed_requests == failed[0], "the one that failed is asked last"


def test_groups_that_a_run_before_scored_otherwise_are_not_used():
    def scored_by(top_k: int) -> Teachers:
        return Teachers({"": [EmbeddedScorer("http://a:1", None, "tiny", 1.0, top_k=top_k)]}, 1.0)

    def group(logprobs: bool, k: int = 0, failed: bool = False) -> Group:
        samples = group_of()
        for sample in samples:
            sample.teacher_logprobs = [-1.0] * len(sample.token_ids) if logprobs else None
            sample.top = TopTokens.none(len(sample.token_ids), k) if k and sample.token_ids else None
            sample.reward_failures = {"teacher": "gone"} if failed else {}
        return samples

    groups = [group(False), group(True), group(True, 3), group(True, 4), group(False, failed=True)]
    assert [scored_by(0).has_scored(each) for each in groups] == [False, True, False, False, True]
    assert [scored_by(3).has_scored(each) for each in groups] == [False, False, True, False, True]


def test_a_teacher_that_comes_back_in_time_is_asked_again():
    server = ServerThread(0, free_port())  # which no outgoing connection gets while it is away
    teachers, group = Teachers({"": [scorer(server.url)]}, 20.0), group_of()
    server.kill()

    async def run() -> None:
        async def rewarded() -> Group:
            await asyncio.sleep(0.3)
            back.append(await asyncio.to_thread(ServerThread, 0, server.port))
            return group

        await teachers.scored(group, rewarded())
        await teachers.close()

    back: list[ServerThread] = []
    asyncio.run(run())
    back[0].close()
    assert [len(sample.teacher_logprobs) for sample in group] == [5, 1, 0]


def test_a_group_without_scores_is_left_out_in_time_and_says_whose_are_missing():
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    teachers, group = Teachers({"": [scorer(url) for url in urls]}, 1.5), group_of()
    began = time.monotonic()
    scored(teachers, group)
    assert time.monotonic() - began < 10
    for sample in group:
        assert sample.reward is None and sample.teacher_logprobs is None
        why = sample.reward_failures["teacher"]
        assert why.startswith("gave no log-probabilities within 1.5 s ([rollout] request_timeout_seconds): ")
        assert any(url in why for url in urls)


def test_what_the_user_can_fix_ends_the_run(servers):
    group = group_of()
    group[0].token_ids = [64_000]  # no token of this teacher
    with pytest.raises(UserError, match=rf"\[distill\] a teacher: {servers[0].url} refuses .*prompt must lie in 0\.\."):
        scored(Teachers({"": [scorer(servers[0].url)]}, 10.0), group)


def arrays(ids: list[int], logprobs: list[float]) -> dict:
    """A reply of the plug-in."""
    sent = {"ids": np.array(ids, np.int32), "logprobs": np.array(logprobs, np.float32)}
    scores = {name: base64.b64encode(values.tobytes()).decode() for name, values in sent.items()}
    return {"choices": [{"index": 0, "prompt_logprobs": None, "prompt_scores": scores}]}


ASKED = [([5, 6], [7, 8])]
ODD_REPLIES = {
    "no answer": (VllmScorer, {"choices": []}),
    "other tokens": (VllmScorer, {"choices": [{"index": 0, "prompt_logprobs": [None, *[{"9": {"logprob": -1}}] * 3]}]}),
    "too few": (VllmScorer, {"choices": [{"index": 0, "prompt_logprobs": [None, {"6": {"logprob": -1}}]}]}),
    "not a logprob": (VllmScorer, {"choices": [{"index": 0, "prompt_logprobs": [None, {"6": {"logprob": 3}}]}]}),
    "nothing of the answer": (VllmScorer, {"choices": [{"index": 0, "prompt_logprobs": None}]}),
    "arrays: other tokens": (VllmScorer, arrays([7, 9], [-1, -1])),
    "arrays: too few": (VllmScorer, arrays([7], [-1])),
    "arrays: of two lengths": (VllmScorer, arrays([7, 8], [-1])),
    "arrays: logits": (VllmScorer, arrays([7, 8], [-1, 3])),
    "arrays: not a number": (VllmScorer, arrays([7, 8], [-1, float("nan")])),
    "arrays: torn": (VllmScorer, {"choices": [{"index": 0, "prompt_scores": {"ids": "AAA", "logprobs": "AAAA"}}]}),
    "sglang: too few": (SglangScorer, [{"meta_info": {"input_token_logprobs": [[None, 6, None], [-1, 7, None]]}}]),
    "impossible": (VllmScorer, arrays([7, 8], [-np.inf, -9999])),
    "sglang: none": (SglangScorer, [{"meta_info": {"input_token_logprobs": [[None, 6, None]] * 3}}]),
    "sglang: not two": (SglangScorer, [{"meta_info": {"input_token_logprobs": []}}] * 2),
}
SCORED = [[None, 6, None], [-1, 7, None], [-1, 8, None]]
ODD_TOPS = {
    "too few": (VllmScorer, {"choices": [{"index": 0, "prompt_logprobs": [None, *[{"7": {"logprob": -1}}] * 3]}]}),
    "arrays: too few": (VllmScorer, arrays([7, 7, 8, 8], [-1] * 4)),
    "arrays: logits": (VllmScorer, arrays([7, 7, 3, 8, 8, 3], [-0.1] * 6)),
    "no tops": (SglangScorer, [{"meta_info": {"input_token_logprobs": SCORED}}]),
    "empty": (SglangScorer, [{"meta_info": {"input_token_logprobs": SCORED, "input_top_logprobs": [None] * 3}}]),
    "logits": (
        VllmScorer,
        {"choices": [{"index": 0, "prompt_logprobs": [None, *[{str(n): {"logprob": -0.1} for n in (6, 7, 8)}] * 3]}]},
    ),
    "too short": (
        SglangScorer,
        [{"meta_info": {"input_token_logprobs": SCORED, "input_top_logprobs": [None, SCORED[1:]]}}],
    ),
}


@pytest.mark.parametrize(("name", "top_k"), [*((name, 0) for name in ODD_REPLIES), *((name, 2) for name in ODD_TOPS)])
def test_a_reply_that_is_about_something_else_is_the_teachers_failure(name, top_k, monkeypatch):
    kind, reply = (ODD_TOPS if top_k else ODD_REPLIES)[name]
    client = kind("http://teacher", None, "tiny", 5.0, top_k=top_k)

    async def post(*_: object) -> bytes:
        return json.dumps(reply).encode()

    monkeypatch.setattr(client, "_post", post)
    with pytest.raises(EngineError, match="request r: the answer is not as expected"):
        asyncio.run(client.score(ASKED, "r"))


def config_of(*urls: str, flags: tuple[str, ...] = ()):
    config = "train_configs/quickstart.toml"
    words = ["--job.config_file", config, "--distill.teacher_urls", ",".join(urls), *flags]
    return load_config([*words, "--rollout.start_timeout_seconds", "1"])


def test_teachers_are_checked_at_the_start(servers):
    tokenizer = load_tokenizer(str(TINY_QWEN3))
    assert connect_teachers(load_config(["--job.config_file", "train_configs/quickstart.toml"]), tokenizer, 64) is None
    group = group_of()
    config = config_of(*(server.url for server in servers), flags=("--distill.top_k", "3"))
    scored(connect_teachers(config, tokenizer, 64), group)
    assert [None if sample.top is None else sample.top.ids.shape for sample in group] == [
        *((5, 3), (1, 3)),
        None,  # an empty answer
    ]
    expected = answer_logprobs(tiny_model(), PROMPTS[0], ANSWERS[0], 1.2)  # the quickstart's temperature
    torch.testing.assert_close(torch.tensor(group[0].teacher_logprobs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "reply",
    [
        (400, {"error": {"message": "Requested prompt logprobs of 5, which is greater than max allowed: 2"}}),
        (200, {"choices": [{"index": 0, "prompt_logprobs": [None, {"0": {"logprob": -1}}]}]}),
    ],
)
def test_a_server_that_tells_too_few_tokens_is_refused_at_the_start(reply, monkeypatch):
    client = VllmScorer("http://a:1", None, "tiny", 5.0, top_k=5)

    async def post(route: str, body: dict, request_id: str, deadline: float) -> bytes:
        if reply[0] != 200:
            client._raise_for_status(route, reply[0], json.dumps(reply[1]).encode(), request_id)
        return json.dumps(reply[1]).encode()

    monkeypatch.setattr(client, "_post", post)
    with pytest.raises(UserError, match=r"\[distill\] top_k = 5: http://a:1.* Lower it, or .*vLLM: --max-logprobs 5"):
        asyncio.run(check_top_k(client))


def test_arrays_of_the_plug_in_are_read(monkeypatch):
    client = VllmScorer("http://teacher", None, "tiny", 5.0, top_k=2, vocab_size=50)
    assert client._request(ASKED + ASKED)[1]["vllm_xargs"] == {ARGUMENT: "2,2"}

    async def post(*_: object) -> bytes:
        return json.dumps(arrays([7, 7, 60, 8, 3, 2], [-0.5, -0.5, -np.inf, -np.inf, -0.25, -2])).encode()

    monkeypatch.setattr(client, "_post", post)
    [found] = asyncio.run(client.score(ASKED, "r"))
    assert found.logprobs == [-0.5, LOWEST]
    assert found.top.ids.tolist() == [[7, -1], [3, 2]]  # the model has no token 60
    assert found.top.logprobs.tolist() == [[-0.5, -np.inf], [-0.25, -2]]


def test_an_embedded_teacher_says_of_an_impossible_token_what_json_can_hold(servers):
    """At so low a temperature most tokens are far under what a reply may have."""
    teachers = Teachers({"": [scorer(servers[0].url, temperature=1e-6)]}, 10.0)
    group = group_of()
    best = int(likeliest(PROMPTS[0], [0], 1.0, 1).indices)
    group[0].token_ids[0] = best
    scored(teachers, group)
    assert group[0].reward == 1.0 and group[0].teacher_logprobs[0] == 0.0 and group[0].teacher_logprobs[1] == LOWEST
    json.dumps(completions("tiny", [[{3: -math.inf}]]), allow_nan=False)


def test_sglang_writes_null_for_a_token_that_cannot_be(monkeypatch):
    scores = [[None, 6, None], [None, 7, None], [-1, 8, None]]
    tops = [None, [[-0.5, 7, None], [None, 3, None]], [[-1.0, 8, None], [-1.5, 2, None]]]
    client = SglangScorer("http://teacher", None, "tiny", 5.0, top_k=2)

    async def post(*_: object) -> bytes:
        return json.dumps([{"meta_info": {"input_token_logprobs": scores, "input_top_logprobs": tops}}]).encode()

    monkeypatch.setattr(client, "_post", post)
    [found] = asyncio.run(client.score(ASKED, "r"))
    assert found.logprobs == [LOWEST, -1.0]
    assert found.top.ids.tolist() == [[7, -1], [8, 2]] and found.top.logprobs[0].tolist() == [-0.5, -np.inf]


def swapped(folder: Path) -> Path:
    """A folder whose tokenizer has two digits' ids exchanged."""
    shutil.copytree(TINY_QWEN3, folder)
    path = folder / "tokenizer.json"
    said = json.loads(path.read_text())
    vocab = said["model"]["vocab"]
    vocab["1"], vocab["2"] = vocab["2"], vocab["1"]
    path.write_text(json.dumps(said))
    return folder


def test_another_tokenizer_is_refused_and_both_are_named(tmp_path):
    server = ServerThread(0, folder=str(swapped(tmp_path / "other")))
    try:
        with pytest.raises(
            UserError, match=rf"{server.url} serves .*other, whose tokenizer is not .*tiny_qwen3: it re"
        ):
            connect_teachers(config_of(server.url), load_tokenizer(str(TINY_QWEN3)), 64)
    finally:
        server.close()


@pytest.mark.parametrize(
    ("url", "flags", "words"),
    [
        (lambda _: "http://127.0.0.1:1", (), r"not healthy after 1 s.*correct \[distill\] teacher_urls"),
        (lambda server: server.url, ("--training.seq_len", "256", "--rollout.max_answer_tokens", "128"), "up to 145"),
        (lambda server: server.url, ("--distill.top_k", "65"), r"refuses .*prompt_logprobs must lie in 0\.\.64"),
    ],
)
def test_a_teacher_that_is_missing_or_too_short_is_refused(
    servers, url: Callable[[ServerThread], str], flags: tuple[str, ...], words: str
):
    with pytest.raises(UserError, match=rf"\[distill\] a teacher: .*{words}"):
        connect_teachers(config_of(url(servers[0]), flags=flags), load_tokenizer(str(TINY_QWEN3)), 64)


def test_a_dry_run_says_who_scores_and_how_long_texts_are(monkeypatch):
    monkeypatch.chdir(ROOT)
    said = describe(config_of("http://a:1", "http://b:1", flags=("--distill.mode", "add", "--distill.coef", "0.5")))
    assert "  teachers         2 (embedded): each scores its answers, and must take 25 tokens" in said
