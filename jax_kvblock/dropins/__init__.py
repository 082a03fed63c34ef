"""Paged attention of other libraries, by their names and arguments.

A module has one owner's function, with its arguments in its order: what imported it
from there imports it from here. `paged_attention` computes; what that cannot serve is
refused by the argument's name. docs/paged_attention.md has what differs.

It imports `paged`, `attention`, `blocks` and `core`.
"""

from jax_kvblock.dropins import (
    ejkernel,
    pallas_gpu,
    rpa_v2,
    rpa_v3,
    rpa_v3_hd64,
    sglang,
    tokamax,
)

__all__ = [
    "ejkernel",
    "pallas_gpu",
    "rpa_v2",
    "rpa_v3",
    "rpa_v3_hd64",
    "sglang",
    "tokamax",
]
