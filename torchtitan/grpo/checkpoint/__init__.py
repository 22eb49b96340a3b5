"""Checkpoints from which a killed run continues exactly.

There is one folder per checkpoint under `[job] dump_folder`/`[checkpoint] folder`:

    step-20/
      dcp/              weights, optimizer and learning-rate schedule, sharded (torch.distributed.checkpoint)
      rng-rank-0.pt     random states of each rank
      trainer.json      the trainer's other state
      rollouts.msgpack  its part that is bytes: data position, counters, complete groups that wait for their step
      run_config.json   every key of the configuration
      validation.json   the metrics of the validation after this step, if there was one
      hf/               Hugging Face folder for inference (`[checkpoint] export_dtype`)
      adapter/          with `[lora]` in its place: a folder for `peft`; hf/ too with `[lora] merge`
      complete.json     the marker: what the checkpoint is, and size and checksum of every file; written last

All files are written into `step-20.tmp`, and one rename makes it `step-20`. A folder with the suffix, or without
`complete.json`, is not a checkpoint.

    checkpointer.py    which steps are saved, in which order, and what follows from a failure
    writing.py         what is saved of one step, and its files: stage by stage, the marker last
    states.py          what DCP writes and reads: weights, optimizer state, learning-rate schedule
    loading.py         which checkpoint a run continues from, and its state
    trainer_state.py   trainer.json and the files beside it
    parallel_writer.py   DCP's files, several at the same time
    export.py          the Hugging Face folder from DCP's files
    model_card.py      its README.md: what trained the model, without what may not be published
    adapters.py        `[lora]`: adapters as they are saved, and which frozen weights they belong to
    marker.py          complete.json: written, read, checked against the files
    together.py        one stage on every rank: all go on or none, and nobody waits for a rank that has failed
    random_states.py   Python's, NumPy's and torch's generators
    hyperparameters.py   the configuration's learning rate, not the checkpoint's
    run_config.py      the configuration in a checkpoint, and which keys have changed since
    best.py            `[checkpoint] keep_best`
    disk.py            what checkpoints take; a run begins only if its disk has room for one
"""
