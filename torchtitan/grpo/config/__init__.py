"""From a TOML file and the command line to one checked JobConfig, or to one error that names every problem.

    job_config.py       the keys of this project: type, range, default, meaning
      keys.py           all keys as a table, torchtitan's too; checks one value: type, range
        torchtitan_keys.py, unsupported.py
                        the keys of torchtitan's sections, and those without effect here
      ranges.py         Range and Needs, which a key's annotation holds
      tables.py         [[data.mixture]] and [[validation.sets]]: what a table inherits
    load.py             reads file and flags, merges, and runs every check
      hints.py          what an unknown key may mean
        earlier.py      keys of earlier versions
        other_trainers.py, other_trainers.toml
                        the names of TRL, verl, prime-rl, NeMo-RL and OpenRLHF
      contradictions.py what keys must satisfy together
        data_contradictions.py, server_contradictions.py, distill_contradictions.py
                        of data and rewards; of servers and weight sync (urls.py: one address); of teachers
      share.py          how rollouts are divided among processes
      machine.py        what they need from this machine: ranks, GPUs, variables, packages
      target.py         the machine that a dry run is about
    jobs.py             GRPO or supervised fine-tuning: which keys each reads
    hub.py              ids of the Hugging Face Hub become local folders
    frozen.py           no key changes once a run has started
    values.py           the same for a process without torch
    resolved.py         the whole configuration as TOML, and as values by key
    batch.py            batch sizes that follow from the keys

A value that passed these checks is not checked again elsewhere.
"""
