"""The small mistakes in the kernels of casts and norms: the emulator notices them."""

from __future__ import annotations

from mutant_list import Mutant, test

FOLDER = "cpp/ops/cast"
CAST, NORM = f"{FOLDER}/cast_kernel.cuh", f"{FOLDER}/norm_cast_kernel.cuh"
PATCHES = f"{FOLDER}/patches.cuh"
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
        "largest = MaxOrNan(largest, fabsf(numbers[j]));\n        numbers[j] *= scale;",
        "numbers[j] *= scale;\n        largest = MaxOrNan(largest, fabsf(numbers[j]));",
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
        "cast: warps change places where their codes are transposed",
        CAST,
        "LoadTransposed<T>(codes[of], of_column, of % 8);",
        "LoadTransposed<T>(codes[of ^ 1], of_column, (of ^ 1) % 8);",
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
        "patches: bytes of another row",
        PATCHES,
        "words[1] = __byte_perm(low01, low23, 0x7632);",
        "words[1] = __byte_perm(low01, low23, 0x5432);",
        BOTH_ORDERS,
    ),
    Mutant(
        "patches: the lower rows above the upper ones, transposed",
        PATCHES,
        "make_uint2(columns[0][j], columns[1][j]);",
        "make_uint2(columns[1][j], columns[0][j]);",
        BOTH_ORDERS,
    ),
    Mutant(
        "patches: the upper patch always comes first",
        PATCHES,
        "(PatchRow<T>() != 0) != LowerFirst<T>(column);",
        "PatchRow<T>() != 0;",
        BOTH_ORDERS,
    ),
    Mutant(
        "patches: columns are looked for where they would lie unturned",
        PATCHES,
        "codes[PlaceOfColumn(column, turn)];",
        "codes[PlaceOfColumn(column, 0)];",
        BOTH_ORDERS,
    ),
    Mutant(
        "patches: the words of a row change places",
        PATCHES,
        "make_uint2(words[0][i], words[1][i]);",
        "make_uint2(words[1][i], words[0][i]);",
        BOTH_ORDERS,
    ),
    Mutant(
        "patches: neighbours change places in e5m2",
        PATCHES,
        "static_cast<uint32_t>(PairToE5m2(x[2], x[3])) << 16;",
        "static_cast<uint32_t>(PairToE5m2(x[3], x[2])) << 16;",
        BOTH_ORDERS,
    ),
    Mutant(
        "patches: a warp's size is not counted",
        PATCHES,
        "for (int i = 1; i < kWarps; ++i) largest",
        "for (int i = 1; i < kWarps - 1; ++i) largest",
        BOTH_ORDERS,
    ),
    Mutant(
        "patches: half of a warp has the size",
        PATCHES,
        "for (int step = 16; step > 0; step /= 2) {",
        "for (int step = 8; step > 0; step /= 2) {",
        BOTH_ORDERS,
    ),
    Mutant(
        "patches: a size forgets what is no number",
        PATCHES,
        "largest = MaxOrNan(largest, __shfl_xor_sync(0xffffffff, largest, step));",
        "largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, step));",
        test("test_cast_emulated", "test_what_is_not_finite_is_its_tiles_size"),
    ),
    Mutant(
        "patches: nobody waits for the other warps' sizes",
        PATCHES,
        "of_warps[threadIdx.x / 32] = largest;\n  __syncthreads();",
        "of_warps[threadIdx.x / 32] = largest;",
        BOTH_ORDERS,
    ),
    Mutant(
        "patches: neighbours change places in sums of float16",
        PATCHES,
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
        "sum / static_cast<float>(min(p.columns, kWidth)) +",
        PARTS,
    ),
    Mutant(
        "norm: columns beyond the last",
        NORM,
        "const bool within = row < p.rows && column < p.columns;",
        "const bool within = row < p.rows;",
        PARTS,
    ),
    Mutant(
        "norm: both of two lanes keep the same half of their sums",
        NORM,
        "const float given = upper ? sums[i] : sums[i + kStep];",
        "const float given = sums[i + kStep];",
        EVERY_NUMBER,
    ),
    Mutant(
        "norm: a CTA sends its sums to another one's place",
        NORM,
        "SendFloat(address(&shared.of_ctas[rank][lane]),",
        "SendFloat(address(&shared.of_ctas[to][lane]),",
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
        "for (int i = 0; i < p.parts; ++i) sum +=",
        "for (int i = 0; i < p.parts - (p.parts > 1); ++i) sum +=",
        PARTS,
    ),
    Mutant(
        "norm: a row beyond the last has a root",
        NORM,
        "first_row + own < p.rows) {",
        "first_row + own <= p.rows) {",
        EVERY_NUMBER,
    ),
    Mutant(
        "norm: a CTA that sums are sent to in a second round is left out",
        NORM,
        "for (int to = warp; to < p.parts; to += kThreads / 32) {",
        "for (int to = warp; to <= warp; to += kThreads / 32) {",
        PARTS,
    ),
    Mutant(
        "norm: all parts have the first one's gamma",
        NORM,
        "const int at = first_column + of_piece;",
        "const int at = of_piece;",
        PARTS,
    ),
    Mutant(
        "norm: rows that are not there have a size",
        NORM,
        "  if (!within) largest = 0.0f;\n",
        "",
        test("test_norm_cast_emulated", "test_rows_that_are_not_there_have_no_size"),
    ),
    Mutant(
        "norm: the lower warps' codes lie above those of the upper ones",
        NORM,
        "codes(below * kAbreast",
        "codes((1 - below) * kAbreast",
        EVERY_NUMBER,
    ),
)
