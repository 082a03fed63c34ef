"""The bar that a call of attention is held to: plain jnp's error at the same dtype.

`plain` is what a user would write with jnp at the inputs' own dtype. A result may be
1.5 times as far from the truth as plain is, and each row of it three times as far as
plain is there (judge.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import judge
import numpy as np
from attention_model import (
    FAST_ON_CPU,
    Call,
    Results,
    compute,
    f64,
    jit,
    kept,
    truth,
    who_attends,
)

# ---- the bar: plain jnp at the same dtype --------------------------------------------


def plain_attention(
    arrays: Any, mask: Any, alive: Any, scale: Any, cap: Any, kept: Any = 1.0
) -> tuple[jax.Array, jax.Array]:
    """What one would write with jnp, every array in q's dtype; a cap of 0 is none."""
    q, k, v = (arrays[n] for n in "qkv")
    dtype = q.dtype
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    einsum = functools.partial(jnp.einsum, precision="highest")
    score = einsum("btnd,bsnd->bnts", q, k) * jnp.asarray(scale, dtype)
    cap = jnp.asarray(cap, dtype)
    bound = jnp.where(cap > 0, cap, 1)
    score = jnp.where(cap > 0, bound * jnp.tanh(score / bound), score)
    score = score + arrays["bias"].astype(dtype)
    score = jnp.where(mask, score, -jnp.inf)
    sinks = arrays["sinks"].astype(dtype)[:, None, None]
    top = jnp.maximum(jnp.max(score, -1, keepdims=True, initial=-jnp.inf), sinks)
    top = jax.lax.stop_gradient(jnp.where(top == -jnp.inf, 0, top))
    p = jnp.exp(score - top)
    total = p.sum(-1, keepdims=True) + jnp.exp(sinks - top)
    empty = ~alive[:, None, :, None] | (total == 0)
    total = jnp.where(empty, 1, total)
    lse = jnp.where(empty, -jnp.inf, jnp.log(total) + top)[..., 0]
    p = jnp.where(empty, 0, p / total) * jnp.asarray(kept, dtype)
    out = einsum("bnts,bsne->btne", p, v)
    return out, jnp.swapaxes(lse, 1, 2)


def _plain(
    arrays: Any, masks: Any, alive: Any, cotangents: Any, scale: Any, cap: Any
) -> Results:
    mask, kept = masks
    options = {"mask": mask, "alive": alive, "scale": scale, "cap": cap, "kept": kept}
    f = functools.partial(plain_attention, **options)
    (out, lse), pull = jax.vjp(f, arrays)
    d_out, d_lse = cotangents
    (grads,) = pull((d_out.astype(out.dtype), d_lse.astype(lse.dtype)))
    return {"out": out, "lse": lse, **{f"d_{n}": g for n, g in grads.items()}}


_plain_here = jit(_plain)
_plain_on_cpu = jax.jit(_plain, compiler_options=FAST_ON_CPU)

ROOMS = (16, 160, 320)  # few sizes, so that few programs serve all calls


def pad(x: Any, axes: dict[int, int]) -> np.ndarray:
    """Zeros (False) up to these sizes."""
    x = np.asarray(x)
    return np.pad(x, [(0, axes.get(i, n) - n) for i, n in enumerate(x.shape)])


