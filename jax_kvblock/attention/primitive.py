"""The attention primitives: what comes out, how they transform, who computes them.

Three operations, each a pair of primitives. The outer one carries the transformation
rules and lowers to a partitioned call; the inner one is what each device runs, and
lowers to the FFI handler of its platform or to plain JAX in blocks.

    forward        operands                     -> o, lse
    backward       operands, lse, delta, d_o    -> dq, dk, dv
    backward_bias  operands, lse, delta, d_o    -> dbias

Every rule reads the letters of `AXES`: batching folds into B, partitioning cuts B and
the heads.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# custom_partitioning reads the devices while lowering; jit passes them only for
# primitives in this set, which has no public name.
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from jax_kvblock._spmd import lower_local, vary_alike
from jax_kvblock.attention import blocked, cuda
from jax_kvblock.attention.config import AXES, AttentionConfig, Operands, sizes_of


@dataclasses.dataclass(frozen=True)
class Call:
    """The static parameter of the primitives: config, and which operands are there."""

    config: AttentionConfig
    present: tuple[str, ...]  # names of Operands, in order

    def unpack(self, arrays: Sequence[Any]) -> Operands:
        return Operands(**dict(zip(self.present, arrays, strict=True)))

    @staticmethod
    def pack(config: AttentionConfig, x: Operands) -> tuple[Call, list[Any]]:
        given = {name: a for name, a in x._asdict().items() if a is not None}
        return Call(config, tuple(given)), list(given.values())


@dataclasses.dataclass(frozen=True)
class Op:
    """One operation: its further operands and its results, by their letters."""

    name: str
    extra: tuple[str, ...]
    results: tuple[str, ...]

    def operand_names(self, call: Call) -> tuple[str, ...]:
        return (*call.present, *self.extra)


FORWARD = Op("forward", (), ("o", "lse"))
BACKWARD = Op("backward", ("lse", "delta", "o"), ("q", "k", "v"))
BACKWARD_BIAS = Op("backward_bias", ("lse", "delta", "o"), ("bias",))

_LETTERS = {**AXES, "delta": "BNT"}


def letters(name: str, packed: bool) -> str:
    """The axes of an operand or result; packed arrays have no batch."""
    found = _LETTERS[name]
    if packed and name in ("q", "k", "v", "o", "lse", "delta"):
        return found[1:]
    if name in ("cu_q", "cu_kv"):
        return "c"
    return found


_LETTERS |= {"cu_q": "c", "cu_kv": "c"}


def forward(config: AttentionConfig, x: Operands) -> tuple[jax.Array, jax.Array]:
    """o `[B, T, N, Dv]`, lse float32 `[B, N, T]`; packed `[T, N, Dv]`, `[N, T]`."""
    call, arrays = Call.pack(config, x)
    o, lse = _bind(FORWARD, arrays, call)
    return o, lse


def backward(
    config: AttentionConfig,
    x: Operands,
    lse: jax.Array,
    delta: jax.Array,
    d_o: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq, dk, dv; `delta` is rowsum(d_o * o) - d_lse, shaped like lse."""
    call, arrays = Call.pack(config, x)
    dq, dk, dv = _bind(BACKWARD, [*arrays, lse, delta, d_o], call)
    return dq, dk, dv


def backward_bias(
    config: AttentionConfig,
    x: Operands,
    lse: jax.Array,
    delta: jax.Array,
    d_o: jax.Array,
) -> jax.Array:
    """The bias's gradient in its shape and dtype. Unused, it is never computed."""
    call, arrays = Call.pack(config, x)
    return _bind(BACKWARD_BIAS, [*arrays, lse, delta, d_o], call)[0]


# ---- evaluation ----------------------------------------------------------------------


