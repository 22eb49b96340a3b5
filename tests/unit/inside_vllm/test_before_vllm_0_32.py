"""What vLLM before 0.32 needs: names as 0.32 has them, and the count of tokens per weight version."""

from torchtitan.grpo.inside_vllm.before_vllm_0_32 import VersionLedger, loaded_name, token_of


def span(version: str, start: int, end: int) -> dict:
    return {"version": version, "start": start, "end": end}


def test_a_request_without_an_update_has_one_span_of_the_version_in_service():
    ledger = VersionLedger()
    assert ledger.take("a", 3) == [span("default", 0, 3)]
    ledger.serve("1", {})
    assert ledger.take("b", 2) == [span("1", 0, 2)]
    assert ledger.take("aborted before its first token", 0) == []


def test_updates_divide_the_tokens_of_requests_that_run_across_them():
    ledger = VersionLedger()
    ledger.serve("1", {})
    ledger.serve("2", {"long": 5, "waiting": 0})
    ledger.serve("3", {"long": 5, "waiting": 4, "new": 1})  # "long" got no token between the two updates
    assert ledger.take("long", 9) == [span("1", 0, 5), span("3", 5, 9)]
    assert ledger.take("waiting", 4) == [span("2", 0, 4)]
    assert ledger.take("new", 2) == [span("2", 0, 1), span("3", 1, 2)]


def test_a_name_that_comes_again_starts_anew():
    ledger = VersionLedger()
    ledger.serve("1", {"finished": 2, "aborted": 3})
    assert ledger.take("finished", 4) == [span("default", 0, 2), span("1", 2, 4)]
    ledger.serve("2", {})
    assert ledger.take("finished", 1) == ledger.take("aborted", 1) == [span("2", 0, 1)]


def test_experts_are_found_by_either_of_their_names():
    """vLLM 0.25 has the longer name in `named_parameters`, and the shorter one in what `load_weights` returns."""
    short = "model.layers.3.mlp.experts.w13_weight"
    assert loaded_name("model.layers.3.mlp.experts.routed_experts.w13_weight") == loaded_name(short) == short
    assert loaded_name("model.norm.weight") == "model.norm.weight"


def test_a_token_is_found_in_either_form():
    assert token_of({"token_id": 7, "token": "x"}) == token_of({"token": "token_id:7"}) == 7
