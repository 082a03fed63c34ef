"""Between the attentions of two layers, one kernel on a GPU: `between.cu`.

For up to 64 rows of bfloat16 on a Hopper, where all that a layer's products read fits
into half of its multiprocessors' shared memory: SmolLM2-135M's 7 MB do. Else XLA
computes it (`llama.joined`).
"""

import warnings
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_kvblock import BlockSpec, KVPool, kernels
from serve import llama
from serve.config import Config
from serve.weights import Params

SOURCE = Path(__file__).with_suffix(".cu")
EXAMPLES = SOURCE.parents[1]  # where its instructions are
# As in the kernel: its thread blocks are clusters of four. They wait for each other, so
# all must run at once: 120 of them do where two fit on each of 60 multiprocessors. The
# H200s that were measured had room for 30 clusters whose blocks each have one of 132
# multiprocessors for themselves, and no more.
CLUSTERS, CTAS, THREADS, TILE = 30, 4, 256, 8
MOST_ROWS = 64
DTYPES = {
    **dict.fromkeys(("qkv", "out", "gate_up", "down"), jnp.bfloat16),
    **dict.fromkeys(("attn_norm", "mlp_norm"), jnp.float32),
}
MOST_SHARED = 113 * 1024  # bytes of a block, of which two are on a multiprocessor


