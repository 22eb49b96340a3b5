"""`[ray]`: every trainer process is a Ray actor, and `python grpo_train.py` is their driver.

    driver.py      `drive`: what precedes the first import of Ray
    attempts.py    connect, start the ranks, run them, and start them again from the newest checkpoint
    cluster.py     `Cluster`: the connection; `Ranks`: placement group, actors in order of rank, agents
    dispatch.py    how the driver calls a step: plain remote calls or a Compiled Graph; one graph on each node
    servers.py     `Servers`: an actor for each server of `[rollout] replicas`: placed, kept, made anew when it is lost
    supervised.py  inside such an actor, `servers.Supervisor` for one server
    watch.py       `Watch`: a thread of the driver that sees ranks fail, die and hang, and ends the others
    rank.py        `Rank`: inside an actor, the trainer unchanged, in the main thread
    node.py        `NodeAgent`: on each node, knows its ranks' processes: state, stacks, signals; calls its graph
    outcome.py     how a rank ended, as plain values, and the error that the driver makes of it
    actors.py      the classes that Ray gets: they import the rest only inside the actor

Only script.py imports this folder, and only with `[ray] enable`: so nothing else ever imports Ray. No tensor goes
through Ray. Ranks talk over torch.distributed as under torchrun.
"""
