"""Attention over several GPUs by cuDNN in JAX: behind an all-gather, and by heads.

cuDNN's causal mask begins at the first query and the first key. So each chunk of a
device's rows in zigzag meets its own keys causally, and those before it without a mask:
which, a `lax.switch` over the device says. What both gave is merged by its logsumexp.
That, and its gradient, take functions that jax keeps private.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_parallel import DIM, Length, drawn, ours_over
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_kvblock.parallel import from_zigzag
from support import common
from support.common import OURS, Results
from support.peer_work import WORKS, judge
from support.rounds import HOT, median_seconds


def case_name(tokens: int | None) -> str:
    return Length(tokens).name if tokens else "all"


def report(
    results: Results, case: str, who: str, seconds: Any, one: Any, n: int
) -> None:
    """Times by work; and efficiency, where there are those of one."""
    for work in WORKS:
        at = f"{case} / {work}"
        results.add(at, who, "time", seconds[work] * 1e3, "ms")
        if one:
            share = one[work] / n / seconds[work]
            results.add(at, who, "efficiency", share, "")


def jax_name() -> str:
    return "peer cudnn in jax" if common.on_gpu() else "peer xla"


def time_in_jax(tokens: int, options: argparse.Namespace, results: Results) -> None:
    n, case = options.devices, case_name(tokens)
    mesh = Mesh(np.array(jax.devices()[:n]), ("context",))
    rows = P(None, "context")
    backend = "cudnn" if common.on_gpu() else "xla"
    whole = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation=backend
    )
    try:
        one = _Compiled(whole, drawn(Length(tokens), 1, None))
    except Exception as error:
        results.fail(case, jax_name(), error)
        return
    running = {jax_name(): one, f"{OURS}, {n}, auto": ours_over(Length(tokens), n)}
    for way in options.ways:
        who = f"{jax_name()}, {n}, {way}"
        local = _gathered(n) if way == "all_gather" else _ulysses(whole)
        # Its own checks of what varies over devices do not know cuDNN's primitives.
        attend = jax.shard_map(
            local, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows, check_vma=False
        )
        try:
            made = _Compiled(
                attend, drawn(Length(tokens), 1, NamedSharding(mesh, rows))
            )
            _compare(made, one, n if way == "all_gather" else None)
            running[who] = made
        except Exception as error:
            results.fail(case, who, error)
    calls = {
        (who, work): functools.partial(made.run, work)
        for who, made in running.items()
        for work in WORKS
    }
    times = median_seconds(calls, options.quick, HOT)
    alone = {work: times[jax_name(), work] for work in WORKS}
    for who, made in running.items():
        seconds = {work: times[who, work] for work in WORKS}
        peer = isinstance(made, _Compiled) and made is not one
        report(results, case, who, seconds, alone if peer else None, n)


class _Compiled:
    """Both works of a function of q, k and v, and what they are called with."""

    def __init__(self, attend: Callable[..., Any], args: Any) -> None:
        def both(q: Any, k: Any, v: Any, d_out: Any) -> Any:
            out, pull = jax.vjp(attend, q, k, v)
            return out, *pull(d_out)

        self.args = args
        self._compiled = {
            "forward": jax.jit(attend).lower(*args[:-1]).compile(),
            "both": jax.jit(both).lower(*args).compile(),
        }

    def run(self, work: str, args: Any = None) -> Any:
        args = self.args if args is None else args
        return self._compiled[work](*(args if work == "both" else args[:-1]))


def _compare(made: _Compiled, one: _Compiled, zigzag: int | None) -> None:
    """Raises where a result is not that of one device."""

    def natural(a: jax.Array) -> jax.Array:
        here = jax.device_put(a, jax.devices()[0])
        return from_zigzag(here, zigzag) if zigzag else here

    want = one.run("both", tuple(map(natural, made.args)))
    got = tuple(map(natural, made.run("both")))
    forward = natural(made.run("forward"))
    for name, a, b in zip(
        ("out", "out", "dq", "dk", "dv"), (forward, *got), (want[0], *want), strict=True
    ):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        judge(name, float(jnp.abs(a - b).max()), float(jnp.abs(b).max()))


def _ulysses(whole: Callable[..., Any]) -> Callable[..., Any]:
    def local(q: Any, k: Any, v: Any) -> Any:
        exchange = functools.partial(
            jax.lax.all_to_all, axis_name="context", tiled=True
        )
        heads = (exchange(a, split_axis=2, concat_axis=1) for a in (q, k, v))
        return exchange(whole(*heads), split_axis=1, concat_axis=2)

    return local


def _gathered(n: int) -> Callable[..., Any]:
    """A device's rows, which are chunks i and 2n - 1 - i of 2n."""
    forward, backward = _cudnn() if common.on_gpu() else _xla()

    def local(q: Any, k: Any, v: Any) -> Any:
        return attend(q, k, v, gather(k), gather(v))

    def gather(a: Any) -> Any:
        """All rows in their order."""
        a = jax.lax.all_gather(a, "context", axis=1, tiled=True)
        pairs = a.reshape(n, 2, -1, *a.shape[2:])
        ordered = jnp.concatenate([pairs[:, 0], pairs[::-1, 1]])
        return ordered.reshape(a.shape)

    def switch(branch: Callable[..., Any], *args: Any) -> Any:
        """`branch` of this device, to which places of chunks are numbers."""
        branches = [functools.partial(branch, (i, 2 * n - 1 - i)) for i in range(n)]
        return jax.lax.switch(jax.lax.axis_index("context"), branches, *args)

    def before(places: Any, q: Any, keys: Any, values: Any) -> Any:
        """Of both chunks, over all keys before each."""
        outs, lses = [], []
        for i, place in enumerate(places):
            if place == 0:
                outs.append(jnp.zeros_like(q[:1]))
                lses.append(jnp.full((1, q.shape[2], q.shape[1]), -jnp.inf))
                continue
            end = place * q.shape[1]
            made = forward(q[i : i + 1], keys[:, :end], values[:, :end], False)
            outs.append(made[0])
            lses.append(made[1])
        return jnp.concatenate(outs), jnp.concatenate(lses)

    def d_before(
        places: Any, q: Any, keys: Any, values: Any, out: Any, lse: Any, d_out: Any
    ) -> Any:
        d_q, sums = [], []
        for i, place in enumerate(places):
            if place == 0:
                d_q.append(jnp.zeros_like(q[:1]))
                continue
            end, at = place * q.shape[1], slice(i, i + 1)
            seen = q[at], keys[:, :end], values[:, :end]
            made = backward(*seen, out[at], lse[at], d_out[at], False)
            d_q.append(made[0])
            rest = [(0, 0), (0, keys.shape[1] - end), (0, 0), (0, 0)]
            sums.append([jnp.pad(d, rest) for d in made[1:]])
        d_keys, d_values = (
            functools.reduce(jnp.add, d) for d in zip(*sums, strict=True)
        )
        return jnp.concatenate(d_q), d_keys, d_values

    def both_parts(q: Any, k: Any, v: Any, keys: Any, values: Any) -> Any:
        own = forward(q, k, v, True)
        return _merged(own, switch(before, q, keys, values))

    def chunks(a: Any) -> Any:
        return a.reshape(2, -1, *a.shape[2:])

    @jax.custom_vjp
    def attend(q: Any, k: Any, v: Any, keys: Any, values: Any) -> Any:
        return run(q, k, v, keys, values)[0]

    def run(q: Any, k: Any, v: Any, keys: Any, values: Any) -> Any:
        out, lse = both_parts(chunks(q), chunks(k), chunks(v), keys, values)
        return out.reshape(q.shape), (q, k, v, keys, values, out, lse)

    def pull(saved: Any, d_out: Any) -> Any:
        q, k, v, keys, values, out, lse = saved
        q2, k2, v2, d_out = map(chunks, (q, k, v, d_out))
        own = backward(q2, k2, v2, out, lse, d_out, True)
        d_q, *d_rest = switch(d_before, q2, keys, values, out, lse, d_out)
        d_q = (own[0] + d_q).reshape(q.shape)
        return d_q, own[1].reshape(k.shape), own[2].reshape(v.shape), *d_rest

    attend.defvjp(run, pull)
    return local


