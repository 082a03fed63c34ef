"""Devices by platform, their memory, and which implementation serves each op there."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import pytest
from messages import check

import jax_kvblock as kv
from jax_kvblock.core import ffi
from jax_kvblock.hardware import (
    HardwareAbstractionLayer,
    attention_in,
    capabilities,
    detect_available_devices,
    devices,
    served,
)


class Described:
    """A device of hardware that is not here: what JAX says of one."""

    def __init__(self, platform, version="", stats=None, **attributes):
        self.platform = platform
        self.client = types.SimpleNamespace(platform_version=version)
        self.memory_stats = lambda: stats
        vars(self).update(attributes)


NVIDIA = Described("gpu", "PJRT C API\ncuda 13000", compute_capability="9.0")
AMD = Described("gpu", "PJRT C API\nrocm 70000", compute_capability="gfx942")
INTEL = Described("xpu", "an Intel GPU")
TPU = Described("tpu", "libtpu")
LOWERED = {"cuda": NVIDIA, "rocm": AMD, "xpu": INTEL, "tpu": TPU}


def test_this_process_and_its_platforms():
    found = detect_available_devices()
    assert [d for found in found.values() for d in found[:1]]
    default = jax.local_devices()
    assert found[ffi.default_platform()] == default
    assert next(iter(found)) == ffi.default_platform()
    assert found["cpu"] == jax.local_devices(backend="cpu")


def test_devices_of_other_hardware(monkeypatch):
    backends = {"cpu": [Described("cpu")], "cuda": [NVIDIA, NVIDIA], "rocm": [AMD]}
    backends["xpu"] = [INTEL]
    monkeypatch.setattr(devices.backend, "backends", lambda: backends)
    monkeypatch.setattr(
        jax, "local_devices", lambda *, backend="rocm": backends[backend]
    )
    found = detect_available_devices()
    assert list(found) == ["rocm", "cpu", "cuda", "xpu"]
    assert found["rocm"] == [AMD] and found["xpu"] == [INTEL]


def test_the_default_platform_is_not_nvidias_on_an_amd_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for there, platform in ((AMD, "rocm"), (NVIDIA, "cuda")):
        monkeypatch.setattr(jax, "devices", lambda there=there: [there])
        assert ffi.default_platform() == ffi.platform_of(there) == platform


# ---- who serves ----------------------------------------------------------------------

POOL = kv.KVPool.zeros(kv.BlockSpec(1, 2, 16, 1, 128, jnp.bfloat16), 2)
X = jnp.zeros((1, 16, 1, 128), jnp.bfloat16)


def paged(q):
    return kv.paged_attention(q, POOL, 0, jnp.zeros((1, 2), int), jnp.ones(1, int))


def converted(x):
    return kv.block_to_universal(x.reshape(1, 1, 16, 1, 128), num_outer=1)


OPS = {  # an op, a row of it, and the target of its kernel's call
    "attention": (kv.flash_attention, 3, served.ATTENTION_16_BITS, "kvblock_attention"),
    "paged": (paged, 1, served.PAGED, "kvblock_paged_attention"),
    "copies": (converted, 1, served.COPY_OPS[0], "kvblock_copy"),
}


@pytest.mark.cpu  # beside a GPU programs are lowered for that one
@pytest.mark.parametrize("platform", LOWERED)
@pytest.mark.parametrize("op", OPS)
def test_rows_are_what_is_lowered_for_a_platform(op, platform):
    function, count, row, target = OPS[op]
    there = LOWERED[platform]
    rows = {row.op: row for row in capabilities(there)}
    said = rows[row]
    kernels = platform == "cuda"
    assert said.implementation.startswith("xla") != kernels
    assert (platform if not kernels else "sm 9.0") in said.why
    if platform != "xpu":  # jax lowers for those it knows
        traced = jax.jit(function).trace(*[X] * count)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert (f"@{target}" in text) == kernels
        if op != "copies":
            assert attention_in(text) == (("cuda",) if kernels else ("xla",))


@pytest.mark.parametrize("platform", ["rocm", "xpu", "tpu"])
def test_elsewhere_no_row_names_a_kernel(platform):
    rows = capabilities(LOWERED[platform])
    tiles = [row for row in rows if row.op.startswith(served.TILES)]
    for row in rows:
        if row not in tiles:
            assert row.implementation == "none" or row.implementation.startswith("xla")
            assert platform in row.why or row.op == served.ATTENTION_64_BITS
    eight = next(row for row in rows if row.op == served.ATTENTION_8_BITS)
    assert eight.implementation == "none" and "Hopper" in eight.why


def test_what_is_no_device():
    words = "device|str|jax.devices()[0]"
    check("capabilities", TypeError, words, lambda: capabilities("cpu"))


def test_the_default_device_is_taken(four_cpus, monkeypatch):
    """Also one that a context has set; of several processes this one's."""
    for device in jax.devices("cpu")[:2]:
        with jax.default_device(device):
            assert HardwareAbstractionLayer().devices == (device,)
    own = jax.config.jax_default_device or jax.local_devices()[0]
    others: list[jax.Device] = []
    monkeypatch.setattr(jax, "devices", lambda *_: others)
    assert HardwareAbstractionLayer().devices == (own,)


