"""Sessions of the endpoint against real embedded servers: what is recorded is what the servers sampled."""

import asyncio
import json
import random
import re
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.helpers.embedded_servers import ServerThread
from tests.helpers.endpoint_runs import PARAMS, VERSION, Run, chat_tokenizer
from torchtitan.grpo.data.samples import Sample
from torchtitan.grpo.endpoint.chat import calls_in, reply_message
from torchtitan.grpo.endpoint.sessions import Branch, Place, SessionEnded, Texts
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.rollouts.environment import Turns


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ServerThread]]:
    servers = [ServerThread(VERSION), ServerThread(VERSION)]
    yield servers
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


@pytest.fixture
def run(servers, tokenizer) -> Iterator[Run]:
    run = Run(tokenizer, [servers[0].url])
    yield run
    run.collector.close()


async def post(http, session, path: str, **body) -> dict:
    async with http.post(f"{session.base_url}{path}", json=body) as response:
        said = await response.json()
        assert response.status == 200, said
        return said


async def chat(http, session, messages: list[dict], **body) -> dict:
    """The reply's message, which the conversation goes on with."""
    said = await post(http, session, "/v1/chat/completions", messages=messages, max_tokens=6, **body)
    return said["choices"][0]["message"]


def check(run: Run, samples: list[Sample]) -> None:
    """Every sampled token is in one sample, with what its server said of it, behind exactly the tokens it continued."""
    turns = []
    for sample in samples:
        whole = sample.prompt.token_ids + sample.token_ids
        at, ends = len(sample.prompt.token_ids), []
        mask = [*sample.loss_mask, False]
        for i in range(len(sample.token_ids)):
            if mask[i] and (i == 0 or not mask[i - 1] or i in [first for first, _ in sample.servers]):
                ends.append(i)
        for first in ends:
            last = first
            while mask[last] and (last == first or last not in [each for each, _ in sample.servers]):
                last += 1
            part = slice(first, last)
            turns.append((whole[: at + first], sample.token_ids[part], sample.logprobs[part], sample.versions[part]))
    served = [(prompt, c.token_ids, c.logprobs, c.versions) for prompt, c in run.sampled]
    assert sorted(turns) == sorted(served)
    assert sum(len(ids) for _, ids, _, _ in served) == sum(sample.sampled_tokens for sample in samples)


def test_a_chat_of_several_turns_is_one_sample_of_what_the_server_sampled(run) -> None:
    async def play(client, prompt, http):
        async with client.endpoint.session(client, prompt) as session:
            messages = [{"role": "user", "content": "1+1="}]
            for turn in range(4):
                messages.append(await chat(http, session, messages))
                role = "tool" if turn == 1 else "user"
                messages.append({"role": role, "content": [{"type": "text", "text": f"{turn}+2="}]})
            return session.samples()

    [sample] = run.collect(play)
    check(run, [sample])
    assert sample.prompt is run.prompt, "the first rendering is the row's prompt"
    assert len(run.sampled) == 4 and set(sample.sampled_versions) == {VERSION}
    text = run.tokenizer.decode(run.prompt.token_ids + sample.token_ids)
    for part in ("<eos>\nu:0+2=<eos>\na:", "<eos>\nt:1+2=<eos>\na:", "<eos>\nu:2+2=<eos>\na:"):
        assert part in text, "a turn is ended once, whether the model ended it or the limit did"
    assert "<eos><eos>" not in text


def test_texts_and_token_ids_continue_what_was_sampled(run) -> None:
    async def play(client, prompt, http):
        async with client.endpoint.session(client, prompt) as session:
            said = await post(http, session, "/v1/completions", prompt=prompt.text, max_tokens=4, logprobs=1)
            text = prompt.text + said["choices"][0]["text"] + "=3 "
            said = await post(http, session, "/v1/completions", prompt=text, max_tokens=4, return_token_ids=True)
            ids = said["prompt_token_ids"] + said["choices"][0]["token_ids"] + [5, 6]
            said = await post(http, session, "/v1/completions", prompt=ids, max_tokens=3, logprobs=1, temperature=1.0)
            assert len(said["choices"][0]["logprobs"]["token_logprobs"]) == said["usage"]["completion_tokens"]
            return session.samples()

    [sample] = run.collect(play)
    check(run, [sample])
    assert len(run.sampled) == 3 and sample.loss_mask.count(False) == len("=3 ") + 2


