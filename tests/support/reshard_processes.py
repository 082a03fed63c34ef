"""Blocks between pools on devices of several processes, and on eight devices of one.

Each process runs this as a script, `RANK COUNT PORT`, makes the same pools, and looks
at what its devices have; at the end it prints how many cases were right. They are eight
CPU devices together; with `gpu` at the end, a GPU for each process.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

if __name__ == "__main__":
    COUNT, ON = int(sys.argv[2]), [*sys.argv, "cpu"][4]
    DEVICES = f"--xla_force_host_platform_device_count={8 // COUNT}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}"

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from model import PoolModel, assert_same_bits, lay, random_bits

import jax_kvblock as kv
from jax_kvblock.parallel import reshard_blocks

DIMS = (2, 2, 3, 8, 5)
SRC_IDS, DST_IDS = np.int32([4, -1, 0, 5, 9, 2, 1]), np.int32([5, 7, 1, 8, 3, -1, 0])
BLOCKS = 6, 8  # of the source and the destination
HEADS = {"NHD": 4, "HND": 3, "universal": 1, "merged": 1}  # dim of a stack of blocks
CUSTOM = {"merged": kv.Layout("merged", "(H L) T (D O)")}


@dataclasses.dataclass(frozen=True)
class Place:
    """Devices by their numbers, as a mesh with axes "a", "b", and heads cut over it."""

    devices: tuple[int, ...]
    mesh: tuple[int, ...] = ()
    cut: Any = "a"
    layout: str = "NHD"
    contiguous: bool = True
    platform: str = "cpu"

    @property
    def sharding(self) -> NamedSharding:
        everywhere = jax.devices(self.platform)
        shape = self.mesh or (len(self.devices),)
        devices = np.array([everywhere[i] for i in self.devices]).reshape(shape)
        mesh = jax.sharding.Mesh(devices, tuple("ab"[: len(shape)]))
        if self.layout not in HEADS:
            return NamedSharding(mesh, P())
        gone = 0 if self.contiguous else 1
        return NamedSharding(mesh, P(*[None] * (HEADS[self.layout] - gone), self.cut))


def on(numbers: Any, layout: str = "NHD", **more: Any) -> Place:
    return Place(tuple(numbers), layout=layout, **more)


def arrays_of(blocks: np.ndarray, place: Place) -> list[np.ndarray]:
    laid = lay(blocks, place.layout)
    return [laid] if place.contiguous else [laid[:, i] for i in range(laid.shape[1])]


def make_pool(blocks: np.ndarray, place: Place) -> kv.KVPool:
    """A pool of these canonical blocks, whose buffers are its own."""
    sharding = place.sharding

    def put(x: np.ndarray) -> jax.Array:
        parts = [
            jax.device_put(x[at], d).copy()
            for d, at in sharding.addressable_devices_indices_map(x.shape).items()
        ]
        return jax.make_array_from_single_device_arrays(
            x.shape, sharding, parts, dtype=x.dtype
        )

    layout = CUSTOM.get(place.layout, place.layout)
    spec = kv.BlockSpec(*blocks.shape[1:], blocks.dtype, layout)
    arrays = [put(x) for x in arrays_of(blocks, place)]
    return kv.KVPool(arrays[0] if place.contiguous else arrays, spec)


def assert_pool(pool: kv.KVPool, blocks: np.ndarray, place: Place) -> None:
    """That each device of this process has its part of these blocks, to the bit."""
    assert pool.contiguous == place.contiguous
    for x, want in zip(pool.arrays, arrays_of(blocks, place), strict=True):
        assert x.sharding == place.sharding
        for shard in x.addressable_shards:
            assert_same_bits(shard.data, want[shard.index])


def hold(
    src_place: Place,
    dst_place: Place,
    rng: np.random.Generator,
    dtype: str = "bfloat16",
    dims: tuple[int, ...] = DIMS,
    run: Any = reshard_blocks,
) -> None:
    """The whole of both pools afterwards, beside NumPy's."""
    before, others = (random_bits(rng, (n, *dims), dtype) for n in BLOCKS)
    truth = PoolModel(others)
    truth.scatter(DST_IDS, PoolModel(before).gather(SRC_IDS))
    src, dst = make_pool(before, src_place), make_pool(others, dst_place)
    old = dst.arrays
    got = run(src, SRC_IDS, dst, DST_IDS)
    assert_pool(got, truth.blocks, dst_place)
    assert_pool(src, before, src_place)
    here = {d.process_index for d in dst_place.sharding.device_set}
    if jax.process_index() in here:
        assert all(x.is_deleted() for x in old)


