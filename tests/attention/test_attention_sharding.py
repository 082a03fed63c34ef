"""Sharded attention stays on its devices: batch and heads are cut, sums are right."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_bar import assert_close
from attention_model import (
    F32,
    Call,
    cast,
    draw,
    draw_segments,
    draw_tiles,
    f64,
    jit,
    truth,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import by_axis_type, mesh_of

from jax_kvblock import AttentionTiles, flash_attention

GATHERS = re.compile(
    r"all-gather|all-to-all|collective-permute|reduce-scatter|"
    r"collective-broadcast|\bsend\b|\brecv\b"
)
SUMS = re.compile(r"\ball-reduce(?:-start)?\(")

pytestmark = pytest.mark.usefixtures("four_cpus")


# ---- where each operand lives --------------------------------------------------------

HEADS = {"MHA": 4, "GQA": 2, "MQA": 1}
B = P("b")


def specs(call):
    """Batch over "b", heads over "h"; what is shared, or one head, is everywhere."""
    cut = lambda name, extent: name if extent > 1 else None  # noqa: E731
    arrays = {"q": P("b", None, "h")}
    for name in ("k", "v"):
        arrays[name] = P("b", None, cut("h", call.arrays[name].shape[2]))
    if "bias" in call.arrays:
        b, n = call.arrays["bias"].shape[:2]
        arrays["bias"] = P(cut("b", b), cut("h", n))
    if "sinks" in call.arrays:
        arrays["sinks"] = P("h")

    def of_operand(name, x):
        if name == "tiles":
            shape = x.counts.shape
            spec = P(cut("b", shape[0]), cut("h", shape[1]))
            return AttentionTiles(
                spec,
                spec,
                x.block_q,
                x.block_kv,
                partial=None if x.partial is None else spec,
                masks=None if x.masks is None else P(),  # whole everywhere
            )
        return jax.tree.map(lambda x: B if x.ndim else P(), x)

    operands = {n: of_operand(n, x) for n, x in call.operands.items()}
    return arrays, operands, (P("b", None, "h"), P("b", None, "h"))


def place(call, mesh):
    parts = (call.arrays, call.operands, call.cotangents)
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    return jax.tree.map(put, parts, specs(call))


OPTIONS = {
    "causal": {},
    "bias": {"bias": (4, 4)},
    "bias shared by the batch": {"bias": (1, 4)},
    "bias shared by the heads": {"bias": (4, 1)},
    "bias shared by all": {"bias": (1, 1)},
    "sinks": {"sinks": True},
    "lens": {"lens": True},
    "segments": {"segments": True},
    "tiles": {"tiles": (False, False)},
    "shared tiles": {"tiles": (True, True)},
    "masks": {"masks": (4, 4)},
    "shared masks": {"masks": (1, 1)},
}
# All of them in GQA; for the others those that could differ.
TABLE = [("GQA", name) for name in OPTIONS]
TABLE += [(heads, name) for heads in ("MHA", "MQA") for name in list(OPTIONS)[:3]]
TABLE += [("MQA", "sinks"), ("MQA", "tiles"), ("MQA", "bias shared by all")]
by_row = pytest.mark.parametrize(("heads", "options"), TABLE)


def make(rng, heads, options):
    sizes = {"batch": 4, "q_len": 6, "kv_len": 6, "heads": 4, "dim": 8}
    call = draw(rng, F32, **sizes, kv_heads=HEADS[heads], causal=True)
    options = OPTIONS[options]
    if "bias" in options:
        bias = cast(rng.standard_normal((*options["bias"], 6, 6)), F32)
        call = call.replace(bias=bias)
    if "sinks" in options:
        call = call.replace(sinks=cast([2, -1, 0.5, 3], F32))
    if "lens" in options:
        lens = rng.integers(1, 7, (2, 4)).astype(np.int32)
        offsets = jnp.asarray([0, 1, 2, 3], jnp.int32)
        call = call.replace(q_lens=lens[0], kv_lens=lens[1], q_offset=offsets)
    if "segments" in options:
        call = call.replace(segment_ids=draw_segments(rng, 4, 6))
    if "tiles" in options:
        call = call.replace(tiles=draw_tiles(rng, call, options["tiles"]))
    if "masks" in options:
        mask = rng.random((*options["masks"], 6, 6)) < 0.7
        call = call.replace(tiles=AttentionTiles.from_mask(mask))
    return call


def summed(call):
    """The gradients that devices have to add up, and over which axes."""
    x, found = call.arrays, {}
    if x["k"].shape[2] == 1:
        found |= {"d_k": "h", "d_v": "h"}
    if "bias" in x:
        shared = "".join(
            n for n, s in zip("bh", x["bias"].shape, strict=False) if s == 1
        )
        if shared:
            found["d_bias"] = shared
    if "sinks" in x:
        found["d_sinks"] = "b"
    return found


def forward(call):
    def f(arrays, operands, cotangents):
        out, lse = flash_attention(**arrays, **operands, **call.static, return_lse=True)
        return {"out": out, "lse": lse}

    return f


def backward(call):
    def f(arrays, operands, cotangents):
        attend = lambda x: flash_attention(  # noqa: E731
            **x, **operands, **call.static, return_lse=True
        )
        _, pull = jax.vjp(attend, arrays)
        return {f"d_{n}": x for n, x in pull(cotangents)[0].items()}

    return f


def assert_sharded(name, x, mesh, spec):
    want = NamedSharding(mesh, spec)
    assert x.sharding.is_equivalent_to(want, x.ndim), (name, x.sharding, want)


# ---- under jit -----------------------------------------------------------------------


def test_the_checks_see_traffic():
    mesh = mesh_of()
    x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("b")))
    everywhere = NamedSharding(mesh, P())
    gathered = jax.jit(lambda x: x * 2, out_shardings=everywhere).lower(x).compile()
    assert GATHERS.search(gathered.as_text())
    total = jax.jit(jnp.sum).lower(x).compile()
    assert SUMS.search(total.as_text())


@by_axis_type
@by_row
def test_forward(rng, heads, options, axis_type):
    """Nothing moves, and what comes out is cut as q is."""
    mesh, call = mesh_of(axis_type), make(rng, heads, options)
    args = place(call, mesh)
    with jax.set_mesh(mesh):
        compiled = jit(forward(call)).lower(*args).compile()
        got = compiled(*args)
    text = compiled.as_text()
    assert not GATHERS.search(text), GATHERS.findall(text)
    assert not SUMS.search(text), SUMS.findall(text)
    want = truth(call)
    for name, x in got.items():
        assert_sharded(name, x, mesh, P("b", None, "h"))
        assert_close(x, want[name])


@pytest.mark.wide
@by_axis_type
@by_row
def test_gradients(rng, heads, options, axis_type):
    """Nothing is gathered; what is shared is summed, and nothing else is."""
    mesh, call = mesh_of(axis_type), make(rng, heads, options)
    args, sums = place(call, mesh), summed(call)
    with jax.set_mesh(mesh):
        compiled = jit(backward(call)).lower(*args).compile()
        got = compiled(*args)
    text = compiled.as_text()
    assert not GATHERS.search(text), GATHERS.findall(text)
    assert bool(SUMS.search(text)) == bool(sums), (sums, SUMS.findall(text))
    want = truth(call)
    for name, x in got.items():
        assert_sharded(name, x, mesh, specs(call)[0][name.removeprefix("d_")])
        assert_close(x, want[name])


MOVED = [("GQA", "bias shared by the batch"), ("MQA", "sinks"), ("MQA", "bias")]


@by_axis_type
@pytest.mark.parametrize(("heads", "options"), MOVED)
def test_forward_mode_and_products_with_the_hessian(rng, heads, options, axis_type):
    """As on one device; nothing is gathered, and results lie as their arrays do."""
    mesh, call = mesh_of(axis_type), make(rng, heads, options)
    way = {n: cast(rng.standard_normal(x.shape), F32) for n, x in call.arrays.items()}

    def derivatives(arrays, way):
        attend = lambda x: Call(x, call.operands, call.static, None).run()  # noqa: E731
        loss = lambda x: jnp.sum(jnp.square(attend(x)))  # noqa: E731
        moved = lambda f: jax.jvp(f, (arrays,), (way,))[1]  # noqa: E731
        return {"out": moved(attend)} | moved(jax.grad(loss))

    want = jit(derivatives)(call.arrays, way)
    placed = place(dataclasses.replace(call, operands={}), mesh)[0]
    way = {n: jax.device_put(x, placed[n].sharding) for n, x in way.items()}
    with jax.set_mesh(mesh):
        compiled = jit(derivatives).lower(placed, way).compile()
        got = compiled(placed, way)
    text = compiled.as_text()
    assert not GATHERS.search(text), GATHERS.findall(text)
    assert SUMS.search(text)
    lie = specs(call)[0] | {"out": P("b", None, "h")}
    for name, x in got.items():
        assert_sharded(name, x, mesh, lie[name])
        assert_close(x, f64(want[name]), F32)


def test_products_where_one_array_is_cut(rng):
    """On an explicit mesh, by every order: cotangents lie as their arrays do."""
    mesh, call = mesh_of(AxisType.Explicit), make(rng, "GQA", "sinks")
    way = {n: cast(rng.standard_normal(x.shape), F32) for n, x in call.arrays.items()}

    def products(arrays, way):
        loss = lambda x: jnp.sum(jnp.square(flash_attention(**x, causal=True)))  # noqa: E731
        moved = lambda f: lambda x: jax.jvp(f, (x,), (way,))[1]  # noqa: E731
        _, again = jax.vjp(jax.grad(loss), arrays)
        return jax.grad(moved(loss))(arrays), again(way)[0]

    want = jit(products)(call.arrays, way)
    spec = {n: P() for n in way} | {"q": P("b", None, "h")}
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    placed, way = (
        {n: put(x, spec[n]) for n, x in a.items()} for a in (call.arrays, way)
    )
    with jax.set_mesh(mesh):
        got = jit(products)(placed, way)
    for found, right in zip(got, want, strict=True):
        for name, x in found.items():
            assert_sharded(name, x, mesh, spec[name])
            assert_close(x, f64(right[name]), F32)


@pytest.mark.parametrize("heads", ["GQA", "MQA"])
def test_forward_mode_and_products_inside_shard_map(rng, heads):
    """Of varying and of replicated arrays, in varying and in replicated directions."""
    mesh, call = mesh_of(), make(rng, heads, "sinks")
    way = {n: cast(rng.standard_normal(x.shape), F32) for n, x in call.arrays.items()}
    args, (arrays, _, _) = place(call, mesh), specs(call)

    def derivatives(attend, x, way):
        loss = lambda x: jnp.sum(jnp.square(attend(x)))  # noqa: E731
        moved = lambda f: jax.jvp(f, (x,), (way,))[1]  # noqa: E731
        return moved(attend), moved(jax.grad(loss))

    attend = lambda x: flash_attention(**x, causal=True)  # noqa: E731
    mapped = jax.shard_map(
        functools.partial(derivatives, attend),
        mesh=mesh,
        in_specs=(arrays, arrays),
        out_specs=(P("b", None, "h"), arrays),
    )
    got = jit(mapped)(args[0], way)
    want = jit(functools.partial(derivatives, attend))(call.arrays, way)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(x, f64(y), F32)


ONE_AXIS = [(h, c) for c in ("batch", "heads", "both on one") for h in HEADS]
ONE_AXIS.remove(("GQA", "heads"))  # two key heads over four devices: UNFIT


@pytest.mark.parametrize(("heads", "cut"), ONE_AXIS)
def test_one_axis_of_four(rng, heads, cut):
    """Four ways over the batch, over the heads, and two axes over one dim."""
    mesh = mesh_of(shape=(4, 1) if cut == "batch" else (1, 4))
    entry = {"batch": P("b"), "heads": P(None, None, "h")}.get(cut)
    if cut == "both on one":
        mesh, entry = mesh_of(), P(("b", "h"))
    call = make(rng, heads, "causal")
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    arrays = {n: put(x, entry if x.shape[2] > 1 or cut != "heads" else P())
              for n, x in call.arrays.items()}  # fmt: skip
    cotangents = tuple(put(x, entry) for x in call.cotangents)
    compiled = jit(backward(call)).lower(arrays, {}, cotangents).compile()
    text = compiled.as_text()
    assert not GATHERS.search(text), GATHERS.findall(text)
    want, got = truth(call), compiled(arrays, {}, cotangents)
    for name, x in got.items():
        assert_close(x, want[name])


UNFIT = {
    "two key heads over four devices": ((1, 4), P(None, None, "h"), P()),
    "rows and keys": ((2, 2), P("b", "h"), P("b", "h")),
    "head dims": ((2, 2), P("b", None, None, "h"), P("b", None, None, "h")),
    "keys alone": ((2, 2), P("b"), P("b", "h")),
}


@pytest.mark.parametrize("cut", UNFIT)
def test_other_cuts_are_right(rng, cut):
    """They may cost traffic, but never a wrong value."""
    shape, q_spec, k_spec = UNFIT[cut]
    mesh, call = mesh_of(shape=shape), make(rng, "GQA", "causal")
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    arrays = {n: put(x, q_spec if n == "q" else k_spec)
              for n, x in call.arrays.items()}  # fmt: skip
    got, want = jit(backward(call))(arrays, {}, call.cotangents), truth(call)
    for name, x in got.items():
        assert_close(x, want[name])


@by_axis_type
def test_vmap_stays_sharded(rng, axis_type):
    """Members, batch and heads at once: on an explicit mesh folding does not gather.

    On automatic axes B behind a new axis is not kept cut, as docs/attention.md says.
    """
    mesh, calls = mesh_of(axis_type), [make(rng, "GQA", "sinks") for _ in range(2)]
    arrays, cotangents = (
        jax.tree.map(lambda *x: jnp.stack(x), *parts)
        for parts in zip(*((c.arrays, c.cotangents) for c in calls), strict=True)
    )
    arrays["sinks"] = arrays["sinks"][0]
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    wide = (None, "b", None, "h")
    arrays = {n: put(x, *(wide if x.ndim > 1 else ("h",))) for n, x in arrays.items()}
    cotangents = tuple(put(x, *wide) for x in cotangents)
    axes = {"q": 0, "k": 0, "v": 0, "sinks": None}

    def f(arrays, cotangents):
        attend = lambda x: flash_attention(**x, causal=True, return_lse=True)  # noqa: E731
        got, pull = jax.vjp(jax.vmap(attend, (axes,)), arrays)
        return got, pull(cotangents)[0]

    with jax.set_mesh(mesh):
        compiled = jit(f).lower(arrays, cotangents).compile()
        (out, lse), grads = compiled(arrays, cotangents)
    if axis_type == AxisType.Explicit:
        assert not GATHERS.search(compiled.as_text())
    want = [truth(c.replace(sinks=calls[0].arrays["sinks"])) for c in calls]
    for i in range(2):
        assert_close(out[i], want[i]["out"])
        assert_close(lse[i], want[i]["lse"])
        for name in "qkv":
            assert_close(grads[name][i], want[i][f"d_{name}"])
    assert_close(grads["sinks"], want[0]["d_sinks"] + want[1]["d_sinks"])


# ---- inside shard_map ----------------------------------------------------------------


@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize(
    ("heads", "options"),
    [
        ("GQA", "bias shared by the batch"),
        ("GQA", "sinks"),
        ("MQA", "lens"),
        ("MQA", "bias shared by all"),
        ("MHA", "shared tiles"),
        ("GQA", "segments"),
    ],
)
def test_shard_map(rng, heads, options, gradients):
    """With its default checks; gradients of what is shared are summed by its vjp."""
    mesh, call = mesh_of(), make(rng, heads, options)
    args, (arrays, operands, outs) = place(call, mesh), specs(call)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(arrays, operands), out_specs=outs
    )
    def attend(arrays, operands):
        return flash_attention(**arrays, **operands, **call.static, return_lse=True)

    def f(arrays, operands, cotangents):
        if not gradients:
            return dict(zip(("out", "lse"), attend(arrays, operands), strict=True))
        _, pull = jax.vjp(lambda x: attend(x, operands), arrays)
        return {f"d_{n}": x for n, x in pull(cotangents)[0].items()}

    compiled = jit(f).lower(*args).compile()
    assert not GATHERS.search(compiled.as_text())
    want = truth(call)
    for name, x in compiled(*args).items():
        assert_close(x, want[name])


@pytest.mark.parametrize("heads", ["GQA", "MQA"])
def test_grad_inside_shard_map(rng, heads):
    """Of varying and of replicated arrays: the latter's gradients are summed inside."""
    mesh, call = mesh_of(), make(rng, heads, "sinks")
    args, (arrays, _, outs) = place(call, mesh), specs(call)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(arrays, outs), out_specs=arrays
    )
    def slopes(arrays, cotangents):
        attend = lambda x: flash_attention(**x, causal=True, return_lse=True)  # noqa: E731
        _, pull = jax.vjp(attend, arrays)
        return pull(cotangents)[0]

    got, want = jit(slopes)(args[0], args[2]), truth(call)
    for name, x in got.items():
        assert_close(x, want[f"d_{name}"])


