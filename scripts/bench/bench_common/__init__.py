"""What the benchmarks share. Importing it puts the root of this repository first on the path."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
BENCH = ROOT / "scripts" / "bench"
sys.path.insert(0, str(ROOT))
sys.path.append(str(ROOT / "scripts"))  # for what all scripts share
