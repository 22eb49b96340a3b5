"""A trainer without a loop: it publishes weights to one real server, has it answer, and judges the answers.

What names the cause is the run's own: `SamplerCheck` and `Explanation`. Only the optimizer is not there: a step
changes every weight a little.
"""

import asyncio
import dataclasses
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import torchtitan  # noqa: F401  the overlay's shims come first
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config.job_config import WeightSync as SyncConfig
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.protocol import EngineError, SamplingParams
from torchtitan.grpo.engines.registry import make_server
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model.lora import add_adapters, init_adapters, is_adapter
from torchtitan.grpo.model.packed import make_packed
from torchtitan.grpo.model.rounded_weights import round_weights
from torchtitan.grpo.model.source import load_hf_weights, resolve_model
from torchtitan.grpo.policy.microbatch import Microbatch
from torchtitan.grpo.policy.packing import Layout
from torchtitan.grpo.policy.rows import PackedSample
from torchtitan.grpo.policy.sums import by_server, server_values, surprise_values
from torchtitan.grpo.rollouts.questions import ask
from torchtitan.grpo.rollouts.sampler_check import SamplerCheck
from torchtitan.grpo.run.explanation import Explanation
from torchtitan.grpo.weight_sync.published import published_weights
from torchtitan.grpo.weight_sync.sync import WeightSync

CPU = torch.device("cpu")
PROMPTS = [[5 + (i * (7 + 2 * n)) % 400 for i in range(300)] for n in range(4)]
"""Longer than two blocks of vLLM's cache (128 tokens on a CPU)."""
BACK_S = 60.0
"""Until a server that was fed again is in traffic."""
SAMPLING = SamplingParams(n=8, temperature=1.0, max_tokens=32, ignore_eos=True)
LORA = SimpleNamespace(enable=True, rank=4, alpha=6.0, target_modules=["all-linear"])


