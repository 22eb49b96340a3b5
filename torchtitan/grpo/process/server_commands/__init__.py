"""What is known of each engine without asking a server: its command line, and what its servers can do.

    command.py         what all engines share: the class that an engine's is a subclass of; its Python, devices and key
    embedded.py        the server of this package
    vllm.py            vLLM: flags by version and device
    sglang.py          SGLang
    table.py           `[rollout] engine` to one of these classes

`torchtitan-grpo serve` may run in the engine's environment, which need not have torchtitan: these files import nothing
but the standard library and process/addresses.py, which does the same. `engines/registry.py` has the rest of an
engine's row. What a flag is for is said here and nowhere else.
"""
