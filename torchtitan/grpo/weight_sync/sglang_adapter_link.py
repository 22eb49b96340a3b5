"""The trainer's end of one SGLang server that gets LoRA adapters.

A version is an adapter of its own, named like the version, so SGLang can serve several at once:

    load 8@run     from the folder of a `DiskCopy`
    report 8@run   the server says so when it is asked
    (admitted: new requests name 8@run; those that began under 7@run end under it)
    unload 6@run   at the next update: no request names it any more

None of our code runs in the server. It loads an adapter as a whole or not at all, so a failed update leaves the version
before in service. SGLang checks neither shapes nor base weights, so this end does.
"""

import functools
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import safe_open

from torchtitan.grpo.engines.sglang_adapters import SglangAdapterControl
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.weight_sync.disk import DiskFeed
from torchtitan.grpo.weight_sync.sglang_link import SglangServerLink
from torchtitan.grpo.weight_wire.adapters import ENDS, PREFIX, AdapterInfo, adapted_layers, block_layers, fingerprint
from torchtitan.grpo.weight_wire.buckets import Bucket, TensorSpec, plan_from_json
from torchtitan.grpo.weight_wire.refusals import ADAPTERS
from torchtitan.grpo.weight_wire.version_names import lives, other_run, owned_by, version_name, version_of

_ONE_READS = threading.Lock()


class SglangAdapterLink(SglangServerLink):
    """See `ServerLink`. There is no group, and nothing is paused."""

    control: SglangAdapterControl

    def connect(self, plan_info: dict) -> None:
        """Check that the adapters fit the server and its base, and unload what earlier runs have left.

        Raises:
            UserError: They do not fit, or another run has the server.
        """
        super().connect(plan_info)
        self._unload(keep=self.versions_in_use())

    def _connect(self, plan_info: dict) -> None:
        info = AdapterInfo(**plan_info["adapter"])
        specs = [spec for bucket in plan_from_json(plan_info["plan"]) for spec in bucket.tensors]
        self.control.world_size()
        self.control.check_takes_adapters(info.rank, block_layers(spec.name for spec in specs))
        try:
            check_adapters(info, specs, self.control.model_folder())
        except ValueError as error:
            raise UserError(f"{self.url}: {error}") from error

    def stop(self, version: int) -> None:
        """Without `Pause.in_flight`, wait until the server has finished its running answers."""
        self._version, self.bytes_done, self.seconds = version, 0, {}
        self._started = time.perf_counter()
        if not self.pause.in_flight:
            with self._phase("drain"):
                self._wait_until_idle()
            self.seconds["drain"] = time.perf_counter() - self._started
        self._stopped = time.perf_counter()

    def update(self, feed: DiskFeed, buckets: Sequence[Bucket], num_buffers: int) -> dict[str, float]:
        """Have the server load the feed's version.

        `stopped` is 0 with `Pause.in_flight`: the server generates all the time.
        """
        self._version, name = feed.version, version_name(feed.version)
        self._listens()
        in_use = self.versions_in_use()
        self._unload(keep=None if in_use is None else {*in_use, feed.version})

        def load() -> None:
            if name not in self.control.adapters():  # it has the version, if only the reply was lost
                self.control.load_adapter(name, str(feed.folder), self.timeout_s)
            self.control.report(name)

        self._read(buckets, load)
        self._take_into_service(feed.version)
        if self.pause.in_flight:
            self.seconds["stopped"] = 0.0
        return self.seconds

    def _unload(self, keep: set[int] | None) -> None:
        """Unload versions of ours but these (none if None), and all of runs that have ended. Other adapters are not
        ours to touch.

        SGLang first waits for the answers under an adapter. None of ours are left; a request that was just cancelled
        may take a moment to end there.
        """
        with self._phase("unload"):
            for name in self.control.adapters():
                run = other_run(name)
                if run and lives(run):
                    raise UserError(f"{self.url}: {owned_by(run)}")
                if run or (keep is not None and version_of(name) not in {None, *keep}):
                    self.control.unload_adapter(name, self.timeout_s)


def check_adapters(info: AdapterInfo, specs: Sequence[TensorSpec], folder: str) -> None:
    """Whether adapters have the shapes of the server's layers, and belong to its weights.

    Both are read from the folder that the server says it loaded. If this machine does not have that folder, only the
    adapters themselves are looked at.

    Raises:
        ValueError: They do not. The message begins with ADAPTERS.
    """
    adapted_layers(spec.name for spec in specs)
    shapes = _shapes(folder)
    for spec in specs:
        down = spec.name.endswith(ENDS[0])
        layer = spec.name.removeprefix(PREFIX).removesuffix(ENDS[0] if down else ENDS[1])
        outputs, inputs = shapes.get(f"{layer}.weight", (0, 0)) if shapes else (spec.shape[0], spec.shape[-1])
        if not outputs:
            raise ValueError(f"{ADAPTERS} the server's model in {folder} has no layer {layer} to adapt")
        expected = (info.rank, inputs) if down else (outputs, info.rank)
        if spec.shape != expected:
            raise ValueError(
                f"{ADAPTERS} {spec.name} is {list(spec.shape)}, and the server's layer {layer} takes {list(expected)}: "
                "start the server with the folder that [model] hf_assets_path names"
            )
    if shapes:
        with _ONE_READS:  # the others find its result
            info.check_base(Path(folder).name, lambda: _fingerprints(folder, _stamp(folder), frozenset(info.base)))


def _files(folder: str) -> list[Path]:
    return sorted(Path(folder).glob("*.safetensors"))


def _stamp(folder: str) -> tuple[tuple[str, int, int], ...]:
    """Changes with the files."""
    return tuple((file.name, (status := file.stat()).st_mtime_ns, status.st_size) for file in _files(folder))


def _shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of each weight. Empty if there are no files."""
    found: dict[str, tuple[int, ...]] = {}
    for path in _files(folder):
        with safe_open(path, framework="pt") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return found


@functools.lru_cache(maxsize=1)
def _fingerprints(folder: str, stamp: tuple, names: frozenset[str]) -> Mapping[str, str]:
    """Of these weights. They are read once, however many servers have loaded the folder."""
    found: dict[str, str] = {}
    for path in _files(folder):
        with safe_open(path, framework="pt") as file:
            found |= {name: fingerprint(file.get_tensor(name)) for name in names.intersection(file.keys())}
    return found
