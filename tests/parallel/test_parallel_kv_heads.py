"""Heads over devices, also where KV heads are fewer: as on one, and nothing travels."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import by_axis_type
from paged_meshes import large
from parallel_decode import reductions

import jax_kvblock as kv
from jax_kvblock.parallel import (
    kv_heads_partition,
    own_kv_heads,
    repeat_kv_heads,
    repeat_spec,
)

pytestmark = pytest.mark.usefixtures("four_cpus")

HEADS, DIM, BLOCK, BLOCKS, LENGTH, STEPS = 8, 16, 4, 256, 6, 5
TABLES = np.array([[9, 3, 200], [7, 40, 0]], np.int32)
BAR = 4e-6


def mesh_of(axis_type: AxisType, shape: tuple[int, ...] = (4,)) -> Mesh:
    names = ("h",) if len(shape) == 1 else ("b", "h")
    kinds = (axis_type,) * len(shape)
    return jax.make_mesh(shape, names, kinds, devices=jax.devices("cpu")[:4])


def slots_of(positions: Any) -> Any:
    """Of positions `[B]` or `[B, T]`."""
    tables = jnp.asarray(TABLES)
    row = jnp.arange(2).reshape(2, *[1] * (positions.ndim - 1))
    return tables[row, positions // BLOCK] * BLOCK + positions % BLOCK


class Served:
    """Prompts of two sequences, then steps of decoding, by key heads as they come."""

    def __init__(
        self, kv_heads: int, rng: np.random.Generator, layout: str = "NHD"
    ) -> None:
        self.spec = kv.BlockSpec(2, 2, BLOCK, kv_heads, DIM, "float32", layout=layout)

        def drawn(*lead: int) -> tuple[Any, ...]:
            heads = (HEADS, kv_heads, kv_heads)
            shapes = [(*lead, n, DIM) for n in heads]
            return tuple(rng.standard_normal(s).astype(np.float32) for s in shapes)

        self.prompt, self.steps = drawn(2, LENGTH), drawn(STEPS, 2)

    def empty(self, spec: kv.BlockSpec) -> np.ndarray:
        return np.full((BLOCKS, *spec.block_shape), np.nan, np.float32)

    @staticmethod
    def prefill(spec: kv.BlockSpec, own: Any, data: Any, qkv: Any) -> Any:
        """The prompts by `flash_attention` over what is new, and by pages."""
        pool = kv.KVPool(data, spec)
        q, k, v = qkv[0], own(qkv[1]), own(qkv[2])
        dense = kv.flash_attention(q, k, v, causal=True)
        positions = jnp.broadcast_to(jnp.arange(LENGTH), (2, LENGTH))
        k, v = (a.reshape(-1, *a.shape[2:]) for a in (k, v))
        pool = kv.append_kv(pool, 1, k, v, slots_of(positions).reshape(-1))
        paged = kv.paged_attention(q, pool, 1, TABLES, [LENGTH] * 2)
        return pool.data, dense, paged

    @staticmethod
    def decode(spec: kv.BlockSpec, own: Any, data: Any, qkv: Any) -> Any:
        """Steps, each of one token, that is rotated and appended."""

        def step(data: Any, of: Any) -> Any:
            position, (q, k, v) = of
            position = jnp.broadcast_to(position, 2)
            q, pool = kv.rope_append(
                q, own(k), own(v), kv.KVPool(data, spec), jnp.int32(1),
                slots_of(position), position, theta=1e4,
            )  # fmt: skip
            out = kv.paged_attention(
                q, pool, jnp.int32(1), TABLES, position + 1, query_start=[0, 1, 2]
            )
            return pool.data, out

        positions = LENGTH + jnp.arange(STEPS, dtype=jnp.int32)
        return jax.lax.scan(step, data, (positions, qkv))

    def parts(self) -> Any:
        return (self.prefill, self.prompt), (self.decode, self.steps)

    def one_device(self) -> tuple[Any, list[Any]]:
        data, made = jnp.asarray(self.empty(self.spec)), []
        for part, qkv in self.parts():
            run = jax.jit(functools.partial(part, self.spec, lambda a: a))
            data, *results = run(data, qkv)
            made += results
        return data, made

    def over(self, mesh: Mesh, program: Any, kv_cut: Any = None) -> Any:
        """The same cut by heads: `program` makes a function of a part.

        Looks at what is compiled: nothing travels, and the pool stays where it is.
        """
        spec = repeat_spec(self.spec, mesh.size)
        names = mesh.axis_names
        pool_cut = kv_heads_partition(spec, names)
        # Not of NumPy's memory, which nobody may take.
        data = jnp.copy(jax.device_put(self.empty(spec), NamedSharding(mesh, pool_cut)))
        made, before = [], pointers(data)
        for part, qkv in self.parts():
            cuts = (names, kv_cut, kv_cut)
            lead = qkv[0].ndim - 2
            specs = tuple(P(*[None] * lead, cut) for cut in cuts)
            put = tuple(
                jax.device_put(a, NamedSharding(mesh, s))
                for a, s in zip(qkv, specs, strict=True)
            )
            run = jax.jit(program(part, spec, pool_cut, specs), donate_argnums=0)
            with jax.set_mesh(mesh):
                compiled = run.lower(data, put).compile()
                data, *results = compiled(data, put)
            text = compiled.as_text()
            assert reductions(text) == []
            own = data.size // mesh.size
            found = [x for x in large(text, own / 2) if not in_place(x)]
            assert found == []
            assert compiled.memory_analysis().alias_size_in_bytes == 4 * own
            for a in results:
                cut = NamedSharding(mesh, P(*[None] * (a.ndim - 2), names))
                assert a.sharding.is_equivalent_to(cut, a.ndim)
            made += results
        assert pointers(data) == before
        return data, made

    def hold(self, data: Any, made: Any) -> None:
        want_data, want = self.one_device()
        for x, y in zip(made, want, strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=BAR)
        axis = len(kv_heads_partition(self.spec, "h")) - 1
        times = data.shape[axis] // want_data.shape[axis]
        want_data = np.repeat(want_data, times, axis)
        np.testing.assert_allclose(data, want_data, rtol=0, atol=BAR)


def in_place(line: str) -> bool:
    return "kvblock_copy" in line


def pointers(a: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in a.addressable_shards]


def whole_program(size: int) -> Any:
    """For automatic and explicit meshes: heads of all devices."""
    own = functools.partial(repeat_kv_heads, size=size)
    return lambda part, spec, *_: functools.partial(part, spec, own)


BY_HEADS = [1, 2, 4, 8]


@pytest.mark.parametrize("kv_heads", BY_HEADS)
@by_axis_type
def test_automatic_and_explicit_meshes(axis_type, kv_heads, rng):
    served = Served(kv_heads, rng)
    served.hold(*served.over(mesh_of(axis_type), whole_program(4)))


@pytest.mark.parametrize("layout", ["HND", "universal"])
@by_axis_type
def test_other_layouts(axis_type, layout, rng):
    served = Served(2, rng, layout)
    served.hold(*served.over(mesh_of(axis_type), whole_program(4)))


@by_axis_type
def test_heads_that_come_cut(axis_type, rng):
    """k and v as their projections leave them: over all devices, or one axis of two."""
    served = Served(8, rng)
    served.hold(*served.over(mesh_of(axis_type), whole_program(4), "h"))
    served = Served(2, rng)
    mesh = mesh_of(axis_type, (2, 2))
    served.hold(*served.over(mesh, whole_program(4), "b"))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kv_heads", BY_HEADS)
def test_shard_map(kv_heads, check_vma, rng):
    served = Served(kv_heads, rng)
    mesh = mesh_of(AxisType.Auto)

    def program(part: Any, spec: Any, pool_cut: Any, specs: Any) -> Any:
        local = spec.replace(num_kv_heads=spec.num_kv_heads // 4)
        own = functools.partial(own_kv_heads, axis_name="h")
        count = 2 if part is served.decode else 3
        return jax.shard_map(
            functools.partial(part, local, own),
            mesh=mesh,
            in_specs=(pool_cut, specs),
            out_specs=(pool_cut, *[P(None, None, "h")] * (count - 1)),
            check_vma=check_vma,
        )

    served.hold(*served.over(mesh, program))


@by_axis_type
def test_weights_that_are_repeated_once(axis_type, rng):
    """Each device projects its own head: k comes cut, and nothing travels."""
    mesh = mesh_of(axis_type)
    x = rng.standard_normal((6, 32)).astype(np.float32)
    weights = rng.standard_normal((32, 2, DIM)).astype(np.float32)
    cut = NamedSharding(mesh, P(None, "h"))
    repeated = jax.device_put(repeat_kv_heads(weights, 4), cut)
    x = jax.device_put(x, NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        project = jax.jit(lambda x, w: jnp.einsum("te,ekd->tkd", x, w))
        compiled = project.lower(x, repeated).compile()
        made = compiled(x, repeated)
    assert reductions(compiled.as_text()) == []
    assert made.sharding.is_equivalent_to(cut, 3)
    want = np.repeat(np.einsum("te,ekd->tkd", x, weights), 2, 1)
    np.testing.assert_allclose(made, want, rtol=1e-5, atol=1e-5)


@by_axis_type
def test_scales_of_8_bits_are_cut_with_their_heads(axis_type, rng):
    """Computed for each token and head, in place, and read again."""
    mesh = mesh_of(axis_type)
    q, k, v = (
        rng.standard_normal((3, n, DIM)).astype(np.float32) for n in (HEADS, 2, 2)
    )
    spec = kv.BlockSpec(2, 2, BLOCK, 2, DIM, "int8")

    def step(kept: Any, qkv: Any, times: int) -> Any:
        q, k, v = qkv
        k, v = (repeat_kv_heads(a, times) for a in (k, v))
        pool, scales = kept
        pool, scales = kv.append_kv(pool, 1, k, v, [4, 5, 6], scales=scales)
        out = kv.paged_attention(
            q, pool, 1, [[1]], [3], query_start=[0, 3],
            k_scale=scales.k, v_scale=scales.v,
        )  # fmt: skip
        return (pool, scales), out

    def empty(spec: kv.BlockSpec) -> Any:
        return kv.KVPool.zeros(spec, BLOCKS), kv.KVScales.zeros(spec, BLOCKS)

    _, want = jax.jit(step, static_argnums=2)(empty(spec), (q, k, v), 1)
    spec = repeat_spec(spec, 4)
    pool, scales = empty(spec)
    at = NamedSharding(mesh, kv_heads_partition(spec, "h"))
    scales = jax.device_put(scales, NamedSharding(mesh, P(*[None] * 3, "h")))
    kept = jax.device_put(pool, at), scales
    heads, whole = NamedSharding(mesh, P(None, "h")), NamedSharding(mesh, P())
    put = tuple(jax.device_put((q, k, v), (heads, whole, whole)))
    with jax.set_mesh(mesh):
        run = jax.jit(step, static_argnums=2, donate_argnums=0)
        compiled = run.lower(kept, put, 4).compile()
        _, made = compiled(kept, put)
    assert reductions(compiled.as_text()) == []
    np.testing.assert_allclose(made, want, rtol=0, atol=BAR)


# ---- the helpers ---------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "size"), [(1, 4), (2, 4), (4, 4), (8, 4), (3, 3)])
def test_each_device_has_what_its_queries_read(heads, size, rng):
    """By the definition: query head h reads KV head h // (N / K)."""
    x = rng.standard_normal((5, heads, 3)).astype(np.float32)
    repeated = repeat_kv_heads(x, size)
    count = repeated.shape[1] // size
    for n in (max(heads, size), 3 * heads * size):  # query heads
        for h in range(n):
            device = h // (n // size)
            own = h // (n // repeated.shape[1])
            assert own // count == device
            np.testing.assert_array_equal(repeated[:, own], x[:, h // (n // heads)])
    mesh = jax.make_mesh((size,), ("h",), devices=jax.devices("cpu")[:size])
    own = functools.partial(own_kv_heads, axis_name="h")
    mapped = jax.shard_map(own, mesh=mesh, in_specs=P(), out_specs=P(None, "h"))
    np.testing.assert_array_equal(jax.jit(mapped)(x), repeated)


def test_any_axis(rng):
    x = rng.standard_normal((2, 3, 5)).astype(np.float32)
    for axis in (0, -3):
        made = repeat_kv_heads(x, 4, axis=axis)
        np.testing.assert_array_equal(made, np.repeat(x, 2, 0))
    assert repeat_kv_heads(x[:1], 4, axis=0).shape == (4, 3, 5)


def test_specs():
    spec = kv.BlockSpec(2, 2, 4, 2, 16, "float32")
    assert repeat_spec(spec, 8).num_kv_heads == 8
    assert repeat_spec(spec, 2) == repeat_spec(spec, 1) == spec
    wanted = {"NHD": 4, "HND": 3, "universal": 1}
    for layout, axis in wanted.items():
        spec = spec.replace(layout=layout)
        assert kv_heads_partition(spec, "h") == P(*[None] * axis, "h")
        two = kv_heads_partition(spec, ["a", "b"])
        assert two == P(*[None] * axis, ("a", "b"))
    by_layers = kv_heads_partition(spec.replace(layout="HND"), "h", contiguous=False)
    assert by_layers == P(None, None, "h")


def test_messages():
    spec = kv.BlockSpec(2, 2, 4, 3, 16, "float32")
    x = np.zeros((5, 3, 16), np.float32)
    with pytest.raises(ValueError, match=r"repeat_kv_heads: .* got 3 and 4; hold the"):
        repeat_kv_heads(x, 4)
    with pytest.raises(ValueError, match="repeat_kv_heads: axis must be one of x"):
        repeat_kv_heads(x, 3, axis=3)
    with pytest.raises(ValueError, match="repeat_kv_heads: size must be an integer"):
        repeat_kv_heads(x, 0)
    with pytest.raises(ValueError, match="own_kv_heads: axis_name must be a mesh axis"):
        own_kv_heads(x, "h")
    with pytest.raises(ValueError, match=r"repeat_spec: of KV heads and devices"):
        repeat_spec(spec, 2)
    with pytest.raises(TypeError, match="repeat_spec: spec must be a BlockSpec"):
        repeat_spec(x, 2)
    with pytest.raises(ValueError, match="kv_heads_partition: the layout must have"):
        kv_heads_partition(spec.replace(layout="operational"), "h")
