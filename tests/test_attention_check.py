"""The launchers' own check of what no Python caller can get wrong: the C interface."""

from __future__ import annotations

from pathlib import Path

from cpp_programs import run_cpp

PROGRAM = """
#include <cstdio>
#include "host/attention_check.h"
alignas(16) char array[16];
alignas(16) float sums[4];
alignas(8) int32_t ranges[2];
float rows[4];
int32_t ints[4];
kvblock_attention Valid() {
  kvblock_attention a{};
  a.batch = a.num_heads = a.num_kv_heads = 1;
  a.q_len = a.kv_len = 4;
  a.head_dim = a.value_dim = 8;
  a.scale = 1.0f;
  a.window_left = a.window_right = -1;
  a.q = a.k = a.v = a.d_o = array;
  a.dk = a.dv = array;
  a.lse = rows;
  a.delta = rows;
  return a;
}
int main() {
%s
}
"""
CASE = """  {
    kvblock_attention a = Valid();
    %s
    auto pass = kvblock::AttentionPass::kBackwardKv;
    %s
    const char* error = kvblock::CheckAttention(&a, pass);
    std::puts(error == nullptr ? "ok" : error);
  }
"""
SM90 = "a.kernels = KVBLOCK_KERNELS_SM90;"
SUMS = "a.dq_accum = sums;"
STATE = "a.dq_state = ints;"
SEGMENTS = (
    "a.q_segments = a.kv_segments = ints; "
    "a.q_segment_ranges = a.kv_segment_ranges = ranges;"
)

CASES = [
    ("", "ok"),
    (SUMS, "ok"),
    (f"{SM90} {SUMS} {STATE} a.dq = array;", "ok"),
    (f"{SM90} {SUMS} {STATE} a.dq = array; a.dq_turns = ints;", "ok"),
    ("a.kernels = 7;", "kernels must be KVBLOCK_KERNELS_GENERIC or"),
    (f"{SM90} {SUMS} {STATE}", "dq is NULL, and dq_accum is not"),
    (f"{SM90} {SUMS} a.dq = array;", "dq_state is NULL, and dq_accum is not"),
    (f"{SUMS} {STATE}", "dq_state is for the sm_90a kernels"),
    (f"{SM90} a.dq = array;", "dq_accum is NULL, and dq is not"),
    (f"{SUMS} a.dq_turns = ints;", "dq_turns is for the sm_90a kernels"),
    (
        f"{SM90} {SUMS} {STATE} a.dq = array; a.dq_turns = ints; {SEGMENTS}",
        "dq_turns is for calls without segments and tiles",
    ),
    ("a.lse = nullptr;", "lse is NULL"),
    # Forward, lse is written if it is asked for.
    ("a.lse = nullptr; a.o = array;", "ok"),
    ("a.lse = nullptr; a.o = nullptr;", "o is NULL"),
    ("a.o = array; a.scale = -1e-5f; a.softcap = 5.0f;", "ok"),
    ("a.o = array; a.scale = 0.0f; a.softcap = 5.0f;", "ok"),
    ("a.o = array; a.scale = 1e-5f; a.softcap = 50.0f;", "scale / softcap must lie"),
    ("a.o = array; a.scale = 1e-5f; a.softcap = 1024.0f;", "ok"),
    ("a.scale = 1e-5f; a.softcap = 50.0f;", "ok"),  # backward
]


def test_what_belongs_to_which_kernels(tmp_path: Path) -> None:
    forward = "pass = kvblock::AttentionPass::kForward;"
    program = PROGRAM % "".join(
        CASE % (change, forward if "a.o = " in change else "") for change, _ in CASES
    )
    sources = ("host/attention_check.cc", "host/block_copy_check.cc")
    lines = run_cpp(tmp_path, program, *sources).splitlines()
    for line, (change, said) in zip(lines, CASES, strict=True):
        assert (line == "ok") == (said == "ok"), change
        assert said in line, change
