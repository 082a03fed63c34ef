"""The small mistakes that mutants.py makes in kernels: for the emulator, and a GPU."""

from __future__ import annotations

from mutant_list import ATTENTION, GENERIC, HOPPER, MASK, Mutant, test

# ---- the generic kernels, by the emulator --------------------------------------------

SHARED_KEYS = test("test_emulated", "few_queries")
OPTIONS = test("test_emulated", "option")
PAGED = test("test_emulated_paged", "every_row")
PAGED_BAD = test("test_emulated_paged", "bad_data")
PAGED_BITS = test("test_emulated_paged", "with_split_size")
SPLIT = f"{GENERIC}/split/kernel.cuh"
LATENT = test("test_emulated_latent", "every_row")
LATENT_KERNEL = f"{GENERIC}/latent/kernel.cuh"
EMULATED = (
    Mutant(
        "few queries: nobody waits for the others' copies",
        SPLIT,
        "__syncthreads();  // this tile has arrived for all, and all are done with the "
        "one before",
        "",
        SHARED_KEYS,
    ),
    Mutant(
        "few queries: a tile is waited for too late",
        SPLIT,
        "CopyAsyncWait<kStages - 2>();",
        "CopyAsyncWait<kStages - 1>();",
        SHARED_KEYS,
    ),
    Mutant(
        "few queries: a key more than there is",
        SPLIT,
        "j >= end_[e / 2]",
        "j > end_[e / 2]",
        SHARED_KEYS,
    ),
    Mutant(
        "few queries: O is written over K that others read",
        SPLIT,
        "__syncthreads();  // all are done with the tile, too",
        "",
        SHARED_KEYS,
    ),
    Mutant(
        "few queries: a tile has another owner",
        f"{ATTENTION}/schedule/shares.cuh",
        "Begin(cta + 1) <= tile) ++cta;",
        "Begin(cta + 1) < tile) ++cta;",
        SHARED_KEYS,
    ),
    Mutant(
        "few queries: the wrong piece of the first owner",
        f"{ATTENTION}/combine/combine.cuh",
        "line_.Begin(owner_) < first ? 1 : 0;",
        "line_.Begin(owner_) <= first ? 1 : 0;",
        SHARED_KEYS,
    ),
    Mutant(
        "split_size: a share begins within a piece",
        SPLIT,
        "      begin = line_.PieceFrom(begin);\n",
        "",
        PAGED_BITS,
    ),
    Mutant(
        "split_size: pieces of two units in one place",
        f"{ATTENTION}/schedule/shares.cuh",
        "(static_cast<unsigned>(begin / p_.split) * 2 + (first ? 1 : 0))",
        "(static_cast<unsigned>(begin / p_.split) * 2)",
        PAGED_BITS,
    ),
    Mutant(
        "few queries: a round of pieces forgets those before",
        f"{ATTENTION}/combine/combine.cuh",
        "for (int i = 0; i < 4; ++i) result->o[i] *= factor;",
        "for (int i = 0; i < 4; ++i) result->o[i] = 0.0f;",
        SHARED_KEYS,
    ),
    Mutant(
        "few queries: the threads of a row leave one out",
        f"{ATTENTION}/combine/combine.cuh",
        "for (int i = thread; i < kThreads; i += across) {",
        "for (int i = thread; i < kThreads - across; i += across) {",
        SHARED_KEYS,
    ),
    Mutant(
        "few queries: a tile is computed as if it were the next one",
        SPLIT,
        "if (threadIdx.x == 0) places[(next + 1) % kPlaces] = ahead;",
        "if (threadIdx.x == 0) places[(next + 2) % kPlaces] = ahead;",
        SHARED_KEYS,
    ),
    Mutant(
        "few queries: the next place is that of the tile itself",
        SPLIT,
        "places[(next + 1) % kPlaces] = after_it;",
        "places[next % kPlaces] = after_it;",
        SHARED_KEYS,
    ),
    Mutant(
        "few queries: a piece is not published",
        SPLIT,
        "Publish(p_.piece_there + slot);",
        "Publish(p_.piece_there + (slot | 1));",
        SHARED_KEYS,
    ),
    Mutant(
        "few queries: a unit's first tile is another head's",
        f"{ATTENTION}/schedule/shares.cuh",
        "found = before + tiles * head;",
        "found = before + tiles * index;",
        SHARED_KEYS,
    ),
    Mutant(
        "few queries: pieces of units that are cut are left as they are",
        f"{GENERIC}/split/plan.h",
        "(work.alike && units % ctas == 0)",
        "work.alike",
        SHARED_KEYS,
    ),
    Mutant(
        "few queries: rows past q_lens have results",
        f"{ATTENTION}/combine/result.cuh",
        "if (!attends_) sums.sum = 0.0f;",
        "",
        SHARED_KEYS,
    ),
    Mutant(
        "paged: a key in no block is seen",
        f"{GENERIC}/paged_keys.cuh",
        "return (bits()[tile % kBitRing][key / 32] >> (key % 32) & 1) != 0;",
        "return true;",
        PAGED_BAD,
    ),
    Mutant(
        "paged: a line goes on with another line's head",
        f"{ATTENTION}/schedule/shares.cuh",
        "at->kv_head = number_;",
        "at->kv_head = 0;",
        PAGED,
    ),
    Mutant(
        "paged: values of 8 bits have the scales of keys",
        f"{GENERIC}/paged_keys.cuh",
        "CopyScale(p_.v_scale, there, found, scales()[tile % kBitRing].v);",
        "CopyScale(p_.k_scale, there, found, scales()[tile % kBitRing].v);",
        PAGED,
    ),
    Mutant(
        "paged: drafts see another one's bit",
        f"{ATTENTION}/schedule/ragged.cuh",
        "return __funnelshift_r(load(word), load(word + 1), first & 31);",
        "return __funnelshift_r(load(word), load(word), first & 31);",
        PAGED,
    ),
    Mutant(
        "paged: a row has its neighbour's bits",
        f"{ATTENTION}/schedule/ragged.cuh",
        "p.tree_mask + (s.q_row + query) * p.tree_words",
        "p.tree_mask + s.q_row * p.tree_words",
        PAGED,
    ),
    Mutant(
        "paged: tiles that another query's range has are left out",
        f"{ATTENTION}/schedule/ragged.cuh",
        "high = max(high, range.end);",
        "high = range.end;",
        PAGED,
    ),
    Mutant(
        "paged: Hopper's kernel computes rows that have ranges",
        f"{ATTENTION}/paged_cuda.cu",
        "!RowsDiffer(*a) && ",
        "",
        test("test_emulated_paged", "two_kernels"),
    ),
    Mutant(
        "paged: columns of O are those of 16 bits",
        f"{GENERIC}/narrow_tile.cuh",
        "Cache::template Widen<TwoOf::kOdd>(upper)",
        "Cache::template Widen<TwoOf::kEven>(upper)",
        PAGED,
    ),
    Mutant(
        "latent: nobody waits for the others' maxima",
        LATENT_KERNEL,
        "__syncthreads();  // all have shown their maxima, and are done with columns "
        "from kValue on",
        "",
        LATENT,
    ),
    Mutant(
        "latent: O of the second row of a lane keeps its old maximum",
        LATENT_KERNEL,
        "o_[rb][n][e] *= correction[rb][e / 2];",
        "o_[rb][n][e] *= correction[rb][0];",
        LATENT,
    ),
    Mutant(
        "latent: sums of another group's rows follow",
        LATENT_KERNEL,
        "own = all[i * kOwnBlocks + m][half];",
        "own = all[m][half];",
        LATENT,
    ),
    Mutant(
        "latent: a row's sum lacks the last keys of a tile",
        LATENT_KERNEL,
        "for (int i = 0; i < kKeyGroups; ++i) result.sums.sum += sums[row][i];",
        "for (int i = 0; i + 1 < kKeyGroups; ++i) result.sums.sum += sums[row][i];",
        LATENT,
    ),
    Mutant(
        "latent: a key in no block is seen",
        LATENT_KERNEL,
        "if (!__all_sync(~0u, whole) || !keys_.AllThere(tile, own))",
        "if (!__all_sync(~0u, whole))",
        LATENT,
    ),
    Mutant(
        "a partial tile is taken for a full one",
        f"{MASK}/tile_walk.cuh",
        "if (HasLists()) whole = whole && !partial;",
        "",
        OPTIONS,
    ),
    Mutant(
        "forward: another key's bit",
        f"{MASK}/forward_scores.cuh",
        "if ((pair & 2) == 0) c",
        "if ((pair & 1) == 0) c",
        OPTIONS,
    ),
    Mutant(
        "backward: another query's bits",
        f"{MASK}/backward_scores.cuh",
        "(bits_.From(i, j) & 1) != 0;",
        "(bits_.From(query, j) & 1) != 0;",
        OPTIONS,
    ),
    Mutant(
        "dbias of tiles whose entries have a flag",
        f"{GENERIC}/backward/bias.cuh",
        "partial ? entry - KVBLOCK_ATTENTION_PARTIAL : entry;",
        "entry;",
        OPTIONS,
    ),
    Mutant(
        "dbias: an entry that is none has a flag",
        f"{GENERIC}/backward/bias.cuh",
        "p.tile_masks != nullptr && entry >= KVBLOCK",
        "entry >= KVBLOCK",
        OPTIONS,
    ),
    Mutant(
        "an entry that is none has a flag",
        f"{MASK}/tile_walk.cuh",
        "p_.tile_masks != nullptr && index >= KVBLOCK",
        "index >= KVBLOCK",
        OPTIONS,
    ),
    Mutant(
        "dK and dV: nobody waits for the others' dS",
        f"{GENERIC}/backward/kv.cuh",
        "BarrierWait(ds_ready, step % 2);",
        "",
        OPTIONS,
    ),
)


