"""PTX as text: signatures, and scalars that are loaded from memory."""

from __future__ import annotations

import pytest
from assembler import assemble

from jax_kvblock import kernels
from jax_kvblock.kernels import ptx

EVERYTHING = """
#include <cuda_fp16.h>
struct Pair { float a; int b; };
struct Four { int v[4]; };
extern "C" __global__ void __launch_bounds__(128, 2)
every(float a, const float* x, float* __restrict__ y, int n, unsigned long long m,
      double d, __half h, bool f, Pair s, const float* const* pp, short t,
      signed char c) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n && i < m) {
    y[i] = f ? a * x[i] + (float)d + __half2float(h) + s.a + s.b + t + c : pp[0][i];
  }
}
extern "C" __global__ void taken(const __grid_constant__ Four v, int* q, int j) {
  q[0] = v.v[j];
}
extern "C" __global__ void again(float a, float* x, int n) {
  for (int i = 0; i < n; ++i) x[i] += a;
  if (n > 7) x[n] = a;
}
template <int N, typename T> __global__ void filled(T* x, T v) {
  for (int i = 0; i < N; ++i) x[i] = v;
}
"""


@pytest.fixture(scope="module")
def every():
    return kernels.from_cuda(EVERYTHING, "every", arch="80")


def loaded(kinds: dict[int, str]) -> dict[int, ptx.Loaded]:
    return {number: ptx.Loaded(kind) for number, kind in kinds.items()}


def test_signature(every):
    assert [(p.type, p.size, p.name) for p in every.parameters] == [
        ("f32", 4, "a"),
        ("u64", 8, "x"),
        ("u64", 8, "y"),
        ("u32", 4, "n"),
        ("u64", 8, "m"),
        ("f64", 8, "d"),
        ("b8", 2, "h"),
        ("u8", 1, "f"),
        ("b8", 8, "s"),
        ("u64", 8, "pp"),
        ("u16", 2, "t"),
        ("u8", 1, "c"),
    ]
    assert every.max_threads == 128
    assert every.is_ptx


def test_entries_of_a_module(every):
    found = ptx.entries(every.image.decode())
    assert set(found) >= {"every", "taken", "again"}
    assert ptx.version(every.image.decode()) is not None
    assert ptx.target(every.image.decode()) == "sm_80"


def test_pointers_that_newer_compilers_mark():
    text = """
.version 8.7
.target sm_100
.address_size 64
.visible .entry f( // a comment, ( and {
  .param .u64 .ptr .global .align 16 f_param_0, /* and .param .u32 this */
  .param .b32 f_param_1,
  .param .align 64 .b8 f_param_2[128]
)
.maxntid 64, 2, 1
{
  ret;
}
.entry g()
{ ret; }
.extern .entry h(.param .u64 h_param_0);
"""
    found = ptx.entries(text)
    assert set(found) == {"f", "g"}
    first, second, third = found["f"].parameters
    assert first.pointer is True and first.takes_pointer()
    assert (second.type, second.pointer) == ("b32", False)
    assert (third.type, third.size, third.is_bytes) == ("b8", 128, True)
    assert found["f"].max_threads == 128
    assert found["g"].parameters == ()


@pytest.mark.parametrize(
    ("said", "block", "most"),
    [
        (".reqntid 128", (128, 1, 1), None),
        (".reqntid 64, 2", (64, 2, 1), None),
        (".maxnreg 32\n.reqntid 8,4,2\n.minnctapersm 2", (8, 4, 2), None),
        (".maxntid 64 , 2, 1\n.explicitcluster", None, 128),
        (".maxntid 256", None, 256),
        ("", None, None),
    ],
)
def test_blocks(said, block, most):
    found = ptx.entries(f".entry f(.param .u32 p)\n{said}\n{{ ret; }}")["f"]
    assert (found.block, found.max_threads) == (block, most)


LOADED = {
    0: "f32",
    3: "s32",
    4: "s32",
    5: "f32",
    6: "b16",
    7: "u8",
    10: "s16",
    11: "s8",
}


def test_every_scalar_can_be_loaded(every, tmp_path):
    image = every.image_with(loaded(LOADED)).decode()
    assemble(image.encode(), tmp_path)
    found = ptx.entries(image)["every"].parameters
    assert all(found[i].type == "u64" for i in LOADED)
    # All else stays: the same lines, but for these.
    before, after = every.image.decode().splitlines(), image.splitlines()
    assert len(before) == len(after)
    changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    assert all(".param" in before[i] for i in changed)
    # A parameter that is declared, and one that is loaded, for each but m, which is 64
    # bits wide as it is.
    assert len(changed) == 2 * len(LOADED) - 1


@pytest.mark.parametrize("axis", ["x", "y", "z"])
def test_each_block_of_an_axis_may_have_its_own(every, axis, tmp_path):
    kinds = {0: "f32", 4: "u32", 6: "b16"}
    image = every.image_with({i: ptx.Loaded(k, axis) for i, k in kinds.items()})
    assemble(image, tmp_path)
    text = image.decode()
    assert text.count(f"%ctaid.{axis};") == 3 + every.image.decode().count(
        f"%ctaid.{axis};"
    )
    assert ", 4, %kvblock_at0" in text and ", 2, %kvblock_at6" in text


def test_a_scalar_that_is_loaded_twice(tmp_path):
    text = kernels.from_cuda(EVERYTHING, "again", arch="80").image.decode()
    entry = ptx.entries(text)["again"]
    body = text[entry.start : entry.end]
    load = next(line for line in body.splitlines() if "again_param_0]" in line)
    guarded = load.replace("ld.param", "@%p1 ld.param")
    twice = text.replace(load, f"{load}\n{guarded}")
    image = ptx.load_scalars(twice, "again", loaded({0: "f32"}))
    through = [line for line in image.splitlines() if "[%kvblock_at0]" in line]
    assert len(through) == 2 and "@%p1 ld.global.nc.f32" in through[1]
    assemble(image.encode(), tmp_path)


def test_what_cannot_be_loaded(every):
    with pytest.raises(ValueError, match=r"8 of kernel 'every', 's', is a struct of 8"):
        every.image_with(loaded({8: "b8"}))
    taken = kernels.from_cuda(EVERYTHING, "taken", arch="80")
    with pytest.raises(ValueError, match=r"parameter 0 .* is a struct of 16 bytes"):
        taken.image_with(loaded({0: "u32"}))


def test_a_parameter_whose_address_is_taken():
    text = kernels.from_cuda(EVERYTHING, "again", arch="80").image.decode()
    load = next(line for line in text.splitlines() if "[again_param_0]" in line)
    moved = text.replace(load, f"mov.b64 %rd1, again_param_0;\n{load}")
    with pytest.raises(ValueError, match="its address is taken"):
        ptx.load_scalars(moved, "again", loaded({0: "f32"}))
    part = text.replace("[again_param_0]", "[again_param_0+2]")
    with pytest.raises(ValueError, match="or parts of it are loaded"):
        ptx.load_scalars(part, "again", loaded({0: "f32"}))
