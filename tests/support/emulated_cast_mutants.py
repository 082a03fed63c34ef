"""The small mistakes in the kernels of casts and norms: the emulator notices them."""

from __future__ import annotations

from mutant_list import Mutant, test

FOLDER = "cpp/ops/cast"
CAST, NORM = f"{FOLDER}/cast_kernel.cuh", f"{FOLDER}/norm_cast_kernel.cuh"
SQUARES = f"{FOLDER}/squares.cuh"
BOTH_ORDERS = test("test_cast_emulated", "test_both_orders")
EVERY_NUMBER = test("test_norm_cast_emulated", "test_every_number")
PARTS = test("test_norm_cast_emulated", "test_parts_of_columns")
CAST_EMULATED = (
    Mutant(
        "cast: rows beyond the last",
        CAST,
        "if (row < p.rows && column < p.columns) {",
        "if (row <= p.rows && column < p.columns) {",
        BOTH_ORDERS,
    ),
    Mutant(
        "cast: columns beyond the last",
        CAST,
        "if (row < p.rows && column < p.columns) {",
        "if (row < p.rows && column <= p.columns) {",
        BOTH_ORDERS,
    ),
    Mutant(
        "cast: the size of scaled numbers",
        CAST,
        "largest = MaxOrNan(largest, fabsf(numbers[j]));\n"
        "          numbers[j] *= scale;",
        "numbers[j] *= scale;\n"
        "          largest = MaxOrNan(largest, fabsf(numbers[j]));",
        BOTH_ORDERS,
    ),
    Mutant(
        "cast: the size of positive numbers",
        CAST,
        "MaxOrNan(largest, fabsf(numbers[j]))",
        "MaxOrNan(largest, numbers[j])",
        BOTH_ORDERS,
    ),
    Mutant(
        "cast: a thread's squares change places where they are transposed",
        CAST,
        "int64_t{column + s * kCastSquare} * p.rows",
        "int64_t{column + (1 - s) * kCastSquare} * p.rows",
        BOTH_ORDERS,
    ),
    Mutant(
        "cast: tiles side by side have one size",
        CAST,
        "p.largest[blockIdx.x] = largest;",
        "p.largest[blockIdx.x / p.tiles * p.tiles] = largest;",
        BOTH_ORDERS,
    ),
    Mutant(
        "squares: bytes of another row",
        SQUARES,
        "words[1] = __byte_perm(low01, low23, 0x7632);",
        "words[1] = __byte_perm(low01, low23, 0x5432);",
        BOTH_ORDERS,
    ),
    Mutant(
        "squares: the lower rows above the upper ones, transposed",
        SQUARES,
        "make_uint2(upper[j], lower[j]);",
        "make_uint2(lower[j], upper[j]);",
        BOTH_ORDERS,
    ),
    Mutant(
        "squares: a pair changes places",
        SQUARES,
        "make_uint4(left[0][i], left[1][i], right[0][i], right[1][i]);",
        "make_uint4(right[0][i], right[1][i], left[0][i], left[1][i]);",
        BOTH_ORDERS,
    ),
    Mutant(
        "squares: neighbours change places in e5m2",
        SQUARES,
        "static_cast<uint32_t>(PairToE5m2(x[2], x[3])) << 16;",
        "static_cast<uint32_t>(PairToE5m2(x[3], x[2])) << 16;",
        BOTH_ORDERS,
    ),
    Mutant(
        "squares: a warp's size is not counted",
        SQUARES,
        "for (int i = 1; i < kCastWarps; ++i) largest",
        "for (int i = 1; i < kCastWarps - 1; ++i) largest",
        BOTH_ORDERS,
    ),
    Mutant(
        "squares: half of a warp has the size",
        SQUARES,
        "for (int step = 16; step > 0; step /= 2) {",
        "for (int step = 8; step > 0; step /= 2) {",
        BOTH_ORDERS,
    ),
    Mutant(
        "squares: a size forgets what is no number",
        SQUARES,
        "largest = MaxOrNan(largest, __shfl_xor_sync(0xffffffff, largest, step));",
        "largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, step));",
        test("test_cast_emulated", "test_what_is_not_finite_is_its_tiles_size"),
    ),
    Mutant(
        "squares: nobody waits for the other warps' sizes",
        SQUARES,
        "of_warps[threadIdx.x / 32] = largest;\n  __syncthreads();",
        "of_warps[threadIdx.x / 32] = largest;",
        BOTH_ORDERS,
    ),
    Mutant(
        "squares: neighbours change places in sums of float16",
        SQUARES,
        "__floats2half2_rn(numbers[i], numbers[i + 1]);",
        "__floats2half2_rn(numbers[i + 1], numbers[i]);",
        EVERY_NUMBER,
    ),
    Mutant(
        "norm: rows of almost nothing are divided by it",
        NORM,
        "sqrtf(sum / static_cast<float>(p.columns) + p.eps);",
        "sqrtf(sum / static_cast<float>(p.columns));",
        test("test_norm_cast_emulated", "test_rows_of_almost_nothing"),
    ),
    Mutant(
        "norm: the mean over a part of columns",
        NORM,
        "sum / static_cast<float>(p.columns) +",
        "sum / static_cast<float>(min(p.columns, kSquares * kNormColumns)) +",
        PARTS,
    ),
    Mutant(
        "norm: columns beyond the last",
        NORM,
        "row < p.rows && column + s * kNormColumns < p.columns;",
        "row < p.rows && column < p.columns;",
        PARTS,
    ),
    Mutant(
        "norm: both of two lanes keep the same half of their sums",
        NORM,
        "const float given = upper ? sums[i] : sums[i + step];",
        "const float given = sums[i + step];",
        EVERY_NUMBER,
    ),
    Mutant(
        "norm: a CTA sends its sums to another one's place",
        NORM,
        "SendFloat(address(&shared.of_ctas[rank][lane]),",
        "SendFloat(address(&shared.of_ctas[warp][lane]),",
        PARTS,
    ),
    Mutant(
        "norm: a CTA does not wait for the last one's sums",
        NORM,
        "BarrierExpect(address(&shared.all_sums), p.parts * kNormRows *",
        "BarrierExpect(address(&shared.all_sums), (p.parts - 1) * kNormRows *",
        PARTS,
    ),
    Mutant(
        "norm: sums are sent to a CTA that may not have begun",
        NORM,
        "  ClusterWait();\n",
        "",
        PARTS,
    ),
    Mutant(
        "norm: the sums of the last CTA are left out",
        NORM,
        "if (i < p.parts) sum += shared.of_ctas[i][lane];",
        "if (i < p.parts - (p.parts > 1)) sum += shared.of_ctas[i][lane];",
        PARTS,
    ),
    Mutant(
        "norm: a row beyond the last has a root",
        NORM,
        "warp == 0 && tile * kNormRows + lane < p.rows)",
        "warp == 0 && tile * kNormRows + lane <= p.rows)",
        EVERY_NUMBER,
    ),
    Mutant(
        "norm: nobody waits for the other lanes' roots",
        NORM,
        "  __syncwarp();\n",
        "",
        EVERY_NUMBER,
    ),
    Mutant(
        "norm: a thread's squares have the first one's gamma",
        NORM,
        "static_cast<const float*>(p.gamma) + of_square)",
        "static_cast<const float*>(p.gamma) + column)",
        EVERY_NUMBER,
    ),
)
