"""See `run.py`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    scripts = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(scripts.parent), str(scripts)]
    from faults.run import main

    main()
