"""`joined` and `backward_added` transformed: vmap, donation, meshes, derivatives."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_model import F32, cast, draw, jit
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import by_axis_type, mesh_of, put
from test_attention_joined import bits, checked, others_of
from test_attention_sharding import GATHERS, SUMS

from jax_kvblock.attention import primitive
from jax_kvblock.attention.config import AttentionConfig, Operands
from jax_kvblock.attention.ops import LogSumExp


def stacked(each: list[Any], names: set[str]) -> tuple[Any, Any]:
    """Dictionaries as one, with a batch of `names`, and the axes of it."""
    axes = {n: (i % 2 if n in names else None) for i, n in enumerate(each[0])}
    together = {
        n: x if axes[n] is None else jnp.stack([one[n] for one in each], axes[n])
        for n, x in each[0].items()
    }
    return together, axes


def members(rng: np.random.Generator, packed: bool) -> tuple[AttentionConfig, list]:
    """The operands of three calls of one config, and what other keys gave them."""
    made = []
    for i in range(3):
        if packed:
            bounds = np.int32([1, 4, 7 + i]), np.int32([0, 6 + i, 10])
            call = draw(rng, packed=True, q_len=11, kv_len=11, cu_seqlens=bounds)
        else:
            lens = {"q_lens": np.int32([9, 11 - i]), "kv_lens": np.int32([i, 8])}
            call = draw(rng, q_len=11, kv_len=11, **lens)
        config, x = checked(call.replace(causal=True))
        before = others_of(rng, call)
        before = dataclasses.replace(before, lse=before.lse + 3)  # of gradients near 1
        arrays = {n: a for n, a in x._asdict().items() if a is not None}
        rows = {"delta": cast(rng.standard_normal(before.lse.shape), F32)}
        rows["d_o"] = call.cotangents[0]
        made.append(arrays | vars(before) | rows)
    return config, made


def run_joined(config: AttentionConfig, given: dict[str, Any]) -> Any:
    x = Operands(**{n: a for n, a in given.items() if n in Operands._fields})
    return primitive.joined(config, x, given["o"], given["lse"])


def run_added(config: AttentionConfig, given: dict[str, Any]) -> Any:
    x = Operands(**{n: a for n, a in given.items() if n in Operands._fields})
    rows = (LogSumExp(given["lse"]), given["delta"], given["d_o"], given["dq"])
    return primitive.backward(config, x, *rows)


USED = {run_joined: {"o", "lse"}, run_added: {"lse", "delta", "d_o", "dq"}}
by_run = pytest.mark.parametrize("run", USED, ids=lambda f: f.__name__)
BATCHES = {
    "all": None,
    "what others gave": {"o", "lse", "dq"},
    "o and dq alone": {"o", "dq"},
    "keys": {"k", "v"},
    "queries": {"q"},
    "mask": {"q_lens", "kv_lens", "cu_q", "cu_kv"},
}


@by_run
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("batched", BATCHES)
def test_vmap(rng, run, packed, batched):
    """Of some operands, at any axis: as one after the other."""
    config, each = members(rng, packed)
    each = [{n: a for n, a in one.items() if n in Operands._fields or n in USED[run]}
            for one in each]  # fmt: skip
    names = {*each[0]} if BATCHES[batched] is None else BATCHES[batched] & {*each[0]}
    each = [{n: (x if n in names else each[0])[n] for n in x} for x in each]
    given, axes = stacked(each, names)
    alone = functools.partial(run, config)
    got = jit(jax.vmap(alone, (axes,), axis_size=3))(given)
    wants = [jit(alone)(one) for one in each]
    assert any(not np.array_equal(a, b) for a, b in zip(*wants[:2], strict=True))
    for i, want in enumerate(wants):
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x[i], y, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_vmapped_rows_without_keys_keep_their_bits(rng, packed):
    config, each = members(rng, packed)
    given, axes = stacked(each, {*each[0]})
    got = jit(jax.vmap(functools.partial(run_joined, config), (axes,)))(given)
    for i, one in enumerate(each):
        x = Operands(**{n: a for n, a in one.items() if n in Operands._fields})
        own = primitive.forward(config, x)[1].value
        kept = np.isneginf(np.swapaxes(own, -1, -2))
        assert kept.any() and not kept.all()
        np.testing.assert_array_equal(bits(got[0][i])[kept], bits(one["o"])[kept])
        kept = np.swapaxes(kept, -1, -2)
        np.testing.assert_array_equal(bits(got[1][i])[kept], bits(one["lse"])[kept])


def test_donated(rng):
    """Memory of o, lse and dq may be taken for the results."""
    config, (given, *_) = members(rng, False)
    for run, names in ((run_joined, ("o", "lse")), (run_added, ("dq",))):
        want = jit(functools.partial(run, config))(given)
        rest = {n: a for n, a in given.items() if n not in names}
        taken = {n: jnp.array(given[n]) for n in names}
        f = jit(lambda taken, rest, run=run: run(config, taken | rest),
                donate_argnums=0)  # fmt: skip
        got = f(taken, rest)
        assert all(a.is_deleted() for a in taken.values())
        for x, y in zip(got, want, strict=True):
            np.testing.assert_array_equal(x, y)


@by_run
@by_axis_type
@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.usefixtures("four_cpus")
def test_over_a_mesh(rng, run, axis_type, kv_heads):
    """Batch and heads are cut: nothing is gathered, and dq is added once."""
    mesh = mesh_of(axis_type)
    call = draw(rng, batch=4, q_len=6, kv_len=6, kv_heads=kv_heads, dim=8)
    config, x = checked(call.replace(causal=True))
    before = others_of(rng, call)
    rows, turned = ("b", None, "h"), ("b", "h")
    keys = rows if kv_heads > 1 else ("b",)
    specs = {"q": rows, "k": keys, "v": keys, "o": rows, "lse": turned, "dq": rows}
    specs |= {"delta": turned, "d_o": rows}
    given = {"q": x.q, "k": x.k, "v": x.v, **vars(before), "d_o": call.cotangents[0]}
    given |= {"lse": jnp.full_like(before.lse, 2.0)}
    given |= {"delta": jnp.full_like(before.lse, 0.5)}
    given = {n: a for n, a in given.items() if n in "qkv" or n in USED[run]}
    want = jit(functools.partial(run, config))(given)
    placed = {n: put(a, mesh, *specs[n]) for n, a in given.items()}
    with jax.set_mesh(mesh):
        compiled = jit(functools.partial(run, config)).lower(placed).compile()
        got = compiled(placed)
    text = compiled.as_text()
    assert not GATHERS.search(text)
    assert bool(SUMS.search(text)) == (run is run_added and kv_heads == 1)
    names = ("o", "lse") if run is run_joined else ("q", "k", "v")
    for name, a, b in zip(names, got, want, strict=True):
        lies = NamedSharding(mesh, P(*specs[name]))
        assert a.sharding.is_equivalent_to(lies, a.ndim)
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6)


# ---- derivatives ---------------------------------------------------------------------


def test_who_joins_has_the_rule(rng):
    config, (given, *_) = members(rng, False)
    loss = lambda o: jnp.sum(run_joined(config, given | {"o": o})[0])  # noqa: E731
    with pytest.raises(NotImplementedError, match="no derivative of its own"):
        jax.grad(loss)(given["o"])


@pytest.mark.parametrize("moved", [("dq",), ("d_o", "delta"), ("q", "k", "lse", "dq")])
def test_added_has_the_derivatives_of_a_sum(rng, moved):
    """In forward mode, in reverse, and as a linear function."""
    config, (given, other, _) = members(rng, False)
    given["lse"], other["lse"] = (jnp.full_like(a["lse"], 3.0) for a in (given, other))
    x = {n: given[n] for n in moved}
    way = {n: other[n] for n in moved}

    def once(x: dict[str, Any]) -> Any:
        return run_added(config, given | x)

    def apart(x: dict[str, Any]) -> Any:
        all_ = given | x
        of = Operands(**{n: a for n, a in all_.items() if n in Operands._fields})
        rows = LogSumExp(all_["lse"]), all_["delta"], all_["d_o"]
        dq, *rest = primitive.backward(config, of, *rows)
        return dq + all_["dq"], *rest

    def derivatives(f: Any) -> Any:
        out, pull = jax.vjp(f, x)
        return jax.jvp(f, (x,), (way,)), pull(out)

    got, want = (jit(lambda f=f: derivatives(f))() for f in (once, apart))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=5e-6)
    if {"delta", "d_o", "dq"}.issuperset(moved):
        linear = {n: given[n] for n in ("delta", "d_o", "dq")}
        out = once(linear)
        got, want = (jax.linear_transpose(f, linear)(tuple(out)) for f in (once, apart))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=5e-6)
