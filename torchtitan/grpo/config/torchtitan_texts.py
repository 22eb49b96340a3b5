"""Texts for torchtitan's keys whose type, range and default this project leaves as they are."""

TORCHTITAN_TEXTS: dict[str, str] = {
    "job.config_file": "The TOML file. Given as a flag only.",
    "job.dump_folder": "Folder for metrics, samples, checkpoints and logs of the run.",
    "job.description": "A name for the run, for people.",
    "metrics.disable_color_printing": "Print to the console without colours.",
    "metrics.save_tb_folder": "Folder of TensorBoard files in `job.dump_folder`.",
    "metrics.enable_wandb": "Log to Weights & Biases too. Needs the package wandb.",
    "optimizer.name": "`AdamW` or `Adam`.",
    "optimizer.implementation": "PyTorch's implementation of the optimizer. `fused` is the fastest.",
    "lr_scheduler.decay_type": "Shape of the decay.",
    "training.dtype": "Type of weights, gradients and optimizer state. float32 keeps the small updates of RL.",
    "training.mixed_precision_param": "Type of weights and activations in the forward and backward passes.",
    "training.mixed_precision_reduce": "Type in which gradients are reduced over ranks.",
    "parallelism.data_parallel_shard_degree": "Ranks that shard weights, gradients and optimizer state (FSDP2): 1 or "
    "more. -1 takes all ranks that the other degrees leave.",
    "parallelism.fsdp_reshard_after_forward": "Free gathered weights after the forward pass of their blocks. `never` "
    "keeps them, which saves traffic and costs memory. `default` equals `always`.",
    "checkpoint.export_dtype": "Type of the weights in the Hugging Face folder.",
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": 'With `selective_ac_option = "op"`, linear '
    "layers by name. Matrix multiplications of their shapes are always recomputed.",
    "activation_checkpoint.early_stop": "Stop recomputing a block once all its activations are there.",
    "activation_checkpoint.visualize_memory_budget_pareto": "Draw time against memory for budgets from 0 to 1, into "
    "`job.dump_folder`.",
    "activation_checkpoint.preserve_rng_state": "Restore random states before recomputing.",
    "activation_checkpoint.determinism_check": "How PyTorch compares recomputed activations with the first ones.",
    "activation_checkpoint.debug": "Record a trace of recomputed operations for error messages. Slower.",
    "compile.enable": "Compile the model's blocks. CUDA only.",
    "compile.backend": "Backend of `torch.compile`.",
    "comm.save_traces_folder": "Folder of flight recorder traces in `job.dump_folder`.",
    "comm.save_traces_file_prefix": "Start of a trace's file name; the rank follows.",
    "validation.enable": "Measure pass rates on held-out prompts during the run.",
    "debug.deterministic": "Use deterministic algorithms, which may be slower.",
    "debug.deterministic_warn_only": "Warn about operations that have no deterministic algorithm, and use them.",
}