class Harness:
    """One server and its trainer.

    Args:
        moves: Standard deviation of what a step adds to each weight.
        in_flight: A step's weights arrive while its answers are generated.
        fp8: The server quantizes.
        checked: The server is checked before it gets weights.
    """

    def __init__(
        self,
        engine: str,
        url: str,
        folder: Path,
        moves: float = 0.003,
        lora: bool = False,
        in_flight: bool = False,
        fp8: bool = False,
        checked: bool = True,
    ) -> None:
        self.in_flight, self.moves, self.lora, self.checked = in_flight, moves, lora, checked
        section = SimpleNamespace(hf_assets_path=str(folder), weights="hf")
        self.source = resolve_model(section, 1024, *([LORA] if lora else []))
        self.model = self.source.build()
        with torch.no_grad():
            self.model.init_weights(buffer_device=CPU)
        if lora:
            add_adapters(self.model, self.source.lora, torch.float32)
        load_hf_weights(self.model, self.source, folder)
        if lora:
            init_adapters(self.model, 0)
        if fp8:
            round_weights(self.model)
        make_packed(self.model)
        self.url, self.version = url, -1
        self.make = lambda url: make_server(engine, url, None, 60.0, 60.0, None, 1 << 20, lora)
        self.fleet = Fleet([url], self.make, min_servers=0)
        self.server = self.fleet.servers[0]
        config = JobConfig()
        # Recomputed: else an answer is compared up to the update alone, and plants are to be seen behind it.
        ahead = {"max_trajectory_age_steps": 1, "recompute_kv_cache_after_weight_updates": True}
        config.async_grpo = dataclasses.replace(config.async_grpo, enabled=in_flight, **ahead)
        config.lora.enable = lora
        config.rollout.quantization = "fp8" if fp8 else "none"
        self.config = config
        transport = "disk" if engine == "sglang" and lora else "gloo"
        settings = SyncConfig(timeout_seconds=60.0, async_weight_update=in_flight, transport=transport)
        self.sync = WeightSync(published_weights(self.model, self.source, torch.float32), settings, self.fleet, CPU)
        self.layout = Layout(1 << 14, 1, 1, float("inf"))
        trainer: Any = SimpleNamespace(
            config=config,
            ending=SimpleNamespace(trained=0),
            broadcast=SimpleNamespace(json=lambda value: value),
            is_rank0=True,
            weight_sync=self.sync,
            rollouts=SimpleNamespace(fleet=self.fleet, ask=self._ask),
            layout=self.layout,
            device=CPU,
            policy=SimpleNamespace(model=self.model),
            source=self.source,
        )
        self.explain = Explanation(trainer)
        self.rng = torch.Generator().manual_seed(0)

    def __enter__(self) -> "Harness":
        if self.checked:
            self.server.check()
            self.server.control.check(1024, 5, trained=self.source.identity, recomputes=self.in_flight)
        self.sync.connect()
        self.publish(wait=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.sync.close()

    @torch.no_grad()
    def learn(self) -> None:
        self.sync.order_writes_after()
        for name, parameter in self.model.named_parameters():
            if not self.lora or is_adapter(name):
                scale = self.moves * (10 if self.lora else 1)
                parameter.add_(torch.randn(parameter.shape, generator=self.rng) * scale)

    def publish(self, wait: bool) -> None:
        self.version += 1
        self.sync.publish(self.version, wait)

    def step(self) -> str:
        """One step: the words by which the server is refused or its answers are, "" for none."""
        if not self.server.in_traffic:
            return f"never in traffic: {self.server.reason}"
        self.check = SamplerCheck(self.config, self.fleet)
        self.check.explain = self.explain
        try:
            answers = self._answers()
        except (EngineError, UserError) as error:
            return f"refused: {error}"
        try:
            self.check.after_step([self.url], self._sums(answers))
        except UserError as error:
            return str(error)
        return ""

    def step_with(self, fault: str, file: Path) -> str:
        """What is said of a step with the fault that `file` tells the server. Before it: a step without the fault,
        which must pass, and one with the last version, which caches prompts."""
        assert not (said := self.step()), said
        file.write_text(fault)
        if not self.in_flight:
            self.step()
            for _ in range(8):
                self.learn()
            self.publish(wait=True)
        said = self.step()
        file.write_text("")
        self.recover()
        return said

    def recover(self) -> None:
        """Wait until the server is back, with new weights."""
        self.learn()
        self.publish(wait=True)
        deadline = time.monotonic() + BACK_S
        while not (self.server.in_traffic and self.server.version == self.version):
            if time.monotonic() > deadline:
                raise TimeoutError(self.fleet.describe())
            time.sleep(0.05)

    def _answers(self) -> list[tuple[list[int], Any]]:
        if not self.in_flight:
            return asyncio.run(self._generate())
        found: list[Any] = []
        asking = threading.Thread(target=lambda: found.extend(asyncio.run(self._generate(200))))
        asking.start()
        time.sleep(0.2)
        self.learn()
        self.publish(wait=False)
        asking.join()
        self.sync.drain()
        return found

    async def _generate(self, max_tokens: int = 32) -> list[tuple[list[int], Any]]:
        server, params = self.make(self.url), dataclasses.replace(SAMPLING, max_tokens=max_tokens)
        server.version = self.server.version
        try:
            groups = await asyncio.gather(*(server.client.generate(p, params, f"r{i}") for i, p in enumerate(PROMPTS)))
        finally:
            await server.client.close()
        return [(prompt, answer) for prompt, own in zip(PROMPTS, groups, strict=True) for answer in own]

    @torch.no_grad()
    def _sums(self, answers: list[tuple[list[int], Any]]) -> dict[str, list[float]]:
        samples = [
            PackedSample(
                prompt,
                answer.token_ids,
                0.0,
                1.0,
                answer.logprobs,
                ages=[max(0, self.version - version) for version in answer.versions],
                servers=[1] * len(answer.token_ids),
            )
            for prompt, answer in answers
        ]
        (rows,) = self.layout.pack(samples)
        total: dict[str, Any] = {}
        for row in (Microbatch.of(row, CPU) for row in rows):
            logprobs, entropy = self.model(row, 1.0)[:2]
            values = server_values(logprobs, row.sampler_logprobs) | surprise_values(logprobs, entropy)
            own = by_server(values, torch.ones_like(logprobs), row.ages, int(self.in_flight), row.servers, 1)
            total = {name: total.get(name, 0) + value for name, value in own.items()}
        return {name: value.tolist() for name, value in total.items()}

    def _ask(self, url: str, version: int) -> list[Any]:
        with nullcontext(self.make(url)) as server:
            return [ask(server, version, PROMPTS, SAMPLING, None), ""]
