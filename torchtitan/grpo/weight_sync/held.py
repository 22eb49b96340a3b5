"""Which of the trainer's tensors a server holds: what it says of its own memory against what was published.

embedded, vLLM    fingerprints by Hugging Face's names, of tensors that it can read back whole
SGLang            checksums by its own names, of tensors that have agreed once; see `SglangChecksums`
"""

import hashlib
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import torch

from torchtitan.grpo.engines.sglang_control import SglangControl
from torchtitan.grpo.engines.vllm_control import VllmControl
from torchtitan.grpo.weight_wire.adapters import fingerprint
from torchtitan.grpo.weight_wire.buckets import Bucket

VERIFIED_BYTES = 256 << 20
"""Of each version, about so many are compared in an SGLang server, the next tensors in turn: all of a small model."""

_STACKS = (
    (r"\.([qkv])_proj\.(\w+)$", r".qkv_proj.\2", "qkv"),
    (r"\.experts\.(\d+)\.(gate|up)_proj\.weight$", r".experts.w13_weight", ("gate", "up")),
    (r"\.experts\.(\d+)\.(down)_proj\.weight$", r".experts.w2_weight", ("down",)),
    (r"\.(gate|up)_proj\.(\w+)$", r".gate_up_proj.\2", ("gate", "up")),
)
"""Which tensors SGLang stacks, under which name, and in which order."""
_WORD, _TILE, _WORDS_AT_ONCE = 0xFFFFFFFF, 8192, 1 << 22


class Fingerprints:
    """Takes the published tensors one by one, and compares those that the server can read back.

    Args:
        base: With `[lora]`, fingerprints of the frozen weights.

    Attributes:
        compared: How many it could.
        left_out: How many it could not.
        differing: Names of those that are others.
    """

    def __init__(self, control: VllmControl, base: Mapping[str, str], timeout_s: float) -> None:
        self._held = control.fingerprints(timeout_s)
        known = self._held.keys() & base.keys()
        self.compared, self.left_out = len(known), 0
        self.differing = sorted(name for name in known if self._held[name] != base[name])

    def take(self, name: str, tensor: torch.Tensor) -> None:
        if (held := self._held.get(name)) is None:
            self.left_out += 1
            return
        self.compared += 1
        self.differing += [name] if held != fingerprint(tensor) else []


class SglangChecksums:
    """Verifies what an SGLang server has loaded, by its own route of checksums (0.5.23).

    SGLang stacks some tensors, slices them for tensor parallelism, and may pack or quantise them. So a tensor counts
    once its checksum has been the trainer's. The first version of a connection shows which ones do, and verifies those
    that did before. After that each version verifies VERIFIED_BYTES of them. A difference is an error. Tensors whose
    parts travel in several buckets are left out.

    Use: `begin` a version, `add` its buckets, `check` before the server is resumed.
    """

    def __init__(self, control: SglangControl, buckets: Sequence[Bucket]) -> None:
        self._control = control
        self._compared = False
        sizes = {spec.name: spec.bytes for bucket in buckets for spec in bucket.tensors}
        together = [{spec.name for spec in bucket.tensors} for bucket in buckets]
        stacks = stacked(sizes)
        self._of_bucket = [
            {stack: parts for stack, parts in stacks.items() if names.issuperset(parts)} for names in together
        ]
        self._parts = {stack: parts for own in self._of_bucket for stack, parts in own.items()}
        self._bytes = {stack: sum(map(sizes.__getitem__, parts)) for stack, parts in self._parts.items()}
        self._turn: deque[str] = deque()
        self._expected: dict[str, str] = {}
        self._due: set[str] = set()

    def begin(self) -> None:
        """A version is about to be sent."""
        self._expected, self._due, total = {}, set(), 0
        if not self._control.tells_checksums:
            return
        if not self._compared:
            self._due |= self._bytes.keys()
            return
        self._turn = self._turn or deque(sorted(self._control.comparable.keys() & self._bytes.keys()))
        while self._turn and total < VERIFIED_BYTES:
            self._due.add(name := self._turn.popleft())
            total += self._bytes[name]

    def add(self, bucket: Bucket, wire: torch.Tensor) -> None:
        """Without memory for it, this version is not verified."""
        tensors = dict(bucket.views(wire)) if self._due.intersection(self._of_bucket[bucket.index]) else {}
        try:
            for name, parts in self._of_bucket[bucket.index].items():
                if name in self._due:
                    self._expected[name] = checksum([tensors[part] for part in parts])
        except torch.OutOfMemoryError:
            self._expected, self._due = {}, set()

    def check(self) -> int:
        """How many tensors hold what was sent.

        Raises:
            RuntimeError: One that has agreed before does not. The server has another version, or a torn one.
        """
        if not self._expected:
            return 0
        others = [name for name in self._bytes if name not in self._expected]
        held = self._control.checksums(without=others)
        if held is None:
            return 0
        is_first, self._compared = not self._compared, True
        told = {name: held[name] == expected for name, expected in self._expected.items() if name in held}
        equal, known = {name for name, is_equal in told.items() if is_equal}, self._control.comparable
        if wrong := sorted(name for name in told.keys() & known.keys() if name not in equal):
            may_differ = is_first and self._control.started_anew  # in its flags: then it is learnt anew
            if may_differ:
                self._control.comparable = {}
            if not may_differ or equal & known.keys():
                raise RuntimeError(f"{len(wrong)} of {len(told)} tensors are not those sent, such as {wrong[0]}")
        self._control.comparable |= {name: self._parts[name] for name in equal}
        return len(equal)


