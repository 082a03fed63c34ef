"""`BlockManager`: its extents, its pool in and out of a jit, writes to its blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from managers import BLOCKS, HD, NH, NL, NT, add, donate, make_manager

import jax_kvblock as kv


@pytest.fixture
def manager() -> kv.BlockManager:
    return make_manager()


# ---- extents -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "tail", "heads"),
    [
        ({"inner_dim": 12}, (NT, 12), (1, 12)),
        ({"num_kv_heads": 3, "head_dim": 4}, (NT, 3, 4), (3, 4)),
        ({"inner_dim": 12, "num_kv_heads": 3, "head_dim": 4}, (NT, 3, 4), (3, 4)),
        ({"inner_dim": 12, "num_kv_heads": 3}, (NT, 3, 4), (3, 4)),
        ({"inner_dim": 12, "head_dim": 3}, (NT, 4, 3), (4, 3)),
        ({"inner_dim": 12, "layout": "HND"}, (NT, 12), (1, 12)),
        ({"num_kv_heads": 3, "head_dim": 4, "layout": "HND"}, (3, NT, 4), (3, 4)),
    ],
    ids=str,
)
def test_extents(
    arguments: dict[str, Any], tail: tuple[int, ...], heads: tuple[int, int]
) -> None:
    manager = kv.BlockManager(NL, NT, num_blocks=2, **arguments)
    assert manager.num_blocks == manager.num_free_blocks == manager.pool.num_blocks == 2
    block = manager.allocate_blocks(1)[0]
    assert block.shape == (NL, 2, *tail)
    assert block.dtype == jnp.bfloat16, "the default"
    assert (manager.spec.num_kv_heads, manager.spec.head_dim) == heads
    values = np.arange(block.size).reshape(block.shape).astype(jnp.bfloat16)
    block.copy_from(values)
    np.testing.assert_array_equal(np.asarray(block), values)
    block[1].copy_from(values[2])
    np.testing.assert_array_equal(np.asarray(block[1]), values[2])


def test_sources_constructor() -> None:
    manager = kv.BlockManager(num_layers=32, page_size=16, inner_dim=64, num_blocks=3)
    block = manager.allocate_blocks(1)[0]
    assert (len(block), block[0].shape, block.device_id) == (32, (2, 16, 64), 0)
    assert not np.asarray(block).any()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "give inner_dim, or num_kv_heads and head_dim"),
        ({"num_kv_heads": 2}, ValueError, "belong together.*head_dim=None"),
        ({"head_dim": 2}, ValueError, "belong together.*num_kv_heads=None"),
        (
            {"inner_dim": 9, "num_kv_heads": 2, "head_dim": 4},
            ValueError,
            r"inner_dim must be .* 2 \* 4, got 9",
        ),
        (
            {"inner_dim": 9, "num_kv_heads": 2},
            ValueError,
            "inner_dim must be a multiple of num_kv_heads=2, got 9; leave",
        ),
        (
            {"inner_dim": 9, "head_dim": 2},
            ValueError,
            "inner_dim must be a multiple of head_dim=2, got 9",
        ),
        (
            {"inner_dim": 4, "head_dim": 8},
            ValueError,
            "inner_dim must be a multiple of head_dim=8, got 4",
        ),
        (
            {"inner_dim": 4, "device": "tpuu"},
            ValueError,
            r"BlockManager: device must be .* a platform's name, got 'tpuu'; pass",
        ),
        (
            {"inner_dim": 4, "device": 0},
            TypeError,
            r"BlockManager: device must be .*, got 0; pass one of jax\.devices\(\)",
        ),
        ({"inner_dim": 4, "page_size": 4}, TypeError, "block_size must be given once"),
        ({"inner_dim": 0}, ValueError, "inner_dim must be .* at least 1, got 0"),
        ({"inner_dim": 2.0}, ValueError, r"inner_dim must be an integer.*got 2\.0"),
        ({"inner_dim": 4, "num_blocks": 0}, ValueError, "num_blocks.*got 0"),
        ({"inner_dim": 4, "num_outer": 3}, ValueError, "num_outer.*got 3"),
        ({"inner_dim": 4, "layout": "nhd"}, ValueError, "layout.*'NHD'.*got 'nhd'"),
        ({"inner_dim": 4, "memory_kind": "ssd"}, ValueError, "memory_kind.*'ssd'"),
        (
            {"inner_dim": 4, "layout": "universal", "contiguous": False},
            ValueError,
            "layers outermost.*'universal'",
        ),
        ({"inner_dim": 4, "dtype": jnp.int4}, TypeError, "dtype.*int4"),
        ({"inner_dim": 4, "dtype": object}, TypeError, "dtype.*object"),
    ],
    ids=str,
)
def test_bad_extents(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        kv.BlockManager(NL, NT, **arguments)


def test_a_device_goes_by_its_platforms_name() -> None:
    cpu = {jax.local_devices(backend="cpu")[0]}
    by_name = kv.BlockManager(NL, NT, 4, num_blocks=2, device="cpu")
    assert by_name.pool.sharding.device_set == cpu
    from_spec = kv.BlockManager.from_spec(by_name.spec, 2, device="cpu")
    assert from_spec.pool.sharding.device_set == cpu
    with pytest.raises(ValueError, match=r"BlockManager\.from_spec: device .* 'tpuu'"):
        kv.BlockManager.from_spec(by_name.spec, 2, device="tpuu")


def test_block_size_has_an_old_name() -> None:
    managers = [
        kv.BlockManager(NL, NT, 8),
        kv.BlockManager(NL, block_size=NT, inner_dim=8),
        kv.BlockManager(num_layers=NL, page_size=NT, inner_dim=8),
    ]
    assert {manager.spec for manager in managers} == {managers[0].spec}
    assert managers[0].spec.block_size == NT
    with pytest.raises(TypeError, match=r"BlockManager: block_size must be given, the"):
        kv.BlockManager(NL, inner_dim=8)


SPEC = kv.BlockSpec(NL, 1, NT, NH, HD, np.dtype("float32"), "HND")


def test_a_manager_of_a_spec() -> None:
    manager = kv.BlockManager.from_spec(SPEC, BLOCKS, contiguous=False)
    assert manager.spec == SPEC and manager.num_free_blocks == BLOCKS
    assert not manager.pool.contiguous and isinstance(manager, kv.BlockManager)
    assert manager.allocate_blocks(1)[0].shape == (NL, 1, NH, NT, HD)
    second = jax.devices("cpu")[1]
    pinned = kv.BlockManager.from_spec(SPEC, memory_kind="pinned_host", device=second)
    assert pinned.pool.memory_kind == "pinned_host" and pinned.num_blocks == 64
    assert pinned.pool.data.devices() == {second}
    with pytest.raises(
        TypeError, match=r"BlockManager\.from_spec: device must be a jax"
    ):
        kv.BlockManager.from_spec(SPEC, device=0)


def test_a_manager_of_a_pool_that_exists(rng: np.random.Generator) -> None:
    values = rng.normal(size=(BLOCKS, *SPEC.block_shape)).astype(np.float32)
    pool = kv.KVPool.wrap(jnp.asarray(values), SPEC)
    manager = kv.BlockManager.from_pool(pool)
    assert manager.pool is pool and manager.num_free_blocks == BLOCKS
    block = manager.allocate_blocks(2)[1]
    np.testing.assert_array_equal(np.asarray(block), values[block.id])
    block.copy_from(values[0])
    assert pool.data.is_deleted(), "the pool is the manager's now"
    np.testing.assert_array_equal(np.asarray(block[1].k), values[0, 1, 0])


WRONG_START: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "an array": (TypeError, "must be a KVPool", lambda: jnp.zeros(3)),
    "donated": (
        RuntimeError,
        "donated or deleted",
        lambda: make_dead(kv.BlockManager.from_spec(SPEC, 2)),
    ),
    "over devices": (
        ValueError,
        "must lie on one device, got one on 2",
        lambda: over_two(),
    ),
}


def over_two() -> kv.KVPool:
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:2], "x")
    by_blocks = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    return kv.KVPool.zeros(SPEC, 2, device=by_blocks)


@pytest.mark.parametrize("case", WRONG_START)
def test_refuses_to_start_from(case: str) -> None:
    error, message, make = WRONG_START[case]
    with pytest.raises(error, match=rf"BlockManager\.from_pool: pool .*{message}"):
        kv.BlockManager.from_pool(make())


def test_refuses_to_start_in_a_jit() -> None:
    pool = kv.KVPool.zeros(SPEC, 2)
    with pytest.raises(TypeError, match=r"from_pool.*got a traced float32\["):
        jax.jit(lambda pool: kv.BlockManager.from_pool(pool) and None)(pool)


@pytest.mark.parametrize("name", ["float64", "int64", "uint64", "complex128"])
def test_wide_dtypes(name: str, rng: np.random.Generator) -> None:
    with jax.enable_x64(True):
        block = make_manager(dtype=name).allocate_blocks(1)[0]
        values = rng.integers(0, 100, block.shape).astype(name)
        block.copy_from(values)
        assert block.dtype == name and np.asarray(block).dtype == name
        np.testing.assert_array_equal(np.asarray(block), values)


# ---- the pool ------------------------------------------------------------------------


def make_dead(manager: kv.BlockManager) -> kv.KVPool:
    dead = add(manager.pool)
    donate(dead)
    return dead


def retyped(manager: kv.BlockManager) -> kv.KVPool:
    return jax.tree.map(lambda x: x.astype(jnp.int32), manager.pool)


WRONG_POOLS: dict[str, tuple[Any, Callable[[kv.BlockManager], Any]]] = {
    "no pool": (TypeError, lambda m: m.pool.data),
    "none": (TypeError, lambda m: None),
    "another layout": (ValueError, lambda m: make_manager(layout="HND").pool),
    "another dtype": (ValueError, lambda m: make_manager(dtype=jnp.int32).pool),
    "misdescribed": (ValueError, retyped),
    "fewer blocks": (ValueError, lambda m: make_manager(num_blocks=BLOCKS - 1).pool),
    "layers apart": (ValueError, lambda m: make_manager(contiguous=False).pool),
    "pinned": (ValueError, lambda m: make_manager(memory_kind="pinned_host").pool),
    "donated": ((RuntimeError, ValueError), make_dead),
}


@pytest.mark.parametrize("name", WRONG_POOLS)
def test_refuses_a_wrong_pool(manager: kv.BlockManager, name: str) -> None:
    error, make = WRONG_POOLS[name]
    before, wrong = manager.pool, make(manager)
    with pytest.raises(error, match=r"BlockManager\.pool: must"):
        manager.pool = wrong
    assert manager.pool is before and manager.allocate_blocks(1)[0]


def test_refuses_a_pool_of_another_device() -> None:
    first, second = jax.devices("cpu")[:2]
    manager = make_manager(device=first)
    with pytest.raises(ValueError, match="device"):
        manager.pool = make_manager(device=second).pool
    assert manager.pool.data.devices() == {first}


def test_refuses_a_traced_pool(manager: kv.BlockManager) -> None:
    block = manager.allocate_blocks(1)[0]

    def put_back(pool: kv.KVPool) -> None:
        manager.pool = add(pool)

    with pytest.raises(TypeError, match="traced"):
        jax.jit(put_back)(manager.pool)
    with pytest.raises(TypeError, match="traced"):
        jax.jit(block.copy_from)(jnp.ones(block.shape, jnp.float32))
    assert block and not np.asarray(block).any()


def test_pool_goes_into_a_jit_and_back(manager: kv.BlockManager) -> None:
    blocks = manager.allocate_blocks(2)
    rows = jnp.ones((2, *blocks[0].shape), jnp.float32)
    step = jax.jit(
        lambda pool, ids, x: kv.scatter_blocks(pool, ids, x, "NHD"), donate_argnums=0
    )
    manager.pool = step(manager.pool, blocks.ids, rows)
    assert all(np.asarray(block).all() for block in blocks)
    assert np.asarray(manager.pool.data).sum() == rows.size


def test_update_keeps_the_new_pool(manager: kv.BlockManager) -> None:
    block = manager.allocate_blocks(1)[0]
    old = manager.pool
    assert manager.update(add) is None
    assert old.data.is_deleted(), "the pool was not donated"
    result = manager.update(lambda pool, x: (add(pool, x), x * 3), 4)
    assert result == 12
    np.testing.assert_array_equal(np.asarray(block), np.full(block.shape, 5))


def test_update_traces_a_step_once(manager: kv.BlockManager) -> None:
    traces = []

    def step(pool: kv.KVPool, number: jax.Array) -> kv.KVPool:
        traces.append(number)
        return add(pool, number)

    for number in range(4):
        manager.update(step, number)
    assert len(traces) == 1
    np.testing.assert_array_equal(np.asarray(manager.pool.data), 6)


def test_update_takes_partials(manager: kv.BlockManager) -> None:
    def step(number: Any, pool: kv.KVPool, *, times: int = 1) -> Any:
        return add(pool, number * times), jnp.asarray(number)

    manager.update(functools.partial(step, 2, times=3))
    np.testing.assert_array_equal(np.asarray(manager.pool.data), 6)
    # 1, 1.0 and True are equal, but what they compute is not.
    for number in (1, 1.0, True):
        result = manager.update(functools.partial(step, number))
        assert result.dtype == jnp.asarray(number).dtype
    manager.update(functools.partial(step, np.ones(HD, np.float32)))
    np.testing.assert_array_equal(np.asarray(manager.pool.data), 10)


def fail(pool: kv.KVPool) -> kv.KVPool:
    raise KeyError("in the step")


BAD_STEPS: dict[str, tuple[Any, Callable[[kv.KVPool], Any]]] = {
    "raises": (KeyError, fail),
    "returns an array": (TypeError, lambda pool: pool.data * 2),
    "returns nothing": (TypeError, lambda pool: None),
    "returns three": ((TypeError, ValueError), lambda pool: (add(pool), 1, 2)),
    "swaps the result": (TypeError, lambda pool: (pool.data[0] * 2, add(pool))),
    "returns another shape": (
        ValueError,
        lambda pool: kv.KVPool(pool.data[1:] * 2, pool.spec),
    ),
}


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("name", BAD_STEPS)
def test_a_bad_step_loses_nothing(manager: kv.BlockManager, name: str) -> None:
    block = manager.allocate_blocks(1)[0]
    manager.update(add)
    error, step = BAD_STEPS[name]
    with pytest.raises(error):
        manager.update(step)
    assert block, "the pool was lost"
    np.testing.assert_array_equal(np.asarray(manager.pool.data), 1)


def test_update_after_a_donation_says_what_to_do(manager: kv.BlockManager) -> None:
    donate(manager.pool)
    with pytest.raises(RuntimeError, match=r"update.*donated.*manager\.pool = "):
        manager.update(add)


def test_closed(manager: kv.BlockManager) -> None:
    pool = manager.pool
    manager.close()
    for use in (
        lambda: manager.pool,
        lambda: setattr(manager, "pool", pool),
        lambda: manager.update(add),
        lambda: manager.allocate_blocks(1),
    ):
        with pytest.raises(
            RuntimeError,
            match=r"BlockManager.*: the manager is closed; build a new one",
        ):
            use()
    manager.close()
    assert not pool.data.is_deleted()


# ---- copy_from -----------------------------------------------------------------------

LAYOUTS = {
    "NHD": {},
    "HND": {"layout": "HND"},
    "universal": {"layout": "universal"},
    "operational": {"layout": "operational"},
    "page first": {"layout": kv.Layout("page first", "T L O H D")},
    "heads last": {"layout": kv.Layout("heads last", "O L D T H")},
    "NHD layers": {"contiguous": False},
    "HND layers": {"contiguous": False, "layout": "HND"},
    "inner alone": {"inner_dim": NH * HD, "num_kv_heads": None, "head_dim": None},
    "pinned": {"memory_kind": "pinned_host"},
}


class Exporter:
    """A DLPack object, and nothing else."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def to_torch(array: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(array.copy())