def _result_structs(op: Op, call: Call, avals: Sequence[Any]) -> list[tuple]:
    """(shape, dtype) of the results."""
    x = call.unpack(avals[: len(call.present)])
    size = sizes_of(call.config, x)
    lse = jnp.float64 if x.q.dtype == jnp.float64 else jnp.float32
    if call.config.packed:
        lead: tuple[int, ...] = ()
    else:
        lead = (size.batch,)
    o = (*lead, size.q_len, size.num_heads, size.value_dim)
    rows = (*lead, size.num_heads, size.q_len)
    shapes: dict[str, tuple] = {
        "o": (o, x.q.dtype),
        "lse": (rows, lse),
        "q": (x.q.shape, x.q.dtype),
        "k": (x.k.shape, x.k.dtype),
        "v": (x.v.shape, x.v.dtype),
    }
    if x.bias is not None:
        shapes["bias"] = (x.bias.shape, x.bias.dtype)
    return [shapes[name] for name in op.results]


def _abstract_eval(
    *avals: Any, op: Op, call: Call, sums: tuple[tuple[str, ...], ...] = ()
) -> list[Any]:
    shards = _axis_shards(op, call, avals)
    mesh = avals[0].sharding.mesh
    results = []
    for name, (shape, dtype) in zip(
        op.results, _result_structs(op, call, avals), strict=True
    ):
        spec = _spec(letters(name, call.config.packed), shape, shards)
        results.append(
            avals[0].update(
                shape=shape,
                dtype=np.dtype(dtype),
                weak_type=False,
                sharding=NamedSharding(mesh, spec),
            )
        )
    return results


def _make(op: Op) -> tuple[core.Primitive, core.Primitive]:
    outer = core.Primitive(f"kvblock_attention_{op.name}")
    local = core.Primitive(f"kvblock_attention_{op.name}_local")
    for primitive in (outer, local):
        primitive.multiple_results = True
        primitive.def_abstract_eval(functools.partial(_abstract_eval, op=op))
    outer.def_impl(lambda *arrays, call: _eager(op, call)(*arrays))
    return outer, local


@functools.lru_cache(maxsize=1024)
def _eager(op: Op, call: Call) -> Any:
    return jax.jit(functools.partial(_OUTER[op].bind, call=call))


_OUTER: dict[Op, core.Primitive] = {}
_LOCAL: dict[Op, core.Primitive] = {}
for _op in (FORWARD, BACKWARD, BACKWARD_BIAS):
    _OUTER[_op], _LOCAL[_op] = _make(_op)


def _bind(op: Op, arrays: Sequence[Any], call: Call) -> list[Any]:
    return _OUTER[op].bind(*vary_alike(arrays), call=call)


# ---- lowering: one device ------------------------------------------------------------


def _blocked(op: Op, call: Call, platform: str | None, *arrays: Any) -> tuple:
    """The operation in plain JAX. A CPU has no fast 16-bit products."""
    x = call.unpack(arrays[: len(call.present)])
    narrow = x.q.dtype.itemsize == 2
    compute = jnp.float32 if platform == "cpu" and narrow else None
    if op is FORWARD:
        return blocked.forward(call.config, x, compute, platform)
    lse, delta, d_o = arrays[len(call.present) :]
    with_bias = op is BACKWARD_BIAS
    made = blocked.backward(
        call.config, x, lse, delta, d_o, with_bias, compute, platform
    )
    if with_bias:
        return (made.dbias.astype(x.bias.dtype),)
    return made.dq, made.dk, made.dv


def _lower(
    ctx: Any,
    *operands: Any,
    op: Op,
    call: Call,
    platform: str | None,
    sums: tuple[tuple[str, ...], ...] = (),
) -> Any:
    """`sums`: for each result, the mesh axes over which it is added up."""
    x = call.unpack(ctx.avals_in[: len(call.present)])
    choice = cuda.choose(call.config, x, platform)
    empty = 0 in (*x.q.shape, *x.k.shape)  # nothing to launch a kernel for
    if choice == "cuda" and not empty:
        local = functools.partial(cuda.run, op.name, call)
    else:
        local = functools.partial(_blocked, op, call, platform)

    def function(*arrays: Any) -> Any:
        made = local(*arrays)
        return [
            _sum_over(a, axes)
            for a, axes in itertools.zip_longest(made, sums, fillvalue=())
        ]

    return lower_local(ctx, function, *operands)


def _sum_over(a: Any, axes: tuple[str, ...]) -> Any:
    if not axes:
        return a
    wide = a.astype(jnp.promote_types(a.dtype, jnp.float32))
    return jax.lax.psum(wide, axes).astype(a.dtype)