def _merged(one: Any, other: Any) -> Any:
    """(out [B, T, N, D], logsumexp [B, N, T]) over the keys of both."""
    lse = jnp.logaddexp(one[1], other[1])

    def share(out: Any, part: Any) -> Any:
        weight = jnp.exp(part - lse).swapaxes(1, 2)[..., None]
        return weight * out.astype(jnp.float32)

    return (share(*one) + share(*other)).astype(one[0].dtype), lse


def _cudnn() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward, with its logsumexp; and backward, given that and out over all keys."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    masks = {True: cudnn.MaskType.CAUSAL, False: cudnn.MaskType.NO_MASK}
    layout, scale = cudnn.AttentionLayout.BTNH.value, DIM**-0.5

    def forward(q: Any, k: Any, v: Any, causal: bool) -> Any:
        mask = masks[causal]
        return cudnn.dot_product_attention(
            q, k, v, scale=scale, mask_type=mask, return_residual=True
        )

    def backward(
        q: Any, k: Any, v: Any, out: Any, lse: Any, d_out: Any, causal: bool
    ) -> Any:
        none = (jnp.zeros(0, q.dtype),) * 7  # bias, lengths, offsets, pages
        saved = (q, k, v, *none, lse, out)
        # Scale, seed, dropout, bias and its gradient, ..., window.
        options = (scale, 42, 0.0, (False, False), masks[causal], layout, None)
        version = cudnn.check_cudnn_version()
        rule = cudnn._dot_product_attention_bwd_rule
        return rule(*options, version, False, saved, d_out)[:3]

    return forward, backward