def torch_over(array: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(array)


def to_torch_strided(array: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(np.repeat(array, 2, axis=-1))[..., ::2]


def to_torch_transposed(array: np.ndarray) -> Any:
    return to_torch(array.T).permute(*reversed(range(array.ndim)))


SOURCES: dict[str, Callable[[np.ndarray], Any]] = {
    "numpy": np.copy,
    "numpy strided": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "numpy read only": lambda a: np.broadcast_to(a, a.shape),
    "jax": jnp.asarray,
    "jax on the cpu": lambda a: jax.device_put(a, jax.devices("cpu")[0]),
    "dlpack": Exporter,
    "torch": to_torch,
    "torch strided": to_torch_strided,
    "torch transposed": to_torch_transposed,
}
ALL_SOURCES = [
    pytest.param(name, marks=[pytest.mark.torch] * name.startswith("torch"))
    for name in SOURCES
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_writes_one_block_or_layer(layout: str, rng: np.random.Generator) -> None:
    blocks = make_manager(**LAYOUTS[layout]).allocate_blocks(4)
    shape = (4, *blocks[0].shape)
    values = rng.normal(size=shape).astype(np.float32)
    for block, value in zip(blocks, values, strict=True):
        block.copy_from(value)
    values[2, 1] = 7
    blocks[2][1].copy_from(values[2, 1])
    blocks[3].copy_from(blocks[0])
    values[3] = values[0]
    blocks[1][0].copy_from(blocks[2][-1])
    values[1, 0] = values[2, -1]
    np.testing.assert_array_equal([np.asarray(block) for block in blocks], values)
    got = [[np.asarray(layer) for layer in block] for block in blocks]
    np.testing.assert_array_equal(got, values)


@pytest.mark.parametrize("source", ALL_SOURCES)
@pytest.mark.parametrize("part", ["block", "layer"])
def test_takes_any_source(source: str, part: str, rng: np.random.Generator) -> None:
    blocks = make_manager().allocate_blocks(2)
    target = blocks[1] if part == "block" else blocks[1][2]
    values = rng.normal(size=target.shape).astype(np.float32)
    target.copy_from(SOURCES[source](values))
    np.testing.assert_array_equal(np.asarray(target), values)
    total = np.abs(np.asarray(blocks[1].manager.pool.data)).sum()
    np.testing.assert_allclose(total, np.abs(values).sum(), rtol=1e-5)


@pytest.mark.torch
@pytest.mark.parametrize(
    "name", ["bool", "int8", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
)
def test_takes_torch_dtypes(name: str, rng: np.random.Generator) -> None:
    import torch

    block = make_manager(dtype=jnp.dtype(name)).allocate_blocks(1)[0]
    size = block.nbytes
    raw = torch.from_numpy(
        rng.integers(0, 2 if name == "bool" else 120, size, np.uint8)
    )
    block.copy_from(raw.view(getattr(torch, name)).reshape(block.shape))
    np.testing.assert_array_equal(np.asarray(block).view(np.uint8).ravel(), raw.numpy())


@pytest.mark.parametrize("part", ["Block", "Layer"])
def test_refuses_wrong_sources(manager: kv.BlockManager, part: str) -> None:
    block = manager.allocate_blocks(1)[0]
    target = block if part == "Block" else block[0]
    good = np.ones(target.shape, np.float32)
    shape = str(list(target.shape)).replace("[", r"\[").replace("]", r"\]")
    wrong: list[tuple[type[Exception], str, Any]] = [
        (ValueError, rf"shape {shape}, got float32\[", good[:1]),
        (ValueError, rf"shape {shape}, got float32\[", good[None]),
        (TypeError, r"dtype float32, got float64\[.*cast it", good.astype(np.float64)),
        (TypeError, r"dtype float32, got int32\[.*cast it", jnp.int32(good)),
        # Nothing is cast quietly on the way through DLPack either.
        (TypeError, r"dtype float32, got float64", Exporter(np.float64(good))),
        (TypeError, "must be an array or a DLPack object, got list", good.tolist()),
        (TypeError, "must be an array or a DLPack object, got NoneType", None),
    ]
    for error, message, x in wrong:
        with pytest.raises(error, match=rf"{part}\.copy_from: x .*{message}"):
            target.copy_from(x)
        assert block and not np.asarray(block).any()


@pytest.mark.parametrize("part", ["block", "layer"])
@pytest.mark.parametrize(
    "kind", ["numpy", pytest.param("torch", marks=pytest.mark.torch)]
)
def test_the_source_is_free_at_once(part: str, kind: str) -> None:
    manager = kv.BlockManager(
        8, 64, num_kv_heads=8, head_dim=128, dtype=jnp.float32, num_blocks=2
    )
    block = manager.allocate_blocks(2)[1]
    target = block if part == "block" else block[3]
    # jax aliases NumPy's memory or copies it later, as its alignment allows.
    memory = np.empty(target.size + 32, np.float32)
    aligned = -memory.ctypes.data % 64 // 4
    for first in (aligned, aligned + 4):
        array = memory[first : first + target.size].reshape(target.shape)
        source = array if kind == "numpy" else torch_over(array)
        for number in range(1, 50):
            array[...] = number
            target.copy_from(source)
            array[...] = -1
            assert (np.asarray(target) == number).all(), "it was still being read"
