#!/usr/bin/env python3
"""The short call of ``kernelgen bench``, from a checkout without installing it: python tools/bench/run.py gemm --quick."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from kernelgen.cli import main  # noqa: E402  (the checkout has to be found first)

if __name__ == "__main__":
    main(["bench", *sys.argv[1:]])
