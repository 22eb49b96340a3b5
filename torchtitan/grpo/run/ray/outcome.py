"""How a rank ended, as plain values that any process can read, and the error that the driver makes of it."""

import time
import traceback
from collections.abc import Mapping
from typing import Any

from torchtitan.grpo.errors import REFUSED, PlainError, UserError
from torchtitan.grpo.process.stopping import Stopped

FAILED = 1


class RanksFailed(RuntimeError):
    """Ranks failed, died or hung. Those that were left have been ended. Another attempt may go better."""


def outcome_of(error: BaseException | None) -> dict[str, Any]:
    """What a rank says at its end.

    Returns:
        status: As torchrun's worker would exit.
        words: The last line of a stopped run, from rank 0.
        error: A traceback, or the message of a PlainError.
        at: Time of day in seconds: the first failure is the cause of the others.
    """
    outcome: dict[str, Any] = {"status": 0, "words": "", "error": "", "at": time.time()}
    if isinstance(error, SystemExit):
        outcome["status"] = error.code if isinstance(error.code, int) else FAILED
        outcome["words"] = error.words if isinstance(error, Stopped) else ""
    elif isinstance(error, PlainError):
        outcome |= {"status": error.status, "error": str(error), "at": error.raised_at}
    elif error is not None:
        outcome |= {"status": FAILED, "error": "".join(traceback.format_exception(error)).rstrip()}
    return outcome


def error_of(outcomes: Mapping[int, dict[str, Any]]) -> UserError | RanksFailed | Stopped | None:
    """What the driver raises for the outcomes of some ranks; None if all ended well.

    A failure counts more than a stop, which the other ranks may have made of it. Of several failures the first counts.
    """
    ended = sorted((outcome["at"], rank, outcome) for rank, outcome in outcomes.items() if outcome["status"])
    for _, rank, outcome in ended:
        if outcome["status"] == REFUSED:
            return UserError(outcome["error"])
        if outcome["error"]:
            return RanksFailed(f"rank {rank} failed:\n{outcome['error']}")
    if not ended:
        return None
    words = next((outcome["words"] for _, _, outcome in ended if outcome["words"]), "")
    return Stopped(ended[0][2]["status"], words)
