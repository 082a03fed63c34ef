"""Calls of attention, and attention in NumPy float64 by its definition.

`truth` knows every option and has gradients written by hand.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_problems import dropout_numbers

from jax_kvblock import AttentionTiles, flash_attention
from jax_kvblock.attention import cuda, dropout
from jax_kvblock.core import ffi

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
HALVES = (BF16, F16)
ON_GPU = jax.default_backend() == "gpu"
# What serves half precision: more kernels are added here.
KERNELS = (*(cuda.best_kernels() if ON_GPU and ffi.BUILD["cuda"] else ()), "xla")
# XLA compiles for the CPU in half the time: what is compiled here runs only once.
FAST_ON_CPU = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
}
jit = functools.partial(jax.jit, compiler_options={} if ON_GPU else FAST_ON_CPU)
# conftest.py leaves XLA's own products out, and cuBLAS takes a workspace of 32 MiB.
# What is about memory compiles with them.
AS_USERS_DO = {"xla_gpu_enable_triton_gemm": True} if ON_GPU else None


def served(*dtypes: Any) -> list[Any]:
    """(implementation, dtype): everyone who serves these dtypes here."""
    return [
        pytest.param(name, dtype, id=f"{name}-{jnp.dtype(dtype).name}")
        for dtype in dtypes
        for name in (KERNELS if dtype in HALVES else ("xla",))
    ]


def by_kernel(*dtypes: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("implementation", "dtype"), served(*(dtypes or (F32, BF16, F16)))
    )


def by_turns(names: str, rows: Iterable[Any], *dtypes: Any) -> pytest.MarkDecorator:
    """Each row in one dtype on the CPU, turn by turn; in all of them on a GPU."""
    rows = [row if isinstance(row, tuple) else (row,) for row in rows]
    return pytest.mark.parametrize(
        f"implementation, dtype, {names}",
        [
            pytest.param(*turn.values, *row, id=f"{turn.id}-{row[0]}")
            for i, row in enumerate(rows)
            for turn in served(*(dtypes if ON_GPU else (dtypes[i % len(dtypes)],)))
        ],
    )


def by_main_kernel() -> pytest.MarkDecorator:
    """For transforms: float32, and on a GPU its kernels too."""
    return by_kernel(F32, BF16) if len(KERNELS) > 1 else by_kernel(F32)


# ---- a call --------------------------------------------------------------------------

DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")
STATIC = ("causal", "window", "softcap", "scale", "deterministic", "dropout_rate")


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of `flash_attention`, and the cotangents of (out, lse)."""

    arrays: dict[str, Any]  # the differentiable ones
    operands: dict[str, Any]  # offsets, lengths, segments, boundaries, tiles, seeds
    static: dict[str, Any]
    cotangents: tuple[Any, Any]

    def replace(self, **changes: Any) -> Call:
        """With these arrays and options instead; None takes one away."""
        groups = {"arrays": dict(self.arrays), "operands": dict(self.operands)}
        groups["static"] = dict(self.static)
        for name, value in changes.items():
            kind = "operands"
            if name in DIFFERENTIABLE:
                kind = "arrays"
            elif name in STATIC:
                kind = "static"
            groups[kind].pop(name, None)
            if value is not None:
                groups[kind][name] = value
        return dataclasses.replace(self, **groups)

    def run(self, implementation: str | None = None, **how: Any) -> Any:
        """As a user would call it."""
        return flash_attention(
            **self.arrays,
            **self.operands,
            **self.static,
            implementation=implementation,
            **how,
        )

    def __str__(self) -> str:
        shown = jax.tree.map(
            lambda x: f"{x.dtype}{list(x.shape)}" if np.ndim(x) else x, self.operands
        )
        arrays = {n: f"{x.dtype}{list(x.shape)}" for n, x in self.arrays.items()}
        return f"{arrays} {shown} {self.static}"


def cast(x: Any, dtype: Any) -> jax.Array:
    return jnp.asarray(np.asarray(x, np.float32), dtype)


def draw(
    rng: np.random.Generator,
    dtype: Any = F32,
    *,
    batch: int = 2,
    q_len: int = 70,
    kv_len: int = 130,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    value_dim: int | None = None,
    size: float = 1.0,
    packed: bool = False,
    **options: Any,
) -> Call:
    """Random q, k, v and cotangents, and these options. `size` scales the logits."""
    value_dim = value_dim or dim
    normal = lambda *shape: cast(rng.standard_normal(shape), dtype)  # noqa: E731
    rows = (q_len,) if packed else (batch, q_len)
    keys = (kv_len,) if packed else (batch, kv_len)
    q = cast(size * rng.standard_normal((*rows, heads, dim)), dtype)
    arrays = {"q": q, "k": normal(*keys, kv_heads, dim)}
    arrays["v"] = normal(*keys, kv_heads, value_dim)
    d_lse = cast(rng.standard_normal((*rows, heads)), F32)
    call = Call(arrays, {}, {}, (normal(*rows, heads, value_dim), d_lse))
    return call.replace(**options)


