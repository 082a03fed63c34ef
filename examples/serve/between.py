"""Between the attentions of two layers, one kernel on a GPU: `between.cu`.

For up to 64 rows of bfloat16, where all that a layer's products read fits into the
shared memory of a GPU's multiprocessors: SmolLM2-135M's 7 MB do. Else, and on a CPU,
XLA computes it (`llama.finish`, `llama.project`).
"""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_kvblock import kernels
from serve import llama
from serve.config import Config
from serve.weights import Params

SOURCE = Path(__file__).with_suffix(".cu")
# As in the kernel: its thread blocks are clusters of four. They wait for each other, so
# all must run at once: 128 of them do where two fit on each of 64 multiprocessors.
CLUSTERS, CTAS, THREADS, TILE = 32, 4, 256, 8
MOST_ROWS = 64
MOST_SHARED = 113 * 1024  # bytes of a block, of which two are on a multiprocessor


class Sizes(NamedTuple):
    """Of a layer: what its products read and make."""

    width: int
    heads: int
    inner: int
    qkv: int

    @classmethod
    def of(cls, weights: Params) -> "Sizes":
        """Those of a layer's weights."""
        (width, heads), (qkv, _) = weights["out"].shape, weights["qkv"].shape
        return cls(width, heads, weights["down"].shape[1], qkv)

    def shared_bytes(self, rows: int) -> int:
        """What a thread block needs of shared memory, for padded rows."""
        products = self._products(rows)
        weights = sum(each.weight for each in products)
        barriers, squares = 8 * len(products), 4 * rows
        # A product's rows, and what is sent to it; to `down` in the place of `gate_up`.
        used = [p.rows + (0 if i == 2 else p.sums) for i, p in enumerate(products)]
        return weights + barriers + squares + max(used)

    def has_room_for_sums(self, rows: int) -> bool:
        """Whether what is sent to `down` fits into the place of `gate_up`."""
        _, gate_up, down, _ = self._products(rows)
        return down.sums <= gate_up.weight

    def _products(self, rows: int) -> list["_Bytes"]:
        shapes = (  # outputs, inputs, matrices of which a block has the same tiles
            (self.width, self.heads, 1),
            (2 * self.inner, self.width, 2),
            (self.width, self.inner, 1),
            (self.qkv, self.width, 1),
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


def serves(weights: Params, rows: int) -> bool:
    """Whether the kernel does, for so many rows; on a CPU, whether it would."""
    sizes, gpus = Sizes.of(weights), jax.local_devices()
    has_clusters = (float(getattr(g, "compute_capability", 9)) >= 9 for g in gpus)
    return (
        all(has_clusters)
        and 0 < rows <= MOST_ROWS
        and weights["out"].dtype == jnp.bfloat16
        and not any(name.endswith("_bias") for name in weights)
        and all(n % (16 * CTAS) == 0 for n in sizes[:3])  # what products sum over
        and sizes.qkv % TILE == 0
        and sizes.has_room_for_sums(_padded(rows))
        and sizes.shared_bytes(_padded(rows)) <= MOST_SHARED
    )


def choose(params: Params, rows: int) -> llama.Join:
    """What computes between layers, for steps of so many rows."""
    return between if serves(params["layers"][0], rows) else llama.joined


@partial(jax.jit, static_argnums=0)
def between(
    config: Config,
    weights: Params,
    following: Params,
    x: jax.Array,
    attended: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The rest of a layer, and the queries, keys and values of the one that follows.

    Args:
        config: the model's.
        weights, following: the two layers', of one shape, which `serves` takes.
        x: float32[rows, width].
        attended: bfloat16[rows, N, D].

    Returns:
        x behind the layer, float32[rows, width], and bfloat16[rows, N + 2 K, D].
    """
    rows, sizes = len(x), Sizes.of(weights)
    padded = _padded(rows)
    name = f"between<{padded // 16}, {CLUSTERS}, {', '.join(map(str, sizes))}>"

    dtype = attended.dtype
    x, _, qkv = kernels.kernel_call(
        kernels.from_cuda(SOURCE, name),
        attended.reshape(rows, -1),
        x,
        weights["out"],
        weights["mlp_norm"],
        weights["gate_up"],
        weights["down"],
        following["attn_norm"],
        following["qkv"],
        out=(
            x,
            jax.ShapeDtypeStruct((rows, sizes.inner), dtype),
            jax.ShapeDtypeStruct((rows, sizes.qkv), dtype),
        ),
        aliases={1: 0},
        scalars=(rows, config.norm_eps),
        grid=CTAS * CLUSTERS,
        block=THREADS,
        cluster=CTAS,
        cooperative=True,
        shared_memory=sizes.shared_bytes(padded),
        fallback=partial(_by_xla, config),
    )
    return x, qkv.reshape(rows, -1, config.head_dim)


def _by_xla(
    config: Config,
    attended: jax.Array,
    x: jax.Array,
    out: jax.Array,
    mlp_norm: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    attn_norm: jax.Array,
    qkv: jax.Array,
    *_: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What the kernel computes, where there is no GPU."""
    rows = len(x)
    weights = {"out": out, "mlp_norm": mlp_norm, "gate_up": gate_up, "down": down}
    heads = attended.reshape(rows, -1, config.head_dim)
    x = llama.finish(config, weights, x, heads)
    made = llama.project(config, {"attn_norm": attn_norm, "qkv": qkv}, x)
    return x, jnp.zeros((rows, down.shape[1]), qkv.dtype), made.reshape(rows, -1)


def _padded(rows: int) -> int:
    """Rows of the tensor cores' tiles of 16: one, two or four of them."""
    return next(n for n in (16, 32, 64) if n >= rows)
