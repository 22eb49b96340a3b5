"""Environments: rollouts of several turns, named by `[rollout] environment` and by held-out sets.

    load.py          from these names and their arguments to `Environments`
    verifiers_v1.py  `verifiers:NAME`: tasksets, harnesses and rubrics of the package `verifiers`
    verifiers_client.py  its model: a client of its interception server that asks the run's servers
    in_process.py    a harness for it: chat and tools without a process
    openenv.py       `openenv:URL`: reset and step over the WebSocket of an OpenEnv server
    calculator.py    the model may call a calculator, whose results are masked out of the loss

An environment is an `async def rollout(client, prompt)` that returns the samples of one group, or an object with more
to it. What it uses is in `rollouts/environment.py`: `RolloutClient` sends requests to the servers, `Turns` builds a
sample. It may live in any module that Python can import: nothing else in the project knows which environment runs.
docs/environments.md says how to write one.
"""
