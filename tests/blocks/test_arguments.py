"""Ids, layers, head ranges and blocks come in whatever form people hold them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import has_gpu
from model import DIMS, Kind, assert_pool, assert_same_bits, lay, random_bits, start

import jax_kvblock as kv

KIND = Kind("NHD", True, "device")
SPEC = kv.BlockSpec(*DIMS, jnp.float32)
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


class Held:
    """What has ids, as a list of blocks does."""

    def __init__(self, ids: Any) -> None:
        self.ids = ids


# ---- ids, slots and layers -----------------------------------------------------------

FORMS = {
    "list": [4, 3, 2],
    "tuple": (4, 3, 2),
    "range": range(4, 1, -1),
    "list of NumPy integers": [np.int8(4), np.uint64(3), 2],
    "list of jax integers": [jnp.int32(4), 3, jnp.int32(2)],
    "object with ids": Held(np.int64([4, 3, 2])),
    "object with a list of ids": Held([4, 3, 2]),
}


@pytest.mark.parametrize("form", FORMS)
def test_ids_come_in_any_form(rng, form):
    pool, model = start(rng, KIND)
    got = kv.gather_blocks(pool, FORMS[form], "NHD")
    assert_same_bits(got, model.gather([4, 3, 2]))


def test_a_list_of_blocks_stands_for_its_ids(rng):
    manager = kv.BlockManager(3, 4, num_kv_heads=5, head_dim=6, num_blocks=7)
    first, second = manager.allocate_blocks(2), manager.allocate_blocks(2)
    blocks = jnp.asarray(random_bits(rng, (2, *DIMS), "bfloat16"))
    manager.pool = kv.scatter_blocks(manager.pool, second, blocks, "NHD")
    manager.pool = kv.copy_blocks(manager.pool, second, first)
    got = kv.gather_blocks(manager.pool, first, "NHD")
    assert_same_bits(got, np.asarray(blocks))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_ids_have_any_integer_dtype(rng, dtype):
    pool, model = start(rng, KIND)
    want = model.gather([4, 9, 2])
    ids = np.array([4, 9, 2], dtype)
    assert_same_bits(kv.gather_blocks(pool, ids, "NHD"), want)
    with jax.enable_x64(True):
        ids = jnp.asarray(ids)
        assert ids.dtype == dtype
        assert_same_bits(kv.gather_blocks(pool, ids, "NHD"), want)
        under_jit = jax.jit(lambda p, i: kv.gather_blocks(p, i, "NHD"))
        assert_same_bits(under_jit(pool, ids), want)


@pytest.mark.parametrize("dtype", ["uint32", "int64", "uint64"])
def test_jax_ids_that_do_not_fit_in_int32_are_outside(rng, dtype):
    pool, model = start(rng, KIND)
    with jax.enable_x64(True):
        # Cut to 32 bits, the last would be block 2 in 8 bytes.
        big = 2**32 + 2 if dtype != "uint32" else 2**32 - 1
        ids = jnp.array([4, 2**31, big], dtype)
        assert_same_bits(kv.gather_blocks(pool, ids, "NHD"), model.gather([4, -1, -1]))


def test_every_op_takes_wide_integers_under_x64(rng):
    pool, model = start(rng, KIND, dtype="float32")
    with jax.enable_x64(True):
        ids, others = jnp.array([4, -1, 2]), jnp.array([0, 1, 5])
        assert ids.dtype == jnp.int64
        blocks = kv.gather_blocks(pool, ids)
        model.scatter([0, 1, 5], model.gather([4, -1, 2]))
        pool = kv.scatter_blocks(pool, others, blocks)
        model.scatter([4, -1, 2], model.gather([0, 1, 5]))
        pool = kv.copy_blocks(pool, others, ids)
        pool = kv.transfer_blocks(pool, ids, pool, ids)

        def body(pool, layer):
            k = jnp.full((2, *DIMS[3:]), layer, jnp.float32)
            return kv.append_kv(pool, layer, k, -k, jnp.array([9, -1])), None

        pool, _ = jax.jit(lambda p: jax.lax.scan(body, p, jnp.arange(DIMS[0])))(pool)
        for layer in range(DIMS[0]):
            k = np.full((2, *DIMS[3:]), layer, np.float32)
            model.append(layer, [k, -k], [9, -1])
    assert_pool(pool, model, KIND)


@pytest.mark.parametrize(
    "layer", [2, np.int8(2), np.array(2), jnp.uint8(2), jnp.int32(2)], ids=repr
)
def test_a_layer_is_any_integer(rng, layer):
    pool, model = start(rng, KIND)
    k, v = random_bits(rng, (2, 3, *DIMS[3:]), "bfloat16")
    model.append(2, [k, v], [5, 6, 7])
    assert_pool(kv.append_kv(pool, layer, k, v, range(5, 8)), model, KIND)


def test_a_wide_layer_that_does_not_fit_writes_nothing(rng):
    pool, model = start(rng, KIND)
    k, v = random_bits(rng, (2, 3, *DIMS[3:]), "bfloat16")
    with jax.enable_x64(True):
        layer = jnp.int64(2**32 + 1)  # cut to 32 bits, it would be layer 1
        assert_pool(kv.append_kv(pool, layer, k, v, [5, 6, 7]), model, KIND)


# ---- head ranges ---------------------------------------------------------------------

HEADS = {
    "pair": (2, 4),
    "list": [2, 4],
    "NumPy": np.array([2, 4]),
    "range": range(2, 4),
    "slice": slice(2, 4),
    "slice from the end": slice(-3, -1),
}


@pytest.mark.parametrize("form", HEADS)
def test_heads_come_in_any_form(rng, form):
    pool, model = start(rng, KIND)
    got = kv.gather_blocks(pool, [4, 0], "NHD", HEADS[form])
    assert_same_bits(got, model.gather([4, 0], (2, 4)))


def test_slices_of_heads_may_be_open(rng):
    pool, model = start(rng, KIND)
    for heads, pair in ((slice(2), (0, 2)), (slice(1, None), (1, 5))):
        got = kv.gather_blocks(pool, [4, 0], "NHD", heads)
        assert_same_bits(got, model.gather([4, 0], pair))


# ---- where nothing may move by itself ------------------------------------------------


def test_a_transfer_guard_lets_ids_and_layers_pass(rng):
    pool, model = start(rng, KIND)
    blocks = random_bits(rng, (2, *DIMS), "bfloat16")
    k, v = random_bits(rng, (2, 3, *DIMS[3:]), "bfloat16")
    with jax.transfer_guard("disallow"):
        pool = kv.scatter_blocks(pool, [1, 3], blocks, "NHD")
        pool = kv.append_kv(pool, 1, k, v, range(5, 8))
        pool = kv.append_kv(pool, np.int64(2), k, v, np.array([5, -1, 7]))
        pool = kv.copy_blocks(pool, [3], [0])
        pool = kv.transfer_blocks(pool, (1,), pool, [2], slice(1, 3))
        with jax.enable_x64(True):
            ids = jax.device_put(np.int64([0, 2]))
            got = kv.gather_blocks(pool, ids, "NHD")
            same = kv.convert_blocks(np.asarray(blocks), "NHD", "NHD", pool.spec)
    model.scatter([1, 3], blocks)
    model.append(1, [k, v], [5, 6, 7])
    model.append(2, [k, v], [5, -1, 7])
    model.scatter([0], model.gather([3]))
    model.scatter([2], model.gather([1], (1, 3)), (1, 3))
    assert_pool(pool, model, KIND)
    assert_same_bits(got, model.gather([0, 2]))
    assert_same_bits(same, blocks)


def test_a_transfer_guard_lets_a_batch_of_ids_pass(rng):
    # Integers, because XLA:CPU's own stacking quiets the NaNs of bfloat16.
    pool, model = start(rng, KIND, dtype="uint16")
    ids = jnp.int32([[4, -1], [0, 2]])
    with jax.transfer_guard("disallow"):
        got = jax.vmap(lambda p, i: kv.gather_blocks(p, i, "NHD"), (None, 0))(pool, ids)
        swapped = jax.vmap(kv.copy_blocks)(
            jax.tree.map(lambda x: jnp.stack([x, x]), pool), ids, ids[:, ::-1]
        )
    assert_same_bits(got[1], model.gather([0, 2]))
    model.scatter([-1, 4], model.gather([4, -1]))
    assert_same_bits(swapped.data[0], model.blocks)


# ---- tensors of other libraries ------------------------------------------------------


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "uint8"])
def test_torch_blocks_are_moved(rng, dtype):
    import torch

    values = rng.integers(0, 100, (2, *DIMS)).astype(np.uint8)
    blocks = torch.from_numpy(values).to(getattr(torch, dtype))
    spec = SPEC.replace(dtype=dtype)
    want = lay(np.asarray(jnp.asarray(values).astype(dtype)), "universal")
    assert_same_bits(kv.block_to_universal(blocks), want)
    assert_same_bits(kv.block_to_universal(blocks.swapaxes(3, 4), "HND"), want)
    with_gaps = torch.cat([blocks, blocks], -1)[..., : DIMS[-1]]
    assert_same_bits(kv.convert_blocks(with_gaps, "NHD", "universal", spec), want)
    listed = kv.block_to_universal([[*b.flatten(0, 1)] for b in blocks])
    assert_same_bits(jnp.stack(listed), want)
    pool = kv.KVPool.zeros(spec, 4)
    pool = kv.scatter_blocks(pool, torch.tensor([2, 0]), blocks, "NHD")
    assert_same_bits(kv.gather_blocks(pool, torch.tensor([2, 0]).int()), want)


@pytest.mark.torch
def test_torch_tokens_are_appended_and_their_slots_checked(rng):
    import torch

    pool, model = start(rng, KIND, dtype="float32")
    k, v = rng.normal(size=(2, 3, *DIMS[3:])).astype(np.float32)
    slots = torch.tensor([5, -1, 7])  # int64, as torch makes them
    layer = torch.tensor(1)
    model.append(1, [k, v], [5, -1, 7])
    new = kv.append_kv(pool, layer, torch.from_numpy(k), torch.from_numpy(v), slots)
    assert_pool(new, model, KIND)
    with pytest.raises(ValueError, match=r"slots must fit in int32, got values from"):
        kv.append_kv(pool, 1, k, v, slots + 2**32)


TOO_WIDE = {
    "ids": lambda pool, x: kv.gather_blocks(pool, x),
    "src_ids": lambda pool, x: kv.copy_blocks(pool, x, [0, 1, 2]),
    "dst_ids": lambda pool, x: kv.transfer_blocks(pool, [0, 1, 2], pool, x),
    "slots": lambda pool, x: kv.append_kv(pool, 1, None, None, x),
}


@pytest.mark.torch
@pytest.mark.parametrize("name", TOO_WIDE)
def test_integers_of_torch_are_checked_where_they_lie(rng, elsewhere, name):
    import torch

    pool, _ = start(rng, KIND)
    with pytest.raises(ValueError, match=rf"{name} must fit in int32, got values from"):
        TOO_WIDE[name](pool, torch.tensor([5, -1, 7]) + 2**32)


def assert_shared(layers: list[Any], platform: str) -> None:
    pool = kv.KVPool.wrap(layers, SPEC)
    assert [x.unsafe_buffer_pointer() for x in pool.data] == [
        x.data_ptr() for x in layers
    ]
    assert {d.platform for x in pool.data for d in x.devices()} == {platform}


@pytest.mark.torch
def test_a_pool_of_torch_memory_lies_where_that_lies():
    """On the CPU, too, where there is a GPU."""
    import torch

    platforms = {"cpu": "cpu"}
    if has_gpu() and torch.cuda.is_available():
        platforms["cuda"] = "gpu"
    for device, platform in platforms.items():
        shape = (7, *DIMS[1:])
        layers = [torch.zeros(shape, device=device) for _ in range(DIMS[0])]
        assert_shared(layers, platform)


@pytest.mark.torch
def test_a_pool_of_torch_memory_on_the_host_stays_there(elsewhere):
    import torch

    assert_shared([torch.zeros(7, *DIMS[1:]) for _ in range(DIMS[0])], "cpu")
    assert not elsewhere


@pytest.mark.torch
@pytest.mark.gpu
def test_a_pool_on_the_cpu_is_used_beside_a_gpu(rng):
    """Of torch's memory; blocks come from the host and stay with the pool."""
    import torch

    values = torch.from_numpy(rng.normal(size=(7, *DIMS)).astype(np.float32))
    pool = kv.KVPool.wrap(values, SPEC)
    blocks = torch.ones(2, *DIMS)
    new = kv.scatter_blocks(pool, torch.tensor([4, 2]), blocks, "NHD")
    got = kv.gather_blocks(new, [4, 0], "NHD")
    assert {d.platform for x in (new.data, got) for d in x.devices()} == {"cpu"}
    assert_same_bits(got, np.stack([blocks[0], values[0]]))


@pytest.mark.torch
def test_torch_tensors_that_cannot_be_shared_say_why():
    import torch

    x = torch.zeros(DIMS, requires_grad=True)
    words = r"blocks must be an array that DLPack can share.*torch.*detach\(\)"
    with pytest.raises(BufferError, match=words):
        kv.block_to_universal(x)
    with pytest.raises(TypeError, match=r"blocks must be.*float64.*jax_enable_x64"):
        kv.block_to_universal(torch.zeros(DIMS, dtype=torch.float64))
