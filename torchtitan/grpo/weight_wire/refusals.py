"""How servers begin to say why they refuse a trainer, if the user can mend it. The trainer knows refusals by it.

Standard library only, since servers import it too. `version_names.OWNED` is one more.
"""

ADAPTERS = "[lora]"
"""Of a trainer's adapters, such as those of another model; or of whole models, where adapters are expected."""
ELSEWHERE = 'transport "ipc" cannot reach this server'
"""Of a trainer that is not on the server's GPU or machine."""
