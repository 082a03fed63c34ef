"""The small mistakes in the kernels that choose tiles: the emulator notices them."""

from __future__ import annotations

from mutant_list import Mutant, test

FOLDER = "cpp/ops/select"
SELECT, POOL = f"{FOLDER}/select_kernel.cuh", f"{FOLDER}/pool_kernel.cuh"
LAUNCH, WEIGH = f"{FOLDER}/select_cuda.cu", f"{FOLDER}/weigh_kernel.cuh"
EMULATED = "test_select_emulated"
BEST = test(EMULATED, "test_rows_keep_the_best")
ONE_TILE = test(EMULATED, "test_one_tile_wherever_it_is")
NO_NUMBER = test(EMULATED, "test_what_is_no_number")
NOTHING = test(EMULATED, "test_rows_that_hold_nothing")
LISTS = test(EMULATED, "test_lists_of_maps")
PIECES = test(EMULATED, "test_pieces")
NORMED = test(EMULATED, "test_pieces_that_are_normed")
NOT_FINITE = test(EMULATED, "test_pieces_of_what_is_not_finite")
SHARES = test(EMULATED, "test_shares_of_tiles")
SELECT_EMULATED = (
    Mutant(
        "select: of equal tiles one too many",
        SELECT,
        "(is_equal && rank < more)",
        "(is_equal && rank <= more)",
        BEST,
    ),
    Mutant(
        "select: a threshold that lacks its last bit",
        SELECT,
        "bit = 1u << 31; bit != 0; bit >>= 1",
        "bit = 1u << 31; bit != 1; bit >>= 1",
        ONE_TILE,
    ),
    Mutant(
        "select: it ends as soon as there is enough",
        SELECT,
        "if (!kMass && count == room) break;",
        "if (!kMass && count >= room) break;",
        BEST,
    ),
    Mutant(
        "select: what has to be there takes no room",
        SELECT,
        "min(max(p.limits[row], num_always) - num_always, num_free)",
        "min(p.limits[row], num_free)",
        BEST,
    ),
    Mutant(
        "select: what has to be there has no mass",
        SELECT,
        "need = p.tau * total - always_mass;",
        "need = p.tau * total;",
        BEST,
    ),
    Mutant(
        "select: a row without mass needs nothing",
        SELECT,
        "need = total > 0.0f ? 0.0f : INFINITY;",
        "need = 0.0f;",
        NOTHING,
    ),
    Mutant(
        "select: all there is is not enough",
        SELECT,
        "need = total > 0.0f ? 0.0f : INFINITY;",
        "need = INFINITY;",
        NO_NUMBER,
    ),
    Mutant(
        "select: an infinite mass is taken by shares",
        SELECT,
        "each == INFINITY ? 1.0f : ceilf(missing / each)",
        "ceilf(missing / each)",
        NO_NUMBER,
    ),
    Mutant(
        "select: NaN as its bits are",
        SELECT,
        "if (score != score) return 1;",
        "",
        NO_NUMBER,
    ),
    Mutant(
        "select: scores below 0 have a mass",
        SELECT,
        "key > 0x80000000u ? __uint_as_float(key & 0x7fffffffu) : 0.0f",
        "__uint_as_float(key & 0x7fffffffu)",
        BEST,
    ),
    Mutant(
        "select: sums of warps take one place",
        SELECT,
        "    turn_ ^= 1;\n",
        "",
        BEST,
    ),
    Mutant(
        "select: whole pieces where rows are none",
        LAUNCH,
        "columns % kSelectEach == 0 && !Misaligned(arrays, 16)",
        "!Misaligned(arrays, 16)",
        BEST,
    ),
    Mutant(
        "select: lists that are too long",
        SELECT,
        "kept != 0 && place < p.width;",
        "kept != 0;",
        LISTS,
    ),
    Mutant(
        "select: counts of what did not fit",
        SELECT,
        "p.counts[row] = min(all, p.width);",
        "p.counts[row] = all;",
        LISTS,
    ),
    Mutant(
        "pool: rows of the next piece",
        POOL,
        "last = within ? min(first + p.side, end)",
        "last = within ? min(first + p.side + 1, end)",
        PIECES,
    ),
    Mutant(
        "pool: rows that do not count",
        POOL,
        "last = within ? min(first + p.side, end)",
        "last = within ? min(first + p.side, p.length)",
        PIECES,
    ),
    Mutant(
        "pool: means over all rows of a piece",
        POOL,
        "sum[i] /= max(count, 1);",
        "sum[i] /= p.side;",
        PIECES,
    ),
    Mutant(
        "pool: extremes of nothing",
        POOL,
        "if (count == 0) high[i] = low[i] = 0.0f;",
        "",
        PIECES,
    ),
    Mutant(
        "pool: a norm over the numbers of one lane",
        POOL,
        "for (int step = 1; step < lanes; step *= 2) square",
        "for (int step = 1; step < 1; step *= 2) square",
        NORMED,
    ),
    Mutant(
        "pool: nothing is normed to a mean square of 1",
        POOL,
        "MaxOrNan(mean, 1e-30f)",
        "mean",
        NORMED,
    ),
    Mutant(
        "pool: a norm that passes over NaN",
        POOL,
        "MaxOrNan(mean, 1e-30f)",
        "fmaxf(mean, 1e-30f)",
        test(EMULATED, "test_a_head_that_is_normed"),
    ),
    Mutant(
        "pool: heads that are normed lie one column too far",
        POOL,
        "3 * (to - column % p.normed)",
        "3 * to",
        NORMED,
    ),
    Mutant(
        "pool: a maximum that passes over NaN",
        POOL,
        "high[i] = MaxOrNan(high[i], number);",
        "high[i] = fmaxf(high[i], number);",
        NOT_FINITE,
    ),
    Mutant(
        "weigh: a piece more than is seen",
        WEIGH,
        "key < rows[i].end; };",
        "key <= rows[i].end; };",
        SHARES,
    ),
    Mutant(
        "weigh: a tile of keys that some see in part is whole",
        WEIGH,
        "sees(i, first_key) && sees(i, first_key + kKeys - 1)",
        "sees(i, first_key)",
        SHARES,
    ),
    Mutant(
        "weigh: segments that only touch do not meet",
        WEIGH,
        "own.y < other.x ||",
        "own.y <= other.x ||",
        SHARES,
    ),
    Mutant(
        "weigh: sums stay behind their maxima",
        WEIGH,
        "rows[i].sum * Exp2(fmaf(rows[i].top, scale, -reference))",
        "rows[i].sum",
        SHARES,
    ),
    Mutant(
        "weigh: a lane's maximum for all four",
        WEIGH,
        "other_sum * Exp2(other_top - reference)",
        "other_sum",
        SHARES,
    ),
    Mutant(
        "weigh: sums of pieces of queries in place of means",
        WEIGH,
        "row.top + Log2(row.sum) + down",
        "row.top + Log2(row.sum)",
        SHARES,
    ),
    Mutant(
        "weigh: distances are of a thread's first row",
        WEIGH,
        "apart = first_key - known[i].place;",
        "apart = first_key - known[0].place;",
        SHARES,
    ),
    Mutant(
        "weigh: scores are ordered as if the scale were above 0",
        WEIGH,
        "if (scale > 0.0f) continue;",
        "if (scale != 0.0f) continue;",
        SHARES,
    ),
    Mutant(
        "weigh: what is not seen times 0",
        WEIGH,
        "left ? known[i].scale : 1.0f",
        "known[i].scale",
        SHARES,
    ),
    Mutant(
        "weigh: a head's factor is that of the first",
        WEIGH,
        "known.scale *= p.factors[known.head];",
        "known.scale *= p.factors[0];",
        SHARES,
    ),
    Mutant(
        "weigh: all neighbours are of one class",
        WEIGH,
        "of == ClassOf(apart + kKeys - 1);",
        "true;",
        SHARES,
    ),
    Mutant(
        "weigh: the first piece has no score of its own",
        WEIGH,
        "if (own >= 0 && own < kKeys) {",
        "if (false) {",
        SHARES,
    ),
    Mutant(
        "weigh: the next tile of keys is not waited for",
        WEIGH,
        "CopyAsyncWait<0>();",
        "CopyAsyncWait<1>();",
        SHARES,
    ),
    Mutant(
        "weigh: what nobody sees is left as it was",
        WEIGH,
        "column < first_column || column >= end_column",
        "column >= end_column",
        SHARES,
    ),
    Mutant(
        "weigh: rows of another key head",
        WEIGH,
        "(at.piece * p.kv_heads + pair % p.kv_heads) * p.group",
        "at.piece * p.kv_heads * p.group",
        SHARES,
    ),
    Mutant(
        "weigh: a thread's keys are the first of all tiles",
        WEIGH,
        "const int first_key = tile * kKeys + lane",
        "const int first_key = lane",
        SHARES,
    ),
    Mutant(
        "weigh: pieces that two lanes have are one's",
        WEIGH,
        "if (p.across > kOwnAcross) {",
        "if (false) {",
        SHARES,
    ),
    Mutant(
        "weigh: pieces of queries that lanes have are one's",
        WEIGH,
        "if (p.down > 2) {",
        "if (false) {",
        SHARES,
    ),
    Mutant(
        "weigh: of 32 pieces of queries 16",
        WEIGH,
        "if (p.down > 4) add_lanes",
        "if (false) add_lanes",
        SHARES,
    ),
    Mutant(
        "pool: means are not rounded",
        POOL,
        "if (p.rounded) {",
        "if (false) {",
        PIECES,
    ),
)
