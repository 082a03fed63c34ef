"""`kernel_call`: what reaches the kernel, in a jit and under its transformations.

On a CPU a driver stands in that runs the kernels as C++; on a GPU they run
themselves.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import emulated_kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cpp_programs import folder_of
from emulated_kernels import BLOCK, blocks, kernel, scale
from jax.experimental.compilation_cache import compilation_cache

from jax_kvblock import kernels
from jax_kvblock.kernels import cuda


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv(
        "JAX_KVBLOCK_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "kernels")
    )


@pytest.fixture(
    params=[
        pytest.param("emulator", marks=pytest.mark.cpu),
        pytest.param("gpu", marks=pytest.mark.gpu),
    ]
)
def where(request):
    """On a driver that stands in, and where there is a GPU, on it."""
    if request.param == "emulator":
        request.getfixturevalue("driver")
    return request.param


def shift(x, a, n):
    """In place."""
    return kernels.kernel_call(
        kernel("shift"),
        x,
        out=x,
        aliases={0: 0},
        scalars=(a, n),
        grid=blocks(x.size),
        block=BLOCK,
    )


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.standard_normal(1000, np.float32))


# ---- scalars -------------------------------------------------------------------------


def test_a_number(where, x):
    np.testing.assert_array_equal(scale(x, 3.0), 3 * x)
    np.testing.assert_array_equal(jax.jit(scale, static_argnums=1)(x, 2), 2 * x)
    np.testing.assert_array_equal(scale(x, np.float32(-0.5)), -0.5 * x)


def test_a_hundred_values_and_one_compilation(where, x):
    compiled = 0

    @jax.jit
    def run(x, a):
        nonlocal compiled
        compiled += 1
        return scale(x, a)

    for i in range(100):
        a = np.float32(i * 0.37 - 5)
        np.testing.assert_array_equal(run(x, a), a * x)
    assert compiled == 1
    assert run._cache_size() == 1


def test_a_value_that_the_device_computes(where, x):
    run = jax.jit(lambda x: scale(x, jnp.max(x)))
    np.testing.assert_array_equal(run(x), x * jnp.max(x))


def test_a_concrete_array_is_as_a_traced_one(where, x):
    np.testing.assert_array_equal(scale(x, jnp.float32(4)), 4 * x)


def test_both_scalars_traced(where, x):
    @jax.jit
    def run(x, a, n):
        return kernels.kernel_call(
            kernel("scale"), x, out=x, scalars=(a, n), grid=blocks(x.size), block=BLOCK
        )

    got = run(x, 2.0, 1000)
    np.testing.assert_array_equal(got, 2 * x)
    assert run._cache_size() == 1
    for n in (1, 63, 640):
        np.testing.assert_array_equal(run(x, 2.0, n)[:n], 2 * x[:n])
    assert run._cache_size() == 1


def test_wider_parameters_than_jax_has_types(where, x):
    """A double and a 64-bit integer, from float32 and int32."""

    @jax.jit
    def run(x, a, n):
        return shift(x, a, n)

    want = np.where(np.arange(1000) < 500, x + np.float32(1.5), x)
    np.testing.assert_array_equal(run(x, 1.5, 500), want)
    np.testing.assert_array_equal(run(x, 1.5, -1), x)
    np.testing.assert_array_equal(shift(x, 1.5, 500), want)


def test_scalars_by_name_and_order(where, x):
    common = {"out": x, "grid": blocks(x.size), "block": BLOCK}
    call = functools.partial(kernels.kernel_call, kernel("scale"), x, **common)
    for scalars in ({"n": 1000, "a": 3.0}, {3: 1000, "a": jnp.float32(3)}):
        np.testing.assert_array_equal(call(scalars=scalars), 3 * x)
    # The last item is a, the one before it n.
    np.testing.assert_array_equal(call(scalars=(1000, 3.0), order=(0, 1, 3, 2)), 3 * x)


def test_scalars_and_results_that_depend_on_shapes(where, x):
    run = jax.jit(
        lambda x: kernels.kernel_call(
            kernel("scale"),
            x,
            out=lambda x: jax.ShapeDtypeStruct((x.size,), x.dtype),
            scalars=lambda x: (2.0, x.size),
            grid=lambda x: blocks(x.size),
            block=BLOCK,
        )
    )
    for n in (1, 64, 65, 1000):
        np.testing.assert_array_equal(run(x[:n]), 2 * x[:n])


# ---- how it is launched --------------------------------------------------------------


def test_the_launch(driver):
    given = {"grid": (2, 4, 6), "block": (8, 4, 2), "cluster": (2, 1, 2)}
    made = kernels.kernel_call(
        kernel("nothing"),
        out=jax.ShapeDtypeStruct((4,), jnp.float32),
        shared_memory=100_000,
        cooperative=True,
        **given,
    )
    made.block_until_ready()
    numbers = (ctypes.c_uint * 11)()
    driver.emulator_last_launch(numbers)
    assert list(numbers) == [2, 4, 6, 8, 4, 2, 100_000, 2, 1, 2, 1]


def test_code_is_loaded_once(driver, x):
    before = driver.emulator_loads(), driver.emulator_launches()
    run = jax.jit(lambda x: scale(scale(x, 1.25), 1.25))
    for _ in range(3):
        run(x).block_until_ready()
    jax.jit(lambda x: scale(x, 1.25) + 1)(x).block_until_ready()
    loads, launches = driver.emulator_loads(), driver.emulator_launches()
    assert (loads - before[0], launches - before[1]) in ((0, 7), (1, 7))


def test_sidecars_say_block_and_shared_memory(where, x):
    beside = {"entryPoint": "scale", "blockSize": 32, "sharedMemory": 64}
    known = kernels.from_ptx(kernel("scale").image, sidecar=beside)
    got = kernels.kernel_call(known, x, out=x, scalars=(2.0, 1000), grid=32)
    np.testing.assert_array_equal(got, 2 * x)


@pytest.mark.gpu
def test_ptx_whose_constant_is_edited_computes_something_else():
    """What stands in runs the source: a GPU alone runs what is loaded."""
    source = 'extern "C" __global__ void f(float* x) { x[threadIdx.x] = 2.0f; }'
    made = kernels.from_cuda(source, "f")
    edited = made.image.decode().replace("0f40000000", "0f40400000")
    edited = edited.replace("1073741824", "1077936128")
    out = jax.ShapeDtypeStruct((32,), jnp.float32)
    for image, value in ((made.image.decode(), 2.0), (edited, 3.0)):
        got = kernels.kernel_call(kernels.from_ptx(image), out=out, grid=1, block=32)
        np.testing.assert_array_equal(got, np.full(32, value, np.float32))


def test_tensor_maps(where, rng):
    x = jnp.asarray(rng.standard_normal((96, 64), np.float32)).astype(jnp.bfloat16)
    show = functools.partial(
        kernels.kernel_call,
        kernel("show_map"),
        grid=1,
        block=32,
        out=jax.ShapeDtypeStruct((32,), jnp.uint32),
        tensor_maps={0: kernels.TensorMap(box=(16, 64), swizzle=128)},
    )
    words = np.asarray(jax.jit(show)(x)).view(np.uint64)
    assert words.any()
    if where == "emulator":
        assert words[0] % 16 == 0  # the array's address
        assert list(words[1:4]) == [9 | 2 << 8 | 3 << 24 | 2 << 32, 64, 96]
        assert words[7] == 128
        assert list(words[11:13]) == [64 | 1 << 32, 16 | 1 << 32]


def test_debug_names_what_failed(driver, x):
    driver.emulator_fail_with(700)
    try:
        with pytest.raises(Exception, match=r"Kernel\('scale'\) failed as it ran"):
            scale(x, 2.0, debug=True).block_until_ready()
        np.testing.assert_array_equal(scale(x, 2.0), 2 * x)  # nobody asks
    finally:
        driver.emulator_fail_with(0)
    np.testing.assert_array_equal(scale(x, 2.0, debug=True), 2 * x)


# ---- results -------------------------------------------------------------------------


def keep(x, capacity, **options):
    n = jnp.asarray(x).size
    return kernels.kernel_call(
        kernel("keep_positive"),
        x,
        out=jax.ShapeDtypeStruct((capacity,), jnp.float32),
        append=0,
        scalars=(n, capacity),
        grid=blocks(n),
        block=BLOCK,
        **options,
    )


@pytest.mark.parametrize("capacity", [1, 100, 5000])
def test_appended(where, x, capacity):
    want = np.asarray(x[x > 0])
    for _ in range(2):  # the counter begins anew
        data, count, overflowed = jax.jit(keep, static_argnums=1)(x, capacity)
        assert count.dtype == jnp.int32 and int(count) == min(len(want), capacity)
        assert bool(overflowed) == (len(want) > capacity)
        kept = np.asarray(data)
        assert set(kept[:count]) <= set(want)
        assert len(set(kept[:count])) == int(count)
        assert not kept[int(count) :].any()


def test_appended_to_nothing(where):
    got = keep(jnp.full(100, -1.0), 10)
    assert int(got.count) == 0 and not got.overflowed and not got.data.any()


def test_an_alias_is_updated_in_place(where, x):
    @functools.partial(jax.jit, donate_argnums=0)
    def run(x):
        return shift(x, 1.0, x.size)

    want = np.asarray(x) + 1
    text = run.lower(x).compile().as_text()
    assert " copy(" not in text
    np.testing.assert_array_equal(run(x), want)


def test_an_alias_of_what_lives_on_is_copied(where, x):
    def run(x):
        return x, shift(x, 1.0, x.size)

    before, after = jax.jit(run)(x)
    np.testing.assert_array_equal(before, x)
    np.testing.assert_array_equal(after, x + 1)


# ---- transformations -----------------------------------------------------------------


def test_scan_and_while(where, x):
    def step(x, a):
        return scale(x, a), jnp.sum(x)

    factors = jnp.asarray([2.0, 0.5, 4.0, -1.0])
    got, _ = jax.jit(lambda x: jax.lax.scan(step, x, factors))(x)
    np.testing.assert_array_equal(got, -4 * x)
    looped = jax.lax.fori_loop(0, 3, lambda i, x: scale(x, 2.0), x)
    np.testing.assert_array_equal(looped, 8 * x)


def members(x, a, n, batch):
    name = "scale" if batch == "sequential" else "scale_members"
    return kernels.kernel_call(
        kernel(name),
        x,
        out=x,
        scalars=(a, n),
        grid=blocks(x.size),
        block=BLOCK,
        batch=batch,
    )


@pytest.mark.parametrize("batch", ["sequential", "z"])
@pytest.mark.parametrize("scalar", ["shared", "own", "number"])
def test_vmap(where, rng, batch, scalar):
    x = jnp.asarray(rng.standard_normal((5, 70), np.float32))
    a = jnp.arange(1.0, 6) if scalar == "own" else jnp.float32(3)
    axes = (1, 0 if scalar == "own" else None)

    def run(x, a):
        return members(x, 3.0 if scalar == "number" else a, 70, batch)

    got = jax.jit(jax.vmap(run, in_axes=axes, out_axes=1))(x.T, a)
    want = x * (a[:, None] if scalar == "own" else 3)
    np.testing.assert_array_equal(got.T, want)


@pytest.mark.parametrize("batch", ["sequential", "z"])
def test_vmap_of_vmap(where, rng, batch):
    x = jnp.asarray(rng.standard_normal((3, 4, 40), np.float32))
    a = jnp.asarray(rng.standard_normal(3, np.float32))

    def run(x, a):
        return members(x, a, 40, batch)

    inner = jax.vmap(run, in_axes=(0, None))
    np.testing.assert_array_equal(jax.vmap(inner)(x, a), x * a[:, None, None])
    # The outer axis belongs to the scalar alone, the inner one to the array.
    got = jax.vmap(inner, in_axes=(None, 0))(x[0], a)
    np.testing.assert_array_equal(got, x[0][None] * a[:, None, None])


def test_vmap_launches_once_or_for_each(driver, rng):
    x = jnp.asarray(rng.standard_normal((5, 70), np.float32))
    for batch, launches in (("sequential", 5), ("z", 1)):
        before = driver.emulator_launches()
        jax.vmap(lambda x, b=batch: members(x, 2.0, 70, b))(x).block_until_ready()
        assert driver.emulator_launches() - before == launches


def test_vmap_of_what_is_appended(where, rng):
    x = jnp.asarray(rng.standard_normal((4, 90), np.float32))
    got = jax.vmap(lambda x: keep(x, 40, batch="sequential"))(x)
    assert list(got.count) == [min(40, int((row > 0).sum())) for row in x]
    assert got.data.shape == (4, 40)
    for row, data, count in zip(x, got.data, got.count, strict=True):
        assert set(np.asarray(data[:count])) <= set(np.asarray(row[row > 0]))


def test_no_rule_for_vmap(where, x):
    with pytest.raises(
        NotImplementedError, match=r"Pass batch='sequential'.*batch='z'"
    ):
        jax.vmap(lambda x: scale(x, 2.0))(x[None])
    with pytest.raises(ValueError, match="must be 1 without one"):
        call = functools.partial(members, a=2.0, n=10, batch="x")
        jax.vmap(call)(jnp.ones((2, 1000)))


def test_a_derivative(where, x):
    def with_vjp(x):
        return scale(x, 3.0, vjp=lambda arrays, y, g: scale(g, 3.0))

    got = jax.grad(lambda x: jnp.sum(jnp.sin(with_vjp(x))))(x)
    np.testing.assert_allclose(got, 3 * jnp.cos(3 * x), rtol=1e-6)
    hot = jax.jit(
        jax.grad(lambda x, a: scale(x, a, vjp=lambda _, y, g: (g * a,)).sum())
    )
    np.testing.assert_array_equal(hot(x, 2.0), np.full(1000, 2.0))


def test_no_derivative(where, x):
    with pytest.raises(NotImplementedError, match="pass vjp="):
        jax.grad(lambda x: scale(x, 3.0).sum())(x)
    with pytest.raises(ValueError, match="a cotangent for each of 1 arrays, got 2"):
        jax.grad(lambda x: scale(x, 3.0, vjp=lambda a, y, g: (g, g)).sum())(x)
    stopped = jax.grad(lambda x: scale(jax.lax.stop_gradient(x), 3.0).sum() + x.sum())
    np.testing.assert_array_equal(stopped(x), np.ones(1000))


def test_export(x):
    """The kernel's code travels with the program."""
    pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
    exported = jax.export.export(
        jax.jit(scale),
        platforms=["cuda"],
        disabled_checks=[
            jax.export.DisabledSafetyCheck.custom_call("kvblock_kernel_call")
        ],
    )(x, jnp.float32(2))
    data = bytes(exported.serialize())
    assert b"ld.global.nc.f32" in data and b".entry scale" in data
    again = jax.export.deserialize(bytearray(data))
    assert again.out_avals[0].shape == (1000,)


