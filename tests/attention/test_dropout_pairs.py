"""Dropout pair by pair: what is kept is what kvblock/attention.h says, however called.

test_attention_dropout.py has results and gradients of every option.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_model import Call, f64, jit, kept
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

from jax_kvblock import flash_attention

RATE = 0.3
SIDE = 40  # queries, keys and columns of values


def read_pairs(attend: Any, wrap: Any) -> dict[str, np.ndarray]:
    """Which pairs are kept `[B, N, T, S]`, forward, backward and in forward mode.

    Where all scores are 0 and the values are the identity, the output is 1 / S times
    what is kept; so is its slope, and the gradient of the values is its transpose.
    """
    q = jnp.zeros((4, SIDE, 2, 8))
    ones = jnp.broadcast_to(jnp.eye(SIDE)[:, None], (4, SIDE, 2, SIDE))

    def everything(q: Any, ones: Any) -> Any:
        out, pull = jax.vjp(lambda v: attend(q, q, v), ones)
        slope = jax.jvp(lambda v: attend(q, q, v), (0 * ones,), (ones,))[1]
        return out, pull(ones)[0], slope

    out, back, slope = wrap(everything)(q, ones)
    found = {
        "forward": jnp.moveaxis(out, 2, 1),
        "backward": jnp.transpose(back, (0, 2, 3, 1)),
        "forward mode": jnp.moveaxis(slope, 2, 1),
    }
    return {name: f64(x) * SIDE for name, x in found.items()}


SEEDS = np.arange(8, dtype=np.int32).reshape(4, 2)


def attend_with(seeds: Any, **options: Any) -> Any:
    return functools.partial(
        flash_attention, dropout_rate=RATE, dropout_seed=seeds, **options
    )


def over_members(q: Any, k: Any, v: Any) -> jax.Array:
    one = lambda q, k, v, seed: attend_with(seed[None])(  # noqa: E731
        q[None], k[None], v[None]
    )[0]
    return jax.vmap(one)(q, k, v, jnp.asarray(SEEDS))


def over_heads(q: Any, k: Any, v: Any) -> jax.Array:
    one = lambda q, k, v, seed: attend_with(seed[:, None])(  # noqa: E731
        *(x[:, :, None] for x in (q, k, v))
    )[:, :, 0]
    return jax.vmap(one, (2, 2, 2, 1), 2)(q, k, v, jnp.asarray(SEEDS))


def over_devices(q: Any, k: Any, v: Any) -> jax.Array:
    spec = P("b", None, "h")
    f = jax.shard_map(
        lambda q, k, v, seeds: attend_with(seeds)(q, k, v),
        mesh=mesh_of(),
        in_specs=(spec, spec, spec, P("b", "h")),
        out_specs=spec,
    )
    return f(q, k, v, jnp.asarray(SEEDS))


WAYS = {
    "eager": attend_with(SEEDS),
    "jit": attend_with(SEEDS),
    "xla": attend_with(SEEDS, implementation="xla"),
    "causal": attend_with(SEEDS, causal=True),
    "checkpoint": jax.checkpoint(attend_with(SEEDS)),
    "vmap over members": over_members,
    "vmap over heads": over_heads,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_calling_keeps_the_pairs_of_the_header(way):
    """One by one, forward and backward."""
    wrap = (lambda f: f) if way == "eager" else jit
    hold_pairs(read_pairs(WAYS[way], wrap), causal="causal" in way)


@pytest.mark.usefixtures("four_cpus")
def test_shard_map_keeps_the_pairs_of_the_header():
    hold_pairs(read_pairs(over_devices, jit))


def hold_pairs(found: dict[str, np.ndarray], causal: bool = False) -> None:
    call = Call(
        dict.fromkeys("qkv", np.zeros((4, SIDE, 2, 8))),
        {"dropout_seed": SEEDS},
        {"dropout_rate": RATE},
        (),
    )
    want, counts = kept(call), np.full(SIDE, SIDE)
    assert 0.2 < (want == 0).mean() < 0.4
    if causal:
        want, counts = want * np.tri(SIDE), np.arange(1, SIDE + 1)
    for name, x in found.items():
        here = x * counts[:, None] / SIDE
        np.testing.assert_allclose(here, want, atol=1e-4, err_msg=name)
