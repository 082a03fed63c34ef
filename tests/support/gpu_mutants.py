"""The small mistakes in kernels that a GPU has to notice: for mutants.py."""

from __future__ import annotations

from mutant_list import GENERIC, HOPPER, MASK, Mutant

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
        "Pack<T>(dq[0][n][2 * h] * scale, dq[0][n][2 * h + 1] * scale);",
        "Pack<T>(dq[0][n][2 * h] * scale, dq[0][n][2 * h + 1]);",
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
        f"{HOPPER}/forward/result.cuh",
        "(own == joint ? 1.0f : Exp2((own - reference) * unit));",
        "0.0f;",
        SM90,
        FORWARD,
    ),
    Mutant(
        "Hopper forward: lse of the neighbouring row",
        f"{HOPPER}/forward/result.cuh",
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
        f"{HOPPER}/forward/result.cuh",
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
        ": Pack<T>(low * p.scale, high * p.scale);",
        ": Pack<T>(low * p.scale, high);",
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
