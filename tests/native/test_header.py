"""The installed C header and library, from C and from ctypes."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from append_launches import CAppend
from attention_launches import SCALES, Attention, Backward, Call, Forward, fields
from c_interface import SCHEDULE, TASK, CCopy, CSide, load_library
from cast_launches import CCast
from norm_cast_launches import CNormCast
from paged_problems import Paged, Scales, Strides
from quantize_launches import CArray, CQuantize
from select_launches import CKeepTiles, CListTiles, CPoolPieces

import jax_kvblock
from jax_kvblock.cache.copy_lines import FIELDS, STRIP
from jax_kvblock.core.ffi import BUILD

PACKAGE = Path(jax_kvblock.__file__).parent
INCLUDE, LIB = PACKAGE / "include", PACKAGE / "lib"
CC = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
CXX = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
STRICT = ["-Wall", "-Wextra", "-Werror", "-pedantic"]


class CStrip(ctypes.Structure):
    """What `cache.copies` makes arrays of, as NumPy has it."""

    _fields_ = [(name, ctypes.c_int64) for name in FIELDS]


needs_cc = pytest.mark.skipif(CC is None, reason="no C compiler here")
needs_cxx = pytest.mark.skipif(CXX is None, reason="no C++ compiler here")

NL, NO, NT, NH, HD = 3, 2, 2, 4, 5
IDS = (2, -1, 0, 9)  # of a pool of three blocks: two lie outside

# Gathers NHD blocks by id into universal ones, all int16, from stdin to stdout.
GATHER = r"""
#include <kvblock/block_copy.h>
#include <stdio.h>
#include <string.h>

enum { NB = 3, N = 4, NL = 3, NO = 2, NT = 2, NH = 4, HD = 5 };
enum { BLOCK = NL * NO * NT * NH * HD };

static int fail(const char* message) {
  fprintf(stderr, "%s\n", message);
  return 1;
}

