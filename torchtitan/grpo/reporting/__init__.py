"""What a run reports: where its seconds went, what its samples say, and the files and dashboards that hold it.

    ledger.py          `Ledger`: seconds by stage of one step; `verdict`: what bounds the step
    step_metrics.py    groups, loss sums (over all ranks), servers and pushes -> flat metrics
      estimates.py     held-out answers -> means, pass@k and majority@k with their standard errors
    usage.py           `Usage`: tokens and FLOPs a second, GPU memory, GPU hours
    writers.py         `MetricsLogger`: `metrics.jsonl`, `config.toml`, TensorBoard, and whoever else shows metrics
      wandb_run.py, prometheus.py    Weights & Biases;  an endpoint for Prometheus
      step_lines.py    `StepLines`: a JSONL file that a resumed run continues; reads one
    sample_log.py      `SampleLog`: `samples.jsonl`, `validation_samples.jsonl`
    console.py         `Console`: what a user reads of a step

ledger, step_metrics and usage -> one dictionary of numbers by name -> writers. Rank 0 writes; other ranks do nothing
here. docs/metrics.md explains every name, and a test holds it to that.
"""
