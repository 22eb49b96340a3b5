"""The reward: one function of an answer and its row."""


def letters_in_place(answer, prompt):
    """The share of letters that stand where they belong. Letters too many count as wrong ones."""
    right = sum(a == b for a, b in zip(answer, prompt.answer, strict=False))
    return right / max(len(answer), len(prompt.answer))
