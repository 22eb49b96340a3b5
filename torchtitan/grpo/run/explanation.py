"""Why a server under suspicion differs: what it is asked, what the trainer computes of the same, and the cause."""

import pkgutil
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torchtitan.grpo.data.kept_tokens import KeptTokens
from torchtitan.grpo.engines.engine import Engine
from torchtitan.grpo.engines.protocol import EngineError
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.model.lora import without_adapters
from torchtitan.grpo.policy.microbatch import Microbatch
from torchtitan.grpo.policy.rows import PackedSample
from torchtitan.grpo.rollouts.diagnosis import Evidence, Probe, cause
from torchtitan.grpo.rollouts.questions import ASKED_S, Asked

if TYPE_CHECKING:
    from grpo_train import Trainer

_LOOK_S = 0.05
Found = dict[int, np.ndarray]
"""Log-probabilities of each document."""


class Explanation:
    """Names the cause, on every rank. It asks on rank 0, and all ranks compute.

    The questions are about the newest version, which the model has between two steps: first the server gets it. All
    waits are bounded. Whatever fails, a server's reply included, costs the explanation alone.
    """

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer = trainer

    def __call__(self, url: str) -> str:
        """The cause; "" amid a step's optimizer steps, when no server has the model's weights, and where servers sleep
        while trainers compute."""
        trainer = self._trainer
        if trainer.ending.trained is None or trainer.config.rollout.colocate:
            return ""
        asked, tokens, failed = trainer.broadcast.json(self._asked(url) if trainer.is_rank0 else None)
        asked = [own for own in asked if len(own[0]) <= trainer.layout.row_tokens]
        probes = self._probes(asked) if asked else []
        config = trainer.config
        evidence = Evidence(config.rollout.max_logprob_mismatch, probes, tokens=tokens, failed=failed)
        evidence.experts = getattr(trainer.source.model_args, "moe_enabled", False)
        evidence.quantized = config.rollout.quantization != "none"
        evidence.in_flight = config.async_grpo.enabled and config.async_grpo.in_flight_weight_updates
        if trainer.broadcast.json(not probes or evidence.computes_otherwise):
            self._compare_weights(url, evidence)
        return trainer.broadcast.json(cause(evidence))

    # ---------------------------------------------------------------------------------------------------- on rank 0

    def _asked(self, url: str) -> tuple[list[Asked], str, str]:
        """Its answers, what its tokenizer reads otherwise, and why there are none."""
        version = self._trainer.weight_sync.newest
        try:
            self._wait_for(url, version)
            asked, tokens = self._trainer.rollouts.ask(url, version)
            return asked, tokens, ""
        except Exception as error:  # the other ranks wait
            return [], "", str(error)

    def _server(self, url: str) -> Server | None:
        fleet = self._trainer.rollouts.fleet
        assert fleet is not None
        return next((server for server in fleet.servers if server.url == url), None)

    def _wait_for(self, url: str, version: int) -> None:
        """Until the server has this version."""
        deadline = time.monotonic() + ASKED_S
        while True:
            server = self._server(url)
            if server is None or server.lost:
                raise EngineError(f"{url} is lost since")
            if server.in_traffic and server.version == version:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{url} did not get version {version} within {ASKED_S:g} s")
            time.sleep(_LOOK_S)

    # ------------------------------------------------------------------------------------------------- on every rank

    @torch.no_grad()
    def _probes(self, asked: list[Asked]) -> list[Probe]:
        """What the trainer computes of the same documents: each rank of the same rows."""
        trainer = self._trainer
        samples = [PackedSample(document[:1], document[1:], 0.0, 1.0, None) for document, *_ in asked]
        cut = [replace(sample, kept=_kept(own)) for sample, own in zip(samples, asked, strict=True)]
        layout = replace(trainer.layout, ranks=1, share_prompts=False)
        model, temperature = trainer.policy.model, trainer.config.rollout.temperature

        def computed(forward: Callable[..., Any], temperature: float, samples: list[PackedSample]) -> Found:
            found: Found = {}
            for batch in (Microbatch.of(row, trainer.device) for row in layout.pack(samples)[0]):
                logprobs = forward(batch, temperature)[0].float().cpu().numpy()
                of_sample = batch.samples[batch.sample_ids].cpu().numpy()
                found |= {int(sample): logprobs[of_sample == sample] for sample in np.unique(of_sample)}
            return found

        trained = computed(model, 1.0, samples)
        drawn = computed(model, temperature, cut) if temperature != 1 or cut[0].kept else trained
        scores = all(scored for *_, scored, _ in asked)
        of_base = without_adapters(model)
        given = (1.0, samples) if scores else (temperature, cut)
        base = computed(of_base, *given) if trainer.config.lora.enable else {}
        probes = []
        for i, (_, prompt_tokens, generated, scored, _) in enumerate(asked):
            answer = slice(prompt_tokens - 1, None)
            part = slice(None) if scores else answer
            probes.append(
                Probe(
                    np.asarray(generated),
                    drawn[i][answer],
                    np.asarray(scored if scores else generated),
                    trained[i] if scores else drawn[i][answer],
                    base[i][part] if base else np.zeros(0),
                )
            )
        return probes

    def _compare_weights(self, url: str, evidence: Evidence) -> None:
        """Those that the server holds, with the model's."""
        trainer, held = self._trainer, None
        try:
            held = self._held(url) if trainer.is_rank0 else None
        except Exception as error:  # the other ranks wait
            evidence.failed = evidence.failed or str(error)
        if not trainer.broadcast.json(held is not None):
            return
        for name, tensor in trainer.weight_sync.whole_tensors():
            try:
                if held is not None:
                    held.take(name, tensor)
            except Exception as error:  # the other ranks gather the rest with this one
                evidence.failed, held = evidence.failed or str(error), None
        if held is not None:
            evidence.compared, evidence.differing, evidence.left_out = held.compared, held.differing, held.left_out

    def _held(self, url: str) -> Any:
        server = self._server(url)
        if server is None or not isinstance(server.engine, Engine):
            return None
        return pkgutil.resolve_name(server.engine.held)(server.control, self._trainer.weight_sync.base, ASKED_S)


def _kept(asked: Asked) -> KeptTokens | None:
    """What could be drawn in place of each of the document's tokens but the first."""
    _, prompt_tokens, *_, kept = asked
    if not kept:
        return None
    counts, ids = (np.array(numbers, np.int32) for numbers in kept)
    return KeptTokens.joined([KeptTokens.all(prompt_tokens - 1), KeptTokens(counts, ids)])
