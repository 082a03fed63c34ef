"""What the library promises, said in NumPy: layouts by transposing, pools by loops.

Blocks are kept in one canonical order, `[..., nl, no, nt, nh, hd]`; nothing here shares
code with the package.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock import BlockSpec, KVPool, Layout

CUSTOM = {
    "page_first": Layout("page_first", "T L O H D"),
    "merged": Layout("merged", "(H L) T (D O)"),
    "layer_first": Layout("layer_first", "L (O H) D T"),
}
NAMED = ("NHD", "HND", "operational", "universal")
LAYOUTS = (*NAMED, *CUSTOM)

DTYPES = (
    "bool",
    "int8",
    "uint8",
    "float8_e4m3fn",
    "float8_e5m2",
    "int16",
    "uint16",
    "float16",
    "bfloat16",
    "int32",
    "uint32",
    "float32",
    "int64",
    "uint64",
    "float64",
    "complex64",
    "complex128",
)


def layout_of(name: str) -> str | Layout:
    """A layout's name as the library takes it: custom ones are objects."""
    return CUSTOM.get(name, name)


def lay(blocks: np.ndarray, name: str, inner: str = "NHD") -> np.ndarray:
    """Canonical blocks in the layout called `name`."""
    *lead, nl, no, nt, nh, hd = blocks.shape
    x = blocks.reshape(math.prod(lead), nl, no, nt, nh, hd)
    match name:
        case "NHD":
            pass
        case "HND":
            x = x.transpose(0, 1, 2, 4, 3, 5)
        case "operational":
            x = lay(x, inner).reshape(len(x), nl, no, nt * nh * hd)
        case "universal":
            x = x.transpose(0, 4, 1, 2, 3, 5)
        case "page_first":
            x = x.transpose(0, 3, 1, 2, 4, 5)
        case "merged":
            x = x.transpose(0, 4, 1, 3, 5, 2).reshape(len(x), nh * nl, nt, hd * no)
        case "layer_first":
            x = x.transpose(0, 1, 2, 4, 5, 3).reshape(len(x), nl, no * nh, hd, nt)
        case _:
            raise AssertionError(name)
    return np.ascontiguousarray(x).reshape(*lead, *x.shape[1:])


def unlay(x: Any, dims: tuple[int, ...], name: str, inner: str = "NHD") -> np.ndarray:
    """The canonical blocks of `x`, an array `[n, *block]` in layout `name`."""
    x = np.asarray(x)
    shape = (x.shape[0], *dims)
    where = lay(np.arange(math.prod(shape)).reshape(shape), name, inner)
    assert x.shape == where.shape, (x.shape, where.shape)
    blocks = np.empty(math.prod(shape), x.dtype)
    blocks[where.reshape(-1)] = x.reshape(-1)
    return blocks.reshape(shape)


def random_bits(rng: np.random.Generator, shape: Any, dtype: Any) -> np.ndarray:
    """Any bit pattern the dtype has, NaNs of every kind among them."""
    dtype = jnp.dtype(dtype)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    raw = rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
    return raw.view(dtype).reshape(shape)


def assert_same_bits(got: Any, want: np.ndarray) -> None:
    got = np.asarray(got)
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(
        np.frombuffer(got.tobytes(), np.uint8), np.frombuffer(want.tobytes(), np.uint8)
    )


