"""DLPack exports: zero copy, owners that stay alive, donation that harms nobody."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import managers
import numpy as np
import pytest
from managers import HD, NH, NL, NO, NT, Holder

import jax_kvblock as kv

BLOCKS = 5


def make_manager(**changes: Any) -> kv.BlockManager:
    """A manager in CPU memory, where NumPy can look at it, also on a GPU machine."""
    cpu = jax.devices("cpu")[0]
    return managers.make_manager(**{"num_blocks": BLOCKS, "device": cpu, **changes})


def fill(manager: kv.BlockManager, rng: np.random.Generator) -> np.ndarray:
    """Random bits in every block; returns them `[blocks, *block.shape]`."""
    with manager.allocate_blocks(manager.num_blocks) as blocks:
        bits = rng.integers(0, 2, (len(blocks), blocks[0].nbytes), np.uint8)
        if manager.spec.dtype != np.bool_:
            bits *= rng.integers(0, 120, bits.shape, np.uint8)
        values = bits.view(manager.spec.dtype).reshape(-1, *blocks[0].shape)
        for block in blocks:
            block.copy_from(values[block.id])
    return values


def add_one(pool: kv.KVPool) -> kv.KVPool:
    return jax.tree.map(lambda x: x + jnp.ones((), x.dtype), pool)


donate = jax.jit(add_one, donate_argnums=0)


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


# ---- zero copy -----------------------------------------------------------------------

LAYOUTS = {
    "NHD": {},
    "HND": {"layout": "HND"},
    "universal": {"layout": "universal"},
    "operational": {"layout": "operational"},
    "page first": {"layout": kv.Layout("page first", "T L O H D")},
    "merged": {"layout": kv.Layout("merged", "(H D) T (L O)")},
    "NHD layers": {"contiguous": False},
    "HND layers": {"contiguous": False, "layout": "HND"},
    "inner alone": {"inner_dim": NH * HD, "num_kv_heads": None, "head_dim": None},
    "combined": {"num_outer": 1, "dtype": jnp.int16},
    "pinned": {"memory_kind": "pinned_host"},
}


def look_into(manager: kv.BlockManager, block_id: int, layer: int | None) -> np.ndarray:
    """A block or layer by NumPy's own indexing of the pool's memory."""
    spec, pool = manager.spec, manager.pool
    axes = [axis for axis in spec.block_layout.axes if axis.isalpha()]
    picked = {"H": 0} if spec.num_kv_heads == 1 else {}
    if not pool.contiguous:
        axes.remove("L")
    elif layer is not None:
        picked["L"] = layer
    array = pool.data if pool.contiguous else pool.data[layer]
    whole = np.from_dlpack(array)[block_id].reshape([spec.sizes[a] for a in axes])
    part = whole[tuple(picked.get(axis, slice(None)) for axis in axes)]
    left = [axis for axis in axes if axis not in picked]
    order = "LOHTD" if spec.layout == "HND" else "LOTHD"
    return part.transpose([left.index(axis) for axis in order if axis in left])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numpy_shares_the_memory_of_keys_and_values(
    layout: str, rng: np.random.Generator
) -> None:
    manager = make_manager(**LAYOUTS[layout])
    values = fill(manager, rng)
    block = manager.allocate_blocks(BLOCKS)[3]
    for layer in block:
        whole = np.from_dlpack(layer)
        for piece in layer:
            view = np.from_dlpack(piece)
            assert address(view) == address(whole[piece.index])
            assert view.strides == whole.strides[1:]
            expected = values[block.id, layer.index, piece.index]
            np.testing.assert_array_equal(view, expected)


PARTS = [
    (layout, layer)
    for layout, changes in LAYOUTS.items()
    for layer in (None, 0, NL - 1)
    if layer is not None or changes.get("contiguous", True)
]


@pytest.mark.parametrize(("layout", "layer"), PARTS)
def test_numpy_shares_the_memory(
    layout: str, layer: int | None, rng: np.random.Generator
) -> None:
    manager = make_manager(**LAYOUTS[layout])
    values = fill(manager, rng)
    for block in manager.allocate_blocks(BLOCKS):
        view = np.from_dlpack(block if layer is None else block[layer])
        own = look_into(manager, block.id, layer)
        assert address(view) == address(own)
        assert view.strides == own.strides
        expected = values[block.id] if layer is None else values[block.id, layer]
        np.testing.assert_array_equal(view, expected)


@pytest.mark.torch
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_shares_the_memory(layout: str, rng: np.random.Generator) -> None:
    import torch

    manager = make_manager(**LAYOUTS[layout])
    values = fill(manager, rng)
    block = manager.allocate_blocks(BLOCKS)[3]
    for layer in [*range(NL), None][: NL + manager.pool.contiguous]:
        part = block if layer is None else block[layer]
        own = look_into(manager, block.id, layer)
        for tensor in (torch.from_dlpack(part), torch.from_dlpack(part.__dlpack__())):
            assert tensor.data_ptr() == address(own)
            assert [n * own.itemsize for n in tensor.stride()] == list(own.strides)
            expected = values[block.id] if layer is None else values[block.id, layer]
            np.testing.assert_array_equal(tensor.numpy(), expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_offset_into_the_pool(device: str) -> None:
    """What the capsule itself says, whoever reads it, on any device."""
    manager = make_manager(device=jax.devices(device)[0])
    start = manager.pool.data.unsafe_buffer_pointer()
    for block in manager.allocate_blocks(BLOCKS):
        bytes_before = block.id * block.nbytes
        for layer in block:
            described = read_capsule(layer.__dlpack__(max_version=(1, 0)))
            assert described.data == start + bytes_before + layer.index * layer.nbytes
            assert described.shape == layer.shape
            assert described.device == layer.__dlpack_device__()
            assert described.device[0] == (1 if device == "cpu" else 2)


NUMPY_DTYPES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32"),
    *("float16", "float32", "complex64"),
]
TORCH_DTYPES = [
    *NUMPY_DTYPES,
    *("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
    *("float8_e5m2fnuz", "float8_e8m0fnu"),
]


@pytest.mark.parametrize("name", NUMPY_DTYPES)
def test_numpy_dtypes(name: str, rng: np.random.Generator) -> None:
    manager = make_manager(dtype=jnp.dtype(name))
    values = fill(manager, rng)
    block = manager.allocate_blocks(1)[0]
    view = np.from_dlpack(block)
    assert view.dtype == name
    assert view.tobytes() == values[block.id].tobytes()


@pytest.mark.torch
@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_torch_dtypes(name: str, rng: np.random.Generator) -> None:
    import torch

    manager = make_manager(dtype=jnp.dtype(name))
    values = fill(manager, rng)
    block = manager.allocate_blocks(2)[1]
    for tensor in (torch.from_dlpack(block), torch.from_dlpack(block.__dlpack__())):
        assert tensor.dtype == getattr(torch, name)
        got = tensor.contiguous().view(torch.uint8).numpy()
        assert got.tobytes() == values[block.id].tobytes()


def test_writes_go_both_ways() -> None:
    manager = make_manager(layout="universal")
    blocks = manager.allocate_blocks(3)
    view = np.from_dlpack(blocks[1])
    view[...] = 5
    np.testing.assert_array_equal(np.asarray(blocks[1]), 5)
    gathered = kv.gather_blocks(manager.pool, blocks.ids, "NHD")
    np.testing.assert_array_equal(
        np.asarray(gathered).sum((1, 2, 3, 4, 5)) > 0, [0, 1, 0]
    )
    layer = np.from_dlpack(blocks[1][2])
    layer[...] = 7
    assert (view[2] == 7).all() and (view[:2] == 5).all()


def test_jax_takes_a_layer(rng: np.random.Generator) -> None:
    manager = make_manager()
    values = fill(manager, rng)
    block = manager.allocate_blocks(1)[0]
    np.testing.assert_array_equal(jnp.from_dlpack(block[1]), values[block.id, 1])


# ---- who stays alive -----------------------------------------------------------------


def test_a_view_keeps_the_memory() -> None:
    view = np.from_dlpack(make_manager().allocate_blocks(2)[1][1])
    gc.collect()
    view[...] = 3
    others = [make_manager() for _ in range(20)]  # would take memory that was freed
    for manager in others:
        manager.update(add_one)
    np.testing.assert_array_equal(view, 3)


def test_a_view_outlives_a_closed_manager() -> None:
    with make_manager() as manager:
        view = np.from_dlpack(manager.allocate_blocks(1)[0])
    del manager
    gc.collect()
    view += 2
    assert (view == 2).all()


@pytest.mark.parametrize("part", ["block", "layer"])
def test_an_exported_block_is_not_reused(part: str) -> None:
    manager = make_manager()
    block = manager.allocate_blocks(1)[0]
    taken = block.id
    view = np.from_dlpack(block if part == "block" else block[1])
    view = view[..., :1]  # a view of the view holds it, too
    assert block.ref_count == 2
    manager.free(block)
    del block
    assert manager.num_free_blocks == BLOCKS - 1
    others = manager.allocate_blocks(BLOCKS - 1)
    assert taken not in others.ids
    with pytest.raises(kv.PoolExhaustedError):
        manager.allocate_blocks(1)
    view[...] = 1
    assert not any(np.asarray(other).any() for other in others)
    del view
    assert manager.num_free_blocks == 1 and manager.allocate_blocks(1)[0].id == taken


def test_live_exports_are_named() -> None:
    manager = make_manager()
    blocks = manager.allocate_blocks(3)
    views = [np.from_dlpack(blocks[0]), np.from_dlpack(blocks[2][1])]
    first, second = manager.live_exports
    assert first == f"block {blocks[0].id}"
    assert second == f"block {blocks[2].id}, layer 1"
    del views
    assert manager.live_exports == []


@pytest.mark.parametrize("max_version", [None, (0, 8), (1, 0), (1, 1), (2, 0)])
def test_unused_capsules_are_freed(max_version: tuple[int, int] | None) -> None:
    block = make_manager().allocate_blocks(1)[0]
    capsules = [block.__dlpack__(max_version=max_version) for _ in range(3)]
    assert block.ref_count == 4
    del capsules
    assert block.ref_count == 1 and block.manager.live_exports == []
    copies = [block.__dlpack__(max_version=max_version, copy=True) for _ in range(3)]
    assert block.ref_count == 1 and block.manager.live_exports == []
    del copies


def test_a_capsule_is_used_once() -> None:
    block = make_manager().allocate_blocks(1)[0]
    for max_version in (None, (1, 0)):
        capsule = block.__dlpack__(max_version=max_version)
        view = np.from_dlpack(Holder(capsule))
        with pytest.raises(ValueError):
            np.from_dlpack(Holder(capsule))
        del capsule
        assert block.ref_count == 2 and not view.any()
        del view
        assert block.ref_count == 1


def test_views_are_dropped_on_any_thread() -> None:
    block = make_manager().allocate_blocks(1)[0]
    views = [[np.from_dlpack(block[i % NL])] for i in range(40)]
    threads = [threading.Thread(target=view.clear) for view in views]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert block.ref_count == 1 and block.manager.live_exports == []


def test_views_may_live_until_the_end(tmp_path: Path) -> None:
    program = tmp_path / "keeps_a_view.py"
    program.write_text(
        "import jax, numpy as np, jax_kvblock as kv\n"
        "cpu = jax.devices('cpu')[0]\n"
        "manager = kv.BlockManager(2, 4, 8, dtype='float32', device=cpu)\n"
        "block = manager.allocate_blocks(1)[0]\n"
        "views = [np.from_dlpack(block), block.__dlpack__(), manager]\n"
        "views.append(views)\n"
    )
    ends_well(program)


def test_a_view_is_dropped_while_python_ends(tmp_path: Path) -> None:
    """By a thread that Python does not know, which waits for the GIL until the end."""
    program = tmp_path / "drops_a_view.py"
    program.write_text(
        "import atexit, ctypes, sys, time\n"
        "import jax, jax_kvblock as kv\n"
        "cpu = jax.devices('cpu')[0]\n"
        "manager = kv.BlockManager(2, 4, 8, dtype='float32', device=cpu)\n"
        "block = manager.allocate_blocks(1)[0]\n"
        "capsule = block.__dlpack__()\n"
        "api = ctypes.pythonapi\n"
        "api.PyCapsule_GetPointer.restype = ctypes.c_void_p\n"
        "object_of = ctypes.py_object(capsule)\n"
        "tensor = api.PyCapsule_GetPointer(object_of, b'dltensor')\n"
        "api.PyCapsule_SetName(object_of, b'used_dltensor')\n"
        "deleter = ctypes.c_void_p.from_address(tensor + 56)\n"
        "process = ctypes.PyDLL(None)  # it keeps the GIL\n"
        "sys.setswitchinterval(1000)  # so does this\n"
        "def drop():\n"
        "    thread, data = ctypes.c_size_t(), ctypes.c_void_p(tensor)\n"
        "    process.pthread_create(ctypes.byref(thread), None, deleter, data)\n"
        "    end = time.monotonic() + 0.3\n"
        "    while time.monotonic() < end:\n"
        "        pass\n"
        "atexit.register(drop)\n"
        "class Last:\n"
        "    def __del__(self, sleep=time.sleep):\n"
        "        sleep(0.3)  # others may have the GIL, but for the interpreter's end\n"
        "last = Last()\n"
    )
    ends_well(program)


def ends_well(program: Path) -> None:
    package = str(Path(kv.__file__).parent.parent)
    path = os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])
    child = subprocess.run(
        [sys.executable, program],
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    for complaint in ("Traceback", "Exception ignored", "nanobind", "Fatal"):
        assert complaint not in child.stderr


# ---- the protocol's options ----------------------------------------------------------


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("extents", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.extents[: self.ndim])

    @property
    def device(self) -> tuple[int, int]:
        return self.device_type, self.device_id


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    ]


READ_ONLY, COPIED = 1, 2


def open_capsule(capsule: Any) -> Versioned:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = (
        ctypes.c_void_p,
        [ctypes.py_object, ctypes.c_char_p],
    )
    place = pointer(capsule, b"dltensor_versioned")
    content = Versioned.from_address(place)
    content.keeps = capsule
    return content


def read_capsule(capsule: Any) -> DLTensor:
    opened = open_capsule(capsule)
    assert opened.tensor.byte_offset == 0, "several consumers ignore it"
    tensor = opened.tensor
    tensor.keeps = opened
    return tensor


def test_versions() -> None:
    block = make_manager().allocate_blocks(1)[0]
    for old in (None, (0, 8)):
        assert '"dltensor"' in repr(block.__dlpack__(max_version=old))
    for new in ((1, 0), (1, 1), (2, 3)):
        opened = open_capsule(block.__dlpack__(max_version=new))
        assert opened.major == 1 and opened.flags == 0
    opened = open_capsule(block.__dlpack__(max_version=(1, 0), copy=True))
    assert opened.flags & COPIED and not opened.flags & READ_ONLY
    assert np.from_dlpack(block).flags.writeable


@pytest.mark.parametrize("dl_device", [None, (1, 0)])
@pytest.mark.parametrize("part", ["block", "layer"])
def test_copies_when_asked(part: str, dl_device: tuple[int, int] | None) -> None:
    manager = make_manager(layout="HND")
    block = manager.allocate_blocks(2)[1]
    view: Any = block if part == "block" else block[1]
    for copy in (None, False):
        capsule = view.__dlpack__(dl_device=dl_device, copy=copy, max_version=(1, 0))
        shared = np.from_dlpack(Holder(capsule))
        shared[...] = 4
    capsule = view.__dlpack__(dl_device=dl_device, copy=True, max_version=(1, 0))
    copied = np.from_dlpack(Holder(capsule))
    assert not np.shares_memory(copied, shared) and copied.flags.c_contiguous
    copied[...] = 9
    assert (np.asarray(view) == 4).all()
    del shared, capsule
    assert manager.live_exports == [], "a copy holds nothing"
    assert (np.from_dlpack(view, copy=True) == 4).all()
    assert (np.from_dlpack(view, device="cpu", copy=False) == 4).all()


@pytest.mark.parametrize("dl_device", [(2, 0), (1, 1), (13, 0)])
@pytest.mark.parametrize("copy", [None, True, False])
def test_other_devices_are_refused(dl_device: tuple[int, int], copy: Any) -> None:
    block = make_manager().allocate_blocks(1)[0]
    for view in (block, block[0]):
        with pytest.raises(BufferError) as error:
            view.__dlpack__(dl_device=dl_device, copy=copy)
        for part in (f"block {block.id}", "(1, 0)", str(dl_device), "device_put"):
            assert part in str(error.value)
    assert block.ref_count == 1


def test_separate_layers_are_no_single_tensor() -> None:
    block = make_manager(contiguous=False).allocate_blocks(1)[0]
    with pytest.raises(BufferError, match=r"separate arrays.*contiguous=True"):
        block.__dlpack__()
    assert block.ref_count == 1 and block.manager.live_exports == []
    assert block[1].__dlpack_device__() == (1, 0)


# ---- donation ------------------------------------------------------------------------

UPDATES: dict[str, Callable[[kv.BlockManager], None]] = {
    "update": lambda manager: manager.update(add_one),
    "put back": lambda manager: setattr(manager, "pool", donate(manager.pool)),
    "copy_from": lambda manager: manager.allocate_blocks(1)[0].copy_from(
        np.ones((NL, NO, NT, NH, HD), np.float32)
    ),
}


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("contiguous", [True, False])
def test_donation_on_the_cpu_warns(
    update: str, contiguous: bool, rng: np.random.Generator
) -> None:
    manager = make_manager(contiguous=contiguous)
    values = fill(manager, rng)
    block = manager.allocate_blocks(2)[1]
    view = np.from_dlpack(block[2])
    other = np.from_dlpack(block[0], copy=True)
    with pytest.warns(
        kv.PoolDoubledWarning, match=rf"alive: block {block.id}, layer 2\."
    ) as caught:
        UPDATES[update](manager)
    assert [warning.filename for warning in caught] == [__file__], "the caller's line"
    expected = values[block.id] + (update != "copy_from")
    np.testing.assert_array_equal(view, values[block.id, 2])
    np.testing.assert_array_equal(np.asarray(block), expected)
    view[...] = 0  # the old memory, no longer the pool's
    np.testing.assert_array_equal(np.asarray(block), expected)
    np.testing.assert_array_equal(other, values[block.id, 0])
    del view
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        UPDATES[update](manager)
    assert np.shares_memory(np.from_dlpack(block[1]), look_into(manager, block.id, 1))


def test_reading_does_not_warn() -> None:
    manager = make_manager()
    blocks = manager.allocate_blocks(2)
    view = np.from_dlpack(blocks[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kv.gather_blocks(manager.pool, blocks.ids)
        manager.pool = manager.pool
        np.asarray(blocks[1])
    assert not view.any()