def draw_bias(
    rng: np.random.Generator, call: Call, shared: tuple[bool, bool], dtype: Any = F32
) -> jax.Array:
    """A bias, `shared` by the batch, by the heads."""
    (b, t, n, _), s = call.arrays["q"].shape, call.arrays["k"].shape[1]
    shape = (1 if shared[0] else b, 1 if shared[1] else n, t, s)
    return cast(rng.standard_normal(shape), dtype)


def draw_tiles(
    rng: np.random.Generator,
    call: Call,
    shared: tuple[bool, bool] = (False, False),
    block_q: int = 128,
    block_kv: int = 128,
    share: float = 0.5,
) -> AttentionTiles:
    """Each tile listed by chance, in any order, with what must not be looked at."""
    (b, t, n, _), s = call.arrays["q"].shape, call.arrays["k"].shape[1]
    rows, columns = -(-t // block_q), -(-s // block_kv)
    shape = (1 if shared[0] else b, 1 if shared[1] else n, rows)
    indices = np.full((*shape, columns + 2), 0, np.int32)
    counts = np.zeros(shape, np.int32)
    for at in np.ndindex(shape):
        listed = rng.permutation(columns)[: rng.binomial(columns, share)]
        row = [*listed, -1] if len(listed) else [columns + 7]  # skipped: not a tile
        indices[at][: len(row)] = rng.permutation(row)
        counts[at] = len(row)
    return AttentionTiles(jnp.asarray(indices), jnp.asarray(counts), block_q, block_kv)


def draw_segments(rng: np.random.Generator, batch: int, length: int) -> np.ndarray:
    """Sorted ids, each a run of rows."""
    return np.sort(rng.integers(0, 3, (batch, length)), axis=-1).astype(np.int32)


# ---- running it ----------------------------------------------------------------------

Results = dict[str, Any]  # out, lse, and d_q, d_k ... for every differentiable array


def attend_with_gradients(
    arrays: Any, operands: Any, cotangents: Any, static: Any, implementation: Any
) -> Results:
    def f(arrays):
        return flash_attention(
            **arrays,
            **operands,
            **dict(static),
            implementation=implementation,
            return_lse=True,
        )

    (out, lse), pull = jax.vjp(f, arrays)
    (grads,) = pull(cotangents)
    return {"out": out, "lse": lse, **{f"d_{n}": g for n, g in grads.items()}}


_jitted = jit(attend_with_gradients, static_argnums=(3, 4))


@functools.partial(jit, static_argnums=(2, 3))
def _jitted_forward(
    arrays: Any, operands: Any, static: Any, implementation: Any
) -> Any:
    out, lse = flash_attention(
        **arrays,
        **operands,
        **dict(static),
        implementation=implementation,
        return_lse=True,
    )
    return {"out": out, "lse": lse}


def compute(call: Call, implementation: str | None, gradients: bool = True) -> Results:
    static = tuple(sorted(call.static.items()))
    inputs = call.arrays, call.operands
    if not gradients:
        return _jitted_forward(*inputs, static, implementation)
    return _jitted(*inputs, call.cotangents, static, implementation)


# ---- who attends to whom -------------------------------------------------------------


def f64(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def tile_mask(tiles: AttentionTiles, t: int, s: int) -> np.ndarray:
    """bool [B|1, N|1, T, S]: the pairs in a listed tile, and those of its bits."""
    indices, counts = np.asarray(tiles.indices), np.asarray(tiles.counts)
    partial = np.full(indices.shape, -1)
    bits = np.zeros((0, tiles.block_q, tiles.block_kv), bool)
    if tiles.masks is not None:
        partial, keys = np.asarray(tiles.partial), np.arange(tiles.block_kv)
        bits = np.asarray(tiles.masks)[:, :, keys // 32] >> (keys % 32) & 1 == 1
    mask = np.zeros((*counts.shape[:2], t, s), bool)
    for b, n, i in np.ndindex(counts.shape):
        used = slice(0, counts[b, n, i])
        for j, p in zip(indices[b, n, i, used], partial[b, n, i, used], strict=True):
            if 0 <= j < -(-s // tiles.block_kv) and p < max(len(bits), 1):
                rows = slice(i * tiles.block_q, (i + 1) * tiles.block_q)
                columns = slice(j * tiles.block_kv, (j + 1) * tiles.block_kv)
                here = mask[b, n, rows, columns]
                here[:] = p < 0 or bits[p, : here.shape[0], : here.shape[1]]
    return mask


def documents(cu: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The sequence of each packed row (-1: none), and its position there."""
    owner, position = np.full(length, -1), np.zeros(length, np.int64)
    for i, (start, end) in enumerate(itertools.pairwise(cu)):
        owner[start:end], position[start:end] = i, np.arange(end - start)
    return owner, position


def who_attends(call: Call) -> tuple[np.ndarray, np.ndarray]:
    """bool [B, N, T, S], and bool [B, T]: the rows that exist."""
    x, static = call.operands, call.static
    q, k = call.arrays["q"], call.arrays["k"]
    if "cu_seqlens" in x:
        q, k = q[None], k[None]
    (b, t, n, _), s = q.shape, k.shape[1]
    rows = np.broadcast_to(np.arange(t), (b, t))
    keys = np.broadcast_to(np.arange(s), (b, s))
    mask = np.ones((b, n, t, s), bool)
    alive = np.ones((b, t), bool)
    shift = np.asarray(x.get("q_offset", 0)) - np.asarray(x.get("kv_offset", 0))
    if "cu_seqlens" in x:
        cu_q, cu_kv = (np.asarray(cu) for cu in x["cu_seqlens"])
        q_owner, rows = documents(cu_q, t)
        kv_owner, keys = documents(cu_kv, s)
        mask &= (q_owner[:, None] == kv_owner) & (q_owner[:, None] >= 0)
        alive = (q_owner >= 0)[None]
        shift = np.broadcast_to(shift, (len(cu_q) - 1,))[q_owner]
        rows, keys = (rows + shift)[None], keys[None]
    else:
        rows = rows + np.broadcast_to(shift, (b,))[:, None]
    ahead = (keys[:, None, :] - rows[:, :, None])[:, None]
    left, right = static.get("window") or (None, None)
    if static.get("causal"):
        mask &= ahead <= 0
    if left is not None:
        mask &= ahead >= -left
    if right is not None:
        mask &= ahead <= right
    if "segment_ids" in x:
        ids = x["segment_ids"]
        q_ids, kv_ids = ids if isinstance(ids, (tuple, list)) else (ids, ids)
        q_ids, kv_ids = np.asarray(q_ids), np.asarray(kv_ids)
        mask &= (q_ids[:, :, None] == kv_ids[:, None, :])[:, None]
    if "q_lens" in x:
        alive = np.arange(t) < np.asarray(x["q_lens"])[:, None]
        mask &= alive[:, None, :, None]
    if "kv_lens" in x:
        exists = np.arange(s) < np.asarray(x["kv_lens"])[:, None]
        mask &= exists[:, None, None, :]
    if "tiles" in x:
        mask &= tile_mask(x["tiles"], t, s)
    return mask, alive


def kept(call: Call) -> np.ndarray:
    """What dropout multiplies probabilities by, `[B, N, T, S]`, or 1.

    Positions are those of the whole sequence here, and of blocks of 16 in offsets.
    """
    parts = round(128 * call.static.get("dropout_rate", 0.0))
    if not parts:
        return np.ones((1, 1, 1, 1))
    x, (q, k) = call.operands, (call.arrays["q"], call.arrays["k"])
    packed = "cu_seqlens" in x
    batch, n = len(x["cu_seqlens"][0]) - 1 if packed else q.shape[0], q.shape[-2]
    words = dropout.check_seed("", x["dropout_seed"], batch, n)
    keys = np.asarray(dropout.keys_of(words, batch, n))
    first = (np.asarray(x.get(f"{side}_offset", 0)) // 16 * 16 for side in ("q", "kv"))
    q_first, kv_first = (np.broadcast_to(a, (batch,)).astype(np.int64) for a in first)
    if packed:
        sides = []
        for i, (rows, begins) in enumerate(((q, q_first), (k, kv_first))):
            owner, position = documents(np.asarray(x["cu_seqlens"][i]), rows.shape[0])
            word = keys[owner, :, i].T[None]
            sides.append(((position + begins[owner])[None], word))
    else:
        sides = [
            (np.arange(rows.shape[1]) + begins[:, None], keys[:, :, i, None])
            for i, (rows, begins) in enumerate(((q, q_first), (k, kv_first)))
        ]
    (rows, of_rows), (columns, of_columns) = sides
    bits = dropout_numbers(rows, columns, of_rows, of_columns)
    return (bits >= parts) * (128 / (128 - parts))


# ---- the truth -----------------------------------------------------------------------


def product(p: np.ndarray, mask: np.ndarray, v: np.ndarray) -> np.ndarray:
    """p [B,N,T,S] times v [B,S,N,E], where only attended values count."""
    finite = np.where(np.isfinite(v), v, 0)
    out = np.einsum("bnts,bsne->btne", p, finite)
    if np.isfinite(v).all():
        return out
    hits = lambda what: np.einsum("bnts,bsne->btne", mask * 1.0, what * 1.0) > 0  # noqa: E731
    up, down, nan = hits(v == np.inf), hits(v == -np.inf), hits(np.isnan(v))
    out = np.where(up, np.inf, np.where(down, -np.inf, out))
    return np.where(nan | (up & down), np.nan, out)


@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def truth(call: Call, cotangents: tuple[Any, Any] | None = None) -> Results:
    """Everything in float64, with gradients by hand.

    Gradients take what is not finite as 0, so they are right where no attended input
    is.
    """
    packed = "cu_seqlens" in call.operands
    arrays = {n: f64(x) for n, x in call.arrays.items()}
    d_out, d_lse = (f64(x) for x in (cotangents or call.cotangents))
    if packed:
        arrays |= {n: arrays[n][None] for n in "qkv"}
        d_out, d_lse = d_out[None], d_lse[None]
    q, k, v = (arrays[n] for n in "qkv")
    d, heads = k.shape[3], k.shape[2]
    group = q.shape[2] // heads
    scale = call.static.get("scale")
    scale = (1 / np.sqrt(d) if d else 1.0) if scale is None else scale
    cap = call.static.get("softcap")
    bias, sinks = arrays.get("bias"), arrays.get("sinks")
    mask, alive = who_attends(call)
    spread_k, spread_v = np.repeat(k, group, 2), np.repeat(v, group, 2)

    score = scale * np.einsum("btnd,bsnd->bnts", q, spread_k)
    bent = np.tanh(score / cap) if cap else None
    if cap:
        score = cap * bent
    if bias is not None:
        score = score + bias
    score = np.where(mask, score, -np.inf)
    top = np.max(score, axis=-1, keepdims=True, initial=-np.inf)
    if sinks is not None:
        top = np.maximum(top, sinks[:, None, None])
    top = np.where(np.isneginf(top), 0, top)
    p = np.exp(score - top)
    total = p.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - top)
    there = alive[:, None, :, None]
    empty = ~there | (total == 0)
    lse = np.where(empty, -np.inf, np.log(total) + top)
    p = np.where(empty, 0, p / total)
    scaled = kept(call)
    out = product(p * scaled, mask, spread_v)

    # d(score) = p (dp - rowsum(d_out out) + d_lse); a sink has no value, so no dp.
    q, k, v, p = (np.where(np.isfinite(x), x, 0) for x in (q, spread_k, spread_v, p))
    dp = scaled * np.einsum("btne,bsne->bnts", d_out, v)
    clean = np.where(np.isfinite(out), out, 0)
    delta = (np.einsum("btne,btne->bnt", d_out, clean) - np.moveaxis(d_lse, 2, 1))[
        ..., None
    ]
    d_score = np.where(mask, p * (dp - delta), 0)
    grads = {"d_v": np.einsum("bnts,btne->bsne", p * scaled, d_out)}
    if bias is not None:
        shared = tuple(i for i in (0, 1) if bias.shape[i] == 1)
        grads["d_bias"] = d_score.sum(shared, keepdims=True).reshape(bias.shape)
    if sinks is not None:
        weight = np.where(empty, 0, np.exp(sinks[:, None, None] - lse))
        weight = np.where(np.isfinite(weight), weight, 0)
        grads["d_sinks"] = -(weight * delta).sum((0, 2, 3))
    if cap:
        d_score = d_score * np.where(mask, 1 - bent**2, 0)
    grads["d_q"] = scale * np.einsum("bnts,bsnd->btnd", d_score, k)
    grads["d_k"] = scale * np.einsum("bnts,btnd->bsnd", d_score, q)
    for name in ("d_k", "d_v"):
        x = grads[name]
        grads[name] = x.reshape(*x.shape[:2], heads, group, x.shape[-1]).sum(3)
    result = {"out": out, "lse": np.moveaxis(lse[..., 0], 1, 2)}
    if packed:
        grads |= {f"d_{n}": grads[f"d_{n}"][0] for n in "qkv"}
        result = {n: x[0] for n, x in result.items()}
    return result | grads
