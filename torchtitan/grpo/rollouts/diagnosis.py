"""Why a server's answers are not the policy's: the cause by name, from what it and the trainer say of a few answers.

A server under suspicion is asked three things. It answers recorded prompts again, as in rollouts. It scores these
answers from their first token on, with nothing cached. It tells which weights it holds, as far as it can. The trainer
scores the same tokens with the same version. What agrees with what leaves few causes.
"""

from dataclasses import dataclass, field

import numpy as np

_FIRST = 4
"""Positions at the begin of a document, where rotary embeddings of any kind are almost the same."""
_GROWS = 0.3
_FEW = 0.1
_FAR = 1.0


@dataclass
class Probe:
    """One answer, in nat. `scored` and `trained` have one entry for each token behind the first; `generated` and
    `sampled` one for each of the answer.

    Attributes:
        generated: The server's, as rollouts get them.
        sampled: The trainer's, at the temperature of `generated`.
        scored: The server's, of the whole document, at temperature 1 and with nothing cached. Where it cannot score,
            what it generated; `trained` and `base` are then of the answer alone too.
        trained: The trainer's, at temperature 1.
        base: The trainer's without its adapters; empty without `[lora]`.
    """

    generated: np.ndarray
    sampled: np.ndarray
    scored: np.ndarray
    trained: np.ndarray
    base: np.ndarray = field(default_factory=lambda: np.zeros(0))


@dataclass
class Evidence:
    """What is known of one server.

    Attributes:
        limit: `[rollout] max_logprob_mismatch`.
        probes: What it answered; empty if it did not.
        compared: How many tensors that it holds were compared with the trainer's.
        differing: Names of those that are others.
        left_out: How many tensors it cannot read back.
        experts: The model is a mixture of experts.
        quantized: It quantizes each version itself.
        in_flight: Answers run across updates of weights.
        tokens: What its tokenizer reads otherwise, if it does.
        failed: Why it did not answer.
    """

    limit: float
    probes: list[Probe]
    compared: int = 0
    differing: list[str] = field(default_factory=list)
    left_out: int = 0
    experts: bool = False
    quantized: bool = False
    in_flight: bool = False
    tokens: str = ""
    failed: str = ""

    @property
    def computes_otherwise(self) -> bool:
        """It scores other log-probabilities, with nothing cached."""
        return bool(self.probes) and _mean([probe.scored - probe.trained for probe in self.probes]) > self.limit


def cause(evidence: Evidence) -> str:
    """The cause in words. The first one says which it is: see docs/by_symptom.md."""
    found = _cause(evidence)
    return f"{found}. Its tokenizer is another one too: {evidence.tokens}" if evidence.tokens else found


def _cause(evidence: Evidence) -> str:
    if evidence.differing:
        return _of_weights(evidence)
    if not evidence.probes:
        return f"unknown: {evidence.failed or 'it was not asked'}"
    limit = evidence.limit
    drawn = [probe.generated - probe.sampled for probe in evidence.probes]
    difference, all_drawn = _mean(drawn), np.concatenate(drawn)
    # Where weights or keys and values differ, a token that a server finds likelier than the trainer does costs others.
    if all_drawn.mean() > limit / 20 and np.quantile(all_drawn, 0.05) > -limit / 4:
        kept = float(np.exp(-all_drawn).mean())
        return (
            f"sampling mask: it samples from {kept:.0%} of the probability, as top-p, top-k or min-p leave, "
            f"and every token is {difference:.3f} nat likelier there"
        )
    scored = [probe.scored - probe.trained for probe in evidence.probes]
    if _mean(scored) > limit:
        return _of_computing(evidence, scored)
    if difference <= limit:
        gone = "its newest weights answer and score as the trainer does"
        if evidence.in_flight:
            return f"old keys and values, or weights, of before its newest version: {gone}"
        return f"weights of before its newest version, or what it had cached under them: {gone}"
    begins = int(np.median([np.argmax(np.abs(own) > limit) for own in drawn]))
    scores = f"it scores the same tokens as the trainer does, and answers {difference:.3f} nat apart"
    if begins <= 1:
        return f"old prefix: {scores} from the first token on: keys and values of the prompt are of other weights"
    return f"old keys and values: {scores} from token {begins + 1} of an answer on"


def _of_weights(evidence: Evidence) -> str:
    names = evidence.differing
    which = f"{len(names)} of {evidence.compared} tensors are not the trainer's: {', '.join(names[:3])}"
    has_base = any(len(probe.base) for probe in evidence.probes)
    kind = "adapter" if any(".lora_" in name for name in names) else "base" if has_base else "weights"
    if len(names) == evidence.compared > 2:
        return f"{kind}: all {which}; it has another version, or another model's"
    if evidence.experts and all(".experts." in name for name in names):
        return f"expert: {which}"
    return f"{kind}: {which}"


def _of_computing(evidence: Evidence, scored: list[np.ndarray]) -> str:
    """It computes other log-probabilities, with nothing cached."""
    every, difference = np.abs(np.concatenate(scored)), _mean(scored)
    apart = f"it scores tokens {difference:.3f} nat apart with nothing cached"
    if all(len(probe.base) for probe in evidence.probes):
        of_base = _mean([probe.scored - probe.base for probe in evidence.probes])
        if of_base <= evidence.limit:
            return f"adapter: it answers as its base does ({of_base:.3f} nat), without the adapter"
    first = float(np.abs(np.concatenate([own[:_FIRST] for own in scored])).mean())
    rest = [own[_FIRST:] for own in scored if len(own) > _FIRST]
    if rest and first < _GROWS * _mean(rest):
        return (
            f"rope or config: {apart}, and {first:.3f} in a document's first {_FIRST} positions: compare rope_theta, "
            "rope_scaling and sliding_window of its config.json"
        )
    if evidence.experts and float(np.median(every)) < _FEW * difference:
        return f"router: {apart}, and most tokens agree: experts are chosen otherwise"
    if evidence.left_out or not evidence.compared:
        equal = f", and {evidence.compared} others are the trainer's" if evidence.compared else ""
        scales = ", or their scales" if evidence.quantized else ""
        return f"weights{scales}, as it seems: {apart}; {evidence.left_out} tensors cannot be read back from it{equal}"
    kind = "kernels or precision" if difference < _FAR else "kernels, precision or config"
    return f"{kind}: {apart}, at all positions, and all {evidence.compared} tensors are the trainer's"


def _mean(differences: list[np.ndarray]) -> float:
    return float(np.abs(np.concatenate(differences)).mean())
