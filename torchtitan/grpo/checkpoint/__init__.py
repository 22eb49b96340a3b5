"""Checkpoints from which a killed run continues exactly.

There is one folder per checkpoint under `[job] dump_folder`/`[checkpoint] folder`:

    step-20/
      dcp/              weights, optimizer and learning-rate schedule, sharded (torch.distributed.checkpoint)
      rng-rank-0.pt     random states of each rank
      trainer.json      the trainer's other state: data position, weight version, counters
      hf/               Hugging Face folder for inference (`[checkpoint] export_hf`)
      complete.json     the marker: what the checkpoint is, and size and checksum of every file; written last

All files are written into `step-20.tmp`, and one rename makes it `step-20`. A folder with the suffix, or without
`complete.json`, is not a checkpoint.

    checkpointer.py    save and load: which steps, in which order, and what follows from a failure
    marker.py          complete.json: written, read, checked against the files
    together.py        one stage on every rank: all go on or none, and nobody waits for a rank that has failed
    random_states.py   Python's, NumPy's and torch's generators
    folder_lock.py     one run at a time in a dump folder
"""
