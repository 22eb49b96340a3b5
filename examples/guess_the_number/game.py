"""Guess a number of three digits from 1 to 4. The model has four guesses, and hears which digits were right."""

import itertools
import random

from torchtitan.grpo.data.samples import Prompt, Sample
from torchtitan.grpo.rollouts.environment import RolloutClient, Turns

DIGITS = "1234"  # at each place
PLACES = 3
GUESSES = 4
RIGHT = "=" * PLACES


class Game:
    """A sample is one game, as `213.=.314==.414===`: the model writes the digits, the environment the signs."""

    per_sample = True  # a game that fails costs no other one

    def __init__(self, held_out: int = 24, games: int = 50) -> None:
        chance = random.Random(0)
        numbers = ["".join(digits) for digits in itertools.product(DIGITS, repeat=PLACES)]
        chance.shuffle(numbers)
        secrets = numbers[held_out:] * games + numbers[:held_out]  # [validation] takes the last rows
        self.rows = [{"question": "guess:", "secret": each, "game": forgetful_game(each, chance)} for each in secrets]

    async def __call__(self, client: RolloutClient, prompt: Prompt) -> list[Sample]:
        turns, secret, signs, guesses = Turns(prompt), prompt.columns["secret"], "", 0
        while guesses < GUESSES and signs != RIGHT:
            [guess] = await client.generate(turns.token_ids, max_tokens=PLACES, session="game")
            turns.sampled(guess)
            signs = compare(client.tokenizer.decode(guess.token_ids, skip_special_tokens=True), secret)
            turns.given(client.tokenizer(signs, add_special_tokens=False)["input_ids"])
            guesses += 1
        sample = turns.sample()
        sample.reward = signs.count("=") / len(signs)  # of the last guess
        sample.rewards = {"found": float(signs == RIGHT), "guesses": guesses}
        return [sample]


def compare(guess: str, secret: str) -> str:
    """For each digit of the secret `=`, if the guess has it at its place, else `.`."""
    return "".join("=" if guess[i : i + 1] == digit else "." for i, digit in enumerate(secret))


def forgetful_game(secret: str, chance: random.Random) -> str:
    """A game for the warm start. Its player keeps right digits, and half the time forgets which ones were wrong."""
    game, signs = "", "." * PLACES
    left = [DIGITS] * PLACES  # what may be right
    for _ in range(GUESSES):
        forgets = [chance.random() < 0.5 and sign == "." for sign in signs]
        guess = "".join(chance.choice(DIGITS if forgot else own) for forgot, own in zip(forgets, left, strict=True))
        signs = compare(guess, secret)
        left = [d if sign == "=" else own.replace(d, "") for d, sign, own in zip(guess, signs, left, strict=True)]
        game += guess + signs
        if signs == RIGHT:
            break
    return game