class HeldBySglang:
    """See `Fingerprints`. Names are SGLang's."""

    def __init__(self, control: SglangControl, base: Mapping[str, str], timeout_s: float) -> None:
        self._order = dict(control.comparable)  # a thread may connect the server again meanwhile
        held = (control.checksums(timeout_s=timeout_s) or {}) if self._order else {}
        self._held = {stack: held[stack] for stack in self._order if stack in held}
        self._stack_of = {part: stack for stack in self._held for part in self._order[stack]}
        self._parts: dict[str, dict[str, torch.Tensor]] = {}
        self.compared, self.left_out, self.differing = 0, 0, list[str]()

    def take(self, name: str, tensor: torch.Tensor) -> None:
        stack = self._stack_of.get(name)
        if stack is None:
            self.left_out += 1
            return
        parts = self._parts.setdefault(stack, {})
        parts[name] = tensor
        if len(parts) == len(self._order[stack]):
            self.compared += 1
            own = checksum([parts[part] for part in self._order[stack]])
            self.differing += [stack] if self._held[stack] != own else []
            del self._parts[stack]


def stacked(names: Iterable[str]) -> dict[str, list[str]]:
    """SGLang's names -> the published tensors that each holds, in its order."""
    stacks: dict[str, list[tuple[tuple[int, int], str]]] = {}
    for name in names:
        stack, place = name, (0, 0)
        for pattern, becomes, order in _STACKS:
            if found := re.search(pattern, name):
                kind = next(group for group in found.groups() if group in order)
                number = next((int(group) for group in found.groups() if group.isdigit()), 0)
                stack, place = re.sub(pattern, becomes, name), (number, order.index(kind))
                break
        stacks.setdefault(stack, []).append((place, name))
    return {stack: [name for _, name in sorted(parts)] for stack, parts in stacks.items()}


def checksum(parts: Sequence[torch.Tensor]) -> str:
    """SGLang's, of the tensor that these are stacked to: of 64 bits, in hex. On a CPU it is the begin of SHA-256."""
    if parts[0].device.type == "cpu":
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part.contiguous().flatten().view(torch.uint8).numpy())
        return digest.hexdigest()[:16]
    return f"{_hash_of_tiles(torch.cat([part.flatten().view(torch.uint8) for part in parts])):016x}"


def _hash_of_tiles(data: torch.Tensor) -> int:
    """SGLang 0.5.23's hash of a tensor on a GPU (`gpu_tensor_hash`): each 32-bit word is mixed with its position, in
    two ways; the words of a tile are added, and then the tiles."""
    words = torch.nn.functional.pad(data, (0, -len(data) % 4)).view(torch.int32)
    sums: list[torch.Tensor] = []
    for start in range(0, len(words), _WORDS_AT_ONCE):
        chunk = words[start : start + _WORDS_AT_ONCE].long() & _WORD
        at = torch.arange(start, start + len(chunk), device=chunk.device)
        halves = []
        for seed, factor, turn in ((0x243F6A88, 0x27D4EB2D, 15), (_SECOND_SEED, 0x165667B1, 13)):
            place = ((at * factor + seed) & _WORD) ^ (((at << turn) | (at >> (32 - turn))) & _WORD)
            mixed = torch.nn.functional.pad(_mixed(chunk ^ place), (0, -len(chunk) % _TILE))
            halves.append(_mixed((mixed.view(-1, _TILE).sum(1) & _WORD) ^ (4 * len(words) & _WORD)))
        sums.append(((halves[0] << 32) | halves[1]).sum())
    total = int(torch.stack(sums).sum()) & _WORD_64 if sums else 0
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        total = ((total ^ (total >> shift)) * factor) & _WORD_64
    return total


_WORD_64 = 0xFFFFFFFFFFFFFFFF
_SECOND_SEED = (0x243F6A88 * 0x9E3779B1 ^ 0xDEADBEEF) & _WORD


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's last mix of 32-bit words, which are int64 here."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & _WORD
    return x ^ (x >> 16)
