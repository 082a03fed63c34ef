"""`python examples/serve`: see `terminal`."""

import sys
from pathlib import Path

EXAMPLES = str(Path(__file__).resolve().parents[1])
# Python has put this folder first; its files are modules of the package `serve`.
sys.path[0] = EXAMPLES

from serve.terminal import main

if __name__ == "__main__":
    main()
