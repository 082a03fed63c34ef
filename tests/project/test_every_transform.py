"""The table of transforms × ops: every transform of JAX on every public op.

A column is an op: arguments, a call, and the same in plain jnp. A row is a transform: a
way to run a call, and what has to come out of it by plain jnp. A cell that is missing
is an error that says why; it stands in its column and is tested as the others are.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from attention_model import ON_GPU
from attention_model import jit as fast  # it runs once
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of
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
from jax_kvblock.attention import RESIDUAL_NAMES

MEMBERS = 4  # of a batch; two to a device
OUTER, INNER = 2, 3


# ---- columns: the ops ----------------------------------------------------------------


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
    q: Any, k: Any, v: Any, mask: Any = True, bias: Any = 0.0, sinks: Any = None
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
    out = exact_einsum("bnts,bsnd->btnd", jnp.exp(scores - lse), v)
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


# Attention has a reverse mode, once.
FORWARD_MODE = (TypeError, "can't apply forward-mode")
REVERSE_ALONE = {
    "jvp": FORWARD_MODE,
    "linearize": FORWARD_MODE,
    "linear_transpose": (NotImplementedError, "custom_vjp_call"),
}
TWICE = (NotImplementedError, "flash_attention: its gradients have no gradients")
DERIVATIVES = (
    "grad", "value_and_grad", "jacrev", "jvp", "linearize", "linear_transpose", "remat",
)  # fmt: skip

ATTENTION = [
    Column(
        "flash_attention",
        attend,
        plain_attend,
        [*QKV, np.int32(1), np.int32([4])],
        heads=[2, 2, 2, None, None],
        out_heads=2,
        exact=False,
        missing=REVERSE_ALONE,
    ),
    Column(
        "flash_attention with lse",
        attend_with_lse,
        plain_attend_with_lse,
        [*QKV, (1, N, T, S), (N,)],
        heads=[2, 2, 2, 1, 0],
        out_heads=(2, 2),
        exact=False,
        missing=REVERSE_ALONE,
    ),
    Column(
        "flash_attention of packed sequences",
        attend_packed,
        plain_attend_packed,
        [(S, N, D), (S, K, D), (S, K, D), np.int32([2, 3])],
        heads=[1, 1, 1, None],
        out_heads=1,
        exact=False,
        missing=REVERSE_ALONE,
    ),
    Column(
        "dot_product_attention",
        attend_as_jax_nn,
        plain_attend_as_jax_nn,
        [*QKV, (N, T, S), np.array([1, 0, 1, 1, 1], bool)],
        heads=[2, 2, 2, 0, None],
        out_heads=2,
        exact=False,
        missing=REVERSE_ALONE,
    ),
    Column(
        "flash_attention_forward",
        attend_forward,
        plain_attend_forward,
        [HEADS_FIRST] * 3,
        heads=[1, 1, 1],
        out_heads=1,
        exact=False,
        missing=REVERSE_ALONE,
    ),
    Column(
        "flash_attention_backward",
        attend_backward,
        plain_backward,
        [*[HEADS_FIRST] * 5, ROWS_FIRST, ROWS_FIRST],
        heads=[1] * 7,
        out_heads=(1, 1, 1),
        exact=False,
        missing=dict.fromkeys(DERIVATIVES, TWICE),
    ),
]
COLUMNS = {column.name: column for column in (*COPIES, *ATTENTION)}
NOT_COLUMNS = {
    "attention_fn": "dot_product_attention by the name that flax wants",
    "lm_to_lse": "plain jnp",
    "lse_to_lm": "plain jnp",
    "available_tiles": "no arrays",
    "estimate_memory_usage": "no arrays",
    "get_optimal_block_sizes": "no arrays",
}


# ---- what has to come out, by plain jnp ----------------------------------------------


def weigh(y: Any) -> jax.Array:
    """A sum in which every element has a weight of its own."""
    return sum(jnp.sum(x.astype(jnp.float32) * weights(x)) for x in jax.tree.leaves(y))


def weights(x: Any) -> Any:
    """Fixed small numbers in the shape of x; sums of them with integers are exact."""
    return (jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape) * 5 + 2) % 17 - 8


def cotangents_of(y: Any) -> Any:
    return jax.tree.map(lambda x: weights(x).astype(x.dtype), y)


def of_floats(f: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, list[Any]]:
    """`f` as a function of its float arguments alone, and these."""
    at = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]

    def only(*floats: Any) -> Any:
        full = list(args)
        for i, x in zip(at, floats, strict=True):
            full[i] = x
        return f(*full)

    return only, [args[i] for i in at]


def value_and_slopes(f: Callable[..., Any], args: Sequence[Any]) -> Any:
    """`f`'s value, and the gradients of its weighted sum to all float arguments."""
    only, floats = of_floats(f, args)

    def weighed(floats: Any) -> Any:
        y = only(*floats)
        return weigh(y), y

    (_, y), slopes = jax.value_and_grad(weighed, has_aux=True)(floats)
    return y, slopes


