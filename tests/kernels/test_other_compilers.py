"""The PTX of Triton, Numba and CUTLASS: what is read from it, and what is made of it.

The texts are in tests/support/ptx (`foreign_ptx.py` beside it writes them), so that no
compiler is needed; where one is installed, it is asked again.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assembler import assemble

from jax_kvblock import kernels
from jax_kvblock.kernels import ptx

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests/support/ptx"


def load_example() -> Any:
    path = ROOT / "examples/other_compilers.py"
    spec = importlib.util.spec_from_file_location("other_compilers", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load_example()
KEPT = {f"{m.compiler.split()[0]} {m.name}": m for m in example.kept(FOLDER)}

# (type, size, whether the PTX says that it is a pointer)
MARKED, PLAIN = ("u64", 8, True), ("u64", 8, None)
F32, F64, HALF = ("f32", 4, False), ("f64", 8, False), ("b8", 2, False)
U8, U16, U32 = ("u8", 1, False), ("u16", 2, False), ("u32", 4, False)
STRUCT_OF_A_POINTER = ("b8", 8, None)
NUMBA_ARRAY = [PLAIN] * 7

SIGNATURES = {
    "triton_axpb": [MARKED, MARKED, F32, F32, U32, MARKED, MARKED],
    "triton_softmax": [MARKED, MARKED, F32, U32, MARKED, MARKED],
    "numba_axpb": [PLAIN, PLAIN, F32, F32, U32],
    "cutlass_axpb": [MARKED, MARKED, F32, F32, U32],
    "triton_every": [
        *(MARKED, MARKED, HALF, HALF, U8, U8, U16, U32, U32, PLAIN, PLAIN, F64),
        *(MARKED, MARKED),
    ],
    "numba_every": [
        *(*NUMBA_ARRAY, *NUMBA_ARRAY, U16, U8, U8, U16, U32, U32, PLAIN, PLAIN),
        *(F32, F64),
    ],
    "cutlass_every": [
        *(STRUCT_OF_A_POINTER, STRUCT_OF_A_POINTER, HALF, HALF, U8, U8, U16, U32, U32),
        *(PLAIN, PLAIN, F32, F64),
    ],
}
# The threads that a block has to have, and the most that it may have.
BLOCKS = {
    "triton_axpb": (128, None),
    "triton_softmax": (128, None),
    "triton_every": (128, None),
    "numba_axpb": (None, 256),
    "numba_every": (None, None),
    "cutlass_axpb": (256, None),
    "cutlass_every": (128, None),
}


def text_of(name: str) -> str:
    return (FOLDER / f"{name}.ptx").read_text()


def test_every_text_is_tested():
    assert {path.stem for path in FOLDER.glob("*.ptx")} == set(SIGNATURES)
    assert len(KEPT) == 4


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    made = kernels.from_ptx(text_of(name))
    assert [(p.type, p.size, p.pointer) for p in made.parameters] == SIGNATURES[name]
    assert name.split("_")[1] in made.name
    block, most = BLOCKS[name]
    assert made.block == (None if block is None else (block, 1, 1))
    assert made.block_is_fixed == (block is not None)
    assert made.max_threads == most
    takes = [p.takes_pointer() for p in made.parameters]
    assert takes == [p[1] == 8 and p != F64 for p in SIGNATURES[name]]


@pytest.mark.parametrize("made", KEPT.values(), ids=KEPT)
def test_what_lies_beside(made):
    kernel = example.kernel_of(made)
    assert [p.name for p in kernel.parameters[:2]] == ["x", "y"]
    assert kernel.block is not None
    assert (kernel.shared_memory > 0) == (made.name == "softmax")


# ---- scalars that are loaded ---------------------------------------------------------

# What a traced scalar is in memory, for each type that a parameter may have. JAX has 32
# bits for those of 64.
LIES = {
    **{"f32": ["f32"], "f64": ["f32", "f64"], "b8": ["b16"], "u8": ["u8", "s8"]},
    **{"u16": ["s16", "b16"], "u32": ["s32", "u32"], "u64": ["s32", "u32", "s64"]},
}
LOAD = re.compile(r"ld\.param\.(\w+)\s+(%\w+),\s*\[(\w+)\]")
THROUGH = re.compile(
    r"\{ \.reg \.b64 (?P<at>%\w+); ld\.param\.u64 (?P=at), \[(?P<symbol>\w+)\]; "
    r"cvta\.to\.global\.u64 (?P=at), (?P=at); (?P<rest>.*) \}"
)


def scalars_of(name: str) -> list[int]:
    """The numbers of the parameters that may be scalars."""
    return [
        i
        for i, (_, size, pointer) in enumerate(SIGNATURES[name])
        if pointer is not True and not (size == 8 and i < 14 and "numba_e" in name)
        if not (pointer is None and i < 2)
    ]


@pytest.mark.parametrize("choice", [0, 1, 2])
@pytest.mark.parametrize("name", SIGNATURES)
def test_every_scalar_can_be_loaded(name, choice, tmp_path):
    text = text_of(name)
    (entry,) = ptx.entries(text)
    numbers = scalars_of(name)
    lies = {}
    for i in numbers:
        kinds = LIES[SIGNATURES[name][i][0]]
        lies[i] = kinds[choice % len(kinds)]
    loaded = {i: ptx.Loaded(kind) for i, kind in lies.items()}
    after = ptx.load_scalars(text, entry, loaded)
    assemble(after.encode(), tmp_path)
    symbols = ptx.entries(text)[entry].symbols
    found = ptx.entries(after)[entry]
    assert found.symbols == symbols
    for i, parameter in enumerate(found.parameters):
        before = SIGNATURES[name][i]
        assert (parameter.type, parameter.size) == (
            ("u64", 8) if i in lies else before[:2]
        )
    # A line that loads a scalar becomes one that loads it from where it lies, into the
    # same register, as the same type; no other line changes, but for declarations.
    seen = set()
    for was, now in zip(text.splitlines(), after.splitlines(), strict=True):
        if was == now:
            continue
        if ".param" in was and "ld.param" not in was:
            continue
        wanted, register, symbol = LOAD.search(was).groups()
        number = symbols.index(symbol)
        seen.add(number)
        through = THROUGH.search(now)
        assert through["symbol"] == symbol
        *_, last = through["rest"].rstrip(";").split("; ")
        kind = lies[number]
        if kind[1:] == wanted[1:]:
            assert last == f"ld.global.nc.{wanted} {register}, [{through['at']}]"
        else:
            to = "f64" if kind == "f32" else f"{kind[0]}64"
            assert last.startswith(f"cvt.{to}.{kind} {register}, %")
            assert f"ld.global.nc.b32 {last.split()[-1]}, [" in through["rest"]
    assert seen == set(numbers)


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_text_itself_assembles(name, tmp_path):
    """So that it is the change which a failure above is about."""
    assemble(text_of(name).encode(), tmp_path)


def test_a_struct_with_a_pointer_is_no_scalar():
    text = text_of("cutlass_every")
    (entry,) = ptx.entries(text)
    with pytest.raises(ValueError, match=r"parameter 0 .* is a struct of 8 bytes"):
        ptx.load_scalars(text, entry, {0: ptx.Loaded("s32")})


# ---- calls ---------------------------------------------------------------------------

HALF_BITS = np.float16(1.5).view(np.uint16)  # as Numba takes a float16
VALUES = {
    "half": np.float16(1.5),
    "brain": np.asarray(2.5, jnp.bfloat16)[()],
    "flag": True,
    "byte": np.uint8(200),
    "short": np.int16(-300),
    "word": np.int32(-70000),
    "unsigned": np.uint32(5),
    "long": np.int32(-9),
    "natural": np.uint32(11),
    "single": np.float32(0.25),
    "double": np.float32(0.125),
}
TAKES = {
    "triton_every": [n for n in VALUES if n != "single"],
    "numba_every": [n for n in VALUES if n != "brain"],
    "cutlass_every": list(VALUES),
}


def every(name: str, x: Any, values: dict[str, Any]) -> Any:
    """x and the sum of all scalars, which is exact in float32."""
    made = kernels.from_ptx(FOLDER / f"{name}.ptx")
    first = 14 if name == "numba_every" else 2
    scalars = {first + i: values[n] for i, n in enumerate(TAKES[name])}
    if name == "triton_every":
        scalars |= {12: 0, 13: 0}  # scratch
    if name == "numba_every":
        n = x.size
        # Of an array: two pointers that a kernel has no use for, how many elements, of
        # how many bytes, the pointer, the shape, the strides.
        for at in (0, 7):
            scalars |= {at: 0, at + 1: 0, at + 2: n, at + 3: 4, at + 5: n, at + 6: 4}
    return kernels.kernel_call(made, x, out=x, scalars=scalars, grid=1, block=128)


def values_for(name: str, kind: str) -> dict[str, Any]:
    values = dict(VALUES)
    if kind == "python":
        halves = ("half", "brain")
        values = {
            k: v if k in halves else np.asarray(v).item() for k, v in values.items()
        }
    if name == "numba_every":
        values["half"] = HALF_BITS if kind != "python" else int(HALF_BITS)
    if kind == "numpy":  # fixed ones are what the parameter is
        values |= {"double": np.float64(values["double"])}
    return values


@pytest.mark.parametrize("kind", ["python", "numpy", "traced"])
@pytest.mark.parametrize("name", TAKES)
def test_scalars_of_every_type(name, kind):
    x = jnp.arange(128, dtype=jnp.float32)
    values = values_for(name, kind)
    if kind == "traced":
        run = jax.jit(lambda x, values: every(name, x, values))
        traced = run.trace(x, values)
    else:
        run = jax.jit(lambda x: every(name, x, values))
        traced = run.trace(x)
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    loads = len(re.findall(r"cvta\.to\.global\.u64 %kvblock_at\d+,", lowered))
    assert loads == (len(TAKES[name]) if kind == "traced" else 0)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["python", "numpy", "traced"])
@pytest.mark.parametrize("name", TAKES)
def test_scalars_of_every_type_arrive(name, kind):
    x = jnp.arange(128, dtype=jnp.float32)
    values = values_for(name, kind)
    if kind == "traced":
        got = jax.jit(lambda x, values: every(name, x, values))(x, values)
    else:
        got = jax.jit(lambda x: every(name, x, values))(x)
    total = sum(float(VALUES[n]) for n in TAKES[name])
    np.testing.assert_array_equal(got, np.arange(128) + np.float32(total))


def test_half_of_numba_travels_as_bits():
    """Its PTX calls a float16 u16, as it calls an integer of 16 bits."""
    x = jnp.zeros(128)
    for half in (np.float16(1.5), jnp.float16(1.5)):
        values = {**values_for("numba_every", "numpy"), "half": half}
        with pytest.raises(TypeError, match=r"parameter 14 \(u16\)"):
            jax.eval_shape(lambda x, v=values: every("numba_every", x, v), x)


@pytest.mark.parametrize("made", KEPT.values(), ids=KEPT)
def test_calls_are_lowered(made):
    assert example.check(made, on_gpu=False).startswith("traced and lowered")


@pytest.mark.gpu
@pytest.mark.parametrize("made", KEPT.values(), ids=KEPT)
def test_calls_compute_as_jnp(made):
    assert example.check(made, on_gpu=True).startswith("as jnp")


def test_scratch_is_a_null_pointer_and_no_other_number():
    made = KEPT["Triton axpb"]
    kernel = example.kernel_of(made)
    x = jnp.zeros(1024)
    numbers = {"a": 1.0, "b": 1.0, "n": 1024, "global_scratch": 0}
    for scratch, says in ((0, None), (64, "is a pointer, got 64")):

        def run(x, scratch=scratch):
            scalars = {**numbers, "profile_scratch": scratch}
            return kernels.kernel_call(kernel, x, out=x, scalars=scalars, grid=1)

        if says is None:
            assert jax.eval_shape(run, x).shape == x.shape
        else:
            with pytest.raises(TypeError, match=says):
                jax.eval_shape(run, x)


def test_the_block_is_known():
    kernel = example.kernel_of(KEPT["CUTLASS axpb"])
    assert "blockSize" not in KEPT["CUTLASS axpb"].sidecar
    x = jnp.zeros(1024)
    scalars = {"a": 1.0, "b": 1.0, "n": 1024}
    with pytest.raises(ValueError, match=r"has \(256, 1, 1\) threads, .*got \(128, 1"):
        jax.eval_shape(
            lambda x: kernels.kernel_call(
                kernel, x, out=x, scalars=scalars, grid=4, block=128
            ),
            x,
        )


# ---- the compilers, where they are installed -----------------------------------------


@pytest.mark.parametrize("compiler", example.COMPILERS)
def test_a_compiler_that_is_installed(compiler):
    try:
        all_made = list(example.COMPILERS[compiler](80))
    except (ImportError, FileNotFoundError) as missing:
        pytest.skip(f"{compiler} cannot be used here: {missing}")
    for made in all_made:
        assert example.check(made, on_gpu=False).startswith("traced and lowered")
        if compiler == "cutile":
            continue
        kernel = example.kernel_of(made)
        kept = example.kernel_of(KEPT[f"{made.compiler.split()[0]} {made.name}"])
        assert kernel.parameters == kept.parameters
        assert kernel.block == kept.block
