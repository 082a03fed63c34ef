"""Layers of attention that visit a tenth of the tiles, by each of S2's patterns.

Every tile of the text is about one of sixteen topics and says something of its own. A
layer collects what all tiles of a row's topic say. A line a pattern tells which share
of the tiles it visits, how much of attention lies in them (recall), and how far the
layer's result is from that of all tiles. Patterns that look at the text find its
topics; the others find what chance gives them. A task that a model has learned is in
sparse_retrieval.py.

    python examples/sparse_attention.py            # sized for what there is to run on
    python examples/sparse_attention.py --quick    # small on a GPU, too

A gate is trained with optax (`pip install optax`).
"""

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.sparse import (
    DynamicSparseAttention,
    Random,
    SparsePattern,
    create_sparse_attention,
    evaluate_selector,
    tile_mass,
    train_gate,
)

RATIO = 0.9  # S2's: the share of the tiles that is left out
TOPICS = 16
SHARP = 16.0  # queries beside keys: so large that other topics hardly count
FIND = (SparsePattern.DYNAMIC_THRESHOLD, SparsePattern.LEARNED)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A layer, its tiles and its text."""

    d_model: int
    heads: int
    block: int
    tokens: int
    steps: int  # that a gate learns for
    dtype: Any


SMALL = Sizes(128, 2, block=32, tokens=2048, steps=20, dtype=jnp.float32)
LARGE = Sizes(1024, 8, block=128, tokens=16384, steps=60, dtype=jnp.bfloat16)


def draw_text(sizes: Sizes, seed: int) -> jax.Array:
    """`[1, S, d_model]`: half of a row is its tile's topic, half what the tile says."""
    rng = np.random.default_rng(seed)
    tiles, half = sizes.tokens // sizes.block, sizes.d_model // 2
    topics = np.linalg.qr(rng.standard_normal((half, TOPICS)))[0].T * half**0.5
    topic = topics[rng.permutation(np.arange(tiles) % TOPICS)]
    tile = np.concatenate([topic, rng.standard_normal((tiles, half))], axis=1)
    rows = np.repeat(tile, sizes.block, axis=0)
    rows += 0.3 * rng.standard_normal(rows.shape)
    return jnp.asarray(rows[None], sizes.dtype)


def finds_topics(layer: DynamicSparseAttention) -> DynamicSparseAttention:
    """Queries and keys read the topic, by the same weights; values read the rest."""
    q, _, v = jnp.split(layer.qkv, 3, axis=1)
    topic = (jnp.arange(len(q)) < len(q) // 2)[:, None]
    q, v = jnp.where(topic, q, 0), jnp.where(topic, 0, v)
    return dataclasses.replace(layer, qkv=jnp.concatenate([SHARP * q, q, v], axis=1))


def make_layer(sizes: Sizes, pattern: SparsePattern) -> DynamicSparseAttention:
    """S2's factory, and tiles for the size of the text."""
    layer = create_sparse_attention(
        d_model=sizes.d_model,
        num_heads=sizes.heads,
        sparsity_ratio=RATIO,
        pattern=pattern,
        block_q=sizes.block,
        block_kv=sizes.block,
        dtype=sizes.dtype,
    )
    layer = finds_topics(layer)
    return train(layer, sizes) if pattern is SparsePattern.LEARNED else layer


def train(layer: DynamicSparseAttention, sizes: Sizes) -> DynamicSparseAttention:
    """The layer with a gate that knows where its attention lies; prints the loss."""
    import optax

    tiles = {"block_q": sizes.block, "block_kv": sizes.block}
    batches = []
    for seed in range(1, 5):
        q, k = layer.queries_and_keys(draw_text(sizes, seed))
        batches.append((q, k, tile_mass(q, k, **tiles)))
    gate, losses = train_gate(
        layer.selector.gate,
        (batches[step % len(batches)] for step in range(sizes.steps)),
        optax.adam(2e-3),
        **tiles,
    )
    print(f"a gate learns: loss {losses[0]:.3f}, {losses[-1]:.3f} after {sizes.steps}")
    return layer.with_gate(gate)


def main() -> None:
    """Every pattern; the exit code is 1 if one does not do what it is for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small on GPUs, too")
    options = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    sizes = LARGE if on_gpu and not options.quick else SMALL
    x = draw_text(sizes, seed=0)
    layers = {pattern: make_layer(sizes, pattern) for pattern in SparsePattern}
    all_tiles = dataclasses.replace(
        layers[SparsePattern.RANDOM], selector=Random(sparsity_ratio=0.0)
    )
    run = jax.jit(lambda layer, x: layer(x))
    dense = run(all_tiles, x).astype(jnp.float32)
    print(f"{sizes.tokens:,} tokens in tiles of {sizes.block}, {sizes.heads} heads")
    print("pattern              tiles   recall    error")
    for pattern, layer in layers.items():
        q, k = layer.queries_and_keys(x)
        found = evaluate_selector(q, k, k, layer.selector)  # recall needs no values
        out = run(layer, x).astype(jnp.float32)
        error = float(jnp.linalg.norm(out - dense) / jnp.linalg.norm(dense))
        print(f"{pattern.value:17} {found.share:8.3f} {found.recall:8.3f} {error:8.4f}")
        if found.share > 1 - RATIO + 0.01:
            raise SystemExit(f"failed: {pattern.value} visits {found.share:.3f}")
        if pattern in FIND and not (found.recall > 0.99 and error < 0.01):
            raise SystemExit(f"failed: {pattern.value} does not find the topics")
    print("who looks at the text is within 1 % of all tiles with a tenth of them")


if __name__ == "__main__":
    main()