# Several rows want the same.
@functools.cache
def value(column: Column) -> Any:
    return fast(column.plain)(*column.draw())


@functools.cache
def value_and_gradients(column: Column) -> Any:
    return fast(lambda *args: value_and_slopes(column.plain, args))(*column.draw())


def gradients(column: Column) -> Any:
    return value_and_gradients(column)[1]


@functools.cache
def members(column: Column) -> Any:
    return fast(lambda args: jax.lax.map(lambda one: column.plain(*one), args))(
        batch(column)
    )


def batch(column: Column) -> list[Any]:
    return column.draw([(MEMBERS,)] * len(column.args))


# ---- rows: the transforms ------------------------------------------------------------

Run = Callable[[Callable[..., Any], Column], Any]
ROWS: dict[str, tuple[Run, Callable[[Column], Any]]] = {}


def row(want: Callable[[Column], Any]) -> Callable[[Run], Run]:
    """A row by the name of its function; `want` says what has to come out."""

    def register(run: Run) -> Run:
        ROWS[run.__name__.removesuffix("_")] = (run, want)
        return run

    return register


def same_of_plain(draw: Callable[[Column], Any]) -> Callable[[Any], Any]:
    """A row `(f, args)` under jit, whose truth is the same of plain jnp."""

    def register(transform: Callable[..., Any]) -> Any:
        def run(f: Callable[..., Any], column: Column) -> Any:
            return fast(functools.partial(transform, f))(draw(column))

        run.__name__ = transform.__name__
        return row(lambda column: run(column.plain, column))(run)

    return register


def everything(f: Callable[..., Any], column: Column) -> Callable[..., Any]:
    """The value, and where there are gradients these."""
    if not column.differentiable:
        return f
    return lambda *args: value_and_slopes(f, args)


def everything_wanted(column: Column) -> Any:
    return (value_and_gradients if column.differentiable else value)(column)


@row(value)
def eager(f, column):
    return f(*column.draw())


@row(value)
def jit(f, column):
    return fast(f)(*column.draw())


@row(value)
def disable_jit(f, column):
    with jax.disable_jit():
        return f(*column.draw())


@row(value)
def debug_nans(f, column):
    """What is finite comes out as ever; a NaN is JAX's error, eagerly and under jit."""
    args = column.draw()
    at, x = next((i, x) for i, x in enumerate(args) if x.dtype == jnp.float32)
    hurt = [*args[:at], jnp.full_like(x, jnp.nan), *args[at + 1 :]]
    with jax.debug_nans(True):
        for call in (f, fast(f)):
            with pytest.raises(FloatingPointError, match="nan"):
                call(*hurt)
        return f(*args)


@row(everything_wanted)
def x64(f, column):
    """Wide integers come in, and no float gets wider."""
    with jax.enable_x64(True):
        wide = {jnp.dtype("int32"): jnp.int64}
        args = [x.astype(wide.get(x.dtype, x.dtype)) for x in column.draw()]
        return fast(everything(f, column))(*args)


@row(everything_wanted)
def strict_promotion(f, column):
    with jax.numpy_dtype_promotion("strict"):
        return fast(everything(f, column))(*column.draw())


def zeros(column: Column) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), value(column))