for _op, _primitive in _LOCAL.items():
    for _platform in (None, "cpu", "cuda"):
        mlir.register_lowering(
            _primitive,
            functools.partial(_lower, op=_op, platform=_platform),
            platform=_platform,
        )


# ---- lowering: partitioned over a mesh -----------------------------------------------
#
# Batch members and heads are independent. Query heads come in groups, one for each key
# head: where there are several key heads, whole groups are cut (the factor K); where
# there is one, its group is (the factor G), and the key head's gradients are summed.
# Results that are shared by what is cut (dbias, or dk and dv of one head) are summed
# over the devices.


def _factors(call: Call, op: Op, arrays: Sequence[Any]) -> dict[str, int]:
    """The sizes of the factors that may be cut: B, and K or G."""
    config = call.config
    size = sizes_of(config, call.unpack(arrays[: len(call.present)]))
    factors = {}
    shared = {
        a.shape[0]
        for name, a in zip(op.operand_names(call), arrays, strict=True)
        if letters(name, config.packed)[0] == "b"
    }
    if not config.packed and shared <= {1, size.batch}:
        factors["B"] = size.batch
    if size.num_kv_heads > 1:
        factors["K"] = size.num_kv_heads
    else:
        factors["G"] = size.num_heads
    return factors


def _dim_factor(letter: str, dim: int, factors: dict[str, int]) -> str | None:
    """The factor that cuts a dimension, None where nothing does."""
    if letter in "Bb":
        # A shared bias has 1 here.
        return "B" if factors.get("B") == dim else None
    if letter == "K":
        return "K" if "K" in factors else None
    if letter in "Nn":
        if letter == "n" and dim == 1:
            return None
        return "K" if "K" in factors else "G"
    return None


def _axis_shards(op: Op, call: Call, operands: Sequence[Any]) -> dict[str, Any]:
    """The mesh axes over which B and the heads are cut, read off the operands."""
    packed = call.config.packed
    factors = _factors(call, op, operands)
    shards: dict[str, Any] = {"factors": factors}
    for name, operand in zip(op.operand_names(call), operands, strict=True):
        spec = getattr(operand.sharding, "spec", None)
        if spec is None:
            continue
        sizes = dict(operand.sharding.mesh.shape)
        for letter, dim, part in zip(
            letters(name, packed), operand.shape, spec, strict=False
        ):
            factor = _dim_factor(letter, dim, factors)
            if part is None or factor is None or dim == 1:
                continue
            # A part that does not divide the factor cuts nothing.
            if factors[factor] % math.prod(sizes[n] for n in _names(part)) == 0:
                shards.setdefault(factor, part)
    return shards


def _spec(axes: str, shape: Sequence[int], shards: dict[str, Any]) -> PartitionSpec:
    factors = shards["factors"]
    found = [
        _dim_factor(axis, dim, factors) for axis, dim in zip(axes, shape, strict=True)
    ]
    return PartitionSpec(*(shards.get(f) if f else None for f in found))


def _names(part: Any) -> tuple[str, ...]:
    return part if isinstance(part, tuple) else (part,)


def _partition(op: Op, call: Call, mesh: Any, operands: Any, results: Any) -> Any:
    packed = call.config.packed
    shards = _axis_shards(op, call, operands)

    def sharding(name: str, dims: Sequence[int]) -> NamedSharding:
        return NamedSharding(mesh, _spec(letters(name, packed), dims, shards))

    cut: dict[str, tuple[str, ...]] = {
        f: _names(shards[f]) for f in ("B", "K", "G") if f in shards
    }

    sums = tuple(
        _shared_axes(op, name, full.shape, cut, shards["factors"], packed)
        for name, full in zip(op.results, results, strict=True)
    )

    def run(*arrays: Any) -> Any:
        return tuple(_LOCAL[op].bind(*arrays, call=call, sums=sums))

    return (
        mesh,
        run,
        tuple(sharding(n, r.shape) for n, r in zip(op.results, results, strict=True)),
        tuple(
            sharding(n, a.shape)
            for n, a in zip(op.operand_names(call), operands, strict=True)
        ),
    )