def _xla() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The same for CPUs, where it is the script that is tested."""

    def scores(q: Any, k: Any, causal: bool) -> Any:
        q, k = (a.astype(jnp.float32) for a in (q, k))
        q = q.reshape(*q.shape[:2], k.shape[2], -1, DIM)
        s = jnp.einsum("btkgd,bskd->bkgts", q, k) * DIM**-0.5
        seen = jnp.tril(jnp.ones(s.shape[-2:], bool))
        return jnp.where(seen, s, -jnp.inf) if causal else s

    def forward(q: Any, k: Any, v: Any, causal: bool) -> Any:
        s = scores(q, k, causal)
        lse = jax.nn.logsumexp(s, axis=-1)
        p = jnp.exp(s - lse[..., None])
        out = jnp.einsum("bkgts,bskd->btkgd", p, v.astype(jnp.float32))
        return out.reshape(q.shape).astype(q.dtype), lse.reshape(
            q.shape[0], q.shape[2], q.shape[1]
        )

    def backward(
        q: Any, k: Any, v: Any, out: Any, lse: Any, d_out: Any, causal: bool
    ) -> Any:
        s, pull = jax.vjp(lambda q, k: scores(q, k, causal), q, k)
        p = jnp.exp(s - lse.reshape(s.shape[:-1])[..., None])
        v, out, d_out = (a.astype(jnp.float32) for a in (v, out, d_out))
        split = (*q.shape[:2], k.shape[2], -1, DIM)
        delta = (out * d_out).sum(-1).reshape(split[:-1])
        d_out = d_out.reshape(split)
        d_v = jnp.einsum("bkgts,btkgd->bskd", p, d_out)
        d_p = jnp.einsum("btkgd,bskd->bkgts", d_out, v)
        d_s = p * (d_p - delta.transpose(0, 2, 3, 1)[..., None])
        return *pull(d_s), d_v.astype(k.dtype)

    return forward, backward
