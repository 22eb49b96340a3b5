"""`python -m torchtitan.grpo.commands`: the console script where it is not installed, as in a checkout."""

from torchtitan.grpo.commands.console import main

if __name__ == "__main__":
    main()