def _shared_axes(
    op: Op,
    name: str,
    shape: Sequence[int],
    cut: dict[str, tuple[str, ...]],
    factors: dict[str, int],
    packed: bool,
) -> tuple[str, ...]:
    """The mesh axes whose devices share a gradient's array and each hold a part."""
    if op is FORWARD:
        return ()
    own = {
        _dim_factor(letter, dim, factors)
        for letter, dim in zip(letters(name, packed), shape, strict=True)
    }
    return tuple(n for factor, names in cut.items() if factor not in own for n in names)


def _sharding_rule(op: Op, call: Call, mesh: Any, operands: Any, results: Any) -> Any:
    """Says to Shardy which dimensions of operands and results are cut together."""
    packed = call.config.packed
    factors = _factors(call, op, operands)
    grouped = (
        sizes_of(call.config, call.unpack(operands[: len(call.present)])).group > 1
    )
    whole: dict[str, None] = {}  # factors that every device needs whole, in order

    def mapping(name: str, dims: Sequence[int]) -> ArrayMapping:
        parts: list[str] = []
        for letter, dim in zip(letters(name, packed), dims, strict=True):
            factor = _dim_factor(letter, dim, factors)
            if factor is None:
                factor = f"x{len(whole)}"
                whole[factor] = None
            elif letter in "Nn" and grouped:
                # Not one factor with K: where more devices share the query heads than
                # there are key heads, Shardy would cut K by a part of a mesh axis,
                # which jax cannot name. `_partition` cuts K as it cuts these.
                factor = "N"
            parts.append(factor)
        return ArrayMapping(*parts)

    operand_maps = tuple(
        mapping(n, a.shape)
        for n, a in zip(op.operand_names(call), operands, strict=True)
    )
    result_maps = tuple(
        mapping(n, a.shape) for n, a in zip(op.results, results, strict=True)
    )
    return SdyShardingRule(
        operand_maps, result_maps, need_replication_factors=tuple(whole)
    )


def _partitioned(op: Op) -> Any:
    @functools.partial(custom_partitioning, static_argnums=(0,))
    def run(call: Call, *arrays: Any) -> Any:
        return tuple(_LOCAL[op].bind(*arrays, call=call))

    run.def_partition(
        partition=functools.partial(_partition, op),
        sharding_rule=functools.partial(_sharding_rule, op),
    )
    return run


for _op, _primitive in _OUTER.items():
    prim_requires_devices_during_lowering.add(_primitive)
    _run = _partitioned(_op)
    mlir.register_lowering(
        _primitive,
        mlir.lower_fun(
            functools.partial(lambda run, *arrays, call: run(call, *arrays), _run),
            multiple_results=True,
        ),
    )


# ---- batching ------------------------------------------------------------------------
#
# A batch folds into B. What the members share (a bias, sinks, tiles) keeps one row for
# all, or one for each member: row b // (B / rows) of it belongs to batch member b.
#
# The new axis V comes before B, so that an operand with one row for each member folds
# without a copy. On an explicit mesh that cuts B it comes behind it: a dimension whose
# minor part is cut has no sharding.


def _batch(
    arrays: Sequence[Any], dims: Sequence[Any], *, op: Op, call: Call
) -> tuple[list[Any], list[int]]:
    if call.config.packed:
        return _batch_one_by_one(arrays, dims, op, call)
    names = op.operand_names(call)
    batched = {n: d is not None for n, d in zip(names, dims, strict=True)}
    count, size = 0, 0
    for name, a, d in zip(names, arrays, dims, strict=True):
        if d is not None:
            count = a.shape[d]
        if name == "q":
            size = a.shape[int(d == 0)]
    cut = any(
        _is_cut(a, int(d is not None and d == 0))
        for name, a, d in zip(names, arrays, dims, strict=True)
        if name == "q"
    )
    fold = functools.partial(_fold, count=count, size=size, behind=cut)
    folded = []
    rows = 1
    for name, a, d in zip(names, arrays, dims, strict=True):
        # A list of tiles and its counts are shared alike. The gradient of a bias that
        # the members share is asked for each of them.
        pair = {"tile_indices", "tile_counts"}
        own = (name in pair and any(batched.get(n) for n in pair)) or (
            name == "bias" and op is BACKWARD_BIAS
        )
        if name == "bias":
            rows = a.shape[int(d == 0)]
        folded.append(fold(a, d, shared=_LETTERS[name][0] == "b", own=own))
    results = _OUTER[op].bind(*folded, call=call)
    members = rows if op is BACKWARD_BIAS else size
    return [_unfold(r, count, size, members, cut) for r in results], [
        int(cut) for _ in results
    ]


