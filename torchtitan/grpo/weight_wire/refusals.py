"""How servers begin to say why they refuse a trainer, if the user can mend it. The trainer knows refusals by it.

Standard library only, since servers import it too. `version_names.OWNED` is one more.
"""

ADAPTERS = "[lora]"
"""Of a trainer's adapters, such as those of another model; or of whole models, where adapters are expected."""
ELSEWHERE = 'transport "ipc" cannot reach this server'
"""Of a trainer that is not on the server's GPU or machine."""
PROTOCOLS = "weight transfer protocol"
"""Of a trainer with another protocol."""

PROTOCOL = 5


def other_protocol(trainer: object, server: object) -> str:
    """Why they do not fit. Both are numbers, or words for them."""
    return (
        f"{PROTOCOLS} {trainer} from the trainer, {server} on the server: install the same torchtitan-grpo in the "
        "trainer's and the server's environment"
    )
