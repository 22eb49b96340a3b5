"""The model card of an export: README.md, with the front matter that the Hugging Face Hub reads.

An export may be published. So a card holds no address, no prompt and no argument of an environment, and of an absolute
path the last name only.
"""

import os
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import distributions
from pathlib import PurePath
from typing import Any

from huggingface_hub import ModelCardData

from torchtitan.grpo.config.jobs import UNREAD, Job, covering
from torchtitan.grpo.config.keys import keys, toml
from torchtitan.grpo.sources.table import SOURCES

CARD = "README.md"
_SETTINGS = (
    *("optimizer", "lr_scheduler", "training", "grpo", "async_grpo", "lora", "debug.seed"),
    *("sft.steps", "sft.batch_size", "sft.lr", "rollout.temperature", "rollout.max_answer_tokens"),
    *("distill.mode", "distill.coef", "distill.top_k"),
    *("data.chat_template", "data.max_prompt_tokens", "reward.weights", "validation.prompts"),
)
"""Sections and keys that a card shows where they differ from their defaults."""
_PACKAGES = ("torchtitan-grpo", "torchtitan", "torch", "transformers")
_HELD_OUT = ("/greedy_reward", "/sampled_reward", "/loss")
_ON_THE_HUB = re.compile(r"([^/@]+/[^/@]+)@[0-9a-f]{40}")
"""What `config.hub.named` makes of an id. Any other name may be a folder."""
_LOAD = {
    "hf": """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(".")""",
    "adapter": """\
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained(".", dtype="auto")
base = model.active_peft_config
tokenizer = AutoTokenizer.from_pretrained(base.base_model_name_or_path, revision=base.revision or "main")""",
}
_LIBRARY = {"hf": "transformers", "adapter": "peft"}
_RENDER = """\
inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)"""
_RENDER_CHAT = """\
messages = [{"role": "user", "content": prompt}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")"""


def model_card(kind: str, step: int, job: Job, run_config: Mapping[str, Any], held_out: Mapping[str, float]) -> str:
    """The text of README.md.

    Args:
        kind: "hf", or "adapter" for PEFT's folder.
        run_config: `config.resolved.resolved`. Keys that it lacks have their defaults.
        held_out: Metrics of the validation after this step, none without one.
    """
    config = (defaults := {path: key.default for path, key in keys().items()}) | dict(run_config)
    base = config["model.hf_assets_path"]
    tables = config["data.mixture"] or [{}]
    is_chat = tables[0].get("chat_template", config["data.chat_template"])
    has_weights = config["model.weights"] == "hf"
    is_taught = config["distill.teacher_urls"] and config["distill.mode"] == "only"
    method = "supervised fine-tuning" if job == "sft" else "on-policy distillation" if is_taught else "GRPO"
    rows = {"base model": _public(base) + ("" if has_weights else ", its shape with random weights")}
    rows["data"] = "; ".join(_rows_of(config, table) for table in tables)
    if job == "grpo":
        rows["reward"] = ", ".join(config["reward.functions"])
        rows["environment"] = re.sub(r":\w+://.*", "", config["rollout.environment"])  # without its server's address
        rows["a step"] = f"{config['grpo.prompts_per_step']} prompts, {config['grpo.group_size']} answers each"
    for name in filter(lambda name: name.endswith(_HELD_OUT), held_out):
        error = f" (standard error {held_out[f'{name}_se']:.3f})" if f"{name}_se" in held_out else ""
        rows[f"held-out {name.removeprefix('validation/')}"] = f"{held_out[name]:.3f}{error}"
    installed = [found for name in _PACKAGES for found in [*distributions(name=name)][:1]]
    rows["versions"] = ", ".join(f"{each.name} {each.version}" for each in installed)
    shown = [path for path in config if covering(path, _SETTINGS) and not covering(path, UNREAD[job])]
    settings = [f"{path} = {toml(config[path])}" for path in shown if config[path] != defaults[path]]
    front = ModelCardData(
        base_model=next(iter(_ids([base] if has_weights else [])), None),
        datasets=_ids(table.get("path", config["data.path"]) for table in tables) or None,
        library_name=_LIBRARY[kind],
        pipeline_tag="text-generation",
        tags=["torchtitan", job],
    )
    newline = "\n"  # an f-string of Python 3.11 takes no backslash
    return f"""---
{front.to_yaml()}
---

# {_public(base).partition("@")[0]} after {step} steps of {method}

{newline.join(f"- {name}: {value}" for name, value in rows.items() if value)}

Settings that differ from their defaults:

```toml
{newline.join(settings)}
```

Load it from this folder, or by its id:

```python
{_LOAD[kind]}

prompt = "..."
{_RENDER_CHAT if is_chat else _RENDER}
answer = model.generate(**inputs, max_new_tokens={config["rollout.max_answer_tokens"]})
print(tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```
"""


def _rows_of(config: Mapping[str, Any], table: Mapping[str, Any]) -> str:
    """The rows of [data], or of a `[[data.mixture]]` table."""
    names = ("source", "path", "subset", "split", "source_args")
    source, path, *others = (table.get(name, config[f"data.{name}"]) for name in names)
    read = SOURCES[source].keys
    said = [f"{name} = {toml(value)}" for name, value in zip(names[2:], others, strict=True) if value and name in read]
    return ", ".join([source, *([_public(path)] if "path" in read else []), *said])


def _ids(names: Iterable[str]) -> list[str]:
    """Those on the hub, each once."""
    return list(dict.fromkeys(match[1] for name in names if (match := _ON_THE_HUB.fullmatch(name))))


def _public(path: str) -> str:
    return PurePath(path).name if os.path.isabs(path) else path
