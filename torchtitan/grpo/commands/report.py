"""Write a run as one HTML file: curves, answers, configuration, servers, and what the numbers mean."""

from argparse import Namespace

from torchtitan.grpo.commands.run_report.page import page
from torchtitan.grpo.commands.run_report.run_folder import read_run
from torchtitan.grpo.errors import UserError


def main(arguments: Namespace) -> int:
    metrics = arguments.run / "metrics.jsonl"
    if not metrics.exists():
        raise UserError(f"{metrics} does not exist: name the folder of a run")
    out = arguments.out or arguments.run / "report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(read_run(arguments.run)), encoding="utf-8", errors="backslashreplace")
    print(f"wrote {out}")
    return 0
