"""Dropout of probabilities: the same pairs in every pass, implementation and transform.

The truth is float64 with the numbers that kvblock/attention.h defines, of positions in
the whole sequence. What these are like is in test_dropout_bits.py, and which pairs they
keep in test_dropout_pairs.py. Every transform has its cell in test_every_transform.py,
Hopper's kernels and the generic ones theirs in test_emulated_sm90.py and
test_emulated.py.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_bar import assert_close, assert_exact
from attention_model import (
    BF16,
    F16,
    F32,
    KERNELS,
    Call,
    by_kernel,
    by_main_kernel,
    by_turns,
    cast,
    compute,
    draw,
    draw_bias,
    draw_segments,
    draw_tiles,
    f64,
    jit,
    kept,
    truth,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import by_axis_type, mesh_of

from jax_kvblock import AttentionScales, flash_attention, merge_attention
from jax_kvblock.attention import arguments, dense

RATE = 0.3


def with_dropout(call: Call, rate: float = RATE, seed: Any = 7) -> Call:
    seed = jnp.asarray(seed, jnp.int32) if isinstance(seed, (int, list)) else seed
    return call.replace(dropout_rate=rate, dropout_seed=seed)


def drawn(rng: np.random.Generator, dtype: Any = F32, **options: Any) -> Call:
    return with_dropout(draw(rng, dtype, **options))


# ---- values and gradients ------------------------------------------------------------


def _offsets(rng: np.random.Generator, call: Call) -> Call:
    return call.replace(causal=True, q_offset=jnp.int32([67, 3]), kv_offset=16)


def _segments(rng: np.random.Generator, call: Call) -> Call:
    return call.replace(segment_ids=jnp.asarray(draw_segments(rng, 2, 130)))


OPTIONS = {
    "full": lambda rng, call: call,
    "causal": lambda rng, call: call.replace(causal=True, q_offset=jnp.int32(60)),
    "offsets": _offsets,
    "window": lambda rng, call: call.replace(window=(40, 10)),
    "lengths": lambda rng, call: call.replace(
        q_lens=jnp.int32([70, 33]), kv_lens=jnp.int32([7, 130])
    ),
    "bias": lambda rng, call: call.replace(bias=draw_bias(rng, call, (True, False))),
    "sinks": lambda rng, call: call.replace(sinks=cast(rng.standard_normal(4), F32)),
    "softcap": lambda rng, call: call.replace(softcap=2.0),
    "tiles": lambda rng, call: call.replace(tiles=draw_tiles(rng, call, (False, True))),
    "negative scale": lambda rng, call: call.replace(scale=-0.3),
    "deterministic": lambda rng, call: call.replace(deterministic=True, causal=True),
    "a seed for each member": lambda rng, call: with_dropout(call, seed=[3, -1]),
    "nearly all": lambda rng, call: with_dropout(call, 0.9),
    "hardly any": lambda rng, call: with_dropout(call, 1 / 128),
}


@by_turns("name", OPTIONS, F32, BF16, F16)
def test_every_option_is_right(rng, implementation, dtype, name):
    call = OPTIONS[name](rng, drawn(rng, dtype))
    assert 0 < (kept(call) == 0).mean() < 1
    serving = None if implementation == "cuda_sm90" else implementation
    assert_exact(call, serving)


@by_kernel(F32, BF16)
def test_segments_are_right(rng, implementation, dtype):
    call = _segments(rng, drawn(rng, dtype, q_len=130))
    assert_exact(call, implementation)


@by_kernel(F32, BF16)
def test_packed_sequences_are_right(rng, implementation, dtype):
    """Positions count from the first row, and each sequence has a seed."""
    cu_q, cu_kv = jnp.int32([3, 40, 40, 150]), jnp.int32([0, 33, 60, 170])
    call = drawn(rng, dtype, packed=True, q_len=160, kv_len=180, causal=True)
    for seed in (4, [5, 6, 7]):
        assert_exact(
            with_dropout(call, seed=seed).replace(
                cu_seqlens=(cu_q, cu_kv), q_offset=jnp.int32([0, 5, 40])
            ),
            implementation,
        )


HEADS = ((4, 4), (4, 2), (4, 1))


@by_kernel(F32, BF16)
@pytest.mark.parametrize("t, s", [(1, 300), (16, 16), (17, 15), (300, 1), (0, 5)])
def test_lengths(rng, implementation, dtype, t, s):
    """Few queries too, whose own kernels have no dropout."""
    n, k = HEADS[t % 3]
    call = drawn(rng, dtype, q_len=t, kv_len=s, heads=n, kv_heads=k)
    assert_exact(call, implementation)


def test_arrays_in_8_bits(rng):
    """By name in plain JAX: the pairs of the same call in float32."""
    call = drawn(rng, causal=True)
    x = {n: a.astype(jnp.float8_e4m3fn) for n, a in call.arrays.items()}
    scales = AttentionScales(jnp.float32(2), jnp.float32(0.5), jnp.float32(3))
    factors = {"q": 2, "k": 0.5, "v": 3}
    got = call.replace(**x, scales=scales).run("xla")
    assert got.dtype == BF16
    wide = {n: a.astype(F32) * factors[n] for n, a in x.items()}
    assert_close(got, call.replace(**wide).run("xla").astype(BF16), BF16)


# ---- what dropout leaves alone -------------------------------------------------------


@by_main_kernel()
def test_lse_is_the_same_with_it(rng, implementation, dtype):
    call = draw(rng, dtype, causal=True)
    without = compute(call, implementation, gradients=False)
    dropped = compute(with_dropout(call), implementation, gradients=False)
    assert_close(dropped["lse"], without["lse"], F32)
    assert np.abs(f64(dropped["out"]) - f64(without["out"])).max() > 0.1


@by_main_kernel()
def test_a_rate_of_0_is_none(rng, implementation, dtype):
    call = draw(rng, dtype)
    plain = compute(call, implementation)
    for seed in (None, 3):
        same = call.replace(dropout_rate=0.0, dropout_seed=seed)
        for name, x in compute(same, implementation).items():
            np.testing.assert_array_equal(x, plain[name])


def test_a_rate_of_0_is_the_same_program(rng):
    call = draw(rng, causal=True)

    def program(**options: Any) -> str:
        def f(arrays: Any) -> Any:
            return call.replace(**arrays).run(**options)

        return str(
            jax.make_jaxpr(jax.value_and_grad(lambda x: f(x).sum()))(call.arrays)
        )

    assert program(dropout_rate=0.0, dropout_seed=3) == program()
    assert program(dropout_rate=0.1, dropout_seed=3) != program()


def test_the_output_is_the_mean_of_many_seeds():
    """Unbiased, at the rate that is applied: 13 of 128."""
    q = jnp.zeros((1, 64, 2, 8))
    v = jax.random.normal(jax.random.key(0), (1, 64, 2, 8))
    run = lambda seed: flash_attention(  # noqa: E731
        q, q, v, dropout_rate=0.1, dropout_seed=seed
    )
    outs = jit(jax.vmap(run))(jnp.arange(600, dtype=jnp.int32))
    want = flash_attention(q, q, v)
    # sqrt(13 / 115 / 64 / 600), of terms of 1 and 64 x 8 x 2 results of 64 equal rows
    off = np.abs(f64(outs).mean(0) - f64(want)).max()
    assert 1e-5 < off < 6 * np.sqrt(13 / 115 / 64 / 600)
    assert abs(f64(outs).mean((0, 1, 2)) - f64(want).mean((0, 1))).max() < 2e-3


# ---- seeds ---------------------------------------------------------------------------


def test_a_seed_is_the_same_in_any_form(rng):
    call = drawn(rng)
    want = f64(call.run())
    for seed in (7, np.int64(7), np.uint8(7), np.array(7), jnp.uint32(7), jnp.int16(7)):
        np.testing.assert_array_equal(call.replace(dropout_seed=seed).run(), want)
    key = jax.random.key(7)
    raw = call.replace(dropout_seed=jax.random.key_data(key)).run()
    np.testing.assert_array_equal(call.replace(dropout_seed=key).run(), raw)
    many = np.array([-1, 2**40 + 5])
    lists = call.replace(dropout_seed=many.tolist()).run()
    np.testing.assert_array_equal(call.replace(dropout_seed=many).run(), lists)


def test_a_seed_is_the_same_on_the_host_and_on_a_device(rng):
    """Also of 64 bits, below 0, traced, and in a list."""
    call = drawn(rng)
    run = jit(lambda seed: call.replace(dropout_seed=seed).run())
    with jax.enable_x64(True):
        for seed in (-1, 2**40 + 5, -(2**63), 2**63, 2**64 - 1):
            want = f64(call.replace(dropout_seed=seed).run())
            wide = (np.uint64 if seed >= 2**63 else np.int64)(seed)
            np.testing.assert_allclose(run(jnp.asarray(wide)), want, atol=2e-6)
            pair = np.array([wide, wide // 3])
            want = f64(call.replace(dropout_seed=pair).run())
            np.testing.assert_allclose(run(jnp.asarray(pair)), want, atol=2e-6)
    for seed in (jnp.int8(-1), jnp.int32(-1)):
        want = f64(call.replace(dropout_seed=-1).run())
        np.testing.assert_allclose(run(seed), want, atol=2e-6)
    pair = f64(call.replace(dropout_seed=jnp.int32([4, 9])).run())
    for seeds in ([jnp.int32(4), 9], [4, 9], range(4, 14, 5), np.uint8([4, 9])):
        np.testing.assert_array_equal(call.replace(dropout_seed=seeds).run(), pair)


def test_each_seed_member_and_head_has_its_own_bits(rng):
    """Of one seed; and a member's do not depend on its place, if it has its seed."""
    x = jnp.broadcast_to(
        jax.random.normal(jax.random.key(1), (1, 40, 1, 8)), (3, 40, 2, 8)
    )
    attend = functools.partial(flash_attention, x, x, x, dropout_rate=0.5)
    seen = [f64(attend(dropout_seed=seed))[b, :, n]
            for seed in (0, 1, -1, 2**32, 2**63, jax.random.key(1))
            for b in range(3) for n in range(2)]  # fmt: skip
    assert len({a.tobytes() for a in seen}) == len(seen)
    own = f64(attend(dropout_seed=jnp.int32([5, 9, 5])))
    np.testing.assert_array_equal(own[0], own[2])
    assert (own[0] != own[1]).any() and (own[0, :, 0] != own[0, :, 1]).any()
    alone = flash_attention(
        x[1:2], x[1:2], x[1:2], dropout_rate=0.5, dropout_seed=jnp.int32([9])
    )
    assert_close(alone[0], own[1], F32)
    shared = f64(attend(dropout_seed=jnp.full((3, 2), 4)))
    assert (shared == shared[:1, :, :1]).all()
    keys = f64(attend(dropout_seed=jax.random.split(jax.random.key(2), 3)))
    assert (keys[0] != keys[1]).any()


