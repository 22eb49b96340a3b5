"""What starts the integration tests' processes."""

from tests.helpers.ranks import Ranks


def test_ranks_that_end_between_two_looks_at_them_have_ended(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text("print('done')\n")
    run = Ranks(2, script, log=tmp_path / "log.txt")
    run.check(60)
    looks = iter([None, 0])  # as if they had still run at the first
    monkeypatch.setattr(run, "poll", lambda: next(looks))
    assert run.wait(5) == 0
    assert run.log == "done\n" * 2
