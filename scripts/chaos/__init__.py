"""The parts of the fault campaign, scripts/chaos.py. Importing this puts the repository's root on the path."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The repository."""
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