def test_new_seeds_do_not_recompile(rng):
    call = drawn(rng)
    counted = []

    @jax.jit
    def f(arrays, seed):
        counted.append(seed)
        return call.replace(**arrays, dropout_seed=seed).run()

    outs = [f(call.arrays, jnp.int32(seed)) for seed in (1, 2)]
    outs += [f(call.arrays, jax.random.key(seed)) for seed in (1, 2)]
    assert len(counted) == 2 and len({f64(o).tobytes() for o in outs}) == 4


# ---- positions -----------------------------------------------------------------------


@by_main_kernel()
def test_parts_of_a_call_see_the_pairs_of_all_of_it(rng, implementation, dtype):
    """Of queries and of keys, by their offsets; as over a ring of devices."""
    call = drawn(rng, dtype, q_len=130, kv_len=130, causal=True)
    x = call.arrays
    run = functools.partial(
        flash_attention, causal=True, dropout_rate=RATE, dropout_seed=7,
        implementation=implementation, return_lse=True,
    )  # fmt: skip
    whole, lse = run(x["q"], x["k"], x["v"])
    for t0, t1 in ((0, 48), (48, 130)):
        q, parts = x["q"][:, t0:t1], []
        for s0, s1 in ((0, 64), (64, 80), (80, 130)):
            part = (x["k"][:, s0:s1], x["v"][:, s0:s1])
            parts.append(run(q, *part, q_offset=t0, kv_offset=jnp.int32([s0, s0])))
        out, joint = merge_attention(parts)
        assert_close(out, whole[:, t0:t1], dtype)
        assert_close(joint, lse[:, t0:t1], F32)


