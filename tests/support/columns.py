"""The columns of the table of transforms × ops: each public op and its truth.

A column is an op: arguments, a call, and the same in plain jnp. A cell that is missing
is an error that says why; it stands in its column.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention_model import ON_GPU
from model import CUSTOM
from ops import (
    BLOCKS,
    DIMS,
    HD,
    IDS,
    NH,
    NL,
    NO,
    NT,
    POOL,
    SLOTS,
    SPEC,
    TOKENS,
    UNIQUE,
    Op,
    merge,
    plain_append,
    plain_gather,
    plain_scatter,
    to_universal,
)

import jax_kvblock as kv
from jax_kvblock.attention import dropout


@dataclasses.dataclass(frozen=True, eq=False)
class Column:
    """An op, the heads' axis of its arguments and results, and the missing cells."""

    name: str
    run: Callable[..., Any]
    plain: Callable[..., Any]
    args: Sequence[Any]  # float32 shapes, or values of integers and bools
    heads: Sequence[int | None]
    out_heads: Any
    exact: bool = True
    missing: Mapping[str, tuple[type[Exception], str]] = dataclasses.field(
        default_factory=dict
    )

    def draw(self, lead: Sequence[tuple[int, ...]] = ()) -> list[Any]:
        """The arguments, with leading axes of these extents; always the same."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        return Op(self.name, self.run, self.plain, self.args).draw(rng, lead)

    @property
    def differentiable(self) -> bool:
        return "grad" not in self.missing


def pool(data: Any, layout: str = "NHD") -> kv.KVPool:
    """A pool of the heads that `data` has, all of them or one device's."""
    heads = data.shape[4 if layout == "NHD" else 3]
    return kv.KVPool(data, SPEC.replace(layout=layout, num_kv_heads=heads))


def spec_like(heads: int) -> kv.BlockSpec:
    return SPEC.replace(num_kv_heads=heads)


