"""`python -m jax_kvblock`: what this install can do here, and why."""

from jax_kvblock._report import report

print(report())
