"""`jax-kvblock`, or `python -m jax_kvblock`: what this install can do here, and why.

With `simulate` and traces of requests: which share of their blocks a cache would find.
"""

from __future__ import annotations

import sys

from jax_kvblock._report import report


def main() -> None:
    """Prints the capability report, or what a command that is named says."""
    if sys.argv[1:2] == ["simulate"]:
        from jax_kvblock.cache.simulate_command import main as simulate

        simulate(sys.argv[2:])
    else:
        print(report())


if __name__ == "__main__":
    main()
