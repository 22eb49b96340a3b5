"""SGLang's client and control without a server: what is sent, what is read, what is refused."""

import os
from types import SimpleNamespace

import msgspec
import pytest

from torchtitan.grpo.engines import sglang
from torchtitan.grpo.engines.http_client import Span
from torchtitan.grpo.engines.protocol import Completion, EngineError, SamplingParams
from torchtitan.grpo.engines.sglang import SglangClient, _completion, _cut, _sampling_params
from torchtitan.grpo.engines.sglang_adapters import SglangAdapterControl
from torchtitan.grpo.engines.sglang_control import SglangControl, _numbers
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.weight_wire.version_names import _run_of_process, own_run, version_name

URL = "http://127.0.0.1:9"


def answer(**meta) -> sglang._Answer:
    parts = {"finish_reason": {"type": "length"}, "output_token_logprobs": [[-0.5, 7, None], [-1.5, 8, None]]}
    return msgspec.convert({"output_ids": [7, 8], "meta_info": parts | meta}, sglang._Answer)


def test_a_token_has_the_version_of_its_span_or_that_of_the_start():
    spans = [Span(version_name(v), v - 3, v - 2) for v in (3, 4)]
    assert _completion(answer(), 3, spans).versions == [3, 4]
    assert _completion(answer(), 3, None).versions == [3, 3]  # before 0.5.19
    assert _completion(answer(), -1, [Span("default", 0, 2)]).versions == [-1, -1]


def test_stop_tokens_count_also_where_end_tokens_do_not():
    whole = _completion(answer(), 0, None)
    assert _cut(whole, ()) is whole and _cut(whole, (9,)) is whole
    cut = _cut(whole, (7, 8))
    assert (cut.token_ids, cut.logprobs, cut.finish_reason, cut.versions) == ([7], [-0.5], "stop", [0])


def test_each_answer_of_a_prompt_has_a_seed_of_its_own():
    params = SamplingParams(n=3, temperature=0.7, max_tokens=5, seed=11)
    assert [_sampling_params(params, i)["sampling_seed"] for i in range(3)] == [11, 12, 13]
    assert _sampling_params(SamplingParams(1, 1.0, 5), 0)["sampling_seed"] is None


def test_answers_of_other_weights_and_missing_logprobs_are_errors():
    client = SglangClient(URL, None, 1.0, lambda: 2)
    with pytest.raises(EngineError, match="answered by weights 'default' in place of version 2"):
        client._check_origin("r", [None, [Span(version_name(2), 0, 1), Span("default", 1, 2)]], 2)
    with pytest.raises(EngineError, match="2 tokens came with 1 log-probabilities"):
        client._check("r", [Completion([7, 8], [-0.5], "length", [2, 2])], [None], SamplingParams(1, 1.0, 5), 2)


@pytest.mark.parametrize(
    "version,numbers",
    [("0.5.21", (0, 5, 21)), ("0.5.21.post1", (0, 5, 21)), ("0.5.15rc2", (0, 5, 15)), ("", ()), ("dev", ())],
)
def test_versions_are_compared_by_number(version, numbers):
    assert _numbers(version) == numbers


class Answering(SglangControl):
    """Has the reply of /server_info."""

    def __init__(self, **info):
        super().__init__(URL, None, 1.0)
        self._info = {"version": "0.5.23", "context_length": 64} | info
        self.serves = "default"

    def info(self):
        return self._info

    def weight_version(self):
        return self.serves


@pytest.mark.parametrize(
    "info,said",
    [
        ({"version": "0.5.10"}, "SGLang 0.5.10: 0.5.15 or newer is needed"),
        ({"version": ""}, "of an unknown version: 0.5.15 or newer"),
        ({"dp_size": 2}, "--dp-size 2: .*one server for each"),
        ({"context_length": 32}, r"at most 32 tokens \(--context-length\), the trainer asks for up to 64"),
    ],
)
def test_a_server_that_cannot_serve_is_refused(info, said):
    with pytest.raises(UserError, match=said):
        Answering(**info).check(64)