def _is_cut(a: Any, axis: int) -> bool:
    """Whether an explicit mesh cuts this axis."""
    sharding = jax.typeof(a).sharding
    return not sharding.mesh.empty and sharding.spec[axis] is not None


def _fold(
    a: Any, d: Any, *, count: int, size: int, behind: bool, shared: bool, own: bool
) -> Any:
    """An operand with V in its first dimension, B's."""
    if d is None:
        if shared and not own and (behind or a.shape[0] == 1):
            return a  # one row for all, of all members
        if not behind:
            return _merge(jnp.broadcast_to(a, (count, *a.shape)))
        a = jnp.broadcast_to(a[:, None], (a.shape[0], count, *a.shape[1:]))
    else:
        a = jnp.moveaxis(a, d, int(behind))
    if not behind:
        return _merge(a)
    if a.shape[0] != size:  # rows that several of B share
        a = jnp.repeat(a, size // a.shape[0], axis=0)
    return _merge(a)


def _merge(a: Any) -> Any:
    """The first two dimensions as one, cut as the first was."""
    shape = (a.shape[0] * a.shape[1], *a.shape[2:])
    return _reshape(a, shape, (0, *range(2, a.ndim)))


def _unfold(r: Any, count: int, size: int, members: int, behind: bool) -> Any:
    """A result with V as a dimension of its own, the first, or behind B the second."""
    if not behind:
        rest = (None, None, *range(1, r.ndim))
        return _reshape(r, (count, members, *r.shape[1:]), rest)
    kept: tuple[int | None, ...] = (0, None, *range(1, r.ndim))
    r = _reshape(r, (size, count, *r.shape[1:]), kept)
    if members == size:
        return r
    return r.reshape(members, size // members, *r.shape[1:]).sum(1)


def _reshape(a: Any, shape: tuple[int, ...], kept: tuple[int | None, ...]) -> Any:
    """Reshapes; on an explicit mesh dimension i is cut as dimension kept[i] was."""
    sharding = jax.typeof(a).sharding
    if sharding.mesh.empty:
        return a.reshape(shape)
    spec = PartitionSpec(*(None if k is None else sharding.spec[k] for k in kept))
    return jax.lax.reshape(a, shape, out_sharding=NamedSharding(sharding.mesh, spec))


def _batch_one_by_one(
    arrays: Sequence[Any], dims: Sequence[Any], op: Op, call: Call
) -> tuple[list[Any], list[int]]:
    """Packed calls have no batch to fold into: a loop over the members."""
    moved = [
        a if d is None else jnp.moveaxis(a, d, 0)
        for a, d in zip(arrays, dims, strict=True)
    ]
    batched = [a for a, d in zip(moved, dims, strict=True) if d is not None]

    def member(parts: Sequence[Any]) -> list[Any]:
        rest = iter(parts)
        every = [
            a if d is None else next(rest) for a, d in zip(moved, dims, strict=True)
        ]
        return _OUTER[op].bind(*every, call=call)

    results = jax.lax.map(member, batched)
    return list(results), [0] * len(results)


for _op, _primitive in _OUTER.items():
    batching.primitive_batchers[_primitive] = functools.partial(_batch, op=_op)


# ---- differentiation -----------------------------------------------------------------


def _no_jvp(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "flash_attention: its gradients have no gradients (grad of grad, hessian, jvp "
        "of grad); for those, write the attention in jax.numpy or use "
        "jax.nn.dot_product_attention(implementation='xla')"
    )


for _primitive in _OUTER.values():
    ad.primitive_jvps[_primitive] = _no_jvp
