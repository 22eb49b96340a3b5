"""What a run reads, in a few lines: counts of rows, and the first prompt of each source as the model sees it."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from torchtitan.grpo.data.held_out import HeldOut
from torchtitan.grpo.data.load import Prompts
from torchtitan.grpo.data.samples import Conversation, Prompt
from torchtitan.grpo.errors import written_out

SHOWN_CHARS = 2000
"""Of a prompt. What is between its beginning and its end is left out."""


def overview(prompts: Prompts, held_out: Sequence[HeldOut], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Lines about what is trained on and what is held out."""
    lines = ["rows", *(f"  {line}" for line in prompts.counts())]
    lines += [f"  held-out set {each.name}".rstrip() + f": {len(each.prompts):,} rows" for each in held_out]
    return lines + [line for prompt in prompts.first(1) for line in _rendered(prompt, tokenizer)]


def _rendered(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """A prompt, decoded from its tokens. Of a conversation also what is learned of it."""
    source = prompt.source and f' of "{prompt.source}"'
    if not isinstance(prompt, Conversation):
        return [f"first prompt{source}, {len(prompt.token_ids)} tokens", *visible(tokenizer.decode(prompt.token_ids))]
    ids, trained = prompt.documents[0].token_ids, prompt.documents[0].trained
    return [
        f"first conversation{source}, {len(ids)} tokens",
        *visible(tokenizer.decode(ids)),
        f"of which it learns {trained.sum()} tokens",
        *visible(tokenizer.decode(ids[trained])),
    ]


def visible(text: str) -> list[str]:
    """Indented lines in which line breaks and other characters without a shape are written out."""
    if (left_out := len(text) - SHOWN_CHARS) > 0:
        half = SHOWN_CHARS // 2
        text = f"{text[:half]}[... {left_out:,} characters ...]{text[-half:]}"
    return [f"  {written_out(line)}" for line in text.splitlines(keepends=True)]
