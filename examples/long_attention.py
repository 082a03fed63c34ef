"""Layers of attention by pattern, for sequences that are cut over devices.

Every pattern of `create_attention` runs, and a line says how far its result is from the
definition in float32. Then the ring's memory: what a device needs is read from compiled
programs, which nobody runs, up to a million tokens.

    python examples/long_attention.py            # on GPUs, or on four CPU devices
    python examples/long_attention.py --quick    # small everywhere
"""

import argparse
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.parallel import (
    Attention,
    AttentionConfig,
    AttentionPatterns,
    create_attention,
    create_context_parallel_attention,
    create_ring_attention,
    from_zigzag,
    to_zigzag,
)

MILLION = 2**20
# Of what is computed in float32 and in bfloat16, relative to the result's size.
BARS = {"float32": 1e-5, "bfloat16": 2e-2}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What every layer is made with."""

    d_model: int
    heads: int
    tokens: int
    window: int
    dtype: Any

    @property
    def bar(self) -> float:
        return BARS[jnp.dtype(self.dtype).name]


SMALL = Sizes(d_model=64, heads=4, tokens=512, window=100, dtype=jnp.float32)
LARGE = Sizes(d_model=1024, heads=8, tokens=8192, window=1000, dtype=jnp.bfloat16)


@functools.partial(jax.jit, static_argnums=0)
def definition(
    config: AttentionConfig, qkv: jax.Array, out: jax.Array, x: jax.Array, mask: Any
) -> jax.Array:
    """A layer on one device, by a softmax over all scores of all positions."""
    length = x.shape[1]
    heads = (x @ qkv).reshape(*x.shape[:2], 3, config.num_heads, -1)
    q, k, v = (heads[:, :, i] for i in range(3))
    scores = jnp.einsum("bqnd,bknd->bnqk", q, k) * q.shape[-1] ** -0.5
    behind = jnp.arange(length)[:, None] - jnp.arange(length)
    seen = jnp.ones_like(behind, bool)
    if config.is_causal:
        seen = behind >= 0
    if config.window is not None:
        seen &= behind <= config.window
    seen = seen & mask[:, None, None, :]
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    o = jnp.einsum("bnqk,bknd->bqnd", weights, v)
    return o.reshape(*x.shape[:2], -1) @ out


def check(
    name: str, got: Any, layer: Attention, x: Any, mask: Any, sizes: Sizes
) -> None:
    """Prints how far a layer's result is from the definition; fails if too far."""
    arrays = (np.asarray(a, np.float32) for a in (layer.qkv, layer.out, x))
    want = np.asarray(definition(layer.config, *arrays, mask), np.float64)
    got = np.asarray(got, np.float64)
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    print(f"  {name:26} error {error:.1e}")
    if not error < sizes.bar:
        raise SystemExit(f"failed: {name} is more than {sizes.bar} off")


def all_patterns(sizes: Sizes, x: jax.Array) -> None:
    """One config, five patterns; sequences that are cut or not, by one call."""
    plain = AttentionConfig(sizes.d_model, sizes.heads, dtype=sizes.dtype)
    for pattern in AttentionPatterns:
        window = sizes.window if pattern is AttentionPatterns.SLIDING_WINDOW else None
        config = dataclasses.replace(plain, pattern=pattern, window=window)
        layer = create_attention(config)  # over all devices, if the pattern has some
        check(pattern.name, layer(x), layer, x, jnp.ones(x.shape[:2], bool), sizes)


def ring_and_parallel(sizes: Sizes, x: jax.Array) -> None:
    """S2's factories: a padding mask, and work that is even under a causal one."""
    count = jax.device_count()
    ring = create_ring_attention(
        d_model=sizes.d_model,
        num_heads=sizes.heads,
        max_sequence_length=sizes.tokens,
        dtype=sizes.dtype,
    )
    real = jnp.arange(sizes.tokens) < 0.8 * sizes.tokens
    mask = jnp.broadcast_to(real, x.shape[:2])
    got = ring(x, attention_mask=mask)
    check("ring, a fifth is padding", got, ring, x, mask, sizes)
    parallel = create_context_parallel_attention(
        *(sizes.d_model, sizes.heads),
        context_parallel_size=count,
        causal=True,
        layout="zigzag",
        dtype=sizes.dtype,
    )
    got = from_zigzag(parallel(to_zigzag(x, count)), count)
    check("causal, in zigzag", got, parallel, x, jnp.ones_like(mask), sizes)
    try:
        ring(jnp.concatenate([x, x], axis=1))
    except ValueError as error:
        print(f"  twice as long: {error}")
    else:
        raise SystemExit("failed: a sequence was longer than max_sequence_length")


def memory(sizes: Sizes) -> None:
    """Bytes that a device needs for a forward pass, by length."""
    ring = create_ring_attention(
        sizes.d_model, sizes.heads, max_sequence_length=MILLION, dtype=sizes.dtype
    )
    attend = jax.jit(lambda layer, x: layer(x))
    needed = []
    for length in (MILLION // 16, MILLION):
        x = jax.ShapeDtypeStruct((1, length, sizes.d_model), sizes.dtype)
        told = attend.lower(ring, x).compile().memory_analysis()
        parts = ("argument", "output", "temp")
        held = sum(getattr(told, f"{part}_size_in_bytes") for part in parts)
        needed.append(held / length)
        scores = sizes.heads * length**2 / jax.device_count() * 4
        print(
            f"  {length:9,} tokens: {held / 2**20:8,.0f} MiB a device, "
            f"{held / length:,.0f} bytes a token; scores alone would be "
            f"{scores / 2**20:,.0f} MiB"
        )
    if needed[-1] > 1.1 * needed[0]:
        raise SystemExit("failed: memory grows faster than the length")
    print("memory grows as the length does")


def main() -> None:
    """All of it; the exit code is 1 if a result is off or memory grows too fast."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small on GPUs, too")
    parser.add_argument("--cpu-devices", type=int, default=4, help="where no GPU is")
    options = parser.parse_args()
    if options.cpu_devices:
        jax.config.update("jax_num_cpu_devices", options.cpu_devices)
    on_gpu = jax.default_backend() == "gpu"
    sizes = LARGE if on_gpu and not options.quick else SMALL
    x = jax.random.normal(
        jax.random.key(1), (1, sizes.tokens, sizes.d_model), sizes.dtype
    )
    kind = jax.devices()[0].device_kind
    print(f"{sizes.tokens:,} tokens over {jax.device_count()} x {kind}")
    with jax.default_matmul_precision("highest"):
        all_patterns(sizes, x)
        ring_and_parallel(sizes, x)
    memory(sizes)


if __name__ == "__main__":
    main()