@pytest.mark.parametrize("causal", [False, True])
def test_ring(rng, causal):
    """Keys go round, offsets are the shard's index, parts merge by logaddexp."""
    mesh = jax.make_mesh((4,), ("s",), (AxisType.Auto,), devices=jax.devices("cpu")[:4])
    call = draw(rng, F32, q_len=12, kv_len=16, dim=8)
    call = call.replace(
        causal=causal or None, q_offset=jnp.int32(4) if causal else None
    )
    cut = P(None, "s")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(cut,) * 3, out_specs=cut)
    def ring(q, k, v):
        me = jax.lax.axis_index("s")
        out = jnp.zeros_like(q)
        lse = jax.lax.pcast(jnp.full(q.shape[:3], -jnp.inf), "s", to="varying")
        for step in range(4):
            owner = (me - step) % 4
            out_i, lse_i = flash_attention(
                q, k, v, causal=causal, return_lse=True,
                q_offset=me * 3 + 4, kv_offset=owner * 4,
            )  # fmt: skip
            new = jnp.logaddexp(lse, lse_i)
            # A first shard may hold nothing that a row attends to.
            safe = jnp.where(jnp.isneginf(new), 0, new)
            a, b = (jnp.exp(x - safe)[..., None] for x in (lse, lse_i))
            out, lse = a * out + b * out_i, new
            k, v = (jax.lax.ppermute(x, "s", [(i, (i + 1) % 4) for i in range(4)])
                    for x in (k, v))  # fmt: skip
        return out, lse

    arrays = [call.arrays[n] for n in "qkv"]
    put = lambda x: jax.device_put(x, NamedSharding(mesh, cut))  # noqa: E731

    @jit
    def f(arrays, cotangents):
        got, pull = jax.vjp(lambda *x: ring(*x), *arrays)
        return got, pull(cotangents)

    (out, lse), grads = f([put(x) for x in arrays], tuple(map(put, call.cotangents)))
    want = truth(call)
    assert_close(out, want["out"])
    assert_close(lse, want["lse"])
    for name, grad in zip("qkv", grads, strict=True):
        assert_close(grad, want[f"d_{name}"])


def test_sequences_over_devices_packed(rng):
    """Packed calls have no batch to cut: heads are."""
    mesh = mesh_of()
    call = draw(rng, F32, packed=True, q_len=9, kv_len=9, heads=4, dim=8, causal=True)
    cu = jnp.asarray([0, 4, 9], jnp.int32)
    call = call.replace(cu_seqlens=(cu, cu))
    put = lambda x: jax.device_put(x, NamedSharding(mesh, P(None, "h")))  # noqa: E731
    arrays, cotangents = jax.tree.map(put, (call.arrays, call.cotangents))
    compiled = jit(backward(call)).lower(arrays, call.operands, cotangents).compile()
    assert not GATHERS.search(compiled.as_text())
    got, want = compiled(arrays, call.operands, cotangents), truth(call)
    for name, x in got.items():
        assert_close(x, want[name])


def test_eager_calls_take_sharded_arrays(rng):
    mesh, call = mesh_of(), make(rng, "GQA", "sinks")
    arrays, operands, _ = place(call, mesh)
    out = Call(arrays, operands, call.static, None).run()
    assert_sharded("out", out, mesh, P("b", None, "h"))
    assert_close(out, truth(call)["out"])