def test_offsets_count_in_whole_blocks(rng):
    """From the block of 16 on in which they lie, below 0, too."""
    call = drawn(rng, causal=True)
    at = {d: f64(call.replace(q_offset=d, kv_offset=d).run()) for d in (0, 5, 15, -1)}
    np.testing.assert_array_equal(at[5], at[0])
    np.testing.assert_array_equal(at[15], at[0])
    assert (at[-1] != at[0]).any()
    assert_exact(call.replace(q_offset=-37, kv_offset=-90), "xla")


# ---- transforms ----------------------------------------------------------------------


def members(call: Call, axes: dict[str, Any], count: int) -> list[Call]:
    def member(i: int) -> Call:
        given = call.arrays | call.operands
        return call.replace(**{
            n: jnp.take(x, i, axes[n]) if axes.get(n) is not None else x
            for n, x in given.items()
        })  # fmt: skip

    return [member(i) for i in range(count)]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    "names",
    [("q",), ("k", "v"), ("dropout_seed",), ("q", "k", "v"), ("v", "dropout_seed")],
    ids="-".join,
)
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_vmap_is_each_member_alone(rng, names, axis, packed):
    """Bit for bit what is kept; a seed that all share keeps the same for all."""
    count, options = 3, {"q_len": 20, "kv_len": 24, "dim": 8, "packed": packed}
    call = drawn(rng, **options)
    if packed:
        cu = (jnp.int32([0, 11, 20]), jnp.int32([1, 10, 24]))
        call = call.replace(cu_seqlens=cu)
    axes = dict.fromkeys((*call.arrays, *call.operands))
    for name in names:
        at = 0 if name == "dropout_seed" else axis
        axes[name] = at
        if name == "dropout_seed":
            x = jnp.int32([4, 5, 6])
        else:
            x = cast(rng.standard_normal((count, *call.arrays[name].shape)), F32)
            x = jnp.moveaxis(x, 0, at)
        call = call.replace(**{name: x})
    given = call.arrays | call.operands

    def out(given: Any) -> Any:
        return flash_attention(**given, dropout_rate=RATE)

    got = jit(jax.vmap(out, (axes,)))(given)
    for i, member in enumerate(members(call, axes, count)):
        assert_close(got[i], truth_of_out(member), F32)


