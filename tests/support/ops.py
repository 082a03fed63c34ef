"""Every public op, the same in plain jnp, and arguments for both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from model import CUSTOM

import jax_kvblock as kv

NL, NO, NT, NH, HD = DIMS = (2, 2, 3, 4, 5)
BLOCKS = 6
SPEC = kv.BlockSpec(*DIMS, jnp.float32)
HND = SPEC.replace(layout="HND")
IDS = np.int32([4, -1, 0, 2, 9])
UNIQUE = np.int32([5, -1, 1, 3, 8])
SLOTS = np.int32([17, -1, 3, 40])
POOL = (BLOCKS, *DIMS)


@dataclasses.dataclass(frozen=True)
class Op:
    """An op, the same in plain jnp, and arguments: float32 shapes or int32 values."""

    name: str
    run: Callable[..., Any]
    plain: Callable[..., Any]
    args: Sequence[Any]

    def draw(self, rng: np.random.Generator, lead: Sequence[tuple] = ()) -> list[Any]:
        """Arguments; those of `lead` get leading axes of these extents."""
        lead = lead or [()] * len(self.args)
        return [
            self.draw_one(rng, arg, extents)
            for arg, extents in zip(self.args, lead, strict=True)
        ]

    @staticmethod
    def draw_one(rng: np.random.Generator, arg: Any, extents: tuple) -> jax.Array:
        if isinstance(arg, tuple):
            # Small integers, so that sums are exact in any order.
            shape = (*extents, *arg)
            return jnp.asarray(rng.integers(-8, 9, shape).astype(np.float32))
        rolled = [np.roll(arg, i) for i in range(int(np.prod(extents)))]
        return jnp.asarray(np.reshape(rolled, (*extents, *arg.shape)))

    @property
    def floats(self) -> list[int]:
        return [i for i, arg in enumerate(self.args) if isinstance(arg, tuple)]


def plain_gather(data, ids):
    return data.at[jnp.where(ids < 0, BLOCKS, ids)].get(mode="fill", fill_value=0)


def plain_scatter(data, ids, blocks):
    return data.at[jnp.where(ids < 0, BLOCKS, ids)].set(blocks, mode="drop")


def plain_append(data, layer, k, v, slots):
    """`data` is [blocks, nl, no, nt, nh, hd]."""
    block = jnp.where(slots < 0, BLOCKS, slots // NT)
    layer = jnp.where((layer < 0) | (layer >= NL), NL, layer)
    for outer, x in enumerate((k, v)):
        data = data.at[block, layer, outer, slots % NT].set(x, mode="drop")
    return data


def plain_append_all(data, k, v, slots):
    for layer in range(NL):
        data = plain_append(data, layer, k[layer], v[layer], slots)
    return data


def plain_gather_kv(data, layer, ids):
    layer = jnp.where((layer < 0) | (layer >= NL), NL, layer)
    kv = data.at[:, layer].get(mode="fill", fill_value=0)
    return plain_gather(kv, ids).swapaxes(0, 1).reshape(NO, -1, NH, HD)


def merge(x):
    """NHD blocks as "(H L) T (D O)"."""
    x = x.transpose(*range(x.ndim - 5), *(x.ndim - 5 + i for i in (3, 0, 2, 4, 1)))
    return x.reshape(*x.shape[:-5], NH * NL, NT, HD * NO)


def to_universal(x):
    return jnp.moveaxis(x, -2, -5)


def pool(data, spec=SPEC):
    return kv.KVPool(data, spec)


def layered(data):
    """A layered pool of `[nl, blocks, …]`."""
    return kv.KVPool(tuple(data), SPEC)


TOKENS = (len(SLOTS), NH, HD)
OPS = [
    Op("block_to_universal", kv.block_to_universal, to_universal, [(3, *DIMS)]),
    Op(
        "universal_to_block HND",
        lambda x: kv.universal_to_block(x, "HND"),
        lambda x: jnp.moveaxis(x, -5, -3),
        [(3, NH, NL, NO, NT, HD)],
    ),
    Op(
        "block_to_operational",
        kv.block_to_operational,
        lambda x: x.reshape(*x.shape[:-3], -1),
        [(3, *DIMS)],
    ),
    Op(
        "operational_to_block",
        lambda x: kv.operational_to_block(x, spec=SPEC),
        lambda x: x.reshape(*x.shape[:-1], NT, NH, HD),
        [(3, NL, NO, NT * NH * HD)],
    ),
    Op(
        "convert_blocks",
        lambda x: kv.convert_blocks(x, "NHD", CUSTOM["merged"], SPEC),
        merge,
        [(3, *DIMS)],
    ),
    Op(
        "convert_blocks of a list",
        lambda x: jnp.stack(kv.convert_blocks(list(x), "HND", "universal", HND)),
        lambda x: jnp.moveaxis(x, -3, -5),
        [(3, NL, NO, NH, NT, HD)],
    ),
    Op(
        "gather_blocks",
        lambda data, ids: kv.gather_blocks(pool(data), ids),
        lambda data, ids: to_universal(plain_gather(data, ids)),
        [POOL, IDS],
    ),
    Op(
        "gather_blocks of heads",
        lambda data, ids: kv.gather_blocks(pool(data), ids, "HND", (1, 3)),
        lambda data, ids: plain_gather(data, ids)[..., 1:3, :].swapaxes(-2, -3),
        [POOL, IDS],
    ),
    Op(
        "gather_blocks of layers",
        lambda data, ids: kv.gather_blocks(layered(data), ids, "NHD"),
        lambda data, ids: plain_gather(data.swapaxes(0, 1), ids),
        [(NL, BLOCKS, *DIMS[1:]), IDS],
    ),
    Op(
        "scatter_blocks",
        lambda data, ids, x: kv.scatter_blocks(pool(data), ids, x).data,
        lambda data, ids, x: plain_scatter(data, ids, jnp.moveaxis(x, -5, -2)),
        [POOL, UNIQUE, (len(UNIQUE), NH, NL, NO, NT, HD)],
    ),
    Op(
        "scatter_blocks of heads",
        lambda d, ids, x: kv.scatter_blocks(pool(d), ids, x, "NHD", (1, 3)).data,
        lambda d, ids, x: d.at[..., 1:3, :].set(plain_scatter(d[..., 1:3, :], ids, x)),
        [POOL, UNIQUE, (len(UNIQUE), NL, NO, NT, 2, HD)],
    ),
    Op(
        "copy_blocks",
        lambda data, src, dst: kv.copy_blocks(pool(data), src, dst).data,
        lambda data, src, dst: plain_scatter(data, dst, plain_gather(data, src)),
        [POOL, IDS, UNIQUE],
    ),
    Op(
        "transfer_blocks",
        lambda src, i, dst, j: kv.transfer_blocks(pool(src, HND), i, pool(dst), j).data,
        lambda src, i, dst, j: plain_scatter(
            dst, j, plain_gather(src.swapaxes(-2, -3), i)
        ),
        [(BLOCKS, NL, NO, NH, NT, HD), IDS, POOL, UNIQUE],
    ),
    Op(
        "append_kv",
        lambda data, k, v, slots: kv.append_kv(pool(data), 1, k, v, slots).data,
        lambda data, k, v, slots: plain_append(data, 1, k, v, slots),
        [POOL, TOKENS, TOKENS, SLOTS],
    ),
    Op(
        "append_kv to a traced layer",
        lambda data, n, k, v, s: kv.append_kv(pool(data), n, k, v, s).data,
        plain_append,
        [POOL, np.int32(1), TOKENS, TOKENS, SLOTS],
    ),
    Op(
        "append_kv to layers",
        lambda data, n, k, v, s: jnp.stack(
            kv.append_kv(layered(data), n, k, v, s).data
        ),
        lambda data, n, k, v, s: plain_append(data.swapaxes(0, 1), n, k, v, s).swapaxes(
            0, 1
        ),
        [(NL, BLOCKS, *DIMS[1:]), np.int32(0), TOKENS, TOKENS, SLOTS],
    ),
    Op(
        "append_kv to all layers",
        lambda data, k, v, s: kv.append_kv(pool(data), None, k, v, s).data,
        plain_append_all,
        [POOL, (NL, *TOKENS), (NL, *TOKENS), SLOTS],
    ),
    Op(
        "gather_kv",
        lambda data, n, ids: jnp.stack(kv.gather_kv(pool(data), n, ids)),
        plain_gather_kv,
        [POOL, np.int32(1), IDS],
    ),
]
MAIN_OPS = [
    op
    for op in OPS
    if op.name
    in (
        "block_to_universal",
        "gather_blocks",
        "scatter_blocks of heads",
        "transfer_blocks",
        "append_kv to a traced layer",
    )
]


def assert_same(got: Any, want: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, got, want)
