"""More traced scalars than are loaded one by one: a warp loads all of them at once."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assembler import assemble
from emulated_kernels import emulate

from jax_kvblock import kernels
from jax_kvblock.kernels import ptx

TYPES = ("float", "int", "short", "unsigned char", "long long", "double")
COUNT = 75  # 26 of 8 bytes, 25 of 4, 12 of 2 and 12 of 1
LIES = {
    "float": "f32",
    "int": "s32",
    "short": "s16",
    "unsigned char": "u8",
    "long long": "s32",
    "double": "f32",
}
OF = [TYPES[i % len(TYPES)] for i in range(COUNT)]
SOURCE = (
    'extern "C" __global__ void many(float* y, '
    + ", ".join(f"{kind} a{i}" for i, kind in enumerate(OF))
    + """) {
  const int threads = blockDim.x * blockDim.y * blockDim.z;
  const int row = threadIdx.z * blockDim.y + threadIdx.y;
  const int thread = row * blockDim.x + threadIdx.x;
  float* const own = y + (blockIdx.z * threads + thread) * """
    + f"{COUNT};\n"
    + "\n".join(f"  own[{i}] = static_cast<float>(a{i});" for i in range(COUNT))
    + "\n}\n"
)


def many():
    return kernels.from_cuda(SOURCE, "many")


def values_of(draw: int) -> list[np.generic]:
    """Each of its own, which a float holds exactly; others for every draw."""
    numbers = [(37 * i + 11 * draw) % 251 + 1 for i in range(COUNT)]
    signs = [1 if kind == "unsigned char" else (-1) ** i for i, kind in enumerate(OF)]
    as_kept = {"f": np.float32, "s": np.int32, "u": np.uint8}
    return [
        (np.int16 if LIES[kind] == "s16" else as_kept[LIES[kind][0]])(n * sign)
        for n, sign, kind in zip(numbers, signs, OF, strict=True)
    ]


def fallback(*scalars, block):
    row = jnp.stack([jnp.asarray(x, jnp.float32) for x in scalars])
    return jnp.tile(row, (int(np.prod(block)), 1))


def call(scalars, block, **options):
    out = jax.ShapeDtypeStruct((int(np.prod(block)), COUNT), jnp.float32)
    return kernels.kernel_call(
        many(),
        out=out,
        scalars=scalars,
        grid=1,
        block=block,
        fallback=lambda *scalars: fallback(*scalars, block=block),
        **options,
    )


# The emulator has blocks of one dimension.
OF_THREE_AXES = [
    pytest.param("fallback", marks=pytest.mark.host),
    pytest.param("gpu", marks=pytest.mark.gpu),
]


@pytest.fixture
def where(everywhere, request, tmp_path_factory):
    if everywhere == "emulator":
        driver = request.getfixturevalue("kernel_handlers")
        emulate(driver, tmp_path_factory, "many", SOURCE, many())
    return everywhere


# Of fewer threads than a warp, of one that is not full, and of more.
@pytest.mark.parametrize("block", [1, 7, 32, 33, 256])
def test_all_arrive(where, block):
    assert_all_arrive(block)


@pytest.mark.parametrize("block", [(5, 3, 2), (4, 4, 4)])
@pytest.mark.parametrize("everywhere", OF_THREE_AXES, indirect=True)
def test_all_arrive_in_blocks_of_three_axes(everywhere, block):
    assert_all_arrive(block)


def assert_all_arrive(block):
    run, compiles = jax.jit(lambda *scalars: call(scalars, block)), 0
    for draw in range(3):
        values = values_of(draw)
        got = np.asarray(run(*values))
        compiles = run._cache_size()
        np.testing.assert_array_equal(got, np.tile(values, (len(got), 1)))
    assert compiles == 1


@pytest.mark.parametrize("threads", [7, 64])
def test_members_have_their_own(where, threads):
    """Under vmap over an axis of the grid, some of the scalars."""
    draws = [values_of(draw) for draw in range(4)]
    batched = [i % 3 != 0 for i in range(COUNT)]
    operands = [
        np.stack([d[i] for d in draws]) if batched[i] else draws[0][i]
        for i in range(COUNT)
    ]
    axes = [0 if own else None for own in batched]
    got = jax.vmap(lambda *scalars: call(scalars, threads, batch="z"), in_axes=axes)(
        *operands
    )
    for member, draw in enumerate(draws):
        want = [draw[i] if batched[i] else draws[0][i] for i in range(COUNT)]
        np.testing.assert_array_equal(got[member], np.tile(want, (threads, 1)))


def test_the_text(tmp_path):
    """Each has a place of its own, by its address in the table and by its use."""
    kernel = kernels.from_cuda(SOURCE, "many", arch="80")
    lies = {i + 1: ptx.Loaded(LIES[kind]) for i, kind in enumerate(OF)}
    lies |= {i: ptx.Loaded(lies[i].type, "y") for i in lies if i % 5 == 0}
    text = kernel.image_with(lies).decode()
    assemble(text.encode(), tmp_path)
    assert len(text.splitlines()) == len(kernel.image.decode().splitlines())
    array, table = ptx.entries(text)["many"].parameters
    assert array.takes_pointer() and (table.type, table.size) == ("b8", 8 * COUNT)
    (begin,) = (line for line in text.splitlines() if ".shared .align" in line)
    order = ptx.order_of(lies)
    assert sorted(order) == sorted(lies)
    shown = " ".join(f"{n}{lies[n].axis or ''}" for n in order)
    assert f"/* kvblock_addresses: {shown} */" in begin
    # Lanes load by their group's addresses, and leave what they find in its places.
    first, place_of = 0, {}
    for group in range(begin.count("ld.global.nc")):
        (many,) = re.findall(
            rf"setp.lt.u32 %kvblock_p{group}, %kvblock_lane, (\d+);", begin
        )
        own = order[first : first + int(many)]
        (size,) = {ptx.SIZES[lies[n].type[1:]] for n in own}
        (axis,) = {lies[n].axis for n in own}
        at, value, here = (f"%kvblock_{x}{group}" for x in ("from", "value", "p"))
        assert f"@{here} ld.param.u64 {at}, [%kvblock_table+{8 * first}];" in begin
        assert f"@{here} ld.global.nc.b{8 * size} {value}, [{at}];" in begin
        assert f"st.shared.b{8 * size} [%kvblock_own+{256 * group}], {value};" in begin
        moved = f"mad.wide.u32 {at}, %kvblock_block{group}, {size}, {at};" in begin
        assert moved == (axis is not None)
        place_of |= {n: 32 * group + lane for lane, n in enumerate(own)}
        first += int(many)
    assert first == COUNT
    assert f".b8 kvblock_scalars[{256 * (group + 1)}];" in begin
    used = re.findall(r"ld\.shared\.\w+ \S+ \[kvblock_scalars\+(\d+)\]", text)
    assert sorted(map(int, used)) == sorted(8 * x for x in place_of.values())


@pytest.mark.parametrize("stays", ["first", "last", "both", "none"])
def test_a_table_takes_the_place_of_its_parameters(stays, tmp_path):
    """Behind those that stay, wherever they are."""
    first = ".param .u64 .ptr .global f_first" if stays in ("first", "both") else None
    last = ".param .align 4 .b8 f_last[12]" if stays in ("last", "both") else None
    scalars = [f".param .f32 f_{i}" for i in range(40)]
    given = ",\n".join(filter(None, [first, *scalars, last]))
    sum_up = "\n".join(
        f"ld.param.f32 %f1, [f_{i}];\nadd.f32 %f0, %f0, %f1;" for i in range(40)
    )
    text = f"""
.version 8.0
.target sm_80
.address_size 64
.visible .entry f(
{given}
)
{{
.reg .f32 %f<2>;
.shared .align 4 .b8 sum[4];
mov.f32 %f0, 0f00000000;
{sum_up}
st.shared.f32 [sum], %f0;
ret;
}}
"""
    begin = 1 if first else 0
    lies = {begin + i: ptx.Loaded("f32") for i in range(40)}
    changed = ptx.load_scalars(text, "f", lies)
    assemble(changed.encode(), tmp_path)
    found = ptx.entries(changed)["f"]
    names = [*(["f_first"] if first else []), *(["f_last"] if last else [])]
    assert list(found.symbols) == [*names, "kvblock_addresses"]
    assert found.parameters[-1].size == 8 * 40


def test_few_are_loaded_where_they_are_used():
    lies = {i + 1: ptx.Loaded(LIES[OF[i]]) for i in range(ptx.MOST_APART)}
    few = many().image_with(lies).decode()
    assert ".shared" not in few and few.count("ld.global.nc") == ptx.MOST_APART
    assert ptx.order_of(lies) == ()
    lies[COUNT] = ptx.Loaded(LIES[OF[-1]])
    assert ".shared" in many().image_with(lies).decode()
