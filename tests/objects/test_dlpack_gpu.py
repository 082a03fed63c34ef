"""DLPack exports of GPU and pinned memory: streams, donation, who can read them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import managers
import numpy as np
import pytest
from managers import add

import jax_kvblock as kv

pytestmark = pytest.mark.gpu

BLOCKS = 5
CUDA, CUDA_HOST = 2, 3


def make_manager(**changes: Any) -> kv.BlockManager:
    gpu = jax.devices("gpu")[0]
    return managers.make_manager(**{"num_blocks": BLOCKS, "device": gpu, **changes})


def fill(manager: kv.BlockManager, rng: np.random.Generator) -> np.ndarray:
    with manager.allocate_blocks(BLOCKS) as blocks:
        values = rng.normal(size=(BLOCKS, *blocks[0].shape)).astype(np.float32)
        for block in blocks:
            block.copy_from(values[block.id])
    return values


LAYOUTS = {
    "NHD": {},
    "HND": {"layout": "HND"},
    "universal": {"layout": "universal"},
    "layers": {"contiguous": False},
}


@pytest.mark.torch
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_shares_the_memory(layout: str, rng: np.random.Generator) -> None:
    import torch

    manager = make_manager(**LAYOUTS[layout])
    values = fill(manager, rng)
    block = manager.allocate_blocks(2)[1]
    for layer in block:
        arrays = manager.pool.arrays
        array = arrays[0] if manager.pool.contiguous else arrays[layer.index]
        tensor = torch.from_dlpack(layer)
        assert tensor.device.type == "cuda"
        start = array.unsafe_buffer_pointer()
        assert start <= tensor.data_ptr() < start + array.nbytes
        np.testing.assert_array_equal(tensor.cpu(), values[block.id, layer.index])
        tensor.fill_(layer.index)
        torch.cuda.synchronize()
        assert (np.asarray(layer) == layer.index).all()


@pytest.mark.torch
@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "bool"])
def test_torch_dtypes(name: str) -> None:
    import torch

    block = make_manager(dtype=jnp.dtype(name)).allocate_blocks(1)[0]
    block.copy_from(jnp.ones(block.shape, jnp.dtype(name)))
    tensor = torch.from_dlpack(block)
    assert tensor.dtype == getattr(torch, name)
    got = tensor.contiguous().view(torch.uint8).cpu().numpy()
    assert got.tobytes() == np.ones(block.shape, jnp.dtype(name)).tobytes()


def keep_adding(pool: kv.KVPool) -> kv.KVPool:
    """Enough work that an export which does not wait sees unfinished data."""
    return jax.lax.fori_loop(0, 400, lambda _, p: add(p), pool)


@pytest.mark.torch
@pytest.mark.parametrize("how", ["side stream", "default stream", "bare capsule"])
def test_torch_sees_finished_data(how: str) -> None:
    import torch

    manager = kv.BlockManager(
        8, 64, num_kv_heads=8, head_dim=128, dtype=jnp.float32, num_blocks=64
    )
    block = manager.allocate_blocks(64)[-1]
    side = torch.cuda.Stream()
    for turn in range(1, 4):
        manager.update(keep_adding)
        if how == "bare capsule":
            result = torch.from_dlpack(block.__dlpack__()).clone()
        else:
            stream = side if how == "side stream" else torch.cuda.default_stream()
            with torch.cuda.stream(stream):
                result = torch.from_dlpack(block).clone()
            stream.synchronize()  # for what torch does below, on another stream
        assert (result.cpu() == 400 * turn).all(), "it ran ahead of jax"
    assert manager.live_exports == []


def test_cupy_shares_the_memory(rng: np.random.Generator) -> None:
    cupy = pytest.importorskip("cupy")
    manager = make_manager(layout="universal")
    values = fill(manager, rng)
    block = manager.allocate_blocks(3)[2]
    array = cupy.from_dlpack(block)
    start = manager.pool.data.unsafe_buffer_pointer()
    assert start <= array.data.ptr < start + manager.pool.nbytes
    np.testing.assert_array_equal(array.get(), values[block.id])
    assert manager.live_exports == [f"block {block.id}"]
    with cupy.cuda.Stream(non_blocking=True) as stream:
        layer = cupy.from_dlpack(block[1])
        layer *= 2
        stream.synchronize()
    np.testing.assert_array_equal(np.asarray(block[1]), values[block.id, 1] * 2)
    np.testing.assert_array_equal(array[1].get(), values[block.id, 1] * 2)


def test_donation_while_exported_is_refused(rng: np.random.Generator) -> None:
    manager = make_manager()
    values = fill(manager, rng)
    block = manager.allocate_blocks(2)[1]
    capsule = block[2].__dlpack__()
    named = rf"alive: block {block.id}, layer 2\. .*copy=True"
    with pytest.raises(BufferError, match=f"update: .*{named}"):
        manager.update(add)
    with pytest.raises(BufferError, match=named):
        block.copy_from(np.zeros(block.shape, np.float32))
    assert block and block.ref_count == 2
    np.testing.assert_array_equal(np.asarray(block), values[block.id])
    # A jit of one's own is refused by XLA, and harms nothing either.
    with pytest.raises(Exception, match="external reference"):
        jax.block_until_ready(jax.jit(add, donate_argnums=0)(manager.pool))
    assert block
    np.testing.assert_array_equal(np.asarray(block), values[block.id])
    del capsule
    manager.update(add)
    np.testing.assert_array_equal(np.asarray(block), values[block.id] + 1)


def test_a_copy_does_not_hinder_donation() -> None:
    manager = make_manager()
    block = manager.allocate_blocks(1)[0]
    copies = [block.__dlpack__(copy=True), block[0].__dlpack__(dl_device=(1, 0))]
    manager.update(add)
    assert (np.asarray(block) == 1).all() and copies


def test_numpy_gets_a_copy_that_is_asked_for(rng: np.random.Generator) -> None:
    manager = make_manager(layout="HND")
    values = fill(manager, rng)
    block = manager.allocate_blocks(2)[1]
    assert block.__dlpack_device__() == (CUDA, block.device_id)
    for part, expected in ((block, values[block.id]), (block[1], values[block.id, 1])):
        np.testing.assert_array_equal(np.from_dlpack(part, device="cpu"), expected)
        with pytest.raises(BufferError, match=r"needs a copy, and copy=False forbids"):
            np.from_dlpack(part, device="cpu", copy=False)
    assert manager.live_exports == []


def test_pinned_memory_is_told_alike(rng: np.random.Generator) -> None:
    manager = make_manager(memory_kind="pinned_host")
    values = fill(manager, rng)
    block = manager.allocate_blocks(2)[1]
    assert block.__dlpack_device__() == (CUDA_HOST, block.device_id)
    view = np.from_dlpack(block)
    offset = block.id * block.nbytes
    start = manager.pool.data.unsafe_buffer_pointer()
    assert view.__array_interface__["data"][0] == start + offset
    np.testing.assert_array_equal(view, values[block.id])
    view[1] = 6
    assert (np.asarray(block[1]) == 6).all()
    as_cpu = np.from_dlpack(block[1], device="cpu", copy=False)
    assert np.shares_memory(as_cpu, view)
    copied = np.from_dlpack(block, copy=True)
    assert not np.shares_memory(copied, view)
    np.testing.assert_array_equal(copied, view)
    del as_cpu, view
    manager.update(add)
    assert (np.asarray(block[1]) == 7).all()


@pytest.mark.torch
def test_torch_takes_pinned_memory(rng: np.random.Generator) -> None:
    import torch

    manager = make_manager(memory_kind="pinned_host", layout="universal")
    values = fill(manager, rng)
    block = manager.allocate_blocks(2)[1]
    # torch takes no pinned memory as such; shown as what it is, CPU memory, it does.
    with pytest.raises(BufferError, match="device_type"):
        torch.from_dlpack(block)
    tensor = torch.from_dlpack(block.__dlpack__(dl_device=(1, 0)))
    assert tensor.device.type == "cpu"
    np.testing.assert_array_equal(tensor.numpy(), values[block.id])
    np.testing.assert_array_equal(tensor.to("cuda").cpu().numpy(), values[block.id])


@pytest.mark.torch
def test_copy_from_a_gpu_tensor(rng: np.random.Generator) -> None:
    import torch

    manager = make_manager()
    block = manager.allocate_blocks(2)[1]
    values = rng.normal(size=block.shape).astype(np.float32)
    block.copy_from(torch.from_numpy(values).cuda())
    np.testing.assert_array_equal(np.asarray(block), values)
    on_cpu = make_manager(device=jax.devices("cpu")[0]).allocate_blocks(1)[0]
    on_cpu.copy_from(torch.from_numpy(values).cuda())
    np.testing.assert_array_equal(np.asarray(on_cpu), values)
