"""What a run reports: where its seconds went, what its samples say, and the files and dashboards that hold it.

    ledger.py          `Ledger`: seconds by stage of one step; `verdict`: what bounds the step
    watchdog.py        `Progress`: since when nothing was done; `Watchdog`: what every part waits for then
    step_metrics.py    groups, loss sums (over all ranks), servers and pushes -> flat metrics
    writers.py         `MetricsLogger` (`metrics.jsonl`, console, TensorBoard, Weights & Biases), `SampleLog`
                       (`samples.jsonl`)

ledger and step_metrics -> one dictionary of numbers by name -> writers. Rank 0 writes; other ranks do nothing here.
docs/metrics.md explains every name, and a test holds it to that.
"""
