import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers import ROOT
from tests.helpers.files import limited
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.weight_sync.disk import DiskCopy
from torchtitan.grpo.weight_wire.adapters import ENDS, PREFIX, AdapterInfo
from torchtitan.grpo.weight_wire.bucket_files import bucket_path, check_bucket, read_bucket, write_bucket
from torchtitan.grpo.weight_wire.buckets import Checksum, TensorSpec, plan_buckets, plan_to_json
from torchtitan.grpo.weight_wire.receiver import PROTOCOL, Receiver
from torchtitan.grpo.weight_wire.version_names import FOLDER_PREFIX, MEMORY, own_run

SPECS = [
    TensorSpec("a", torch.bfloat16, (3, 5)),
    TensorSpec("b", torch.float32, (7,)),
    TensorSpec("c", torch.float32, ()),
]


@pytest.fixture
def bucket():
    (bucket,) = plan_buckets(SPECS, 1 << 20)
    return bucket


def wire_of(bucket, version: int) -> torch.Tensor:
    wire = torch.zeros(bucket.wire_bytes, dtype=torch.uint8)
    for _, view in bucket.views(wire):
        view.copy_(torch.randn(view.shape))
    checksum = int(Checksum(torch.device("cpu"), bucket.payload_bytes)(wire[: bucket.payload_bytes]))
    bucket.trailer(wire).copy_(torch.tensor([version, bucket.index, bucket.payload_bytes, checksum]))
    return wire


def test_a_bucket_comes_back_byte_by_byte_and_other_tools_can_read_it(bucket, tmp_path):
    wire = wire_of(bucket, 7)
    write_bucket(tmp_path, bucket, wire)
    assert torch.equal(read_bucket(tmp_path, bucket), wire)
    for name, tensor in load_file(bucket_path(tmp_path, bucket)).items():
        assert torch.equal(tensor, dict(bucket.views(wire))[name])


@pytest.mark.parametrize("damage", ["name", "shape", "dtype", "no trailer"])
def test_a_file_that_is_not_the_plans_is_refused(bucket, tmp_path, damage):
    write_bucket(tmp_path, bucket, wire_of(bucket, 7))
    path = bucket_path(tmp_path, bucket)
    tensors, metadata = load_file(path), {"trailer": "7,0,1,2"}
    if damage == "name":
        tensors["d"] = tensors.pop("b")
    elif damage == "shape":
        tensors["b"] = tensors["b"][:3].clone()
    elif damage == "dtype":
        tensors["b"] = tensors["b"].double()
    else:
        metadata = None
    save_file(tensors, path, metadata)
    said = {
        "shape": r": b is torch.float32 \(3,\), expected torch.float32 \(7,\)",
        "dtype": r": b is torch.float64 \(7,\), expected torch.float32 \(7,\)",
    }
    with pytest.raises(ValueError, match=f"{path}{said.get(damage, '')}"):
        read_bucket(tmp_path, bucket)


def test_a_file_that_was_written_wrongly_is_refused(bucket, tmp_path):
    write_bucket(tmp_path, bucket, wire_of(bucket, 7))
    check_bucket(tmp_path, bucket)
    path = bucket_path(tmp_path, bucket)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # of a tensor
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{path} is torn: checksum -?\d+, expected"):
        check_bucket(tmp_path, bucket)


def test_a_copy_shows_whole_versions_only_and_removes_old_ones(bucket, tmp_path):
    copy = DiskCopy(str(tmp_path / "weights"), [bucket])
    (own,) = (tmp_path / "weights").iterdir()
    assert own_run() in own.name
    for version in (3, 4):
        copy.begin()
        copy.store(0, wire_of(bucket, version))
        assert copy.version == -1
        assert not (own / f"version-{version:08d}").exists()
        copy.complete(version, [1])
        assert int(bucket.trailer(read_bucket(copy.feed().folder, bucket))[0]) == version
    assert [folder.name for folder in own.glob("version*")] == ["version-00000004"]
    copy.close()
    assert list((tmp_path / "weights").iterdir()) == []


def publish(copy: DiskCopy, bucket, version: int) -> torch.Tensor:
    copy.begin()
    wire = wire_of(bucket, version)
    copy.store(0, wire)
    copy.complete(version, [1, version, len(bucket.tensors), bucket.payload_bytes, int(bucket.trailer(wire)[-1])])
    return wire


