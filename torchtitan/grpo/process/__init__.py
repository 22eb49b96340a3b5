"""What a process needs around its work, trainer or server: to begin, to speak, to end.

    launch.py            torchrun with clean ends
    joining.py           how ranks find one another, and hear of a rank 0 that has failed
    collectives.py       JSON values and tensors between ranks
    channel.py           messages and large bytes between two processes of a machine
    stopping.py          signals and errors: a process ends in bounded time
    random_numbers.py    Python's and NumPy's own generators
    event_loop.py        an event loop on a thread of its own
    stacks.py            where every thread is
    log_lines.py         how a line of the log looks
    disk_full.py         a full disk in one line
    folder_lock.py       one run at a time in a folder
    import_path.py       functions that the configuration names
    addresses.py         how a server's address is written, who reaches it, whether it is free; keys
    server_commands/     each engine: the command lines of its servers, and what they can do

This room stands on the ground: it imports errors.py alone.
"""