def test_a_layer_of_devices_has_their_rows(four_cpus):
    hal = HardwareAbstractionLayer(jax.devices("cpu"))
    assert hal.platform == "cpu" and len(hal.devices) == 4
    rows = hal.implementations()
    assert rows == capabilities(jax.devices("cpu")[0])
    row = next(row for row in rows if row.op == "convert_blocks")
    assert row.implementation == "kernel (CPU, threaded)"
    assert row.why == f"{jax.devices('cpu')[0]} is the CPU"


@pytest.mark.cpu
def test_which_kernels_a_program_calls():
    def hopper(x):
        return kv.flash_attention(x, x, x, implementation="cuda_sm90")

    def both(x):
        return hopper(x), kv.flash_attention(x, x, x, implementation="cuda")

    for function, names in ((hopper, ("cuda_sm90",)), (both, ("cuda_sm90", "cuda"))):
        traced = jax.jit(function).trace(X)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert attention_in(text) == names
    assert attention_in(jax.jit(jnp.sin).lower(1.0)) == ("xla",)
    compiled = jax.jit(kv.flash_attention).lower(X, X, X).compile()
    assert attention_in(compiled.as_text()) == attention_in(compiled) == ("xla",)
    function = jax.jit(kv.flash_attention)
    words = "lowered or compiled|got PjitFunction|.compile()"
    check("attention_in", TypeError, words, lambda: attention_in(function))


# ---- memory --------------------------------------------------------------------------


def test_limits_are_what_the_device_tells():
    gpu = Described("gpu", stats={"bytes_limit": 7 * 2**30, "bytes_in_use": 5})
    assert devices.memory_limit("f", gpu) == 7 * 2**30
    smaller = Described("gpu", stats={"bytes_limit": 2**30})
    assert devices.check_limit("f", None, [gpu, smaller]) == 2**30
    assert devices.check_limit("f", 12345, [gpu]) == 12345


def test_a_cpu_has_its_share_of_the_host(four_cpus, monkeypatch):
    monkeypatch.setattr(devices, "_host_memory", lambda: 4_000_003)
    assert devices.memory_limit("f", jax.devices("cpu")[0]) == 1_000_000


def test_the_host_has_what_its_control_group_leaves(tmp_path):
    whole = devices._host_memory(tmp_path)
    assert whole > 2**20
    (tmp_path / "memory.max").write_text("max\n")
    assert devices._host_memory(tmp_path) == whole
    (tmp_path / "memory.max").write_text("65536\n")
    assert devices._host_memory(tmp_path) == 65536
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("4096\n")
    assert devices._host_memory(tmp_path) == 4096


def silent():
    raise NotImplementedError("no allocator")


def test_a_device_that_tells_nothing_asks_for_the_limit(monkeypatch):
    quiet = Described("xpu")
    check("f", ValueError, "limit|None|bytes", lambda: devices.memory_limit("f", quiet))
    quiet.memory_stats = silent
    check("f", ValueError, "limit|None|bytes", lambda: devices.memory_limit("f", quiet))
    monkeypatch.setattr(devices, "_host_memory", lambda: None)
    cpu = Described("cpu")
    check("f", ValueError, "limit|None|bytes", lambda: devices.memory_limit("f", cpu))


def test_what_is_no_limit():
    check("f", TypeError, "limit|whole|1.5", lambda: devices.check_limit("f", 1.5, []))
    check("f", ValueError, "limit|at least 1", lambda: devices.check_limit("f", 0, []))


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ([], TypeError, "devices of JAX|none"),
        (["cpu"], TypeError, "devices of JAX|str|detect_available_devices"),
        ("twice", ValueError, "each once"),
    ],
)
def test_what_are_no_target_devices(given, error, words):
    given = jax.devices()[:1] * 2 if given == "twice" else given
    where = "HardwareAbstractionLayer"
    check(where, error, words, lambda: HardwareAbstractionLayer(given))
