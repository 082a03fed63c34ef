"""The one rule of differentiation of attention over a mesh axis."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_kvblock.attention.derivatives import RESIDUAL_NAMES, sink_gradient
from jax_kvblock.attention.ops import LogSumExp
from jax_kvblock.core.spmd import vary_alike
from jax_kvblock.parallel import gathered, ring
from jax_kvblock.parallel.local import Arrays, Here, Mask, Plan
from jax_kvblock.parallel.sums import Gradients, Merged


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(plan: Plan, q: Any, k: Any, v: Any, sinks: Any, mask: Mask) -> Arrays:
    """out `[B, T, N, Dv]` and lse `[B, N, T]` of this device's rows.

    Of packed arrays without B. sinks `[N]` or None.
    """
    here = Here(plan, mask, q, k)
    if _are_empty(q, k):
        merged = Merged(q, v, 0)
    else:
        merged = (gathered if plan.gathered else ring).forward(here, q, k, v)
    return merged.result(sinks, here.q)


def _are_empty(q: jax.Array, k: jax.Array) -> bool:
    """Whether there is nothing to send and nobody who sees: zeros, and lse of −inf."""
    return 0 in (*q.shape, *k.shape)


def _forward(
    plan: Plan, q: Any, k: Any, v: Any, sinks: Any, mask: Mask
) -> tuple[Arrays, Any]:
    out, lse = attend(plan, q, k, v, sinks, mask)
    named = (
        checkpoint_name(a, name)
        for a, name in zip((q, k, v, out, lse), RESIDUAL_NAMES, strict=False)
    )
    return (out, lse), (*named, sinks, mask)


def _backward(plan: Plan, kept: Any, cotangents: Arrays) -> tuple[Any, ...]:
    q, k, v, out, lse, sinks, mask = kept
    d_out, d_lse = cotangents
    # The log-sum-exp's gradient rides along: d(score) = p (dp - rowsum(d_o o) + d_lse).
    rowsum = jnp.sum(d_out.astype(lse.dtype) * out.astype(lse.dtype), axis=-1)
    delta = jnp.swapaxes(rowsum, -1, -2) - d_lse
    if _are_empty(q, k):
        sums = Gradients((q, k, v), 0)
        dq, dk, dv = sums.result(sums.of_keys([], (k, v)))
    else:
        here = Here(plan, mask, q, k)
        way = gathered if plan.gathered else ring
        dq, dk, dv = way.backward(here, (q, k, v), lse, delta, d_out)
    d_sinks = None
    if sinks is not None:
        d_sinks = sink_gradient(plan.config, sinks, LogSumExp(lse), delta)
        d_sinks, _ = vary_alike([d_sinks, sinks])  # a sum of no rows is a constant
    return dq, dk, dv, d_sinks, None


attend.defvjp(_forward, _backward)
