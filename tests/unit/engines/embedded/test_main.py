import asyncio
import socket
from argparse import Namespace
from unittest.mock import Mock

import pytest
from aiohttp import web

from torchtitan.grpo.engines.embedded.__main__ import parse_arguments, serve
from torchtitan.grpo.errors import UserError


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


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"--host 127\.0\.0\.1 --port {port}: .*address already in use"):
            asyncio.run(serve(Mock(application=web.Application), Namespace(host="127.0.0.1", port=port)))