def test_samples_are_in_the_order_of_their_calls_whichever_is_answered_first(run) -> None:
    async def play(client, prompt, http):
        async with client.endpoint.session(client, prompt) as session:
            calls = []
            for tokens in (12, 1, 2):  # the first is answered last
                calls.append(session.generate([5 + tokens, 6], max_tokens=tokens))
            await asyncio.gather(*calls)
            return session.samples()

    assert [len(sample.token_ids) for sample in run.collect(play)] == [12, 1, 2]


def test_other_contexts_and_parallel_branches_are_samples_of_their_own(run) -> None:
    async def play(client, prompt, http):
        async with client.endpoint.session(client, prompt) as session:
            first = [{"role": "user", "content": "1+1="}]
            said = await chat(http, session, first)
            more = [*first, said, {"role": "user", "content": "2+2="}]
            await asyncio.gather(*(chat(http, session, more) for _ in range(3)))
            await chat(
                http, session, [{"role": "system", "content": "a short story"}, {"role": "user", "content": "?"}]
            )
            await post(http, session, "/v1/completions", prompt="3+3=", max_tokens=2, n=2)
            return session.samples()

    samples = run.collect(play)
    check(run, samples)
    assert len(samples) == 3 + 1 + 2
    assert sum(sample.prompt is run.prompt for sample in samples) == 3
    assert all(len(sample.token_ids) <= PARAMS.max_tokens for sample in samples)


def test_calls_with_tools_are_parsed_and_results_are_masked(run) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    message = reply_message("well\n" + call + call, tools, "asked")
    assert message["content"] == "well"
    assert [c["function"] for c in message["tool_calls"]] == [{"name": "add", "arguments": '{"a": 1}'}] * 2
    assert message == reply_message("well\n" + call + call, tools, "asked"), "a template may write the ids"
    ids = {c["id"] for asked in ("asked", "more") for c in reply_message(call + call, tools, asked)["tool_calls"]}
    assert len(ids) == 4
    for text in (
        "no call",
        "<tool_call>{not json}</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>",
    ):
        assert reply_message(text, tools, "") == {"role": "assistant", "content": text}
    assert reply_message(call, None, "")["content"] == call

    async def play(client, prompt, http):
        async with client.endpoint.session(client, prompt) as session:
            messages = [{"role": "user", "content": "1+1="}]
            messages.append(await chat(http, session, messages, tools=tools))
            messages.append({"role": "tool", "content": "2", "tool_call_id": "call_1"})
            await chat(http, session, messages, tools=tools)
            return session.samples()

    [sample] = run.collect(play, replace(PARAMS, max_tokens=120))
    check(run, [sample])
    assert "t:2<eos>\na:" in run.tokenizer.decode(sample.token_ids)


REFUSED = {
    "temperature": ({"temperature": 0.5}, 400, "has 1.0"),
    "top_p": ({"top_p": 0.9}, 400, "has 1.0"),
    "top_k": ({"top_k": 5}, 400, "0 or -1"),
    "min_p": ({"min_p": 0.1}, 400, "has 0"),
    "seed": ({"seed": 1}, 400, "debug"),
    "penalty": ({"frequency_penalty": 0.1}, 400, "leave it out"),
    "bias": ({"logit_bias": {"5": 1}}, 400, "leave it out"),
    "unknown": ({"guided_regex": "a"}, 400, "does not know"),
    "many logprobs": ({"logprobs": 5}, 400, "sampled token"),
    "no length": ({"max_tokens": 0}, 400, "`int` >= 1 - at `$.max_tokens`"),
    "no answer": ({"n": 0}, 400, "`int` >= 1 - at `$.n`"),
    "stops": ({"stop": [1]}, 400, "Expected `str`, got `int` - at `$.stop[0]`"),
    "many stops": ({"stop": ["a"] * 17}, 400, "length <= 16 - at `$.stop`"),
    "a long stop": ({"stop": "a" * 257}, 400, "length <= 256 - at `$.stop[0]`"),
    "many stop tokens": ({"stop_token_ids": [5] * 2**15}, 400, "length <= 16384"),
    "many answers": ({"n": 65_537}, 400, "`int` <= 128 - at `$.n`"),
    "no prompt": ({"prompt": ""}, 400, "is empty"),
    "other tokens": ({"prompt": [1, 99999]}, 400, "ids under 64"),
    "no text": ({"prompt": [1.5]}, 400, "Expected `int`, got `float`"),
}


