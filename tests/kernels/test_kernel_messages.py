"""What is wrong with a call of a kernel is said while tracing, by names and numbers."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_kernels import SOURCE, kernel

from jax_kvblock import kernels

X = np.ones(1000, np.float32)
F32 = jax.ShapeDtypeStruct((1000,), jnp.float32)


def call(*arrays: Any, name: str = "scale", **options: Any) -> Any:
    known = options.pop("kernel", None) or kernel(name)
    given = {"out": F32, "scalars": (2.0, 1000), "grid": 16, "block": 64} | options
    return jax.eval_shape(
        lambda: kernels.kernel_call(known, *(arrays or (X,)), **given)
    )


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "too few parameters": (
        {"scalars": (2.0,)},
        r"has 4 parameters, and 3 came.*parameter 3, 'n' \(u32\)",
    ),
    "too many": ({"scalars": (2.0, 1, 1)}, "has 4 parameters, and 5 came"),
    "no grid": ({"grid": 0}, "grid must be 1 or more, got"),
    "a negative grid": ({"grid": (1, -2)}, "grid must be 1 or more"),
    "four sizes": ({"grid": (1, 1, 1, 1)}, "must be one to three integers"),
    "a grid that is no integer": (
        {"grid": 1000 / 256},
        r"grid must be one to three integers.*got 3\.90625; -\(-n // m\) rounds up",
    ),
    "a function's grid that is none": (
        {"grid": lambda x: x.size / 256},
        r"grid must be one to three integers.*got 3\.90625",
    ),
    "a block that is no integer": ({"block": 256.5}, "block must be one to three"),
    "a block in words": ({"block": "256"}, "block must be one to three.*got '256'"),
    "a cluster that is no integer": ({"cluster": 1.5}, "cluster must be one to three"),
    "a grid that is too large": ({"grid": (1, 65536)}, "let a block do more"),
    "a block that is too large": ({"block": (64, 32)}, r"at most 1024 threads, got"),
    "no block": ({"block": None}, "block must say how many threads"),
    "a cluster beside the grid": ({"cluster": 3}, "must be a multiple of the cluster"),
    "a large cluster": ({"cluster": (8, 4)}, "at most 16 blocks"),
    "shared memory": ({"shared_memory": 300_000}, "must be 0 to 232448 bytes"),
    "shared memory that is no integer": (
        {"shared_memory": 100.7},
        "shared_memory must be an integer, got 100.7; it is in bytes",
    ),
    "a float for an integer": (
        {"scalars": (2.0, 10.5)},
        r"parameter 3, 'n' \(u32\) of Kernel\('scale'\) must be an integer, got 10.5",
    ),
    "an integer that does not fit": (
        {"scalars": (2.0, 2**32)},
        "has 32 bits, and 4294967296 does not fit",
    ),
    "another float": (
        {"scalars": (np.float64(2), 1)},
        r"'a' \(f32\) of .* must be float32, got float64",
    ),
    "a string": ({"scalars": ("2", 1)}, "must be a number, got '2'"),
    "a traced scalar of another type": (
        {"scalars": (jnp.int32(2), 1)},
        r"'a' \(f32\) of .* is traced as int32.*\.astype\(jnp\.float32\)",
    ),
    "a scalar with dimensions": (
        {"scalars": (jnp.ones(2), 1)},
        r"without dimensions, got shape \(2,\)",
    ),
    "a name that is not there": (
        {"scalars": {"b": 2.0, "n": 1}},
        "has no parameter 'b'; its names are 'x', 'y', 'a', 'n'",
    ),
    "a number that is not there": ({"scalars": {4: 2.0}}, "none with the number 4"),
    "an order of others": ({"order": (0, 1, 2, 2)}, "order must name each of 4"),
    "an order of too few": ({"order": (0, 1)}, "order must name each of 4"),
    "an order that is none": ({"order": 3.5}, "order must be integers, got 3.5"),
    "an order of floats": ({"order": (0, 1, 2.5, 3)}, "order must be integers, got"),
    "an array where a number is": (
        {"order": (0, 2, 1, 3), "scalars": (2, 1000)},
        r"'a' \(f32\) of .* is not a pointer; arrays and results take the first",
    ),
    "a map where a pointer is": (
        {"tensor_maps": {0: kernels.TensorMap(box=(16,))}},
        r"'x' \(u64\) of .* is not a tensor map, 128 bytes",
    ),
    "a map of what is not there": (
        {"tensor_maps": {2: kernels.TensorMap(box=(16,))}},
        "names item 2; there are 1 array and 1 result",
    ),
    "maps without numbers": (
        {"tensor_maps": [1]},
        r"tensor_maps must be a mapping, got \[1\]; \{0: TensorMap\(...\)\}",
    ),
    "a map that is none": (
        {"tensor_maps": {0: 3}},
        "must have a TensorMap for each item, got 3 for item 0",
    ),
    "no result": ({"out": ()}, "out has no result"),
    "out that is no shape": ({"out": 3}, "out must be jax.ShapeDtypeStruct's"),
    "an alias of what is not there": (
        {"aliases": {1: 0}, "scalars": (2.0, 1000, 3)},
        "there are 1 array and 1 result",
    ),
    "aliases without numbers": (
        {"aliases": [0, 0]},
        r"aliases must be a mapping, got \[0, 0\]; \{0: 0\} makes array 0 result 0",
    ),
    "aliases by names": ({"aliases": {"x": 0}}, "aliases must be integers, got"),
    "an alias of a half": ({"aliases": {0: 0.5}}, "aliases must be integers, got"),
    "a result that is appended to by name": (
        {"append": "y"},
        "append must be integers, got 'y'; it counts from 0",
    ),
    "one array to wait for": ({"after": X}, "after must be a sequence of arrays, got"),
    "a fallback that is none": ({"fallback": 3}, "fallback must be a function, got 3"),
    "a vjp that is none": ({"vjp": True}, "vjp must be a function, got True"),
    "a batch that is no axis": ({"batch": "w"}, "batch must be 'x', 'y', 'z'"),
    "a sharding rule of other arrays": (
        {"sharding": "i, j -> i", "grid": lambda x: 1},
        "for each of 1 arrays and 1 results",
    ),
    "a kernel that is none": ({"kernel": SOURCE}, "kernel must be a Kernel, got str"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_calls(case):
    options, says = BAD[case]
    with pytest.raises((ValueError, TypeError), match=says) as raised:
        call(**options)
    assert str(raised.value).startswith("kernel_call: ")


def test_a_number_among_the_arrays():
    with pytest.raises(TypeError, match=r"array 0 is 2\.0; numbers go into scalars="):
        call(2.0)


def test_two_arrays_become_one_result():
    with pytest.raises(ValueError, match=r"result of its own, got \{0: 0, 1: 0\}"):
        call(X, X, aliases={0: 0, 1: 0})


def test_aliases_of_other_shapes():
    with pytest.raises(ValueError, match=r"got float32\[7\] and float32\[1000\]"):
        call(X[:7], name="shift", aliases={0: 0}, scalars=(1.0, 7))


def test_a_number_for_a_pointer():
    """Of PTX that tells pointers from numbers."""
    text = """
