"""Environments: rollouts of several turns, named by `[rollout] environment = "module:function"`.

    calculator.py    the model may call a calculator, whose results are masked out of the loss

An environment is an `async def rollout(client, prompt)` that returns the samples of one group. What it uses is in
`rollouts/environment.py`: `RolloutClient` sends requests to the servers, `Turns` builds a sample from turns. It may
live in any module that Python can import: nothing else in the project knows which environment runs.
docs/environments.md says how to write one.
"""