def nested(depth: int) -> bytes:
    """A body that is JSON, with tools that no template renders."""
    tools, messages = b"[" * depth + b"]" * depth, b'[{"role": "user", "content": "1+1="}]'
    return b'{"messages": ' + messages + b', "tools": [' + tools + b"]}"


HALF_PAIRS = [
    json.dumps({"prompt": "1+1="} | body).encode()
    for body in ({"stop": "\ud800"}, {"prompt": "1\udc00"}, {"stop": ["\udfff="]}, {"\ud83d": 1})
]


def test_what_would_change_the_distribution_is_refused_and_costs_nothing(run) -> None:
    async def play(client, prompt, http):
        async with client.endpoint.session(client, prompt) as session:
            for body, status, text in REFUSED.values():
                async with http.post(f"{session.base_url}/v1/completions", json={"prompt": "1+1="} | body) as response:
                    said = (await response.json())["error"]
                    assert (response.status, text in said["message"]) == (status, True), (body, said)
                    assert said["param"] == next(iter(body))
            for data, path, status in (
                (b"{", f"/sessions/{session.id}/v1/completions", 400),
                (b"[]", f"/sessions/{session.id}/v1/chat/completions", 400),
                (b"[" * 100_000, f"/sessions/{session.id}/v1/chat/completions", 400),
                *((nested(depth), f"/sessions/{session.id}/v1/chat/completions", 400) for depth in (500, 980, 1020)),
                (b'{"a": [' + b"[]," * 270_000 + b"[]]}", f"/sessions/{session.id}/v1/chat/completions", 413),
                *((half, f"/sessions/{session.id}/v1/completions", 400) for half in HALF_PAIRS),
                (b"{}", "/v1/completions", 400),
                (b"{}", "/sessions/nobody/v1/completions", 404),
                (b"{}", "/v1/embeddings", 404),
            ):
                async with http.post(f"{client.endpoint.url}{path}", data=data) as response:
                    assert response.status == status and (await response.json())["error"]["message"], path
            await post(
                http, session, "/v1/completions", prompt="1+1=", max_tokens=2, temperature=1, top_p=1.0, top_k=-1
            )
            return session.samples()

    [sample] = run.collect(play)
    assert len(run.sampled) == 1 and sample.sampled_tokens == len(run.sampled[0][1].token_ids)


def test_a_call_that_the_servers_refuse_costs_that_call(run) -> None:
    async def play(client, prompt, http):
        async with client.endpoint.session(client, prompt) as session:
            async with http.post(f"{session.base_url}/v1/completions", json={"prompt": "1+1="}) as response:
                said = (await response.json())["error"]["message"]
            assert response.status == 400 and "max_tokens" in said, said
            await post(http, session, "/v1/completions", prompt="1+1=", max_tokens=2)
            return session.samples()

    [sample] = run.collect(play, replace(PARAMS, max_tokens=10**6))
    assert sample.sampled_tokens == len(run.sampled[0][1].token_ids)


def test_a_long_text_is_refused_by_its_length_and_read_in_a_thread(run, monkeypatch) -> None:
    tokenized: list[tuple[bool, bool]] = []  # is it long, is this the thread that serves requests

    class Noting:
        def __getattr__(self, name: str):
            return getattr(run.tokenizer, name)

        def __call__(self, text: str, **how):
            tokenized.append((len(text) > 2**12, threading.current_thread().name == "collector"))
            return run.tokenizer(text, **how)

    monkeypatch.setattr(run.endpoint.chat, "_tokenizer", Noting())

    async def play(client, prompt, http):
        async with client.endpoint.session(client, prompt) as session:
            for characters, status, text in (
                (2**21, 413, "bytes: 1 MiB and 32 for each token of [training] seq_len"),
                (2**19, 413, "maximum context length"),
                (2**16, 200, "length"),
            ):
                messages = [{"role": "user", "content": "1" * characters}]
                async with http.post(
                    f"{session.base_url}/v1/chat/completions", json={"messages": messages}
                ) as response:
                    assert response.status == status and text in await response.text()
            await post(http, session, "/v1/completions", prompt="1+1=", max_tokens=2)
            return session.samples()

    [sample] = run.collect(play)
    assert sample.sampled_tokens, "nothing has failed"
    assert tokenized == [(True, False), (False, True)], "a refused text is not read, and a long one in another thread"