class Sizes(NamedTuple):
    """Of a layer: what its products read and make; KV heads times their dim."""

    width: int
    heads: int
    inner: int
    kv: int

    @classmethod
    def of(cls, weights: Params) -> "Sizes":
        """Those of a layer's weights."""
        (width, heads), (qkv, _) = weights["out"].shape, weights["qkv"].shape
        return cls(width, heads, weights["down"].shape[1], (qkv - heads) // 2)

    def shared_bytes(self, rows: int, halves: bool = False) -> int:
        """What a thread block needs of shared memory, for padded rows.

        halves: of heads, which the kernel keeps together: rotations that are not
        interleaved.
        """
        out, gate_up, down, qkv = products = self._products(rows, halves)
        weights = gate_up.weight + down.weight + qkv.weight
        # A product's rows, and what is sent to it; to `down` in the place of `gate_up`.
        # When `out` has been multiplied by, its place is taken, too.
        used = (
            out.weight + out.rows + out.sums,
            gate_up.rows + gate_up.sums,
            down.rows,
            qkv.rows + qkv.sums,
        )
        return weights + 2 * 8 * len(products) + max(used)

    def has_room_for_sums(self, rows: int) -> bool:
        """Whether what is sent to `down` fits into the place of `gate_up`."""
        _, gate_up, down, _ = self._products(rows)
        return down.sums <= gate_up.weight

    def _products(self, rows: int, halves: bool = False) -> list["_Bytes"]:
        shapes = (  # outputs, inputs, matrices of which a block has the same tiles
            (self.width, self.heads, 1),
            (2 * self.inner, self.width, 2),
            (self.width, self.inner, 1),
            (self.heads + 2 * self.kv, self.width, 2 if halves else 1),
        )
        made = []
        for outputs, inputs, parts in shapes:
            tiles = -(-outputs // (parts * TILE) // CLUSTERS) * parts
            pitch = inputs // CTAS + TILE
            sums = 4 * rows * (tiles | 1) * TILE
            made.append(_Bytes(2 * tiles * TILE * pitch, 2 * rows * pitch, sums))
        return made


class _Bytes(NamedTuple):
    """Of a product, in a thread block's shared memory."""

    weight: int
    rows: int
    sums: int


def serves(config: Config, weights: Params, rows: int, pool: KVPool) -> bool:
    """Whether the kernel does, for so many rows.

    weights: of one of the layers, as all are.
    """
    sizes = Sizes.of(weights)
    halves = not config.interleaved
    return (
        all(map(_has_room, jax.local_devices()))
        and 0 < rows <= MOST_ROWS
        # No biases, no norms of heads.
        and {name: x.dtype for name, x in weights.items()} == DTYPES
        and pool.spec.dtype == jnp.bfloat16
        and pool.contiguous
        and pool.spec.block_layout.name == "NHD"
        and all(n % (16 * CTAS) == 0 for n in sizes[:3])  # what products sum over
        and config.head_dim % (2 * TILE) == 0
        and sizes.has_room_for_sums(_padded(rows))
        and sizes.shared_bytes(_padded(rows), halves) <= MOST_SHARED
    )


def _has_room(device: jax.Device) -> bool:
    """Whether it is a Hopper, and has room for all thread blocks at once."""
    return (
        getattr(device, "compute_capability", None) == "9.0"  # a CPU has none
        and 2 * device.core_count >= CTAS * CLUSTERS
    )


def choose(config: Config, params: Params, rows: int, pool: KVPool) -> llama.Join:
    """What computes between layers, for steps of so many rows."""
    layers = params["layers"]
    if not all(serves(config, weights, rows, pool) for weights in layers):
        return llama.joined
    try:
        kernel(config, Sizes.of(layers[0]), _padded(rows))
    except RuntimeError as error:  # no NVRTC is installed
        warnings.warn(f"XLA computes between layers: {error}", stacklevel=2)
        return llama.joined
    return between


@partial(jax.jit, static_argnums=0)
def between(
    config: Config,
    weights: Params,
    following: Params,
    x: jax.Array,
    attended: jax.Array,
    place: llama.Place,
) -> tuple[jax.Array, jax.Array, KVPool]:
    """`llama.joined` in one kernel, for what `serves` takes."""
    pool = place.pool
    count, sizes, spec = len(x), Sizes.of(weights), pool.spec
    padded, halves = _padded(count), not config.interleaved
    x, _, q, _, _, data = kernels.kernel_call(
        kernel(config, sizes, padded),
        attended.reshape(count, -1),
        x,
        weights["out"],
        weights["mlp_norm"],
        weights["gate_up"],
        weights["down"],
        following["attn_norm"],
        following["qkv"],
        place.cos_sin,
        place.rows.slots,
        pool.data,
        out=(
            x,
            jax.ShapeDtypeStruct((count, sizes.inner), attended.dtype),
            jax.ShapeDtypeStruct((count, sizes.heads), attended.dtype),
            jax.ShapeDtypeStruct((count, sizes.width), attended.dtype),
            jax.ShapeDtypeStruct((count, CLUSTERS), x.dtype),
            pool.data,
        ),
        aliases={1: 0, 10: 5},
        scalars=(
            place.index, count, config.norm_eps,
            spec.num_layers, len(pool), spec.block_size,
        ),
        grid=CTAS * CLUSTERS,
        block=THREADS,
        cluster=CTAS,
        cooperative=True,
        shared_memory=sizes.shared_bytes(padded, halves),
        fallback=partial(_by_xla, config, spec),
    )  # fmt: skip
    return x, q.reshape(attended.shape), KVPool(data, spec)


def kernel(config: Config, sizes: Sizes, padded: int) -> kernels.Kernel:
    """The kernel of a model's layers, for padded rows."""
    how = (padded // 16, CLUSTERS, *sizes, config.head_dim, int(config.interleaved))
    name = f"between<{', '.join(map(str, how))}>"
    return kernels.from_cuda(SOURCE, name, arch="90", include_paths=[EXAMPLES])


def _by_xla(
    config: Config,
    spec: BlockSpec,
    attended: jax.Array,
    x: jax.Array,
    out: jax.Array,
    mlp_norm: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    attn_norm: jax.Array,
    qkv: jax.Array,
    cos_sin: jax.Array,
    slots: jax.Array,
    data: jax.Array,
    index: jax.Array,
    *_: jax.Array,
) -> tuple[jax.Array, ...]:
    """What the kernel computes, where there is no GPU."""
    count, pool = len(x), KVPool(data, spec)
    weights = {"out": out, "mlp_norm": mlp_norm, "gate_up": gate_up, "down": down}
    following = {"attn_norm": attn_norm, "qkv": qkv}
    heads = attended.reshape(count, -1, config.head_dim)
    rows = llama.Rows(*[slots] * 6, None)  # of which the slots are asked alone
    place = llama.Place(pool, index, rows, cos_sin)
    x, q, pool = llama.joined(config, weights, following, x, heads, place)
    # What the kernel's thread blocks leave for each other.
    hidden, normed = (
        jnp.zeros((count, n), qkv.dtype) for n in (down.shape[1], x.shape[1])
    )
    squares = jnp.zeros((count, CLUSTERS), x.dtype)
    return x, hidden, q.reshape(count, -1), normed, squares, pool.data


def _padded(rows: int) -> int:
    """Rows of the tensor cores' tiles of 16: one, two or four of them."""
    return next(n for n in (16, 32, 64) if n >= rows)