@row(value)
def cond(f, column):
    none = zeros(column)
    choose = fast(lambda p, *args: jax.lax.cond(p, f, lambda *_: none, *args))
    return choose(True, *column.draw())


@row(value)
def while_loop(f, column):
    def loop(none, *args):
        step = lambda state: (state[0] + 1, f(*args))  # noqa: E731
        more = lambda state: state[0] < 2  # noqa: E731
        return jax.lax.while_loop(more, step, (0, none))[1]

    return fast(loop)(zeros(column), *column.draw())


@row(members)
def scan(f, column):
    step = lambda count, args: (count + 1, f(*args))  # noqa: E731
    return fast(lambda args: jax.lax.scan(step, 0, args)[1])(batch(column))


@row(members)
def map_(f, column):
    return fast(lambda args: jax.lax.map(lambda one: f(*one), args))(batch(column))


@row(value)
def donation(f, column):
    """The first argument's memory may be taken for a result."""
    first, *rest = column.draw()
    return fast(f, donate_argnums=0)(jnp.array(first), *rest)


TARGETS = [
    "kvblock_copy",
    *(
        f"kvblock_attention_{op}"
        for op in ("forward", "backward_kv", "backward_q", "backward_bias")
    ),
]


@row(value)
def export(f, column):
    pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
    args = column.draw()
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in TARGETS]
    exported = jax.export.export(jax.jit(f), disabled_checks=checks)(*args)
    return fast(jax.export.deserialize(exported.serialize()).call)(*args)


# ---- batches -------------------------------------------------------------------------


@row(members)
def vmap(f, column):
    return fast(jax.vmap(f))(*batch(column))


@same_of_plain(lambda column: (column.draw(), batch(column)))
def vmap_over_each_operand(f, args):
    """Each alone, the batch first or last."""
    one, many = args
    results = []
    for i, x in enumerate(many):
        axis = 0 if i % 2 else x.ndim - 1
        axes = tuple(axis if i == j else None for j in range(len(one)))
        moved = [*one[:i], jnp.moveaxis(x, 0, axis), *one[i + 1 :]]
        results.append(jax.vmap(f, axes)(*moved))
    return results


def draw_nested(column: Column) -> list[Any]:
    lead = [(OUTER, INNER), *([(OUTER,), (INNER,)] * len(column.args))]
    return column.draw(lead[: len(column.args)])


@same_of_plain(draw_nested)
def nested_vmap(f, args):
    """The first operand has both axes, the others one: the inner or the outer."""
    outer = tuple(0 if i == 0 or i % 2 else None for i in range(len(args)))
    inner = tuple(0 if i % 2 == 0 else None for i in range(len(args)))
    return jax.vmap(jax.vmap(f, inner), outer)(*args)


@row(members)
def spmd_axis_name(f, column):
    """The batch lies over a mesh axis, which constraints inside of it are told of."""
    mesh = mesh_of()
    whole, over_b = NamedSharding(mesh, P()), NamedSharding(mesh, P("b"))

    def inside(*args: Any) -> Any:
        y = f(*args)
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, whole), y)

    args = jax.device_put(batch(column), over_b)
    got = fast(jax.vmap(inside, spmd_axis_name="b"))(*args)
    assert all(
        x.sharding.is_equivalent_to(over_b, x.ndim) for x in jax.tree.leaves(got)
    )
    return got


# ---- derivatives ---------------------------------------------------------------------


@row(gradients)
def grad(f, column):
    """Outside of jit."""
    only, floats = of_floats(f, column.draw())
    return jax.grad(lambda floats: weigh(only(*floats)))(floats)


@row(value_and_gradients)
def value_and_grad(f, column):
    return fast(lambda *args: value_and_slopes(f, args))(*column.draw())


@same_of_plain(Column.draw)
def jacrev(f, args):
    """Of a few elements of the result."""
    only, floats = of_floats(f, args)

    def some(floats: Any) -> Any:
        return jax.tree.map(lambda y: y.reshape(-1)[1:14:4], only(*floats))

    return jax.jacrev(some)(floats)