class PoolModel:
    """A pool as canonical blocks, updated id by id and token by token."""

    def __init__(self, blocks: np.ndarray) -> None:
        self.blocks = blocks.copy()

    def holds(self, block: int) -> bool:
        return 0 <= block < len(self.blocks)

    def gather(self, ids: Any, heads: tuple[int, int] | None = None) -> np.ndarray:
        start, stop = heads or (0, self.blocks.shape[4])
        part = self.blocks[:, :, :, :, start:stop]
        out = np.zeros((len(ids), *part.shape[1:]), part.dtype)
        for i, block in enumerate(ids):
            if self.holds(block):
                out[i] = part[block]
        return out

    def scatter(
        self, ids: Any, blocks: np.ndarray, heads: tuple[int, int] | None = None
    ) -> None:
        start, stop = heads or (0, self.blocks.shape[4])
        for block, value in zip(ids, blocks, strict=True):
            if self.holds(block):
                self.blocks[block, :, :, :, start:stop] = value

    def append(self, layer: int, pieces: list[np.ndarray], slots: Any) -> None:
        _, nl, _, nt, _, _ = self.blocks.shape
        for token, slot in enumerate(slots):
            block, offset = divmod(int(slot), nt)
            if self.holds(block) and 0 <= layer < nl:
                for outer, piece in enumerate(pieces):
                    self.blocks[block, layer, outer, offset] = piece[token]


def make_pool(
    blocks: np.ndarray,
    layout: str = "NHD",
    contiguous: bool = True,
    memory_kind: str = "device",
) -> KVPool:
    """A `KVPool` that holds these canonical blocks."""
    spec = BlockSpec(*blocks.shape[1:], blocks.dtype, layout_of(layout))
    device = jnp.zeros(()).devices().pop()
    place = jax.sharding.SingleDeviceSharding(device, memory_kind=memory_kind)

    def put(x: np.ndarray) -> jax.Array:
        x = jax.device_put(x, place)
        # jax may have taken NumPy's memory as it is, but a donated pool owns its.
        return jnp.copy(x) if memory_kind == "device" else x

    laid = lay(blocks, layout)
    if contiguous:
        return KVPool.wrap(put(laid), spec)
    layers = [np.ascontiguousarray(laid[:, i]) for i in range(spec.num_layers)]
    return KVPool.wrap([put(x) for x in layers], spec)


def read_pool(pool: KVPool) -> np.ndarray:
    """The canonical blocks of a pool, read through its public `data` and `spec`."""
    spec = pool.spec
    name = spec.layout if isinstance(spec.layout, str) else spec.layout.name
    data = pool.data
    if isinstance(data, tuple):
        data = np.stack([np.asarray(x) for x in data], axis=1)
    dims = (spec.num_layers, spec.num_outer, spec.block_size)
    return unlay(data, (*dims, spec.num_kv_heads, spec.head_dim), name)


# ---- the kinds of pools that tests go through ----------------------------------------

DIMS = (3, 2, 4, 5, 6)  # nl, no, nt, nh, hd
INT32 = np.iinfo(np.int32)


class Kind(NamedTuple):
    """How a pool lies: its layout, one array or one per layer, and its memory."""

    layout: str
    contiguous: bool
    memory_kind: str

    def __str__(self) -> str:
        held = "contiguous" if self.contiguous else "layered"
        return f"{self.layout}-{held}-{self.memory_kind}"


CONTIGUOUS = ("NHD", "HND", "universal", "operational", "merged")
LAYERED = ("NHD", "HND", "operational", "layer_first")
KINDS = [
    Kind(layout, contiguous, memory_kind)
    for memory_kind in ("device", "pinned_host")
    for contiguous, layouts in ((True, CONTIGUOUS), (False, LAYERED))
    for layout in layouts
]
ENGINE_KINDS = [k for k in KINDS if k.layout in ("NHD", "HND", "universal")]


def start(
    rng: np.random.Generator,
    kind: Kind,
    num_blocks: int = 7,
    dims: tuple[int, ...] = DIMS,
    dtype: str = "bfloat16",
) -> tuple[KVPool, PoolModel]:
    """A pool of random bits and its model."""
    blocks = random_bits(rng, (num_blocks, *dims), dtype)
    return make_pool(blocks, *kind), PoolModel(blocks)


def assert_pool(pool: KVPool, model: PoolModel, kind: Kind) -> None:
    """The whole pool's bits, and that it stayed the pool it was."""
    assert pool.contiguous == kind.contiguous
    assert pool.memory_kind == kind.memory_kind
    for x in pool.arrays:
        assert x.sharding.memory_kind == kind.memory_kind
    assert_same_bits(read_pool(pool), model.blocks)
