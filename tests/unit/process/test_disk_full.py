"""A full disk is one line, wherever it is found; other errors stay what they are."""

import errno
import os
import pickle
import resource

import pytest
import torch

from tests.helpers import Unspeakable
from tests.helpers.files import limited
from torchtitan.grpo.engines.protocol import EngineError
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.process.disk_full import disk_full_in_one_line, is_disk_full, no_room

TORCH = RuntimeError(
    "[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598\nframe #0: ...\nframe #1: ..."
)


def fail(error: Exception, cause: Exception | None = None) -> None:
    raise error from cause


def test_a_real_full_disk(tmp_path):
    with pytest.raises(UserError) as raised, disk_full_in_one_line(tmp_path / "run"), open("/dev/full", "w") as file:
        file.write("x" * 100_000)
    message = str(raised.value)
    assert message.startswith(f"the disk of {tmp_path / 'run'} is full ([Errno 28]")
    assert "MiB are free now; nothing was saved" in message and "\n" not in message


def test_only_a_checkpoint_that_is_there_is_recommended(tmp_path):
    for saved, said in (([], False), ([20, 40], True)):
        with pytest.raises(UserError) as raised, disk_full_in_one_line(tmp_path, lambda steps=saved: steps):
            fail(TORCH)
        assert ("--checkpoint.resume then goes on from the newest checkpoint, step 40" in str(raised.value)) == said
        assert ("nothing was saved" in str(raised.value)) != said


def save_over_a_limit(path):
    """As DCP does, into a file that Python has opened."""
    with limited(resource.RLIMIT_FSIZE, 100_000), path.open("wb") as file:
        torch.save(torch.zeros(100_000), file)


def test_a_limit_of_a_files_size_is_no_full_disk(tmp_path):
    with pytest.raises(UserError) as raised, disk_full_in_one_line(tmp_path, lambda: [20]):
        save_over_a_limit(tmp_path / "weights")
    assert str(raised.value).startswith(f"a file in {tmp_path} is over `ulimit -f`, or what its file system")
    assert "raise the limit: --checkpoint.resume then goes on from the newest checkpoint, step 20" in str(raised.value)
    assert no_room(RuntimeError("writing failed on rank 0: File too large")) == errno.EFBIG, "as `Together` says it"


def test_what_dcp_tells_other_ranks_has_no_cause(tmp_path):
    """An error that is pickled loses it."""
    with pytest.raises(RuntimeError) as raised:
        save_over_a_limit(tmp_path / "weights")
    told = pickle.loads(pickle.dumps(raised.value))
    with limited(resource.RLIMIT_FSIZE, 100_000):
        assert no_room(told) == errno.EFBIG
    assert no_room(told) == errno.ENOSPC


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (TORCH, None),
        (RuntimeError("a stage failed"), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
        (RuntimeError("a stage failed"), OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))),
        (RuntimeError("safetensors: I/O error: No space left on device (os error 28)"), None),
    ],
)
def test_what_libraries_make_of_it(error, cause, tmp_path):
    with pytest.raises(UserError, match=r"^the disk of .* is full.*$"), disk_full_in_one_line(tmp_path):
        fail(error, cause)


OF_A_SERVER = EngineError("http://a:1 has answered 500: [Errno 28] No space left on device")
OTHERS = [ValueError("x"), OSError(errno.EACCES, "denied"), UserError("no space left"), OF_A_SERVER, Unspeakable()]


@pytest.mark.parametrize("error", OTHERS)
def test_other_errors_are_left_alone(error, tmp_path):
    with pytest.raises(type(error)) as raised, disk_full_in_one_line(tmp_path):
        fail(error)
    assert raised.value is error
    assert not is_disk_full(ValueError("x"))
