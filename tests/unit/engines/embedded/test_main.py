import pytest

from torchtitan.grpo.engines.embedded.__main__ import parse_arguments


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.7", "127.example.com"])
def test_only_an_explicit_word_opens_the_server_to_other_machines(host, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["embedded", "--model", "m", "--host", host])
    with pytest.raises(SystemExit):
        parse_arguments()
    assert "opens the server to other machines" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["embedded", "--model", "m", "--host", host, "--expose"])
    assert parse_arguments().host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_this_machine_needs_no_word(host, monkeypatch):
    monkeypatch.setattr("sys.argv", ["embedded", "--model", "m", "--host", host])
    assert parse_arguments().host == host