def test_calls_begin_in_the_order_in_which_they_came(run) -> None:
    async def play(client, prompt, http):
        async with client.endpoint.session(client, prompt) as session:
            calls, before = [], client.endpoint.calls
            for number, padding in enumerate(("a" * 2**19, "")):  # the first one is read in a thread
                body = {"prompt": f"{number}+1=", "max_tokens": 12, "metadata": padding}
                calls.append(asyncio.create_task(post(http, session, "/v1/completions", **body)))
                while client.endpoint.calls <= before + number:
                    await asyncio.sleep(0)
                if client.params.n == 2:
                    await calls[-1]
            said = await asyncio.gather(*calls)
            return session.samples() if all(said) else []

    at_once, in_turn = run.collect(play), run.collect(play, replace(PARAMS, n=2))
    assert sorted(sample.token_ids for sample in at_once) == sorted(sample.token_ids for sample in in_turn) != [[]]


def test_calls_are_found_as_a_pattern_finds_them() -> None:
    pattern = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
    draw = random.Random(3)
    for _ in range(4000):
        parts = draw.choices(["<tool_call>", "</tool_call>", " ", "\n", "a", "<", "\u3000", "</tool_", "call>"], k=9)
        assert calls_in("".join(parts)) == pattern.findall("".join(parts)), parts


def test_the_longest_text_that_another_begins_with_is_found(run) -> None:
    draw = random.Random(4)
    for _ in range(300):
        texts, known = Texts(), {}
        for _ in range(5):
            text = "".join(draw.choices("a\u00e9\U0001f600", k=draw.randrange(5)))
            known[text] = Place(Branch(Turns(run.prompt), (0, 0)), 1)
            texts.add(text, known[text])
        asked = "".join(draw.choices("a\u00e9\U0001f600", k=6))
        longest = max((text for text in known if asked.startswith(text)), key=len, default=None)
        assert texts.longest(asked) == ((0, None) if longest is None else (len(longest), known[longest]))


def test_the_header_names_a_session_and_one_event_is_a_stream(run) -> None:
    async def play(client, prompt, http):
        async with client.endpoint.session(client, prompt, id="of/mine?") as session:
            with pytest.raises(UserError, match="'of/mine\\?' already"):
                client.endpoint.open(client, prompt, id="of/mine?")
            body = {"messages": [{"role": "user", "content": "1+1="}], "stream": True, "max_tokens": 3}
            where = f"{client.endpoint.url}/v1/chat/completions"
            async with http.post(where, json=body, headers={"X-Session-ID": "of/mine?"}) as response:
                assert response.status == 200
                events = (await response.text()).split("\n\n")
            assert events[1:] == ["data: [DONE]", ""]
            event = json.loads(events[0].removeprefix("data: "))
            [sample] = session.samples()
            said = run.tokenizer.decode(sample.token_ids, skip_special_tokens=True)
            assert event["object"] == "chat.completion.chunk"
            assert event["choices"][0]["delta"] == {"role": "assistant", "content": said}
            async with http.get(f"{session.base_url}/v1/models") as response:
                assert (await response.json())["data"][0]["max_model_len"] == 128
            await chat(http, session, [{"role": "user", "content": "2+2="}])  # by the address
            assert len(session.samples()) == 2
            return [sample]

    run.collect(play)


def test_calls_after_the_end_or_under_way_then_get_410(run) -> None:
    async def play(client, prompt, http):
        server = run.fleet.servers[0]
        async with client.endpoint.session(client, prompt) as session:
            await session.generate(prompt.token_ids, max_tokens=2)
            await asyncio.to_thread(server.control.pause)
            request = http.post(f"{session.base_url}/v1/completions", json={"prompt": "1+1="})
            late = asyncio.create_task(request.__aenter__())
            while not session.is_busy:
                await asyncio.sleep(0.01)
        assert (await late).status == 410
        await asyncio.to_thread(server.control.resume)
        async with http.post(f"{session.base_url}/v1/completions", json={"prompt": "1+1="}) as response:
            assert response.status == 410 and "has ended" in (await response.json())["error"]["message"]
        return session.samples()

    run.collect(play)
    assert run.endpoint.metrics() == {"endpoint/calls": 1, "endpoint/open_sessions": 0}