.version 8.0
.target sm_80
.address_size 64
.entry f(.param .u64 f_param_0, .param .u64 f_param_1, .param .u64 .ptr f_param_2)
{ ret; }
"""
    with pytest.raises(TypeError, match=r"parameter 2 \(u64\) .* is a pointer, got 3"):
        call(kernel=kernels.from_ptx(text), scalars={2: 3})


def test_capacity():
    for shape in ((0,), ()):
        with pytest.raises(ValueError, match="its capacity, 1 or more; got shape"):
            call(
                name="keep_positive",
                out=jax.ShapeDtypeStruct(shape, jnp.float32),
                append=0,
                scalars=(1000, 0),
            )
    with pytest.raises(ValueError, match="append names result 1, and there are 1"):
        call(name="keep_positive", append=1, scalars=(1000, 5))


def test_launch_bounds():
    source = "__global__ void __launch_bounds__(128) f(float* x) { *x = 1; }"
    bounded = kernels.from_cuda(source, "f")
    options = {"out": F32, "grid": 1, "scalars": ()}
    with pytest.raises(ValueError, match="at most 128 threads, as its launch bounds"):
        jax.eval_shape(lambda: kernels.kernel_call(bounded, block=256, **options))


def test_a_block_that_the_ptx_demands():
    source = "__global__ void __block_size__((64, 2, 1)) f(float* x) { *x = 1; }"
    fixed = kernels.from_cuda(source, "f", arch="90")
    options = {"out": F32, "grid": 1, "scalars": ()}
    for block in (None, (64, 2)):
        jax.eval_shape(lambda b=block: kernels.kernel_call(fixed, block=b, **options))
    with pytest.raises(ValueError, match=r"has \(64, 2, 1\) threads, .*got \(128, 1"):
        jax.eval_shape(lambda: kernels.kernel_call(fixed, block=128, **options))


def test_machine_code_needs_types_and_takes_no_traced_scalars():
    cubin = kernels.from_cubin(b"\x7fELF" + bytes(60), "f")
    with pytest.raises(TypeError, match=r"pass one of NumPy's.*np.float32\(2.0\)"):
        call(kernel=cubin)
    with pytest.raises(ValueError, match=r"machine code cannot be changed.*const T\*"):
        call(kernel=cubin, scalars=(jnp.float32(2), np.int32(1)))
    typed = (np.float32(2), np.int32(1))
    assert call(kernel=cubin, scalars=typed).shape == (1000,)


def test_structs():
    source = """