@same_of_plain(Column.draw)
def jvp(f, args):
    only, floats = of_floats(f, args)
    return jax.jvp(only, floats, [weights(x) for x in floats])


@same_of_plain(Column.draw)
def linearize(f, args):
    only, floats = of_floats(f, args)
    y, push = jax.linearize(only, *floats)
    return y, push(*map(weights, floats))


@row(gradients)
def linear_transpose(f, column):
    """Copies are linear in all their arrays."""
    only, floats = of_floats(f, column.draw())
    return list(jax.linear_transpose(only, *floats)(cotangents_of(value(column))))


POLICIES = [
    jax.checkpoint_policies.nothing_saveable,
    jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES),
]


@row(lambda column: [gradients(column)] * len(POLICIES))
def remat(f, column):
    """Everything computed again, and nothing but what is named."""

    def slopes(*args: Any) -> Any:
        only, floats = of_floats(f, args)
        kept = [
            jax.checkpoint(lambda *xs: weigh(only(*xs)), policy=p) for p in POLICIES
        ]
        return [jax.grad(lambda xs, g=g: g(*xs))(floats) for g in kept]

    return fast(slopes)(*column.draw())


# ---- meshes --------------------------------------------------------------------------


def cut(axis: int | None, x: Any) -> P:
    """Heads over "h"."""
    return P(*(("h" if i == axis else None) for i in range(x.ndim)))


def on_a_mesh(column: Column, axis_type: AxisType) -> tuple[Any, list[Any], Any, Any]:
    """A mesh, the arguments with their heads cut, and both sides' specs."""
    mesh = mesh_of(axis_type)
    args = column.draw()
    specs = [cut(axis, x) for axis, x in zip(column.heads, args, strict=True)]
    out_specs = jax.tree.map(cut, column.out_heads, value(column))
    put = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(args, specs, strict=True)
    ]
    return mesh, put, tuple(specs), out_specs


def assert_cut(got: Any, mesh: Any, specs: Any) -> None:
    def one(x: Any, spec: P) -> None:
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)

    jax.tree.map(one, got, specs)


@row(value)
def automatic_mesh(f, column):
    mesh, args, _, out_specs = on_a_mesh(column, AxisType.Auto)
    with jax.set_mesh(mesh):
        got = fast(f)(*args)
    assert_cut(got, mesh, out_specs)
    return got


@row(value)
def explicit_mesh(f, column):
    mesh, args, _, out_specs = on_a_mesh(column, AxisType.Explicit)
    with jax.set_mesh(mesh):
        got = fast(f)(*args)
    assert_cut(got, mesh, out_specs)
    return got


@row(value)
def shard_map(f, column):
    mesh, args, specs, out_specs = on_a_mesh(column, AxisType.Auto)
    mapped = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out_specs)
    return fast(mapped)(*args)


# ---- the table -----------------------------------------------------------------------


def assert_right(got: Any, want: Any, exact: bool) -> None:
    """The same bits; attention is as near as its dtype lets it."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        x, y = (np.asarray(a).astype(np.float64) for a in (x, y))
        if exact:
            np.testing.assert_array_equal(x, y)
        else:
            bar = 3e-2 if ON_GPU else 1e-5
            np.testing.assert_allclose(x, y, rtol=bar, atol=bar * np.abs(y).max())


ON_CPUS = {"spmd_axis_name", "automatic_mesh", "explicit_mesh", "shard_map"}


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("transform", ROWS)
def test_every_cell(transform, name, request):
    if transform in ON_CPUS:
        request.getfixturevalue("four_cpus")
    column, (run, want) = COLUMNS[name], ROWS[transform]
    if transform in column.missing:
        error, message = column.missing[transform]
        with pytest.raises(error, match=message):
            run(column.run, column)
    else:
        assert_right(run(column.run, column), want(column), column.exact)


def test_every_op_is_a_column():
    functions = {n for n in kv.__all__ if n[0].islower()}
    columns = {name.split()[0] for name in COLUMNS}
    assert functions == columns | set(NOT_COLUMNS)


def test_missing_cells_are_rows():
    assert all(set(column.missing) <= set(ROWS) for column in COLUMNS.values())