# Loads a program and runs it on [0, 1, …]; on a CPU by the driver that stands in.
AGAIN = """
import hashlib, sys
from pathlib import Path

import jax
import jax.numpy as jnp

import jax_kvblock  # registers the handlers

if sys.argv[2]:
    sys.path.insert(0, sys.argv[3])
    import emulated_kernels as e

    jax.config.update("jax_platforms", "cpu")
    jax.devices()  # types of FFI cannot wait for the client
    driver = e.register(Path(sys.argv[2]))
    e.add_kernels(driver, Path(sys.argv[2]) / "libsources.so", e.NAMES)
program = jax.export.deserialize(bytearray(Path(sys.argv[1]).read_bytes()))
got = program.call(jnp.arange(1000.0) / 7, jnp.float32(1.1))
print(hashlib.sha256(got.tobytes()).hexdigest())
"""


def test_a_new_process_runs_what_was_exported(where, tmp_path, tmp_path_factory):
    """The same bits, of a kernel that the new process has not seen."""
    pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
    x = jnp.arange(1000.0) / 7
    allowed = jax.export.DisabledSafetyCheck.custom_call("kvblock_kernel_call")
    platforms = ["cuda" if where == "gpu" else "cpu"]
    exported = jax.export.export(
        jax.jit(scale), platforms=platforms, disabled_checks=[allowed]
    )
    (tmp_path / "program").write_bytes(exported(x, jnp.float32(1.1)).serialize())
    libraries = "" if where == "gpu" else folder_of(tmp_path_factory)
    support = Path(emulated_kernels.__file__).parent
    package = Path(kernels.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-P", "-c", AGAIN, tmp_path / "program", libraries, support],
        env={**os.environ, "PYTHONPATH": str(package), "JAX_KVBLOCK_CACHE_DIR": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    want = hashlib.sha256(np.asarray(scale(x, jnp.float32(1.1))).tobytes())
    assert done.stdout.strip() == want.hexdigest()


def test_the_persistent_compilation_cache(where, x, tmp_path):
    """A program that comes from the disk loads the kernel again."""
    hits = []

    def count(event: str, **_: object) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            hits.append(event)

    jax.monitoring.register_event_listener(count)
    options = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }
    before = {name: getattr(jax.config, name) for name in options}
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        for turn in range(2):
            got = jax.jit(lambda x, a: scale(x, a) + 1)(x, jnp.float32(3))
            np.testing.assert_array_equal(got, 3 * x + 1)
            assert bool(hits) == bool(turn)
            jax.clear_caches()
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


# ---- without a GPU -------------------------------------------------------------------


def fallback(x, a, n):
    return jnp.where(jnp.arange(x.size) < n, a * x, 0)


@pytest.mark.cpu
def test_a_fallback(x):
    np.testing.assert_array_equal(scale(x, 3.0, fallback=fallback), 3 * x)
    run = jax.jit(lambda x, a: scale(x, a, fallback=fallback))
    np.testing.assert_array_equal(run(x, 2.0), 2 * x)
    many = jax.vmap(lambda x, a: scale(x, a, fallback=fallback, batch="sequential"))
    np.testing.assert_array_equal(many(x[None], jnp.ones(1)), x[None])


@pytest.mark.cpu
def test_a_fallback_of_what_is_appended(x):
    def kept(x, n, capacity):
        count = jnp.sum(x > 0)
        (at,) = jnp.nonzero(x > 0, size=capacity, fill_value=0)
        return x[at], count

    data, count, overflowed = keep(x, 100, fallback=kept)
    want = np.asarray(x[x > 0])
    assert int(count) == 100 and overflowed and len(want) > 100
    np.testing.assert_array_equal(data, want[:100])
    # What it leaves behind the last is zeros, as it is where a kernel appends.
    data, count, overflowed = keep(x.at[0].set(7), 5000, fallback=kept)
    assert data[0] == 7 and not overflowed and not data[int(count) :].any()


@pytest.mark.cpu
def test_without_one_the_error_says_so(x):
    with pytest.raises(NotImplementedError, match=r"needs an NVIDIA GPU.*fallback="):
        scale(x, 3.0)
    with pytest.raises(ValueError, match=r"must be float32\[1000\], got float32\[1\]"):
        scale(x, 3.0, fallback=lambda x, a, n: x[:1])


# ---- order, and calls made again -----------------------------------------------------


def test_after(where, x):
    """What is waited for is an operand, so nothing runs them side by side."""

    def run(x, a):
        first = scale(x, a)
        return first, scale(x, 3.0, after=(first,))

    first, second = jax.jit(run)(x, 2.0)
    np.testing.assert_array_equal(first, 2 * x)
    np.testing.assert_array_equal(second, 3 * x)
    text = jax.jit(run).lower(x, 2.0).as_text()
    calls = [line for line in text.splitlines() if "custom_call @kvblock" in line]
    name = calls[0].split("=")[0].strip()
    assert len(calls) == 2 and name in calls[1].split("=", 1)[1]


def test_after_under_transformations(where, x):
    def run(x, before):
        return scale(
            x,
            2.0,
            after=(before,),
            batch="sequential",
            vjp=lambda arrays, results, cotangent: 2 * cotangent,
        )

    both = jnp.stack([x, 3 * x])
    np.testing.assert_array_equal(jax.vmap(run, (0, None))(both, x), 2 * both)
    np.testing.assert_array_equal(jax.vmap(run)(both, both), 2 * both)
    gradients = jax.grad(lambda x, b: jnp.sum(run(x, b)), (0, 1))(x, x)
    np.testing.assert_array_equal(gradients[0], np.full(1000, 2, np.float32))
    np.testing.assert_array_equal(gradients[1], np.zeros(1000, np.float32))


def test_a_call_with_functions_is_compiled_once(where, x, monkeypatch):
    """Although each call defines them anew."""
    lowered = []
    lower = cuda.lower
    monkeypatch.setattr(cuda, "lower", lambda *a: lowered.append(1) or lower(*a))
    for _ in range(3):
        np.testing.assert_array_equal(scale(x, 7.5, grid=lambda x: 20), 7.5 * x)
    assert len(lowered) == 1