# ---- all kernels, on a GPU -----------------------------------------------------------

# All at head dim 64 but where a line is another one's.
QUICK = ("--rounds", "2", "--limit", "120", "--most", "1", "--seed", "5")


def swept(kernels: str, only: str = "D64 ") -> tuple[str, ...]:
    return ("--kernels", kernels, "--only", only, *QUICK)


GENERIC_SWEEP, SM90 = swept("generic"), swept("sm90")
GENERIC_FORWARD = ("generic/forward_64_",)
GENERIC_BACKWARD = ("generic/backward_64_",)
FORWARD, BACKWARD = ("hopper/forward_64x64_",), ("hopper/backward_64x64_",)
GPU = (
    Mutant(
        "generic forward: a window ends a key early",
        f"{MASK}/sequence.cuh",
        "s.right = right < 0 ? kFar : Clamp(shift + right + 1, -kFar, kFar);",
        "s.right = right < 0 ? kFar : Clamp(shift + right, -kFar, kFar);",
        GENERIC_SWEEP,
        GENERIC_FORWARD,
    ),
    Mutant(
        "generic forward: another group's keys",
        f"{GENERIC}/forward/kernel.cuh",
        "parked.k = RowsOfHead<T>(p.k, found.kv_row, p.num_kv_heads, head / p.group, "
        "p.head_dim);",
        "parked.k = RowsOfHead<T>(p.k, found.kv_row, p.num_kv_heads, "
        "head % p.num_kv_heads, p.head_dim);",
        GENERIC_SWEEP,
        GENERIC_FORWARD,
    ),
    Mutant(
        "generic forward: the sink is not in the sum",
        f"{GENERIC}/forward/kernel.cuh",
        "sum = sum * factor + (sink == joint ? 1.0f : "
        "Exp2((sink - reference) * unit));",
        "sum = sum * factor;",
        GENERIC_SWEEP,
        GENERIC_FORWARD,
    ),
    Mutant(
        "generic forward: lse lacks the sum",
        f"{GENERIC}/forward/kernel.cuh",
        "nothing, max * (unit * kLn2), logf(sum));",
        "nothing, max * (unit * kLn2), 0.0f);",
        GENERIC_SWEEP,
        GENERIC_FORWARD,
    ),
    Mutant(
        "generic forward: the last four rows are not written",
        f"{GENERIC}/forward/kernel.cuh",
        "if (query < s.q_rows && column < p.value_dim) {",
        "if (query < s.q_rows - 4 && column < p.value_dim) {",
        GENERIC_SWEEP,
        GENERIC_FORWARD,
    ),
    Mutant(
        "generic forward: O is not scaled to a new maximum",
        f"{GENERIC}/forward/kernel.cuh",
        "rows.o[rb][n][half * 2 + 1] *= correction[rb][half];",
        "",
        GENERIC_SWEEP,
        GENERIC_FORWARD,
    ),
    Mutant(
        "generic forward: the last tile of keys is passed over",
        f"{MASK}/tile_walk.cuh",
        "bool visit = first < at_.stretch_end;",
        "bool visit = first < at_.stretch_end - 8;",
        GENERIC_SWEEP,
        GENERIC_FORWARD,
    ),
    Mutant(
        "generic backward: dK and dV without delta",
        f"{GENERIC}/backward/kv.cuh",
        "for (int n = 0; n < kN; ++n) ds[m][n][2 * h] = ds[m][n][2 * h + 1] = -delta;",
        "for (int n = 0; n < kN; ++n) ds[m][n][2 * h] = ds[m][n][2 * h + 1] = 0;",
        GENERIC_SWEEP,
        GENERIC_BACKWARD,
    ),
    Mutant(
        "generic backward: half of dq without the scale",
        f"{GENERIC}/backward/q.cuh",
        "Pack<T>(dq[0][n][2 * h] * p.scale, dq[0][n][2 * h + 1] * p.scale);",
        "Pack<T>(dq[0][n][2 * h] * p.scale, dq[0][n][2 * h + 1]);",
        GENERIC_SWEEP,
        GENERIC_BACKWARD,
    ),
    Mutant(
        "generic backward: another head's bias",
        f"{MASK}/backward_scores.cuh",
        "bn = p.bias_heads > 1 ? head : 0;",
        "bn = 0;",
        GENERIC_SWEEP,
        GENERIC_BACKWARD,
    ),
    Mutant(
        "generic backward: no slope of a softcap",
        f"{MASK}/backward_scores.cuh",
        "slope[e] = fmaf(-c[e] * inverse, c[e] * inverse, 1.0f);",
        "slope[e] = 1.0f;",
        GENERIC_SWEEP,
        GENERIC_BACKWARD,
    ),
    Mutant(
        "generic backward: segments are not looked at",
        f"{MASK}/backward_scores.cuh",
        "attends[e] = attends[e] && of_row[Row(e)] == of_column[Column(e)];",
        "attends[e] = attends[e] || of_row[Row(e)] > of_column[Column(e)];",
        GENERIC_SWEEP,
        GENERIC_BACKWARD,
    ),
    Mutant(
        "dbias of one head alone, where heads share it",
        f"{GENERIC}/backward/bias.cuh",
        "const int head = p.bias_heads > 1 ? bias_head : member % heads;",
        "const int head = p.bias_heads > 1 ? bias_head : 0;",
        GENERIC_SWEEP,
        GENERIC_BACKWARD,
    ),
    Mutant(
        "Hopper forward: a key more before the edge of the mask",
        f"{MASK}/forward_scores.cuh",
        "high[half] = i < s.q_len ? s.EndKey(i) - key : 0;",
        "high[half] = i < s.q_len ? s.EndKey(i) - key + 1 : 0;",
        SM90,
        FORWARD,
    ),
    Mutant(
        "Hopper forward: the sink is not in the sum",
        f"{HOPPER}/forward/rows.cuh",
        "(own == joint ? 1.0f : Exp2((own - reference) * unit));",
        "0.0f;",
        SM90,
        FORWARD,
    ),
    Mutant(
        "Hopper forward: lse of the neighbouring row",
        f"{HOPPER}/forward/rows.cuh",
        "const float top = second ? max[1] : max[0], ",
        "const float top = second ? max[0] : max[1], ",
        SM90,
        FORWARD,
    ),
    Mutant(
        "Hopper forward: another group's keys",
        f"{HOPPER}/forward/planner.cuh",
        "item.kv_head = head / Opaque(p_.group);",
        "item.kv_head = head % (p_.num_heads / p_.group);",
        SM90,
        FORWARD,
    ),
    Mutant(
        "Hopper forward: O is not scaled to a new maximum",
        f"{HOPPER}/forward/consumer.cuh",
        "if (!ends) Rescale<Traits>(rows, factor);",
        "",
        SM90,
        FORWARD,
    ),
    Mutant(
        "Hopper forward: lse of the last row is not written",
        f"{HOPPER}/forward/rows.cuh",
        "place.query, item.sequence.q_rows)) {",
        "place.query, item.sequence.q_rows - 1)) {",
        SM90,
        FORWARD,
    ),
    Mutant(
        "Hopper forward: both CTAs of a cluster have the same head",
        f"{HOPPER}/forward/planner.cuh",
        "heads ? at.pair * Traits::kCluster + ClusterRank() : at.pair;",
        "heads ? at.pair * Traits::kCluster : at.pair;",
        swept("sm90", "D96 "),
        ("hopper/forward_96x96_",),
    ),
    Mutant(
        "Hopper backward: a window ends a key early",
        f"{MASK}/sequence.cuh",
        "s.right = right < 0 ? kFar : Clamp(shift + right + 1, -kFar, kFar);",
        "s.right = right < 0 ? kFar : Clamp(shift + right, -kFar, kFar);",
        SM90,
        BACKWARD,
    ),
    Mutant(
        "Hopper backward: dK without the scale",
        f"{HOPPER}/backward/own_keys.cuh",
        "w.cta.maps.dk, w.cta.K(), dk, w.p().scale);",
        "w.cta.maps.dk, w.cta.K(), dk, 1.0f);",
        SM90,
        BACKWARD,
    ),
    Mutant(
        "Hopper backward: the first to come adds to what lies there",
        f"{HOPPER}/backward/adder.cuh",
        "StoreBytes(to, from, values * 4);",
        "AddBytes(to, from, values * 4);",
        SM90,
        BACKWARD,
    ),
    Mutant(
        "Hopper backward: turns that nobody waits for",
        f"{HOPPER}/backward/adder.cuh",
        "AwaitDqTurn(DqTurn(p, s, at.head, first), mine);",
        "",
        SM90,
        BACKWARD,
    ),
    Mutant(
        "Hopper backward: half of dq without the scale",
        f"{HOPPER}/backward/dq_finish.cuh",
        "(h == 0 ? y.y : y.w) * p.scale);",
        "(h == 0 ? y.y : y.w));",
        SM90,
        ("hopper/backward/backward.cu",),
    ),
    Mutant(
        "Hopper backward: no slope of a softcap",
        "cpp/device/fast_math.cuh",
        "float Slope(float x) const { return fmaf(x * x, s2, 1.0f); }",
        "float Slope(float x) const { return 1.0f; }",
        swept("sm90", "softcap float16 D64 "),
        BACKWARD,
    ),
    Mutant(
        "Hopper backward: passes over queries that see its last keys",
        f"{HOPPER}/backward/split_keys.cuh",
        "return key + 64 <= low || key >= high;",
        "return key + 64 <= low + 8 || key >= high - 8;",
        swept("sm90", "D96 "),
        ("hopper/backward_96x96_",),
    ),
    Mutant(
        "Hopper backward: the last queries of a tall tile have no dq",
        f"{HOPPER}/backward/adder.cuh",
        "const int tall_blocks = (at.end - first + 7) / 8;",
        "const int tall_blocks = (at.end - first) / 8;",
        swept("sm90", "D128 B1 H2/1 T2"),
        ("hopper/backward_128x128_",),
    ),
)
