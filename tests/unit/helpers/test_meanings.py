import pytest

from tests.helpers.meanings import documented, meaning


@pytest.mark.parametrize(
    ("name", "form", "variables"),
    [
        ("reward/mean", "reward/mean", {}),
        ("reward/exact_match", "reward/<function>", {"function": "exact_match"}),
        ("time/train_s", "time/<stage>_s", {"stage": "train"}),
        ("time/train_host_s", "time/<stage>_host_s", {"stage": "train"}),
        ("time/step_s", "time/step_s", {}),
        ("server/a.b-c_8000/busy_share", "server/<server>/busy_share", {"server": "a.b-c_8000"}),
        ("server/embedded/wire_s", "server/<server>/<phase>_s", {"server": "embedded", "phase": "wire"}),
        ("server/embedded/stopped_s", "server/<server>/stopped_s", {"server": "embedded"}),
        ("age/3/ess", "age/<k>/ess", {"k": "3"}),
        ("validation/pass_at_16", "validation/pass_at_<k>", {"k": "16"}),
    ],
)
def test_a_name_finds_its_item(name, form, variables):
    metric = meaning(name)
    assert (metric.name, metric.variables) == (form, variables)
    assert metric.text == documented()[form]


def test_what_the_page_does_not_have_is_its_own_name():
    metric = meaning("train/novelty")
    assert (metric.name, metric.text, metric.variables) == ("train/novelty", "", {})


def test_texts_are_plain():
    assert documented()["policy/kl"] == "KL(policy || reference) per token, with [grpo] kl_coef."
    assert all(text and "`" not in text for text in documented().values())