def test_an_answer_that_comes_with_the_end_changes_no_sample(run) -> None:
    async def play(client, prompt, http):
        async with client.endpoint.session(client, prompt) as session:
            [(completion, _)] = await session.generate(prompt.token_ids, max_tokens=2)
            before = list(completion.token_ids)
            server_says = asyncio.get_running_loop().create_future()

            async def generate(*_, **__):
                return await server_says

            client.generate = generate
            late = asyncio.create_task(session.generate([*prompt.token_ids, *before]))
            while not session.is_busy:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            server_says.set_result([replace(completion)])
            await asyncio.sleep(0)  # the call has its answer, and nobody has seen it
        with pytest.raises(SessionEnded):
            await late
        assert [sample.token_ids for sample in session.samples()] == [before]
        return session.samples()

    run.collect(play)


def test_an_answer_budget_that_is_used_up_ends_the_sample(run) -> None:
    async def play(client, prompt, http):
        async with client.endpoint.session(client, prompt) as session:
            ids = list(prompt.token_ids)
            for _ in range(20):
                [(completion, _)] = await session.generate(ids)
                ids = [*ids, *completion.token_ids, 5]
            return session.samples()

    [sample] = run.collect(play, replace(PARAMS, max_tokens=8))
    check(run, [sample])
    assert len(sample.token_ids) <= 8 and sample.finish_reason == "length"


def test_a_key_is_asked_for(servers, tokenizer) -> None:
    run = Run(tokenizer, [servers[0].url], key="a key")

    async def play(client, prompt, http):
        async with client.endpoint.session(client, prompt) as session:
            where, body = f"{session.base_url}/v1/completions", {"prompt": "1+1=", "max_tokens": 2}
            for given, status in (("", 401), ("Bearer a kez", 401), ("Basic a key", 401), ("Bearer a key", 200)):
                async with http.post(where, json=body, headers={"Authorization": given}) as response:
                    text = await response.text()
                    assert response.status == status and "a key" not in text
            return session.samples()

    try:
        assert len(run.collect(play)) == 1
    finally:
        run.collector.close()


def test_seeds_follow_from_the_session_and_its_calls(run) -> None:
    async def play(client, prompt, http):
        sessions = [client.endpoint.open(client, prompt) for _ in range(3)]
        order = sessions if client.params.n == 1 else sessions[::-1]  # which harness is first does not matter
        for session in order:
            for _ in range(2):
                await session.generate(prompt.token_ids, max_tokens=5)
        for session in sessions:
            client.endpoint.end(session)
        return [sample for session in sessions for sample in session.samples()]

    first, second = run.collect(play), run.collect(play, replace(PARAMS, n=2))
    assert [sample.token_ids for sample in first] == [sample.token_ids for sample in second]
    assert len({tuple(sample.token_ids) for sample in first}) > 3


def test_a_session_stays_at_its_server_until_that_is_lost(servers, tokenizer) -> None:
    dying = ServerThread(VERSION)
    run = Run(tokenizer, [dying.url, servers[1].url])

    async def play(client, prompt, http):
        sessions = [client.endpoint.open(client, prompt) for _ in range(6)]

        async def turns(session):
            ids = session.samples()[0] if session.samples() else None
            ids = prompt.token_ids + ids.token_ids if ids else list(prompt.token_ids)
            for _ in range(3):
                [(completion, _)] = await session.generate(ids, max_tokens=4)
                ids = ids + completion.token_ids
                await asyncio.sleep(0.01)

        await asyncio.gather(*(turns(session) for session in sessions))
        where = [[server for _, server in session.samples()[0].servers] for session in sessions]
        assert all(len(set(each)) == 1 and len(each) == 3 for each in where), "one server each"
        assert {each[0] for each in where} == {dying.url, servers[1].url}, "new sessions are spread"
        await asyncio.to_thread(dying.kill)
        await asyncio.gather(*(turns(session) for session in sessions))
        for session, before in zip(sessions, where, strict=True):
            now = [server for _, server in session.samples()[0].servers]
            assert now == before + [servers[1].url] * 3
            client.endpoint.end(session)
        return [sample for session in sessions for sample in session.samples()]

    try:
        check(run, run.collect(play))
    finally:
        run.collector.close()
