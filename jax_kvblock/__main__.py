"""`jax-kvblock`, or `python -m jax_kvblock`: what this install can do here, and why."""

from __future__ import annotations

from jax_kvblock._report import report


def main() -> None:
    """Prints the capability report."""
    print(report())


if __name__ == "__main__":
    main()
