"""Bad pools, ids, head ranges and tokens are refused while tracing; nothing is lost.

The rows are as in test_messages: the words that a message must hold.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import LAYOUT_NAMES, SPEC, Bad, Table, check, check_row, f32, i32, pool_of

import jax_kvblock as kv

IDS, TOKENS, SLOTS = i32(2), f32(4, 5, 6), i32(4)
POOL, LAYERED = pool_of(), pool_of(contiguous=False)
ARRAY, LAYER = f32(7, *SPEC.block_shape), f32(7, *SPEC.block_shape[1:])
BLOCKS = f32(2, 5, 3, 2, 4, 6)  # universal
gather, scatter, copy = kv.gather_blocks, kv.scatter_blocks, kv.copy_blocks
transfer, append = kv.transfer_blocks, kv.append_kv


def unchecked(data):
    """A pool as trees are put together, which checks nothing."""
    return jax.tree.unflatten(jax.tree.structure(POOL), [data])


# Each op as a call that is right but for what a row changes.
OPS = {
    "gather_blocks": lambda pool=None, ids=None, **how: gather(pool, ids, **how),
    "scatter_blocks": lambda pool=None, ids=None, **how: scatter(
        pool, ids, how.pop("blocks", jnp.zeros(BLOCKS.shape)), **how
    ),
    "copy_blocks": lambda pool=None, ids=None, **how: copy(pool, ids, [0, 1], **how),
    "transfer_blocks": lambda pool=None, ids=None, **how: transfer(
        pool, ids, kv.KVPool(jnp.zeros(ARRAY.shape, jnp.float32), SPEC), [0, 1], **how
    ),
    "append_kv": lambda pool=None, ids=None, **how: append(
        pool,
        how.pop("layer", 0),
        jnp.zeros((2, 5, 6)),
        jnp.zeros((2, 5, 6)),
        ids,
        **how,
    ),
    "gather_kv": lambda pool=None, ids=None, **how: kv.gather_kv(
        pool, how.pop("layer", 0), ids, **how
    ),
}
ID_NAMES = {
    "gather_blocks": "ids",
    "scatter_blocks": "ids",
    "copy_blocks": "src_ids",
    "transfer_blocks": "src_ids",
    "append_kv": "slots",
    "gather_kv": "ids",
}
ROWS = Table()

# ---- what all pool functions share ---------------------------------------------------

for W, op in OPS.items():
    ids = ID_NAMES[W]
    name = "src_pool" if W == "transfer_blocks" else "pool"
    words = f"{name} must be a KVPool|KVPool.wrap(arrays, spec)|got "
    ROWS.kind(W, "array for pool", op, [ARRAY, IDS], words)
    ROWS.kind(W, "no pool", functools.partial(op, None), [IDS], words + "NoneType")

    misfits = {
        "extents": unchecked(f32(7, 3, 2, 4, 5, 7)),
        "batched": unchecked(f32(2, *ARRAY.shape)),
        "missing layer": unchecked((LAYER,) * 2),
    }
    for label, misfit in misfits.items():
        ROWS.value(W, f"misfit: {label}", op, [misfit, IDS], name)
    ROWS.kind(
        W, "misfit: dtype", op, [unchecked(i32(*ARRAY.shape)), IDS],
        f"{name}|float32|int32[7, 3, 2, 4, 5, 6]",
    )  # fmt: skip

    ROWS.kind(W, "float ids", op, [POOL, f32(2)], f"{ids}|int32|got float32[2]|.astype")
    ROWS.kind(
        W, "bool ids", op, [POOL, f32(2, dtype=jnp.bool_)],
        f"{ids}|int32|got bool[2]|.astype(jnp.int32)",
    )  # fmt: skip
    ROWS.value(
        W, "ids of rank 2", op, [POOL, i32(1, 2)],
        f"{ids}|int32[|got int32[1, 2]|.reshape(-1)",
    )  # fmt: skip
    call = functools.partial(lambda pool, op: op(pool, [[1, 2], [3, 4]]), op=op)
    ROWS.value(W, "nested ids", call, [POOL], f"{ids}|int32[|[2, 2]|.reshape(-1)")
    ROWS.value(W, "scalar id", op, [POOL, i32()], f"{ids}|int32[|got int32[]")
    for label, value in {
        "None": None,
        "a Python id": 3,
        "floats": [1.5, 0.5],
        "bools": [True, False],
        "strings": ["a", "b"],
    }.items():
        call = functools.partial(lambda pool, op, ids: op(pool, ids), op=op, ids=value)
        ROWS.kind(W, f"ids are {label}", call, [POOL], ids)
    for label, value in {
        "past int32": [2**31, 0],
        "below int32": np.array([0, -(2**31) - 1]),
        "past int64": [0, 2**70],
        "past int32, unsigned": np.uint32([0, 2**31]),
    }.items():
        call = functools.partial(lambda pool, op, ids: op(pool, ids), op=op, ids=value)
        ROWS.value(W, f"ids {label}", call, [POOL], f"{ids}|int32")

    ROWS.value(
        W, "implementation", functools.partial(op, implementation="cuda"), [POOL, IDS],
        "implementation|None, 'kernel', 'xla'|got 'cuda'",
    )  # fmt: skip

for W in ("gather_blocks", "scatter_blocks", "transfer_blocks"):
    for heads in ((2, 2), (3, 1), (-1, 2), (0, 9), (5, 6)):
        ROWS.value(
            W, f"heads {heads}", functools.partial(OPS[W], heads=heads), [POOL, IDS],
            f"heads|0 <= start < stop <= 5|num_kv_heads|got {heads}",
        )  # fmt: skip
    for heads in ((0,), (0, 1, 2), 5):
        ROWS.value(
            W, f"heads {heads}", functools.partial(OPS[W], heads=heads), [POOL, IDS],
            f"heads|pair (start, stop)|got {heads!r}",
        )  # fmt: skip
    for heads in ((0.0, 2), (False, True)):
        ROWS.kind(
            W, f"heads {heads}", functools.partial(OPS[W], heads=heads), [POOL, IDS],
            f"heads|Python integers|got {heads}",
        )  # fmt: skip
    for heads in (range(0, 4, 2), slice(None, None, -1)):
        ROWS.value(
            W, f"heads {heads}", functools.partial(OPS[W], heads=heads), [POOL, IDS],
            f"heads|side by side|step of 1|got {heads!r}",
        )  # fmt: skip
    for heads, read in (
        (range(3, 3), (3, 3)),
        (range(4, 7), (4, 7)),
        (slice(4, 9), (4, 9)),
        (slice(-6, None), (-1, 5)),
    ):
        ROWS.value(
            W, f"heads {heads}", functools.partial(OPS[W], heads=heads), [POOL, IDS],
            f"heads|0 <= start < stop <= 5|num_kv_heads|got {read}",
        )  # fmt: skip
    call = functools.partial(lambda p, i, n, op: op(p, i, heads=(0, n)), op=OPS[W])
    ROWS.kind(W, "traced heads", call, [POOL, IDS, i32()], "heads|cannot be traced")

for W in ("gather_blocks", "scatter_blocks"):
    for layout in ("nhd", None, 3):
        call = functools.partial(OPS[W], layout=layout)
        words = f"layout|one of {LAYOUT_NAMES}|got {layout!r}"
        ROWS.value(W, f"layout {layout}", call, [POOL, IDS], words)

# ---- building ------------------------------------------------------------------------

W = "KVPool.zeros"
zeros = kv.KVPool.zeros
ROWS.kind(W, "no spec", lambda: zeros(None, 7), [], "spec|BlockSpec|got NoneType|build")
for count in (0, -1, 1.5, True, None):
    call = functools.partial(zeros, SPEC, count)
    ROWS.value(W, f"{count} blocks", call, [], f"num_blocks|at least 1|got {count!r}")
ROWS.value(
    W, "memory kind", lambda: zeros(SPEC, 7, memory_kind="host"), [],
    "memory_kind|'device', 'pinned_host'|got 'host'",
)  # fmt: skip
ROWS.value(
    W, "layers inside",
    lambda: zeros(SPEC.replace(layout="universal"), 7, contiguous=False), [],
    "layers|outermost|'NHD'|'universal'|contiguous pool",
)  # fmt: skip
for count in (2**29, np.int32(2**29)):  # NumPy's product would wrap
    call = functools.partial(zeros, SPEC, count)
    words = "num_blocks|2**31|536870912 * 4"
    ROWS.value(W, f"too large, {type(count).__name__}", call, [], words)

for device, error in ((5, TypeError), (["cpu"], TypeError), ("tpuu", ValueError)):
    call = functools.partial(zeros, SPEC, 7, device=device)
    words = f"device|jax device|sharding|platform|got {device!r}|jax.devices()"
    ROWS.append(Bad(W, f"device {device}", call, [], error, words))
ROWS.kind(
    W, "float64", lambda: zeros(SPEC.replace(dtype=np.float64), 7), [],
    "dtype|float64|float32|'jax_enable_x64'",
)  # fmt: skip
for sizes in ((2**20, 2, 2**10, 2**20, 2**10), (2**30, 2, 1, 2**60, 2**60)):
    call = functools.partial(zeros, kv.BlockSpec(*sizes, jnp.int8), 4)
    ROWS.value(W, f"bytes {sizes}", call, [], "less than 2**63 bytes|got 4 blocks of")


def wrap(arrays):
    return kv.KVPool.wrap(arrays, SPEC)


def build(data):
    return kv.KVPool(data, SPEC)


call = lambda x: kv.KVPool.wrap(x, 3)  # noqa: E731
ROWS.kind("KVPool.wrap", "no spec", call, [ARRAY], "spec|got int|build")
call = lambda x: kv.KVPool(x, 3)  # noqa: E731
ROWS.kind("KVPool", "no spec", call, [ARRAY], "spec|got int|build")
for W, name, make in (("KVPool.wrap", "arrays", wrap), ("KVPool", "data", build)):
    ROWS.value(
        W, "shape", make, [f32(7, 3, 2, 4, 5, 7)],
        f"{name}|[num_blocks, 3, 2, 4, 5, 6]|NHD|got float32[7, 3, 2, 4, 5, 7]",
    )  # fmt: skip
    ROWS.value(
        W, "rank", make, [f32(3, 2, 4, 5, 6)], f"{name}|num_blocks|[3, 2, 4, 5, 6]"
    )
    ROWS.kind(
        W, "dtype", make, [i32(*ARRAY.shape)], f"{name}|dtype float32|got int32[7, 3"
    )
    ROWS.kind(W, "no array", functools.partial(make, 7), [], f"{name}|array|got int")
    ROWS.value(W, "no layers", make, [[]], f"{name}|3 layers|got 0")
    ROWS.value(W, "two layers", make, [[LAYER] * 2], f"{name}|3 layers|got 2")
    ROWS.value(
        W, "layer shape", make, [[LAYER, f32(7, 2, 4, 5, 7), LAYER]],
        f"{name}[1]|[num_blocks, 2, 4, 5, 6]|got float32[7, 2, 4, 5, 7]",
    )  # fmt: skip
    ROWS.value(
        W, "uneven layers", make, [[LAYER, LAYER, f32(8, 2, 4, 5, 6)]],
        f"same blocks|{name}[0] is float32[7|{name}[2] is float32[8",
    )  # fmt: skip
    ROWS.kind(
        W, "layer dtype", make, [[LAYER] * 2 + [i32(*LAYER.shape)]], f"{name}[2]|int32"
    )

# ---- one function each ---------------------------------------------------------------

W = "scatter_blocks"
ROWS.value(
    W, "count", scatter, [POOL, i32(1), BLOCKS],
    "blocks|[1, 5, 3, 2, 4, 6]|got float32[2, 5, 3, 2, 4, 6]",
)  # fmt: skip
ROWS.value(
    W, "whole blocks for a head range",
    lambda p, i, x: scatter(p, i, x, heads=(0, 2)), [POOL, IDS, BLOCKS],
    "blocks|[2, 2, 3, 2, 4, 6]|got float32[2, 5, 3, 2, 4, 6]",
)  # fmt: skip
ROWS.value(
    W, "other layout", lambda p, i, x: scatter(p, i, x, "NHD"), [POOL, IDS, BLOCKS],
    "blocks|[2, 3, 2, 4, 5, 6]|got float32[2, 5, 3, 2, 4, 6]",
)  # fmt: skip
ROWS.kind(
    W, "dtype", scatter, [POOL, IDS, f32(*BLOCKS.shape, dtype=jnp.bfloat16)],
    "blocks|dtype float32|got bfloat16[2, 5, 3, 2, 4, 6]|.astype('float32')",
)  # fmt: skip
ROWS.kind(
    W, "no blocks", lambda p, i: scatter(p, i, None), [POOL, IDS],
    "blocks|array|got NoneType",
)  # fmt: skip
ROWS.value("copy_blocks", "lengths", copy, [POOL, IDS, i32(3)], "src_ids|dst_ids|2|3")
ROWS.kind(
    "copy_blocks", "dst", copy, [POOL, IDS, f32(2)], "dst_ids|int32|got float32[2]"
)

W = "transfer_blocks"
ROWS.value(W, "lengths", transfer, [POOL, IDS, LAYERED, i32(3)], "src_ids|dst_ids|2|3")
ROWS.kind(
    W, "dst_ids", transfer, [POOL, IDS, LAYERED, f32(2)], "dst_ids|int32|got float32[2]"
)
ROWS.kind(W, "dst_pool", transfer, [POOL, IDS, ARRAY, IDS], "dst_pool|KVPool|wrap")
for axis, other in {
    "num_layers": 2,
    "num_outer": 1,
    "block_size": 8,
    "head_dim": 8,
    "dtype": jnp.dtype("bfloat16"),
}.items():
    ROWS.value(
        W, axis, transfer, [POOL, IDS, pool_of(**{axis: other}), IDS],
        f"agree in {axis}|src_pool has {getattr(SPEC, axis)}|dst_pool has {other}",
    )  # fmt: skip
TWO_HEADS = pool_of(num_kv_heads=2)
ROWS.value(
    W, "head counts", transfer, [POOL, IDS, TWO_HEADS, IDS],
    "src_pool has 5|dst_pool has 2|heads=(start, stop)",
)  # fmt: skip
for pools, who in (((POOL, TWO_HEADS), "dst_pool"), ((TWO_HEADS, POOL), "src_pool")):
    ROWS.value(
        W, f"slice of {who}", lambda p, i, q, j: transfer(p, i, q, j, heads=(0, 3)),
        [pools[0], IDS, pools[1], IDS], f"heads=(0, 3)|3 of 5|{who} has 2",
    )  # fmt: skip

W = "append_kv"
call = lambda p, k, v, s: append(p, 0, k, v, s)  # noqa: E731
ROWS.value(
    W, "k", call, [POOL, f32(4, 5, 7), TOKENS, SLOTS],
    "k must|[4, 5, 6]|got float32[4, 5, 7]",
)  # fmt: skip
ROWS.value(
    W, "v", call, [POOL, TOKENS, f32(3, 5, 6), SLOTS],
    "v must|[4, 5, 6]|got float32[3, 5, 6]",
)  # fmt: skip
ROWS.kind(
    W, "dtype", call, [POOL, TOKENS, f32(4, 5, 6, dtype=jnp.float16), SLOTS],
    "v must|float32|got float16[4, 5, 6]|.astype('float32')",
)  # fmt: skip
ROWS.value(
    W, "slots", call, [POOL, TOKENS, TOKENS, i32(3)], "k must|[3, 5, 6]|[4, 5, 6]"
)
ROWS.kind(
    W, "no k", lambda p, v, s: append(p, 0, None, v, s), [POOL, TOKENS, SLOTS],
    "k must|got NoneType",
)  # fmt: skip
ROWS.kind(
    W, "no v", lambda p, k, s: append(p, 0, k, None, s), [POOL, TOKENS, SLOTS],
    "v must|got NoneType",
)  # fmt: skip
ROWS.value(
    W, "v of a latent pool", call, [pool_of(num_outer=1), TOKENS, TOKENS, SLOTS],
    "v must be None|num_outer 1|got float32[4, 5, 6]|as k",
)  # fmt: skip
ROWS.value(
    W, "all layers of one", lambda p, k, s: append(p, None, k, k, s),
    [POOL, TOKENS, SLOTS], "k must|[3, 4, 5, 6]|got float32[4, 5, 6]",
)  # fmt: skip
for W in ("append_kv", "gather_kv"):
    for layer in (3, -1, np.int64(7)):
        ROWS.append(
            Bad(
                W, f"layer {layer}", functools.partial(OPS[W], layer=layer),
                [POOL, IDS], IndexError, f"layer|0 to 2|got {layer}",
            )
        )  # fmt: skip
    for layer in (1.0, True, "1"):
        call = functools.partial(OPS[W], layer=layer)
        words = f"layer must|integer|got {type(layer).__name__}|jnp.int32(layer)"
        ROWS.kind(W, f"layer {layer!r}", call, [POOL, IDS], words)
    call = functools.partial(OPS[W], layer=np.int32([1, 2]))
    ROWS.kind(W, "two static layers", call, [POOL, IDS], "layer must|got int32[2]")
call = functools.partial(OPS["gather_kv"], layer=None)
ROWS.kind("gather_kv", "no layer", call, [POOL, IDS], "layer must|got NoneType")
W = "append_kv"
call = lambda p, n, k, s: append(p, n, k, k, s)  # noqa: E731
ROWS.kind(
    W, "float layer", call, [POOL, f32(), TOKENS, SLOTS], "layer|int32[]|got float32[]"
)
ROWS.value(
    W,
    "two layers",
    call,
    [POOL, IDS, TOKENS, SLOTS],
    "layer|int32[]|got int32[2]|scalar",
)


@pytest.mark.parametrize("bad", ROWS, ids=str)
def test_bad_pools_are_refused_while_tracing(bad):
    check_row(bad)


# ---- what only arrays that exist can show --------------------------------------------


@pytest.mark.parametrize("name", OPS)
def test_donated_pools(name):
    pool, ids = kv.KVPool.zeros(SPEC, 7), np.int32([0, 1])
    kept = jax.jit(kv.copy_blocks, donate_argnums=0)(pool, ids, ids)
    words = "pool was donated or deleted|returned"
    check(name, RuntimeError, words, lambda: OPS[name](pool, ids))
    assert not kept.data.is_deleted()


@pytest.mark.parametrize("name", OPS)
def test_xla_refuses_host_memory(name):
    pool = kv.KVPool.zeros(SPEC, 7, memory_kind="pinned_host")
    call = functools.partial(OPS[name], pool, [0, 1], implementation="xla")
    words = "implementation='xla'|pinned_host|implementation='kernel'"
    check(name, ValueError, words, call)


def test_pools_with_more_slots_than_int32_counts():
    many = f32(2**29, *SPEC.block_shape)
    words = "num_blocks * block_size|2**31|536870912 * 4"
    check("KVPool.wrap", ValueError, words, lambda: jax.eval_shape(wrap, many))
    check("KVPool", ValueError, words, lambda: build(many))


def test_layers_on_different_devices():
    here, there = jax.devices("cpu")[:2]
    x = np.zeros(LAYER.shape, np.float32)
    layers = [jax.device_put(x, d) for d in (here, here, there)]
    check("KVPool.wrap", ValueError, "arrays[2]|device", lambda: wrap(layers))


def test_layers_in_different_memories():
    device = kv.KVPool.zeros(SPEC, 7, contiguous=False).data
    host = kv.KVPool.zeros(SPEC, 7, contiguous=False, memory_kind="pinned_host").data
    layers = [*device[:2], host[2]]
    check("KVPool.wrap", ValueError, "arrays[2]|pinned_host", lambda: wrap(layers))


def test_a_refused_call_loses_nothing():
    """The pool that a bad call was to donate is still there, and unchanged."""
    data = jnp.arange(7 * 720, dtype=jnp.float32).reshape(ARRAY.shape)
    pool, kept = kv.KVPool.wrap(data, SPEC), np.asarray(data)
    step = jax.jit(kv.scatter_blocks, donate_argnums=0)
    with pytest.raises(ValueError, match="scatter_blocks: blocks must have shape"):
        step(pool, np.int32([0, 1]), jnp.zeros((2, 5, 3, 2, 4, 7)))
    with pytest.raises(TypeError, match="scatter_blocks: ids must be int32"):
        step(pool, jnp.zeros(2), jnp.zeros(BLOCKS.shape))
    assert not pool.data.is_deleted()
    np.testing.assert_array_equal(pool.data, kept)
