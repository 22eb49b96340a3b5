"""The trainer's end of weight sync. docs/weight_sync.md has the protocol and the invariants I1 to I7.

A version flows downwards:

    published.py       what is sent: names, shapes, dtype, and which part of a parameter each tensor is
    sync.py            WeightSync: what the training loop calls on every rank
    snapshot.py        this rank's shards at one version, copied after the optimizer step
    sync_thread.py     a thread per rank: decides when a version is sent; ranks.py carries what the ranks agree on
    packer.py          gathers shards on rank 0 and packs them into buckets (weight_wire/buckets.py)
    push.py            one version on its way to several servers
    copies.py          a version kept whole, and the seats of servers that are fed alone from it
    worker.py          a thread per server: common pushes, catching up alone, connecting again
    board.py           what the workers and rank 0's sync thread share
    held.py            which of the published tensors a server holds, by what it says of its memory
    link.py            one server's update from pause to resume; sglang_link.py, disk.py and
                       sglang_adapter_link.py are the other ways
"""
