"""The append under JAX's transforms: in plain JAX, and by the emulated kernel."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from append_cases import BASE, FP8, Case, Drawn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import by_axis_type, mesh_of
from settings import SETTINGS

import jax_kvblock as kv

COMPUTED = FP8.replaced(
    scale="computed", traced=True, zero_tail=True, norms="float32", tokens=12, dim=32
)
JOINED = BASE.replaced(joined=True, kind=("HND", True))
by_case = pytest.mark.parametrize(
    "case", [BASE, COMPUTED, JOINED], ids=["as it is", "computed scales", "joined"]
)


def hold(drawn: Drawn, made: Any) -> None:
    q, pool, *scales = made
    kept = scales[0] if scales else None
    drawn.hold(q, pool, kept and (kept.k, kept.v))


def call_of(drawn: Drawn, **static: Any) -> Any:
    """A function of arrays, and these."""
    given = drawn.tokens() | {"pool": drawn.pool()}
    given |= {"slots": drawn.slots, "positions": drawn.positions}
    if drawn.case.traced:
        given["layer"] = np.int32(drawn.case.layer)
    else:
        static["layer"] = drawn.case.layer
    given |= {n: x for n, x in drawn.storing().items() if n != "zero_tail"}
    static["zero_tail"] = drawn.case.zero_tail
    rotation = drawn.rotation()
    static |= {
        n: rotation.pop(n) for n in (*rotation,) if n not in ("q_norm", "k_norm")
    }
    given |= rotation
    static.pop("rotary_dim", None)

    def call(given: dict[str, Any]) -> Any:
        given = dict(given)
        if "layer" in given:
            given["layer"] = jnp.asarray(given["layer"])
        return kv.rope_append(**given, **static)

    return call, given


@by_case
def test_jit(case, by, rng):
    drawn = Drawn(case, rng)
    call, given = call_of(drawn)
    hold(drawn, jax.jit(call)(given))


@pytest.mark.parametrize("setting", SETTINGS)
@by_case
def test_settings(case, setting, by, rng):
    drawn = Drawn(case, rng)
    drawn.before = np.zeros_like(drawn.before)  # NaN is an error of debug_nans
    call, given = call_of(drawn)
    with SETTINGS[setting]():
        hold(drawn, call(given))
        hold(drawn, jax.jit(call)(given))


@by_case
def test_vmap(case, by, rng):
    """Each member has its own pool."""
    members = [Drawn(case, rng) for _ in range(3)]
    for one in members[1:]:  # what is compiled in
        one.inv_freq, one.k_scale, one.v_scale = (
            members[0].inv_freq,
            members[0].k_scale,
            members[0].v_scale,
        )
    call, _ = call_of(members[0])
    given = [call_of(one)[1] for one in members]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *given)
    made = jax.jit(jax.vmap(call))(stacked)
    for i, one in enumerate(members):
        hold(one, jax.tree.map(lambda a, i=i: a[i], made))


def test_vmap_of_the_tokens_alone(by, rng):
    """One pool becomes as many as there are members."""
    drawn = Drawn(BASE, rng)
    call, given = call_of(drawn)
    many = {n: np.stack([x] * 2) for n, x in given.items() if n in ("q", "k", "v")}
    axes = {n: 0 if n in many else None for n in given}
    made = jax.vmap(call, (axes,))(given | many)
    for i in range(2):
        hold(drawn, jax.tree.map(lambda a, i=i: a[i], made))


@pytest.mark.parametrize("contiguous", [True, False], ids=["one array", "by layers"])
def test_scan_over_layers_with_a_donated_pool(contiguous, by, rng):
    """Nothing of the pool is copied, and it stays where it is."""
    case = COMPUTED.replaced(kind=("HND", contiguous), blocks=64, block_size=16, dim=64)
    drawn = Drawn(case, rng)
    call, given = call_of(drawn)
    pool, scales = given.pop("pool"), given.pop("scales")
    del given["layer"]

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def layers(pool, scales, given):
        def one(kept, layer):
            pool, scales = kept
            q, *kept = call(given | {"pool": pool, "scales": scales, "layer": layer})
            return tuple(kept), q

        order = jnp.arange(case.layers, dtype=jnp.int32)
        kept, q = jax.lax.scan(one, (pool, scales), order)
        return q, *kept

    compiled = layers.lower(pool, scales, given).compile()
    memory = compiled.memory_analysis()
    held = pool.nbytes + 8 * scales.k.size
    assert memory.alias_size_in_bytes >= held
    assert memory.temp_size_in_bytes < held / 4
    assert pool_copies(compiled.as_text(), pool) == []
    before = [a.unsafe_buffer_pointer() for a in (*pool.arrays, scales.k, scales.v)]
    q, pool, scales = layers(pool, scales, given)
    after = [a.unsafe_buffer_pointer() for a in (*pool.arrays, scales.k, scales.v)]
    assert before == after
    for layer in range(case.layers):  # each as if it were the only one
        drawn.case = case.replaced(layer=layer)
        drawn.hold(
            q[layer],
            pool_of_one(drawn, pool, layer),
            scales_of_one(drawn, scales, layer),
        )


def pool_copies(text: str, pool: kv.KVPool) -> list[str]:
    """The copies of a compiled program that are as large as an array of the pool."""
    sizes = {a.size for a in pool.arrays}
    found = []
    for line in text.splitlines():
        made = re.search(r"= \w+\[([\d,]+)\]\S* (copy|convert|bitcast-convert)\(", line)
        if made and np.prod([int(n) for n in made[1].split(",")]) in sizes:
            found.append(line.strip())
    return found


def pool_of_one(drawn: Drawn, pool: kv.KVPool, layer: int) -> np.ndarray:
    """The blocks before, but for this layer, which is that of the pool."""
    from model import read_pool

    blocks = drawn.before.copy()
    blocks[:, layer] = read_pool(pool)[:, layer]
    return blocks


def scales_of_one(drawn: Drawn, scales: kv.KVScales, layer: int) -> list[np.ndarray]:
    made = [a.copy() for a in drawn.scales_before]
    for kept, now in zip(made, (scales.k, scales.v), strict=True):
        kept[layer] = np.asarray(now)[layer]
    return made


def test_a_pool_that_is_kept_is_not_changed(by, rng):
    drawn = Drawn(COMPUTED, rng)
    call, given = call_of(drawn)
    hold(drawn, jax.jit(call)(given))
    hold(drawn, jax.jit(call)(given))


@by_case
def test_new_tokens_do_not_compile_again(case, by, rng):
    first, second = Drawn(case, rng), Drawn(case, rng)
    call, given = call_of(first)
    traced = []

    @jax.jit
    def counted(given):
        traced.append(1)
        return call(given)

    hold(first, counted(given))
    hold(second, counted(call_of(second)[1]))
    assert len(traced) == 1


def test_export(by, rng):
    pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
    drawn = Drawn(COMPUTED, rng)
    call, given = call_of(drawn)
    checks = [
        jax.export.DisabledSafetyCheck.custom_call(name)
        for name in ("kvblock_append", "kvblock_copy")
    ]
    platform = "cuda" if by == "gpu" else "cpu"
    exported = jax.export.export(
        jax.jit(call), platforms=[platform], disabled_checks=checks
    )(given)
    again = jax.export.deserialize(exported.serialize())
    hold(drawn, jax.jit(again.call)(given))


def test_it_has_no_derivative(rng):
    drawn = Drawn(BASE, rng)
    call, given = call_of(drawn)
    with pytest.raises(NotImplementedError, match="rope_append has no derivative"):
        jax.grad(lambda q: call(given | {"q": q})[0].sum())(jnp.asarray(drawn.q))
    kept = jax.lax.stop_gradient
    slope = jax.grad(lambda q: (call(given | {"q": kept(q)})[0] * q).sum())
    turned = slope(jnp.asarray(drawn.q))
    drawn.hold(turned, call(given)[1], None)


# ---- several devices -----------------------------------------------------------------


def specs_of(drawn: Drawn) -> tuple[Any, dict[str, P], Any]:
    """How a call is cut by heads over "h": its arguments and its results."""
    axis = drawn.pool().spec.block_layout.groups
    heads = 1 + [group[0] for group in axis].index("H")
    heads -= not drawn.case.kind[1]
    pool = P(*[None] * heads, "h")
    cut = {"q": P(None, "h"), "k": P(None, "h"), "v": P(None, "h")}
    cut["pool"] = jax.tree.map(lambda _: pool, drawn.pool())
    return pool, cut, P(None, "h")


SHARDED = {
    "NHD": BASE.replaced(heads=8, kv_heads=4),
    "HND by layers": BASE.replaced(heads=8, kv_heads=4, kind=("HND", False)),
    "universal, by heads": FP8.replaced(
        heads=4, kv_heads=4, kind=("universal", True), scale="head", zero_tail=True
    ),
    "computed": COMPUTED.replaced(heads=8, kv_heads=4, kind=("HND", True)),
}


def place(drawn: Drawn, given: dict[str, Any], mesh: Any) -> dict[str, Any]:
    """The arguments of a call, cut by heads."""
    _, cut, _ = specs_of(drawn)
    head = {"k_scale": P("h"), "v_scale": P("h")}
    lead = 2 if drawn.scales_before[0].ndim == 3 else 3
    head["scales"] = P(*[None] * lead, "h")
    put = {}
    for name, x in given.items():
        spec = cut.get(name, head.get(name, P()))
        if name in ("k_scale", "v_scale") and not np.ndim(x):
            spec = P()
        if name == "pool":
            spec = spec.arrays[0]
        put[name] = jax.device_put(x, NamedSharding(mesh, spec))
    return put


@pytest.mark.parametrize("name", SHARDED)
@by_axis_type
def test_automatic_and_explicit_meshes(axis_type, name, by_cpus, rng):
    """Each device writes its own heads: nothing travels."""
    drawn = Drawn(SHARDED[name], rng)
    mesh = mesh_of(axis_type)
    call, given = call_of(drawn)
    args = place(drawn, given, mesh)
    with jax.set_mesh(mesh):
        compiled = jax.jit(call).lower(args).compile()
        made = jax.jit(call)(args)
    text = compiled.as_text()
    assert not re.search(r"all-gather|all-reduce|all-to-all|collective", text)
    pool, _, q = specs_of(drawn)
    assert made[0].sharding.is_equivalent_to(NamedSharding(mesh, q), 3)
    for a in made[1].arrays:
        assert a.sharding.is_equivalent_to(NamedSharding(mesh, pool), a.ndim)
    hold(drawn, made)


@pytest.mark.parametrize("name", SHARDED)
def test_shard_map(name, by_cpus, rng):
    drawn = Drawn(SHARDED[name], rng)
    mesh = mesh_of()
    call, given = call_of(drawn)
    args = place(drawn, given, mesh)
    in_specs = jax.tree.map(lambda a: a.sharding.spec, args)
    leaves, tree = jax.tree.flatten(args)
    spec = given["pool"].spec
    local = spec.replace(num_kv_heads=spec.num_kv_heads // 2)

    def body(*leaves: Any) -> Any:
        given = jax.tree.unflatten(tree, leaves)
        given["pool"] = kv.KVPool(given["pool"].data, local)
        q, pool, *scales = call(given)
        return q, pool.data, *scales

    shape = jax.eval_shape(call, given)
    pool_spec, _, q_spec = specs_of(drawn)
    scale_spec = jax.tree.map(
        lambda a: P(*[None] * (a.ndim - 1), "h"), shape[2] if len(shape) > 2 else ()
    )
    out_specs = (q_spec, jax.tree.map(lambda _: pool_spec, shape[1].data))
    if len(shape) > 2:
        out_specs = (*out_specs, scale_spec)
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=tuple(jax.tree.leaves(in_specs)), out_specs=out_specs
    )
    q, data, *scales = jax.jit(mapped)(*leaves)
    hold(drawn, (q, kv.KVPool(data, spec), *scales))


def test_one_key_head_cuts_the_queries(by_cpus, rng):
    """Each device writes the whole pool, and turns its own queries."""
    drawn = Drawn(BASE.replaced(heads=8, kv_heads=1), rng)
    mesh = mesh_of()
    call, given = call_of(drawn)
    whole = {n: jax.device_put(x, NamedSharding(mesh, P())) for n, x in given.items()}
    whole["q"] = jax.device_put(drawn.q, NamedSharding(mesh, P(None, "h")))
    made = jax.jit(call)(whole)
    assert made[0].sharding.is_equivalent_to(NamedSharding(mesh, P(None, "h")), 3)
    hold(drawn, made)


def test_more_devices_than_key_heads(by_cpus, rng):
    """Queries come cut by four, and there are two key heads: XLA finds a way."""
    drawn = Drawn(BASE.replaced(heads=8, kv_heads=2), rng)
    mesh = mesh_of()
    call, given = call_of(drawn)
    put = {n: jax.device_put(x, NamedSharding(mesh, P())) for n, x in given.items()}
    for name, axes in (("q", ("b", "h")), ("k", "h"), ("v", "h")):
        put[name] = jax.device_put(given[name], NamedSharding(mesh, P(None, axes)))
    hold(drawn, jax.jit(call)(put))


def test_a_layout_whose_heads_lie_behind_others_is_whole_on_every_device(by_cpus, rng):
    """An operational pool: what comes cut is put together first."""
    drawn = Drawn(BASE.replaced(heads=8, kv_heads=4, kind=("operational", True)), rng)
    mesh = mesh_of()
    call, given = call_of(drawn)
    put = {n: jax.device_put(x, NamedSharding(mesh, P())) for n, x in given.items()}
    for name in ("q", "k", "v"):
        put[name] = jax.device_put(given[name], NamedSharding(mesh, P(None, "h")))
    hold(drawn, jax.jit(call)(put))


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_joined_on_several_devices(cut, by_cpus, rng):
    """Where the pool is cut by heads, q, k and v come apart first."""
    drawn = Drawn(SHARDED["NHD"].replaced(joined=True), rng)
    mesh = mesh_of()
    call, given = call_of(drawn)
    pool, _, _ = specs_of(drawn)
    put = {
        name: jax.device_put(x, NamedSharding(mesh, P()))
        for name, x in given.items()
        if x is not None
    }
    put["pool"] = jax.device_put(given["pool"], NamedSharding(mesh, pool))
    if cut:
        put["q"] = jax.device_put(given["q"], NamedSharding(mesh, P(None, "h")))
    given |= put
    text = jax.jit(call).lower(given).compile().as_text()
    sizes = {str(a.size) for a in given["pool"].arrays}
    gathered = re.findall(r"= \w+\[([\d,]+)\]\S* all-gather", text)
    assert not any(
        str(np.prod([int(n) for n in dims.split(",")])) in sizes for dims in gathered
    )
    made = jax.jit(call)(given)
    for a in made[1].arrays:
        assert a.sharding.is_equivalent_to(NamedSharding(mesh, pool), a.ndim)
    hold(drawn, made)


@pytest.mark.parametrize("over", [("b", "h"), ("b",)], ids=["all axes", "one axis"])
@by_axis_type
def test_joined_in_shard_map(over, axis_type, by_cpus, rng):
    """Over all axes each device has its own heads, joined; over "b" XLA cuts by "h"."""
    drawn = Drawn(SHARDED["NHD"].replaced(joined=True), rng)
    mesh, case = mesh_of(axis_type), drawn.case
    call, given = call_of(drawn)
    pool = given.pop("pool")
    pool_spec, _, _ = specs_of(drawn)
    count = 2 if "h" in over else 1  # parts of the heads
    # A device's queries, keys and values, then the next one's.
    parts = [np.split(x, count, 1) for x in (drawn.q, drawn.k, drawn.v)]
    given["q"] = np.concatenate([x[i] for i in range(count) for x in parts], 1)
    cut = P(None, "h") if count > 1 else P()
    spec = pool.spec.replace(num_kv_heads=case.kv_heads // count)
    names = [n for n, x in given.items() if x is not None]
    specs = [cut if n == "q" else P() for n in names]

    def body(data: Any, *arrays: Any) -> Any:
        whole = given | dict(zip(names, arrays, strict=True))
        q, pool = call(whole | {"pool": kv.KVPool(data, spec)})
        return q, pool.data

    own = pool_spec if count > 1 else P()
    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(own, *specs),
        out_specs=(cut, own),
        axis_names=set(over),
    )
    args = [jax.device_put(pool.data, NamedSharding(mesh, pool_spec))]
    args += [
        jax.device_put(given[n], NamedSharding(mesh, s))
        for n, s in zip(names, specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        q, data = jax.jit(mapped)(*args)
        text = (
            jax.jit(mapped).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        )
    assert ("stablehlo.slice" in text) == (over == ("b",))
    hold(drawn, (q, kv.KVPool(data, pool.spec)))


def test_joined_along_an_axis_of_one_device(by_cpus, rng):
    """Heads that are cut over one device are whole."""
    drawn = Drawn(BASE.replaced(joined=True), rng)
    mesh = mesh_of(jax.sharding.AxisType.Explicit, (4, 1))
    call, given = call_of(drawn)
    put = {n: x for n, x in given.items() if x is not None}
    put = {n: jax.device_put(x, NamedSharding(mesh, P())) for n, x in put.items()}
    put["q"] = jax.device_put(given["q"], NamedSharding(mesh, P(None, "h")))
    with jax.set_mesh(mesh):
        hold(drawn, jax.jit(call)(given | put))


def test_joined_on_explicit_axes(by_cpus, rng):
    """Whole, beside a pool that is cut; heads that are cut are refused."""
    drawn = Drawn(SHARDED["NHD"].replaced(joined=True), rng)
    mesh = mesh_of(jax.sharding.AxisType.Explicit)
    call, given = call_of(drawn)
    pool, _, q = specs_of(drawn)
    given = {
        name: jax.device_put(x, NamedSharding(mesh, pool if name == "pool" else P()))
        if x is not None
        else None
        for name, x in given.items()
    }
    with jax.set_mesh(mesh):
        made = jax.jit(call)(given)
        assert made[0].sharding.is_equivalent_to(NamedSharding(mesh, q), 3)
        hold(drawn, made)
        given["q"] = jax.device_put(given["q"], NamedSharding(mesh, q))
        with pytest.raises(
            ValueError, match=r"must lie whole on each device.*project q"
        ):
            jax.jit(call)(given)


# ---- who computes --------------------------------------------------------------------


def lowered(case: Case, rng: Any, **static: Any) -> str:
    drawn = Drawn(case, rng)
    call, given = call_of(drawn, **static)
    lowered = jax.jit(call).trace(given).lower(lowering_platforms=("cuda",))
    return lowered.as_text()


def test_on_a_gpu_it_is_one_call_that_updates_in_place(rng):
    """No other instruction but constants, and the layout of the call."""
    text = lowered(COMPUTED.replaced(angles="inv_freq"), rng)
    (call,) = re.findall(r"custom_call @kvblock_append\((.*?)\)(.*)", text)
    assert "kvblock_copy" not in text
    # The pool and both arrays of scales: results 1 to 3 of 4.
    assert len(re.findall(r"output_operand_alias<", call[1])) == 3
    work = set(re.findall(r"= (?:\"?)(stablehlo\.\w+)", text))
    assert work <= {"stablehlo.constant", "stablehlo.custom_call"}, work


def test_joined_arrays_are_read_where_they_lie(rng):
    """On one device no slice comes ahead of the call."""
    text = lowered(JOINED.replaced(angles="inv_freq"), rng)
    assert len(re.findall("custom_call @kvblock_append", text)) == 1
    work = set(re.findall(r"= (?:\"?)(stablehlo\.\w+)", text))
    assert work <= {"stablehlo.constant", "stablehlo.custom_call"}, work


def test_what_no_kernel_serves_goes_elsewhere_or_is_an_error(rng):
    wide = BASE.replaced(dim=1024, heads=1, kv_heads=1)
    assert "kvblock_append" not in lowered(wide, rng)
    with pytest.raises(ValueError, match="heads of 4096 bytes"):
        lowered(wide, rng, implementation="cuda")
    assert "kvblock_append" in lowered(BASE, rng, implementation="cuda")
    assert "kvblock_append" not in lowered(BASE, rng, implementation="xla")


def test_a_cpu_has_no_kernel(rng, four_cpus):
    drawn = Drawn(BASE, rng)
    with pytest.raises(ValueError, match="'cuda' needs an NVIDIA GPU where it rotates"):
        drawn.rope_append(implementation="cuda")
    kept = Drawn(FP8, rng)
    with pytest.raises(ValueError, match="append_kv: implementation='kernel' needs an"):
        kept.append_kv(implementation="kernel")


@pytest.mark.parametrize("layout", ["NHD", "universal"])
def test_plain_jax_alone(layout, rng):
    """No kernel copies either, also where there is one."""
    drawn = Drawn(COMPUTED.replaced(kind=(layout, True)), rng)
    q, pool, scales = drawn.rope_append(implementation="xla")
    drawn.hold(q, pool, (scales.k, scales.v))