def test_two_runs_in_one_folder_leave_each_other_alone_and_no_server_takes_the_others_weights(bucket, tmp_path):
    first = DiskCopy(str(tmp_path), [bucket])
    given = publish(first, bucket, 1)
    second = DiskCopy(str(tmp_path), [bucket])  # the other run starts
    foreign = publish(second, bucket, 1)
    publish(second, bucket, 2)
    feed = first.feed()
    info = {"protocol": PROTOCOL, "run": "r", "backend": "disk", "master_address": "", "master_port": 0}
    info |= {"rank_offset": 1, "world_size": 2, "num_buffers": 1, "timeout_seconds": 9.0}
    receiver = Receiver(info | {"plan": plan_to_json([bucket])}, torch.device("cpu"))
    update = {"version": 1, "run": "r", "folder": str(feed.folder), "expected": list(feed.expected)}
    got: dict[str, torch.Tensor] = {}
    receiver.receive(update, got.update)
    assert all(torch.equal(got[name], tensor) for name, tensor in bucket.views(given))
    write_bucket(feed.folder, bucket, foreign)  # whole, of the same version, and another run's
    acknowledged: list[int] = []
    with pytest.raises(ValueError, match=rf"version 1 in {feed.folder} is not the trainer's: "):
        receiver.receive(update, got.update, lambda: acknowledged.append(1))
    assert not acknowledged
    second.close()
    assert first.feed().folder.is_dir()
    first.close()


@pytest.mark.parametrize("given", [True, False])
def test_the_files_of_a_killed_trainer_are_removed_by_the_next_one(bucket, given, tmp_path):
    parent = str(tmp_path) if given else ""
    living = DiskCopy(parent, [bucket])
    publish(living, bucket, 1)
    program = "import os; from torchtitan.grpo.weight_sync.disk import DiskCopy; copy = DiskCopy(%r, []); copy.begin()"
    program += "; copy.complete(1, []); print(copy.feed().folder.parent, flush=True); os._exit(9)"
    words = [sys.executable, "-c", program % parent]
    killed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    left = Path(killed.stdout.strip())
    assert left.name.startswith("torchtitan-grpo-"), killed.stderr
    assert left.is_dir()
    next_one = DiskCopy(parent, [bucket])
    assert not left.exists()
    assert living.feed().folder.is_dir(), "that of a trainer that lives stays"
    living.close()
    next_one.close()


def test_a_folder_of_its_own_is_removed(bucket):
    copy = DiskCopy("", [bucket])
    copy.begin()
    copy.store(0, wire_of(bucket, 1))
    copy.complete(1, [1])
    folder = copy.feed().folder.parent
    assert folder.is_dir()
    copy.close()
    assert not folder.exists()


@pytest.mark.parametrize("given", [True, False])
def test_a_folder_without_room_for_two_versions_is_refused_at_the_start(given, tmp_path):
    (bucket,) = plan_buckets([TensorSpec("a", torch.float32, (1 << 45,))], limit_bytes=1)
    own = f"{FOLDER_PREFIX}{own_run()}-*"  # other processes make folders meanwhile
    before = set(MEMORY.glob(own))
    needed = re.escape(f"needs {2 * bucket.wire_bytes:,} bytes in {tmp_path if given else ''}")
    with pytest.raises(UserError, match=needed + r".* and [\d,]+ are free: set \[weight_sync\] disk_folder"):
        DiskCopy(str(tmp_path) if given else "", [bucket])
    assert set(MEMORY.glob(own)) <= before and not list(tmp_path.iterdir()), "it is removed"


def test_a_folder_that_is_full_later_is_named(bucket, tmp_path):
    """It is another disk than that of the run's folder."""
    named = rf"no room for weights in {tmp_path}/torchtitan-.*disk_folder.*File too large"
    copy = DiskCopy(str(tmp_path), [bucket])
    copy.begin()
    with limited(resource.RLIMIT_FSIZE, 10), pytest.raises(UserError, match=named):
        copy.store(0, wire_of(bucket, 1))
    copy.close()
    names = [f"{PREFIX}model.layers.0.q_proj{end}" for end in ENDS]
    adapters = plan_buckets([TensorSpec(name, torch.float32, (2, 2)) for name in names], 1 << 20)
    copy = DiskCopy(str(tmp_path), adapters, AdapterInfo(2, 4.0, "base", {}))
    with limited(resource.RLIMIT_FSIZE, 10), pytest.raises(UserError, match=named):
        copy.begin()
    copy.close()