int main(void) {
  static int16_t pool[NB * BLOCK], blocks[N * BLOCK];
  const int32_t ids[N] = {2, -1, 0, 9};
  void* const from[1] = {pool};
  void* const to[1] = {blocks};
  /* item, head, layer, outer, token, element of a head; in bytes */
  const int64_t dims[6] = {N, NH, NL, NO, NT, HD};
  const int64_t src[6] = {0, HD * 2, NO * NT * NH * HD * 2, NT * NH * HD * 2,
                          NH * HD * 2, 2};
  const int64_t dst[6] = {BLOCK * 2, NL * NO * NT * HD * 2, NO * NT * HD * 2,
                          NT * HD * 2, HD * 2, 2};
  const char* error;
  kvblock_copy copy;

  if (fread(pool, 2, NB * BLOCK, stdin) != NB * BLOCK) return fail("short input");
  memset(blocks, 0xff, sizeof blocks);
  memset(&copy, 0, sizeof copy);
  copy.rank = 6;
  copy.unit = 2;
  memcpy(copy.dims, dims, sizeof dims);
  memcpy(copy.src.strides, src, sizeof src);
  memcpy(copy.dst.strides, dst, sizeof dst);
  copy.src.buffers = from;
  copy.dst.buffers = to;
  copy.src.num_buffers = copy.dst.num_buffers = 1;
  copy.src.buffer_bytes = sizeof pool;
  copy.dst.buffer_bytes = sizeof blocks;
  copy.src.ids = ids;
  copy.src.id_limit = NB;
  copy.src.id_inner = 1;
  copy.src.id_outer_stride = BLOCK * 2;

  error = kvblock_copy_check(&copy);
  if (error != NULL) return fail(error);
  error = kvblock_copy_cpu(&copy, 1, NULL, NULL);
  if (error != NULL) return fail(error);
  fwrite(blocks, 2, N * BLOCK, stdout);

  copy.src.buffer_bytes -= 1;
  error = kvblock_copy_cpu(&copy, 1, NULL, NULL);
  if (error == NULL) return fail("a copy past the end was accepted");
  fprintf(stderr, "%d %s", kvblock_has_cuda(), error);
  return 0;
}
"""


def compile_with(compiler: str | None, *arguments: object) -> None:
    assert compiler is not None
    command = [compiler, *STRICT, *map(str, arguments), "-I", str(INCLUDE)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_cc
@pytest.mark.parametrize(
    "header",
    [
        *("append", "attention", "block_copy", "cast", "copy_stream", "export"),
        *("norm_cast", "quantize", "select"),
    ],
)
@pytest.mark.parametrize("standard", ["c99", "c11"])
def test_header_is_c(standard: str, header: str, tmp_path: Path) -> None:
    source = tmp_path / "only_header.c"
    source.write_text(f"#include <kvblock/{header}.h>\nint unused(void);\n")
    compile_with(CC, f"-std={standard}", "-fsyntax-only", source)


@needs_cxx
@pytest.mark.parametrize("standard", ["c++11", "c++17"])
def test_header_is_cpp(standard: str, tmp_path: Path) -> None:
    source = tmp_path / "only_header.cc"
    source.write_text(
        "#include <kvblock/append.h>\n"
        "#include <kvblock/attention.h>\n"
        "#include <kvblock/block_copy.h>\n"
        "#include <kvblock/cast.h>\n"
        "#include <kvblock/copy_stream.h>\n"
        "#include <kvblock/norm_cast.h>\n"
        "#include <kvblock/quantize.h>\n"
        "#include <kvblock/select.h>\n"
        "const char* (*check)(const kvblock_copy*) = &kvblock_copy_check;\n"
        "const char* (*append)(const kvblock_append*, void*) = &kvblock_append_cuda;\n"
        "const char* (*cast)(const kvblock_cast*, void*) = &kvblock_cast_cuda;\n"
        "const char* (*strips)(const kvblock_strip*, int64_t) = "
        "&kvblock_strips_check;\n"
        "const char* (*norm_cast)(const kvblock_norm_cast*, void*) = "
        "&kvblock_norm_cast_cuda;\n"
        "const char* (*quantize)(const kvblock_quantize*, void*) = "
        "&kvblock_quantize_cuda;\n"
        "const char* (*pool_pieces)(const kvblock_pool_pieces*, void*) = "
        "&kvblock_pool_pieces_cuda;\n"
        "const char* (*keep_tiles)(const kvblock_keep_tiles*, void*) = "
        "&kvblock_keep_tiles_cuda;\n"
        "const char* (*list_tiles)(const kvblock_list_tiles*, void*) = "
        "&kvblock_list_tiles_cuda;\n"
        "const char* (*run)(const kvblock_forward*, void*) = "
        "&kvblock_attention_forward;\n"
    )
    compile_with(CXX, f"-std={standard}", "-fsyntax-only", source)


@needs_cc
def test_the_structs_of_these_tests_are_those_of_the_headers(tmp_path: Path) -> None:
    structs = {
        "kvblock_append": CAppend,
        "kvblock_side": CSide,
        "kvblock_copy": CCopy,
        "kvblock_cast": CCast,
        "kvblock_strip": CStrip,
        "kvblock_norm_cast": CNormCast,
        "kvblock_attention": Call,
        "kvblock_forward": Forward,
        "kvblock_backward": Backward,
        "kvblock_page_strides": Strides,
        "kvblock_scales": Scales,
        "kvblock_paged_attention": Paged,
        "kvblock_quantize": CQuantize,
        "kvblock_quantize_array": CArray,
        "kvblock_pool_pieces": CPoolPieces,
        "kvblock_keep_tiles": CKeepTiles,
        "kvblock_list_tiles": CListTiles,
    }
    same = []
    for name, struct in structs.items():
        same.append(f"sizeof({name}) == {ctypes.sizeof(struct)}")
        for field, _ in struct._fields_:
            place = getattr(struct, field)
            same.append(f"offsetof({name}, {field}) == {place.offset}")
            same.append(f"sizeof((({name}*)0)->{field}) == {place.size}")
    places = [(STRIP.fields or {})[name][1] for name in FIELDS]
    assert places == [getattr(CStrip, name).offset for name in FIELDS]
    checks = "".join(f'_Static_assert({c}, "{c}");\n' for c in same)
    source = tmp_path / "structs.c"
    names = "append attention block_copy cast copy_stream norm_cast paged_attention"
    names += " quantize select"
    headers = (*(f"kvblock/{name}.h" for name in names.split()), "stddef.h")
    included = "".join(f"#include <{header}>\n" for header in headers)
    source.write_text(included + checks)
    compile_with(CC, "-std=c11", "-fsyntax-only", source)


@needs_cxx
def test_kernels_take_the_members_of_the_header_in_their_order(tmp_path: Path) -> None:
    """AttentionArrays lists them again, and takes the first part of each struct whole.

    In place of `deterministic` it has where the parts of a workspace lie. Dropout is
    AttentionCall's alone.
    """
    others = ("deterministic", "dropout", "dropout_keys")
    members = [field for field in Attention._fields_ if field[0] not in others]
    *members, workspace, joins = members[: -len(SCALES)]
    assert (workspace[0], joins[0]) == ("workspace", "joins")
    places = fields(ctypes.c_void_p, "dq_turns dq_state")
    members = [*members, *places, workspace, joins, *SCALES]
    flat = type("Flat", (ctypes.Structure,), {"_fields_": members})
    checks = "".join(
        f"static_assert(offsetof(AttentionArrays, {name}) == {place.offset} &&\n"
        f'  sizeof(AttentionArrays::{name}) == {place.size}, "{name}");\n'
        for name, _ in members
        for place in [getattr(flat, name)]
    )
    source = tmp_path / "call.cc"
    source.write_text(
        f'#include "host/attention_call.h"\nusing namespace kvblock;\n{checks}'
        f"static_assert(sizeof(AttentionArrays) == {ctypes.sizeof(flat)});\n"
        "static_assert(sizeof(AttentionCall::dropout) == 4);\n"
        f"static_assert(sizeof(AttentionCall) == {ctypes.sizeof(flat)} + 16);\n"
    )
    sources = Path(__file__).parents[2] / "cpp"
    compile_with(CXX, "-std=c++17", "-fsyntax-only", "-I", sources, source)


@needs_cc
def test_c_program_gathers(tmp_path: Path, rng: np.random.Generator) -> None:
    source, program = tmp_path / "gather.c", tmp_path / "gather"
    source.write_text(GATHER)
    link = ["-L", LIB, "-lkvblock", f"-Wl,-rpath,{LIB}", "-o", program]
    compile_with(CC, "-std=c99", source, *link)

    pool = rng.integers(-(2**15), 2**15, (3, NL, NO, NT, NH, HD)).astype(np.int16)
    done = subprocess.run([program], input=pool.tobytes(), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()

    padded = np.concatenate([pool, np.zeros_like(pool[:1])])
    picked = padded[[i if 0 <= i < 3 else 3 for i in IDS]]
    expected = picked.transpose(0, 4, 1, 2, 3, 5)
    got = np.frombuffer(done.stdout, np.int16).reshape(expected.shape)
    np.testing.assert_array_equal(got, expected)

    has_cuda, message = done.stderr.decode().split(" ", 1)
    assert int(has_cuda) == BUILD["cuda"]
    assert "source" in message and "past the end" in message


def side(array: np.ndarray, strides: list[int]) -> CSide:
    """One buffer; the strides are in bytes."""
    c = CSide(num_buffers=1, buffer_bytes=array.nbytes, id_inner=1)
    c.buffers = (ctypes.c_void_p * 1)(array.ctypes.data)
    c.strides[: len(strides)] = strides
    return c


def gather_rows(
    pool: np.ndarray, ids: np.ndarray, out: np.ndarray, unit: int, num_threads: int = 1
) -> None:
    """out[i, :, :run] = pool[ids[i], :, :run]; the arrays' rows may be padded."""
    run = min(pool.shape[2], out.shape[2])
    copy = CCopy(rank=3, unit=unit)
    copy.dims[:3] = (len(ids), pool.shape[1], run * pool.itemsize // unit)
    copy.src = side(pool, [0, pool.strides[1], unit])
    copy.dst = side(out, [out.strides[0], out.strides[1], unit])
    copy.src.ids = ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
    copy.src.id_limit = len(pool)
    copy.src.id_outer_stride = pool.strides[0]
    helpers: list[threading.Thread] = []

    def lend(_: int, task: int, data: int) -> None:
        helpers.append(threading.Thread(target=TASK(task), args=(data,)))
        helpers[-1].start()

    schedule = SCHEDULE(lend)
    error = load_library().kvblock_copy_cpu(
        ctypes.byref(copy), num_threads, schedule, None
    )
    for helper in helpers:
        helper.join()
    assert error is None, error
    assert len(helpers) < num_threads


@pytest.mark.parametrize("padding", [0, 1], ids=["packed", "padded"])
@pytest.mark.parametrize("unit", [1, 2, 4, 8, 16])
def test_runs_of_every_length(
    unit: int, padding: int, rng: np.random.Generator
) -> None:
    ids = np.array([3, -1, 0, 4, 2**31 - 1, -(2**31)], np.int32)
    for run in [*range(1, 40), 64, 65, 127, 1000]:
        pool = rng.integers(0, 256, (4, 2, (run + padding) * unit), np.uint8)
        out = np.full((len(ids), 2, run * unit), 0xAA, np.uint8)
        gather_rows(pool, ids, out, unit)
        expected = np.zeros_like(out)
        expected[[0, 2]] = pool[[3, 0], :, : run * unit]
        np.testing.assert_array_equal(out, expected, err_msg=f"a run of {run} units")


@pytest.mark.parametrize("run", [2**12, 2**12 + 4, 2**21], ids=str)
def test_lent_threads_share_a_large_copy(run: int, rng: np.random.Generator) -> None:
    # 16 MiB: beyond where stores go past the cache.
    rows = 2**23 // run
    pool = rng.integers(0, 256, (3, rows, run + 16), np.uint8)
    ids = np.array([2, 0], np.int32)
    out = np.zeros((2, rows, run), np.uint8)
    gather_rows(pool, ids, out, 4, num_threads=4)
    np.testing.assert_array_equal(out, pool[ids, :, :run])