def truth_of_out(call: Call) -> np.ndarray:
    shape = (*call.arrays["q"].shape[:-1], call.arrays["v"].shape[-1])
    return truth(call, (np.zeros(shape), np.zeros(shape[:-1])))["out"]


def test_the_backward_pass_recomputes_what_is_kept(rng):
    """Under checkpoint, and from scan to scan."""
    call = drawn(rng, causal=True)

    def f(arrays: Any, seed: Any) -> Any:
        out = call.replace(**arrays, dropout_seed=seed).run()
        return jnp.sum(out * call.cotangents[0])

    want = jit(jax.grad(f))(call.arrays, 7)
    got = jit(jax.grad(jax.checkpoint(f)))(call.arrays, 7)
    jax.tree.map(np.testing.assert_array_equal, got, want)

    def steps(arrays: Any) -> Any:
        step = lambda total, seed: (total + f(arrays, seed), None)  # noqa: E731
        return jax.lax.scan(step, 0.0, jnp.arange(3))[0]

    got = jit(jax.grad(steps))(call.arrays)
    each = [jit(jax.grad(f))(call.arrays, seed) for seed in range(3)]
    for name, x in got.items():
        assert_close(x, sum(f64(g[name]) for g in each), F32)


SECOND = {
    "causal": {"causal": True},
    "softcap, sinks": {"softcap": 2.0, "sinks": cast([0.1, -0.3], F32)},
}