struct Pair { float a; int b; };
extern "C" __global__ void f(Pair p, float* x) { *x = p.a + p.b; }
"""
    made = kernels.from_cuda(source, "f")
    options = {"out": F32, "grid": 1, "block": 1}

    def run(value: Any) -> Any:
        return jax.eval_shape(
            lambda: kernels.kernel_call(made, scalars={"p": value}, **options)
        )

    pair = np.array((1.5, 2), [("a", "f4"), ("b", "i4")])[()]
    assert run(pair).shape == (1000,)
    assert run(pair.tobytes()).shape == (1000,)
    with pytest.raises(ValueError, match=r"'p' \(8 bytes\) of .* has 8 bytes, got 4"):
        run(np.float32(1))
    with pytest.raises(ValueError, match="is a struct or an array, so it cannot"):
        run(jnp.float32(1))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"box": (16,)}, "box has a size for each dimension"),
        ({"box": (16, 300)}, "1 to 256 elements"),
        ({"box": (16, 64), "swizzle": 64}, "multiple of 16 and at most 64"),
        ({"box": (16, 3)}, "multiple of 16"),
        ({"box": (16, 64), "swizzle": 48}, "swizzle is one of"),
    ],
)
def test_tensor_maps(driver, options, says):
    x = np.ones((96, 64), np.float16)
    with pytest.raises(ValueError, match=says):
        kernels.kernel_call(
            kernel("show_map"),
            x,
            out=jax.ShapeDtypeStruct((32,), jnp.uint32),
            grid=1,
            block=32,
            tensor_maps={0: kernels.TensorMap(**options)},
        )


# ---- what only the driver knows ------------------------------------------------------


def test_the_driver_refuses_the_code(driver):
    broken = kernels.from_ptx(kernel("scale").image + b"\n// broken\n", "scale")
    with pytest.raises(Exception, match="does not load Kernel") as raised:
        kernels.kernel_call(
            broken, X, out=F32, scalars=(2.0, 1000), grid=16, block=64
        ).block_until_ready()
    said = str(raised.value)
    assert "CUDA_ERROR_INVALID_PTX" in said and "ptxas: line 1 is wrong" in said


@pytest.mark.parametrize("version", ["98.1", "99.1"])
def test_the_driver_is_older_than_the_ptx(driver, version):
    """Which it says as it loads the module, or lazily, as it looks for the entry."""
    text = kernel("scale").image.decode()
    text = re.sub(r"\.version \S+", f".version {version}", text)
    with pytest.raises(Exception, match="does not load Kernel") as raised:
        kernels.kernel_call(
            kernels.from_ptx(text, "scale"),
            X,
            out=F32,
            scalars=(2.0, 1000),
            grid=16,
            block=64,
        ).block_until_ready()
    said = str(raised.value)
    assert f"its PTX is of version {version}, newer than the driver: compile" in said
    assert "CUDA_ERROR" in said and "has no entry" not in said


def test_the_driver_refuses_the_launch(driver):
    options = {"out": F32, "scalars": (2.0, 1000), "grid": 16}
    with pytest.raises(Exception, match="refuses to launch Kernel") as raised:
        kernels.kernel_call(
            kernel("scale"), X, block=768, **options
        ).block_until_ready()
    said = str(raised.value)
    assert "it can have blocks of 512 threads, not 768" in said
    assert "grid (16, 1, 1), block (768, 1, 1)" in said
