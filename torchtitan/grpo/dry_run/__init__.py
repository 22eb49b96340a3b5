"""What a run would take, computed without starting it: `grpo_train.py --dry_run`.

    describe.py   the printed text: a TOML file that makes the same run, with the
                  arithmetic below as comments
      batch       answers, tokens, optimizer steps and packed rows of a step
      memory      the table of memory.py, on the machine of config/target.py
      disk        of the checkpoints: checkpoint/disk.py
    copies.py     copies of the model on several nodes: one for each, if it fits
    memory.py     bytes of one rank at each moment of a step; the peak is the need
    activations.py  what autograd saves for a block, and what checkpointing keeps of it
    measured.py   the same for a model of transformers, by running a block without values
    nodes.py      which GPU each process has, and the host memory of a node
    shared_gpu.py trainer and server on one GPU (`[rollout] colocate`): what each takes, and whether both fit
    under_way.py  groups, answers and requests at once; the answers that the age leaves time for

Nothing here touches a GPU or a server. Of the model folder only config.json is read.
"""