@pytest.mark.parametrize("name", SECOND)
def test_forward_mode_and_second_derivatives(rng, name):
    """Against those of the definition, which JAX differentiates itself."""
    sizes = {"batch": 1, "q_len": 17, "kv_len": 20, "heads": 2, "kv_heads": 1, "dim": 8}
    call = drawn(rng, **sizes, **SECOND[name])
    given = {**call.operands, **call.static}
    arrays = call.arrays
    config, x = arguments.normalize("", **arrays, **given)

    def ours(arrays: Any) -> Any:
        return flash_attention(**arrays, **given, return_lse=True)

    def plain(arrays: Any) -> Any:
        moved = arrays | ({"sinks": arrays["sinks"][None]} if "sinks" in arrays else {})
        out, lse = dense.dense_attention(config, x._replace(**moved))
        return out, jnp.swapaxes(lse, 1, 2)

    along = jax.tree.map(lambda a: cast(rng.standard_normal(a.shape), F32), arrays)
    ct = call.cotangents

    def loss(f: Any) -> Any:
        def of(arrays: Any) -> Any:
            out, lse = f(arrays)
            return jnp.sum(out * ct[0]) + jnp.sum(jnp.sin(lse) * ct[1])

        return of

    asks = {
        "jvp": lambda f: jax.jvp(f, (arrays,), (along,))[1],
        "grad": lambda f: jax.grad(loss(f))(arrays),
        "forward over reverse": lambda f: jax.jvp(
            jax.grad(loss(f)), (arrays,), (along,)
        )[1],
        "reverse over forward": lambda f: jax.grad(
            lambda arrays: jax.jvp(loss(f), (arrays,), (along,))[1]
        )(arrays),
    }
    for what, ask in asks.items():
        got, want = jit(lambda ask=ask: ask(ours))(), jit(lambda ask=ask: ask(plain))()
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(
                a, b, atol=5e-5 * (1 + np.abs(b).max()), err_msg=what
            )


# ---- sharding ------------------------------------------------------------------------


@pytest.mark.usefixtures("four_cpus")
@by_axis_type
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_a_sharded_call_is_the_whole_one(rng, axis_type, kv_heads):
    call = drawn(rng, q_len=20, kv_len=24, kv_heads=kv_heads, dim=8, batch=4)
    mesh = mesh_of(axis_type)
    cut = P("b", None, "h" if kv_heads > 1 else None)
    specs = {"q": P("b", None, "h"), "k": cut, "v": cut}
    put = lambda name, x: jax.device_put(x, NamedSharding(mesh, specs[name]))  # noqa: E731
    arrays = {name: put(name, x) for name, x in call.arrays.items()}

    def f(arrays: Any) -> Any:
        out = flash_attention(**arrays, dropout_rate=RATE, dropout_seed=7)
        return jnp.sum(out**2), out

    with jax.set_mesh(mesh):
        got, out = jit(jax.grad(f, has_aux=True))(arrays)
    want, plain = jit(jax.grad(f, has_aux=True))(call.arrays)
    assert_close(out, plain, F32)
    for name, x in got.items():
        assert_close(x, want[name], F32)