def plain(call: Call) -> Results:
    """Plain jnp's results; what is not finite (so never attended to) is 0 there.

    In rooms that are larger than the call, where nothing attends to the rest.
    """
    packed = "cu_seqlens" in call.operands
    arrays = {n: np.asarray(x) for n, x in call.arrays.items()}
    cotangents = [np.asarray(x) for x in call.cotangents]
    if packed:
        arrays |= {n: arrays[n][None] for n in "qkv"}
        cotangents = [x[None] for x in cotangents]
    mask, alive = who_attends(call)
    (b, t, n, d), (_, s, _, e) = arrays["q"].shape, arrays["v"].shape
    room = lambda size: next((r for r in ROOMS if r >= size), size)  # noqa: E731
    rows, keys, wide = room(t), room(s), 64 * -(-max(d, e) // 64)
    clean = lambda x: np.where(np.isfinite(x), x, 0).astype(x.dtype)  # noqa: E731
    given = {"q": pad(clean(arrays["q"]), {1: rows, 3: wide})}
    for name in "kv":
        given[name] = pad(clean(arrays[name]), {1: keys, 3: wide})
    bias = arrays.get("bias", np.zeros((1, 1, 1, 1), np.float32))
    bias = np.where(np.isnan(bias), 0, bias).astype(bias.dtype)
    given["bias"] = pad(np.broadcast_to(bias, (b, n, t, s)), {2: rows, 3: keys})
    given["sinks"] = arrays.get("sinks", np.full(n, -np.inf, np.float32))
    scale = call.static.get("scale")
    scaled = np.broadcast_to(kept(call), (b, n, t, s)).astype(np.float32)
    inputs = (
        given,
        (pad(mask, {2: rows, 3: keys}), pad(scaled, {2: rows, 3: keys})),
        pad(alive, {1: rows}),
        (pad(cotangents[0], {1: rows, 3: wide}), pad(cotangents[1], {1: rows})),
        d**-0.5 if scale is None else scale,
        call.static.get("softcap") or 0.0,
    )
    if arrays["q"].dtype.itemsize > 2:  # a GPU's float32 has errors of its own
        got = _plain_here(*inputs)
    else:  # a CPU compiles faster
        with jax.default_device(jax.devices("cpu")[0]):
            got = _plain_on_cpu(*inputs)
    got = {name: np.asarray(x) for name, x in got.items()}
    for name, size in (("out", e), ("d_q", d), ("d_k", d), ("d_v", e)):
        got[name] = got[name][:, : t if name in ("out", "d_q") else s, :, :size]
    got["lse"] = got["lse"][:, :t]
    shared = tuple(i for i in (0, 1) if bias.shape[i] == 1)
    got["d_bias"] = f64(got["d_bias"])[:, :, :t, :s].sum(shared, keepdims=True)
    if packed:
        batched = ("out", "lse", "d_q", "d_k", "d_v")
        got |= {name: got[name][0] for name in batched}
    return got


# ---- judging -------------------------------------------------------------------------


def assert_same_places(name: str, got: Any, want: Any) -> None:
    """NaN, inf and -inf at the same places."""
    got, want = f64(got), f64(want)
    assert got.shape == want.shape, f"{name}: {got.shape} for {want.shape}"
    for what, test in (
        ("NaN", np.isnan), ("inf", np.isposinf), ("-inf", np.isneginf)
    ):  # fmt: skip
        wrong = np.argwhere(test(got) != test(want))
        assert not len(wrong), (
            f"{name}: {what} at the wrong {len(wrong)} places of {got.size}, the first "
            f"{wrong[0]}: {got[tuple(wrong[0])]} for {want[tuple(wrong[0])]}"
        )


def error(got: Any, want: Any) -> float:
    got, want = f64(got), f64(want)
    finite = np.isfinite(want) & np.isfinite(got)
    return float(np.max(np.abs(got[finite] - want[finite]), initial=0))


def size(x: Any) -> float:
    x = f64(x)
    return float(np.max(np.abs(x), where=np.isfinite(x), initial=0))


def assert_near(
    call: Call, got: Results, want: Results, names: Iterable[str] | None = None
) -> None:
    """At the worst 1.5 times plain's error, row by row three times plain's there.

    Above what rounding the result costs. lse is float32 in every dtype, and held to
    that. Where scores are large a tie may go either way in float32: as good as plain is
    the truth of inputs that are off by a unit in their last place.
    """
    bar, dtype = plain(call), call.arrays["q"].dtype
    for name in names or got:
        if name == "lse":
            judge.assert_lse_near(got[name], want[name], products(call))
            continue
        judge.assert_rows_near(name, got[name], want[name], bar[name], dtype)
        # Half a unit in the last place of the result, and float32 sums.
        eps = float(jnp.finfo(got[name].dtype).eps)
        floor = 0.5 * eps * size(want[name]) + 2e-6 * max(1.0, size(want[name]))
        found, allowed = error(got[name], want[name]), error(bar[name], want[name])
        if found > 1.5 * allowed + floor:  # plain's error is one draw of several
            allowed = max(allowed, *(error(t[name], want[name]) for t in jogged(call)))
        assert found <= 1.5 * allowed + floor, (
            f"{name}: error {found:.3g}, plain jnp's {allowed:.3g}, floor {floor:.3g}"
        )


def jogged(call: Call, draws: int = 4) -> Iterator[Results]:
    """The truth of calls whose q and k are a unit of float32's last place away."""
    rng = np.random.default_rng(0)
    for _ in range(draws):
        moved = {
            name: f64(x) * (1 + 2.0**-23 * rng.choice([-1, 1], np.shape(x)))
            for name, x in call.arrays.items()
            if name in "qk"
        }
        yield truth(dataclasses.replace(call, arrays=call.arrays | moved))


@np.errstate(invalid="ignore", over="ignore")
def products(call: Call) -> np.ndarray:
    """The size of the products that a row's scores sum up, shaped like lse."""
    q, k = f64(call.arrays["q"]), f64(call.arrays["k"])
    scale = call.static.get("scale")
    scale = q.shape[-1] ** -0.5 if scale is None else abs(scale)
    lengths = [np.sqrt((x * x).sum(-1)) for x in (q, k)]
    q_size, k_size = (np.where(np.isfinite(x), x, 0) for x in lengths)
    return scale * q_size * k_size.max(initial=0)


def assert_exact(
    call: Call, implementation: str | None, gradients: bool = True
) -> Results:
    """(out, lse) and every gradient are as near to the truth as plain jnp's."""
    got = compute(call, implementation, gradients)
    dtype = call.arrays["q"].dtype
    assert got["out"].dtype == dtype
    assert got["lse"].dtype == jnp.float32
    for name in call.arrays:
        if gradients:
            assert got[f"d_{name}"].dtype == call.arrays[name].dtype
    try:
        assert_near(call, got, truth(call))
    except AssertionError as e:
        raise AssertionError(f"{e}\n{call}") from None
    return got


def assert_close(got: Any, want: Any, dtype: Any = None) -> None:
    """For transforms: what comes out is the truth, at the dtype's resolution."""
    dtype = dtype or jnp.asarray(got).dtype
    tolerance = {"float32": 2e-5, "float64": 1e-12, "bfloat16": 3e-2, "float16": 4e-3}
    assert_same_places("result", got, want)
    finite = np.isfinite(f64(want))
    bound = tolerance[jnp.dtype(dtype).name]
    found, scale = error(got, want), max(1.0, size(want))
    assert found <= bound * scale, f"error {found:.3g} at a size of {scale:.3g}"
    assert finite.shape == f64(got).shape
