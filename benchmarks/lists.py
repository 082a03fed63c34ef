"""Operational blocks to and from lists of pieces, by each implementation.

Pieces are separate arrays, as engines hold them. A call with hundreds of arrays costs
the host more than the copy takes: one call makes a loop of round trips on the device.
Two loop lengths are timed; their difference has only the copies in it.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from typing import Any

import ceilings
import jax
import numpy as np
from support import common
from support.blocks import Data
from support.common import MIB, OURS, Results, cases

from jax_kvblock import BlockSpec, block_to_operational, operational_to_block

SHORT, LONG = 4, 36  # round trips


def bench(options: argparse.Namespace, results: Results) -> None:
    quick = options.quick or not common.on_gpu()
    data = Data(cases.LLAMA_8B_64, (1 if quick else 64) * MIB)
    spec = data.spec
    n = 1 if quick else data.n
    pieces = [
        [_piece(data.blocks["NHD"], b, i, o) for i, o in np.ndindex(*_pieces(spec))]
        for b in range(n)
    ]
    moved = 2 * n * spec.block_bytes
    size = len(pieces[0])
    case = f"{data.name} / lists of pieces to operational and back"
    for implementation in (
        ("kernel", "batch", "async") if common.on_gpu() else ("kernel",)
    ):
        name = OURS if implementation == "kernel" else f"{OURS}, {implementation}"
        try:
            seconds = _seconds(pieces, spec, implementation)
        except Exception as error:
            results.fail(case, name, error)
            continue
        unit = ceilings.device_unit()
        rate = ceilings.in_unit(moved / seconds, unit)
        results.add(case, name, "bandwidth", rate, unit)
        results.add(case, name, "time", seconds / (n * size) * 1e6, "us a piece")


def _pieces(spec: BlockSpec) -> tuple[int, int]:
    return spec.num_layers, spec.num_outer


@jax.jit  # with traced indices: one program cuts them all
def _piece(blocks: jax.Array, b: int, i: int, o: int) -> jax.Array:
    return blocks[b, i, o]


def _round_trips(trips: int, spec: BlockSpec, implementation: str, pieces: Any) -> Any:
    def trip(_: Any, pieces: Any) -> Any:
        blocks = block_to_operational(pieces, spec=spec, implementation=implementation)
        return operational_to_block(blocks, spec=spec, implementation=implementation)

    return jax.lax.fori_loop(0, trips, trip, pieces)


def _seconds(pieces: Any, spec: BlockSpec, implementation: str) -> float:
    """Seconds of one conversion, there or back."""
    medians = []
    for trips in (SHORT, LONG):
        loop = jax.jit(functools.partial(_round_trips, trips, spec, implementation))
        call = loop.lower(pieces).compile()
        out = jax.block_until_ready(call(pieces))
        last = np.asarray(out[-1][-1]).tobytes()
        if last != np.asarray(pieces[-1][-1]).tobytes():
            raise AssertionError("the round trip changed a piece")
        times = []
        for _ in range(7):
            start = time.perf_counter()
            jax.block_until_ready(call(pieces))
            times.append(time.perf_counter() - start)
        medians.append(statistics.median(times))
    return (medians[1] - medians[0]) / (2 * (LONG - SHORT))