@pytest.mark.usefixtures("four_cpus")
def test_inside_shard_map_a_call_is_its_own(rng):
    """Its members and heads count from 0; seeds of members travel with them."""
    mesh = mesh_of()
    call = drawn(rng, q_len=20, kv_len=24, dim=8, batch=4, kv_heads=4)
    seeds = jnp.arange(16, dtype=jnp.int32).reshape(4, 4)
    spec = P("b", None, "h")

    def f(q: Any, k: Any, v: Any, seeds: Any) -> Any:
        return flash_attention(q, k, v, dropout_rate=RATE, dropout_seed=seeds)

    cut = jax.shard_map(
        f, mesh=mesh, in_specs=(spec, spec, spec, P("b", "h")), out_specs=spec
    )
    x = tuple(call.arrays[n] for n in "qkv")
    assert_close(jit(cut)(*x, seeds), jit(f)(*x, seeds), F32)

    def same(q: Any, k: Any, v: Any) -> Any:
        return flash_attention(q, k, v, dropout_rate=RATE, dropout_seed=3)

    alike = jax.shard_map(same, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    got = jit(alike)(*(jnp.tile(a[:2, :, :2], (2, 1, 2, 1)) for a in x))
    np.testing.assert_array_equal(got[:2], got[2:])

    def other(q: Any, k: Any, v: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(3), jax.lax.axis_index("b"))
        return flash_attention(q, k, v, dropout_rate=RATE, dropout_seed=key)

    others = jax.shard_map(other, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    got = jit(others)(*(jnp.tile(a[:2, :, :2], (2, 1, 2, 1)) for a in x))
    assert (f64(got)[:2] != f64(got)[2:]).any((1, 3)).all()
    np.testing.assert_array_equal(got[:, :, :2], got[:, :, 2:])


# ---- on a GPU ------------------------------------------------------------------------

DIMS = {64: BF16, 96: F16, 128: BF16, 192: F16, 256: BF16}
by_gpu_kernel = pytest.mark.parametrize(
    "implementation", [k for k in KERNELS if k != "xla"] or ["cuda"]
)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", ["full", "causal", "lengths"])
@by_gpu_kernel
def test_the_kernels_of_every_head_dim(rng, implementation, dim, name):
    sizes = {"q_len": 300, "kv_len": 320, "heads": 4, "kv_heads": 2, "dim": dim}
    # Of 192 columns keys have two kernels, by the columns of values.
    value_dim = 128 if dim == 192 and name != "full" else dim
    call = drawn(rng, DIMS[dim], **sizes, value_dim=value_dim)
    if name == "causal":
        call = call.replace(causal=True, q_offset=jnp.int32(20))
    elif name == "lengths":
        lens = {"q_lens": jnp.int32([300, 77]), "kv_lens": jnp.int32([9, 320])}
        call = call.replace(**lens)
    assert_exact(call, implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
@by_gpu_kernel
def test_kernels_and_plain_jax_drop_the_same(dim, implementation):
    """Where every CTA has several tiles, and tiles of a wide launch."""
    shape = (2, 2100, 8, dim)
    q, k, v, d_o = jax.random.normal(jax.random.key(0), (4, *shape), BF16)

    def f(implementation: str) -> Any:
        def loss(q: Any, k: Any, v: Any) -> Any:
            out = flash_attention(
                q, k[:, :, :4], v[:, :, :4], causal=True, dropout_rate=0.1,
                dropout_seed=1, implementation=implementation,
            )  # fmt: skip
            return jnp.sum((out * d_o).astype(F32)), out

        grads, out = jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
        return [*grads, out]

    for got, want in zip(f(implementation), f("xla"), strict=True):
        off = np.linalg.norm(f64(got) - f64(want)) / np.linalg.norm(f64(want))
        assert off < 2e-2, off
