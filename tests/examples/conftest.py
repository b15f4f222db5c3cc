"""The recipe's modules lie beside it, outside the package, as a reader finds them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "sota-implementations" / "grpo"))
