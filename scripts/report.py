"""Write a run as one HTML file: curves, answers, configuration, servers, and what the numbers mean.

    python scripts/report.py outputs/quickstart

The file needs no network and can be mailed. It can be written during the run.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from run_report.page import page
from run_report.run_folder import read_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's folder ([job] dump_folder)")
    parser.add_argument("-o", "--out", type=Path, help="the file to write (default RUN/report.html)")
    arguments = parser.parse_args()
    metrics = arguments.run / "metrics.jsonl"
    if not metrics.exists():
        sys.exit(f"error: {metrics} does not exist: name the folder of a run")
    out = arguments.out or arguments.run / "report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(read_run(arguments.run)), encoding="utf-8", errors="backslashreplace")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