def from_operational(x: Any) -> Any:
    spec = spec_like(x.shape[-1] // (NT * HD)).replace(layout="HND")
    return kv.operational_to_block(x, "HND", spec=spec)


def plain_gather_kv(data: Any, layer: Any, ids: Any) -> Any:
    pieces = plain_gather(data, ids)[:, layer]  # [n, 2, nt, nh, hd]
    return tuple(x.reshape(-1, *x.shape[2:]) for x in jnp.moveaxis(pieces, 1, 0))


UNIVERSAL = (NH, NL, NO, NT, HD)
COPIES = [
    Column(
        "block_to_universal",
        kv.block_to_universal,
        to_universal,
        [(3, *DIMS)],
        heads=[4],
        out_heads=1,
    ),
    Column(
        "universal_to_block",
        lambda x: kv.universal_to_block(x, "HND"),
        lambda x: jnp.moveaxis(x, -5, -3),
        [(3, *UNIVERSAL)],
        heads=[1],
        out_heads=3,
    ),
    Column(
        "block_to_operational",
        lambda x: kv.block_to_operational(x, "HND"),
        lambda x: x.reshape(*x.shape[:-3], -1),
        [(3, NL, NO, NH, NT, HD)],
        heads=[3],
        out_heads=3,
    ),
    Column(
        "operational_to_block",
        from_operational,
        lambda x: x.reshape(*x.shape[:-1], -1, NT, HD),
        [(3, NL, NO, NH * NT * HD)],
        heads=[3],
        out_heads=3,
    ),
    Column(
        "convert_blocks",
        lambda x: kv.convert_blocks(x, "NHD", CUSTOM["merged"], spec_like(x.shape[4])),
        merge,
        [(3, *DIMS)],
        heads=[4],
        out_heads=1,
    ),
    Column(
        "gather_blocks",
        lambda data, ids: kv.gather_blocks(pool(data), ids),
        lambda data, ids: to_universal(plain_gather(data, ids)),
        [POOL, IDS],
        heads=[4, None],
        out_heads=1,
    ),
    Column(
        "gather_kv",
        lambda data, n, ids: kv.gather_kv(pool(data), n, ids),
        plain_gather_kv,
        [POOL, np.int32(1), IDS],
        heads=[4, None, None],
        out_heads=(1, 1),
    ),
    Column(
        "scatter_blocks",
        lambda data, ids, x: kv.scatter_blocks(pool(data), ids, x).data,
        lambda data, ids, x: plain_scatter(data, ids, jnp.moveaxis(x, -5, -2)),
        [POOL, UNIQUE, (len(UNIQUE), *UNIVERSAL)],
        heads=[4, None, 1],
        out_heads=4,
    ),
    Column(
        "copy_blocks",
        lambda data, src, dst: kv.copy_blocks(pool(data), src, dst).data,
        lambda data, src, dst: plain_scatter(data, dst, plain_gather(data, src)),
        [POOL, IDS, UNIQUE],
        heads=[4, None, None],
        out_heads=4,
    ),
    Column(
        "transfer_blocks",
        lambda src, i, dst, j: (
            kv.transfer_blocks(pool(src, "HND"), i, pool(dst), j).data
        ),
        lambda src, i, dst, j: plain_scatter(
            dst, j, plain_gather(src.swapaxes(-2, -3), i)
        ),
        [(BLOCKS, NL, NO, NH, NT, HD), IDS, POOL, UNIQUE],
        heads=[3, None, 4, None],
        out_heads=4,
    ),
    Column(
        "append_kv",
        lambda data, n, k, v, slots: kv.append_kv(pool(data), n, k, v, slots).data,
        plain_append,
        [POOL, np.int32(1), TOKENS, TOKENS, SLOTS],
        heads=[4, None, 1, 1, None],
        out_heads=4,
    ),
]

# Attention: on a GPU its kernels are for 16 bits. What is drawn are integers up to 8.
DTYPE = jnp.bfloat16 if ON_GPU else jnp.float32
T, S, N, K, D = 3, 5, 4, 2, 8
QKV = [(1, T, N, D), (1, S, K, D), (1, S, K, D)]
HEADS_FIRST = (1, N, T, D)
ROWS_FIRST = (1, N, T)
exact_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def narrow(*arrays: Any) -> list[Any]:
    return [(x / 8).astype(DTYPE) for x in arrays]


def widen(*arrays: Any) -> list[Any]:
    return [x.astype(jnp.float32) for x in arrays]


def plain_attention(
    q: Any,
    k: Any,
    v: Any,
    mask: Any = True,
    bias: Any = 0.0,
    sinks: Any = None,
    kept: Any = None,
) -> Any:
    """(out, lse) of `[B, T, N, D]`, as a user would write it."""
    q, k, v = widen(q, k, v)
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = exact_einsum("btnd,bsnd->bnts", q, k) * np.float32(D**-0.5) + bias
    scores = jnp.where(mask, scores, -jnp.inf)
    if sinks is not None:  # a key without a value
        sink = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
        v = jnp.pad(v, [(0, 0), (0, 1), (0, 0), (0, 0)])
    lse = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    p = jnp.exp(scores - lse)
    out = exact_einsum("bnts,bsnd->btnd", p if kept is None else p * kept, v)
    return out.astype(DTYPE), lse[..., 0].swapaxes(1, 2)


def causal(t: int, s: int, offset: Any) -> Any:
    return jnp.arange(s) <= jnp.arange(t)[:, None] + offset


def attend(q: Any, k: Any, v: Any, offset: Any, lens: Any) -> Any:
    options = {"causal": True, "q_offset": offset, "kv_lens": lens}
    return kv.flash_attention(*narrow(q, k, v), **options)


def plain_attend(q: Any, k: Any, v: Any, offset: Any, lens: Any) -> Any:
    mask = causal(T, S, offset) & (jnp.arange(S) < lens[:, None, None, None])
    return plain_attention(*narrow(q, k, v), mask)[0]


def attend_with_lse(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Any:
    options = {"bias": bias / 8, "sinks": sinks / 8, "return_lse": True}
    return kv.flash_attention(*narrow(q, k, v), **options)


def plain_attend_with_lse(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Any:
    return plain_attention(*narrow(q, k, v), True, bias / 8, sinks / 8)


def attend_with_dropout(q: Any, k: Any, v: Any, seeds: Any) -> Any:
    options = {"dropout_rate": 0.3, "dropout_seed": seeds, "causal": True}
    return kv.flash_attention(*narrow(q, k, v), **options)


def plain_attend_with_dropout(q: Any, k: Any, v: Any, seeds: Any) -> Any:
    keys = dropout.keys_of(dropout.check_seed("", seeds, 1, N), 1, N)

    def place_and_half(length: int) -> tuple[Any, Any]:
        at = jnp.arange(length)
        place = (at // 16 * 8 + at % 8).astype(jnp.uint32)
        return place, (at // 8 % 2).astype(jnp.uint32)

    (row, row_half), (column, column_half) = map(place_and_half, (T, S))
    rows = keys[..., 0, None] + dropout.QUERY_STEP * row
    columns = keys[..., 1, None] + dropout.KEY_STEP * (column // 2)
    words = (rows[..., None] ^ columns[:, :, None]) * dropout.FACTORS[0]
    factors = jnp.where(column % 2 == 0, *dropout.KEY_FACTORS)
    words = dropout.shifted(dropout.shifted(words, 15) * factors, 16)
    numbers = words >> (16 * row_half[:, None] + 8 * column_half) & 127
    scaled = jnp.where(numbers >= 38, np.float32(128 / (128 - 38)), np.float32(0))
    return plain_attention(*narrow(q, k, v), causal(T, S, 0), kept=scaled)[0]


def attend_packed(q: Any, k: Any, v: Any, lens: Any) -> Any:
    cu = jnp.pad(jnp.cumsum(lens), (1, 0))
    return kv.flash_attention(*narrow(q, k, v), causal=True, cu_seqlens=(cu, cu))


def plain_attend_packed(q: Any, k: Any, v: Any, lens: Any) -> Any:
    owner = jnp.searchsorted(jnp.cumsum(lens), jnp.arange(S), side="right")
    mask = (owner[:, None] == owner) & causal(S, S, 0)
    return plain_attention(*(x[None] for x in narrow(q, k, v)), mask)[0][0]


def attend_as_jax_nn(q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
    return kv.dot_product_attention(*narrow(q, k, v), bias / 8, mask)


def plain_attend_as_jax_nn(q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
    return plain_attention(*narrow(q, k, v), mask, bias / 8)[0]


def tile() -> tuple[int, int]:
    return kv.get_optimal_block_sizes(T, D)


def attend_forward(Q: Any, K: Any, V: Any) -> Any:
    return kv.flash_attention_forward(*narrow(Q, K, V), *tile())


def plain_attend_forward(Q: Any, K: Any, V: Any) -> Any:
    rows = (x.swapaxes(1, 2) for x in narrow(Q, K, V))
    return plain_attention(*rows)[0].swapaxes(1, 2)


def attend_backward(Q: Any, K: Any, V: Any, O: Any, dO: Any, l: Any, m: Any) -> Any:
    l, m = jnp.exp(l / 8), m / 8  # a sum is positive
    return kv.flash_attention_backward(*narrow(Q, K, V, O, dO), l, m, *tile())


def plain_backward(Q: Any, K: Any, V: Any, O: Any, dO: Any, l: Any, m: Any) -> Any:
    Q, K, V, O, dO = widen(*narrow(Q, K, V, O, dO))
    lse, scale = (m + l) / 8, np.float32(D**-0.5)
    p = jnp.exp(exact_einsum("bhtd,bhsd->bhts", Q, K) * scale - lse[..., None])
    dp = exact_einsum("bhtd,bhsd->bhts", dO, V)
    ds = p * (dp - jnp.sum(dO * O, -1, keepdims=True)) * scale
    dQ = exact_einsum("bhts,bhsd->bhtd", ds, K)
    dK = exact_einsum("bhts,bhtd->bhsd", ds, Q)
    dV = exact_einsum("bhts,bhtd->bhsd", p, dO)
    return tuple(x.astype(DTYPE) for x in (dQ, dK, dV))


# Attention has first and second derivatives, and is not linear.
NOT_LINEAR = (NotImplementedError, "flash_attention: it is not linear in its arrays")
THIRD = (NotImplementedError, "first and second derivatives, and this is a third")
LINEAR_NOWHERE = {"linear_transpose": NOT_LINEAR}

ATTENTION = [
    Column(
        "flash_attention",
        attend,
        plain_attend,
        [*QKV, np.int32(1), np.int32([4])],
        heads=[2, 2, 2, None, None],
        out_heads=2,
        exact=False,
        missing=LINEAR_NOWHERE,
    ),
    Column(
        "flash_attention with lse",
        attend_with_lse,
        plain_attend_with_lse,
        [*QKV, (1, N, T, S), (N,)],
        heads=[2, 2, 2, 1, 0],
        out_heads=(2, 2),
        exact=False,
        missing=LINEAR_NOWHERE,
    ),
    Column(  # a seed for each head, which shard_map cuts with the heads
        "flash_attention with dropout",
        attend_with_dropout,
        plain_attend_with_dropout,
        [*QKV, np.arange(N, dtype=np.int32)[None]],
        heads=[2, 2, 2, 1],
        out_heads=2,
        exact=False,
        missing=LINEAR_NOWHERE,
    ),
    Column(
        "flash_attention of packed sequences",
        attend_packed,
        plain_attend_packed,
        [(S, N, D), (S, K, D), (S, K, D), np.int32([2, 3])],
        heads=[1, 1, 1, None],
        out_heads=1,
        exact=False,
        missing=LINEAR_NOWHERE,
    ),
    Column(
        "dot_product_attention",
        attend_as_jax_nn,
        plain_attend_as_jax_nn,
        [*QKV, (N, T, S), np.array([1, 0, 1, 1, 1], bool)],
        heads=[2, 2, 2, 0, None],
        out_heads=2,
        exact=False,
        missing=LINEAR_NOWHERE,
    ),
    Column(
        "flash_attention_forward",
        attend_forward,
        plain_attend_forward,
        [HEADS_FIRST] * 3,
        heads=[1, 1, 1],
        out_heads=1,
        exact=False,
        missing=LINEAR_NOWHERE,
    ),
    Column(
        "flash_attention_backward",
        attend_backward,
        plain_backward,
        [*[HEADS_FIRST] * 5, ROWS_FIRST, ROWS_FIRST],
        heads=[1] * 7,
        out_heads=(1, 1, 1),
        exact=False,
        missing=LINEAR_NOWHERE | {"hvp": THIRD},
    ),
]
COLUMNS = {column.name: column for column in (*COPIES, *ATTENTION)}
NOT_COLUMNS = {
    "attention_fn": "dot_product_attention by the name that flax wants",
    "lm_to_lse": "plain jnp",
    "lse_to_lm": "plain jnp",
    "debug_checks": "no arrays",
    "merge_attention": "plain jnp, of parts",
    "rope_append": "has no derivative; tests/append/ has its transforms",
    "paged_attention": "has no derivative; tests/paged/ has its transforms",
    "available_tiles": "no arrays",
    "estimate_memory_usage": "no arrays",
    "get_optimal_block_sizes": "no arrays",
}