ALL = range(8)
ONE_PROCESS = [
    (on(range(p)), on(range(8 - d, 8), "HND"))
    for p in (1, 2, 4, 8)
    for d in (1, 2, 4, 8)
    if 8 in (p, d)
] + [
    (on(ALL), on(ALL, mesh=(4, 2), cut="a")),
    (on(ALL, mesh=(4, 2), cut="b"), on(reversed(ALL), "universal")),
]
# Of two processes the first has devices 0 to 3; of four, the second has 2 and 3.
SEVERAL = [
    (on([0, 1]), on([4, 5], "HND")),
    (on([0]), on([4, 5, 6, 7], "universal")),
    (on([4, 5, 6, 7], "HND", contiguous=False), on([2, 3], contiguous=False)),
    (on([3]), on([6])),
    (on([6, 7]), on([7, 0, 3, 5])),  # a part stays on its device
    (on(ALL), on(ALL, mesh=(4, 2), cut="a")),  # one program
    (on(ALL, mesh=(2, 4), cut=None), on(reversed(ALL))),  # nothing travels
    (on([0, 2, 4, 6], mesh=(2, 2), cut="b"), on(ALL, mesh=(2, 4), cut="a")),
    (on([0, 1]), on([1, 0])),  # others have no part
    (on([7], "operational"), on([6], "operational")),
]


MOVES = {  # of so many GPUs
    2: {
        "two to one": (on([0, 1]), on([0], "HND")),
        "two to the other one": (on([0, 1]), on([1], "universal")),
        "one to two": (on([1], "HND"), on([0, 1])),
        "one to another": (on([0]), on([1])),
        "the other way round": (on([0, 1]), on([1, 0], "HND")),
        "layers": (on([0, 1], contiguous=False), on([0], contiguous=False)),
        "operational": (on([0], "operational"), on([1], "operational")),
    },
    4: {
        "four to two": (on(range(4)), on([0, 2], "HND")),
        "two to other two": (on([0, 1]), on([2, 3], "HND")),
        "two to four": (on([0, 1], "HND"), on(range(4), "universal")),
        "a mesh to four": (on(range(4), mesh=(2, 2), cut="b"), on(range(4))),
    },
}


def hold_moves(count: int, rng: np.random.Generator, dtype: str) -> None:
    """All of them on GPUs, with blocks as large as those of models."""
    for places in MOVES[count].values():
        src, dst = (dataclasses.replace(x, platform="gpu") for x in places)
        hold(src, dst, rng, dtype, dims=(2, 2, 16, 8, 128))


def main(rank: int, count: int, port: str, platform: str) -> None:
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"127.0.0.1:{port}", count, rank,
            local_device_ids=[rank] if platform == "gpu" else None,
        )  # fmt: skip
    if platform == "gpu":
        assert len(jax.devices("gpu")) == count
        hold_moves(count, np.random.default_rng(0), "bfloat16")
        print(f"{rank} of {count}: {len(MOVES[count])} are right", flush=True)
        return
    assert len(jax.devices("cpu")) == 8
    cases = ONE_PROCESS if count == 1 else SEVERAL
    for i, case in enumerate(cases):
        hold(*case, np.random.default_rng(i))
    print(f"{rank} of {count}: {len(cases)} are right", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), COUNT, sys.argv[3], ON)
