"""Servers that are started and kept alive here, by a run (`[rollout] replicas`) or by themselves.

    plan.py            `[rollout]` to one command, GPUs and environment per server; `--dry_run` prints it
    own.py             what a run starts: these servers, or none
    supervisor.py      all servers of one owner: start, wait until they serve, write the list of addresses, close
    kept_server.py     the thread of one of them: start, ask for health, restart with backoff
    ports.py           a server's port, reserved against other supervisors of the machine
    state.py           how a server is, for whoever asks its supervisor
    restarts.py        how often a server is started again, and after which pauses
    launched.py        servers that the run's launcher keeps alive (`[ray]`): what it and rank 0 tell one another
    guard.py           the process between a supervisor and a server, which leaves no process behind
    __main__.py        `python -m torchtitan.grpo.servers`: servers for a trainer elsewhere

The flags of the engines are in process/server_commands. What becomes of a server that is lost and
returns is engines/fleet.py's and weight_sync/'s business: it gets the newest weights first, and then requests.
"""