@pytest.mark.parametrize(
    ("info", "recomputes", "taken"),
    [
        ({"version": "0.5.20"}, True, False),
        ({"version": "0.5.20"}, False, True),
        ({"version": "0.5.20", "disable_radix_cache": True}, True, True),
        ({"version": "0.5.21"}, True, True),
    ],
)
def test_an_old_sglang_is_not_asked_to_drop_prefixes_while_answers_wait(info, recomputes, taken, monkeypatch):
    called, replies = [], iter([400, 200])

    def request(self, method, path, phase, **_):
        called.append(path)
        return SimpleNamespace(status=next(replies) if path == "/flush_cache" else 200, data=b"")

    monkeypatch.setattr(SglangControl, "_request", request)
    monkeypatch.setattr(SglangControl, "check_sampling", lambda *_: None)
    control = Answering(**info)
    if not taken:
        with pytest.raises(UserError, match=r"0\.5\.20 .*--disable-radix-cache.*0\.5\.21.*recompute_kv_cache"):
            control.check(64, recomputes=recomputes)
        return
    control.check(64, recomputes=recomputes)
    control.forget()
    assert called.count("/flush_cache") == (0 if "disable_radix_cache" in info else 2)  # refused once


def test_all_of_a_servers_workers_take_part_in_an_update():
    assert Answering(tp_size=4, pp_size=2, dp_size=1).world_size() == 8
    assert Answering().world_size() == 1
    control, found = Answering(startup_time=1.0), []
    for control._info["startup_time"] in (1.0, 1.0, 2.0, 2.0):
        control.world_size()
        found.append(control.started_anew)
    assert found == [True, False, True, False]


def test_an_nccl_error_says_what_to_change():
    said = "Failed to update parameter online: NCCL error: unhandled cuda error, Cuda failure 'invalid argument'"
    with pytest.raises(UserError, match="NCCL_CUMEM_ENABLE=-2"):
        SglangControl(URL)._explain(400, "update", "/update_weights_from_distributed", said)


def test_a_pause_mode_that_sglang_lacks_is_an_error():
    with pytest.raises(ValueError, match="no pause mode 'wait'"):
        SglangControl(URL).pause("wait")


def test_a_server_restarted_at_the_address_of_a_paused_one_is_not_paused(monkeypatch):
    control, serves = SglangControl(URL), "default"
    monkeypatch.setattr(SglangControl, "_call", lambda *_, **__: None)
    monkeypatch.setattr(SglangControl, "weight_version", lambda _: serves)
    assert not control.is_paused()
    control.pause()
    assert not control.is_paused()  # it may be another: nothing was given to this one yet
    for version in ("1", "2", "3"):
        control.load_folder("folder", version, 1.0)
    serves = "2"  # the third has not arrived
    assert control.is_paused()
    serves = "default"
    assert not control.is_paused()
    serves = "3"
    control.resume()
    assert not control.is_paused()


@pytest.mark.parametrize(
    ("name", "given", "refused"),
    [
        ("default", [], False),
        (version_name(3), ["3"], False),
        ("3@elsewhere-7-a1", [], False),  # it may have ended, and this trainer is the newer one
        ("3@elsewhere-7-a1", ["2"], True),  # it has taken the server from us
        (f"3@{own_run().rpartition('-')[0]}-a1", ["2"], False),  # another process had this number
        (version_name(3, _run_of_process(os.getppid())), [], True),
    ],
    ids=["none", "ours", "elsewhere", "elsewhere, taken", "another process", "our parent"],
)
def test_a_server_of_another_run_that_lives_is_refused(monkeypatch, name, given, refused):
    control = SglangControl(URL)
    control._given.extend(given)
    monkeypatch.setattr(SglangControl, "weight_version", lambda _: name)
    if not refused:
        control._check_owner()
        return
    run = name.partition("@")[2]
    with pytest.raises(UserError, match=rf"{URL}: this server gets its weights from run {run} \(process "):
        control._check_owner()


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({}, "was started without LoRA: start it with --enable-lora --max-lora-rank 8 --lora-target-modules q_proj v"),
        ({"max_lora_rank": 4}, r"\[lora\] rank = 8 is over its --max-lora-rank 4: start it with --enable-lora"),
        ({"lora_target_modules": ["o_proj"]}, "--lora-target-modules o_proj has no place for q_proj, v_proj: start it"),
        ({"lora_target_modules": ["k_proj"]}, ""),  # SGLang has the three in one layer
        ({"lora_target_modules": ["all"], "max_lora_rank": 8}, ""),
        ({"max_loaded_loras": 3}, "--max-loaded-loras 3 has SGLang unload adapters by itself"),
    ],
)
def test_a_server_without_a_place_for_the_adapters_is_refused_with_the_flags(info, said, monkeypatch):
    control = SglangAdapterControl(URL)
    monkeypatch.setattr(SglangControl, "info", lambda _: {"enable_lora": bool(info)} | info)
    if not said:
        control.check_takes_adapters(8, ["q_proj", "v_proj"])
        return
    with pytest.raises(UserError, match=f"{URL}: .*{said}"):
        control.check_takes_adapters(8, ["q_proj", "v_proj"])
