"""Peers that are not in this repository, timed in the same run: `--peer file.py`.

The file has one function, which is asked for every piece of work with a source:

    def peers(shape: str, work: str, arrays: dict) -> dict[str, Callable[[], Any]]: ...

It returns implementations of this work, by the name that results shall give them.
`shape` is a name of tests/support/cases.py; `work` is "NHD to universal", "gather, HND
pool" and so on. `arrays` holds

    spec     the BlockSpec: extents, dtype and the pool's layout
    source   what is read, a jax array: blocks, or a contiguous pool
    layers   the pool of a gather as a tuple of per-layer arrays (NHD and HND)
    ids      int32 [n], of a gather or scatter
    target   memory to write, zeros like the result; only this peer uses it

Each callable does the work once and returns the result (any DLPack object), or writes
into `target` (say by `torch.from_dlpack`) and returns None. It may launch on any stream
and need not wait: the clock stops after a device synchronize. Results are compared bit
for bit before anything is timed. Return {} for work that the peer does not do.

A name's part before the first comma is the peer: bars look for the best of "kvbm".
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from types import ModuleType

import jax

from support import common
from support.common import Results
from support.jobs import Group, HostJob, zeros_like


@functools.cache
def _peer_module(path: str) -> ModuleType:
    return common.load_module(f"kvblock_peer_{Path(path).stem}", path)


def add(group: Group, options: argparse.Namespace, results: Results) -> None:
    """Asks each --peer file for its implementations of this work."""
    if not group.arrays or not options.peer:
        return
    shape, work = group.case.split(" / ")
    expected = group.jobs[0].expected
    for path in options.peer:
        try:
            module = _peer_module(path)
            # A peer writes into memory of its own, which starts as zeros, and may work
            # on another stream than jax does: all of it must be there.
            target = jax.tree.map(zeros_like, expected)
            jax.block_until_ready((target, group.arrays))
            found = module.peers(shape, work, {**group.arrays, "target": target})
        except Exception as error:
            results.fail(group.case, f"peer {path}", error)
            continue
        for name, call in found.items():
            group.jobs.append(HostJob(name, call, (), expected, target=target))
