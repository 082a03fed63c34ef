"""The same in Hopper's kernels of 16 bits: what a GPU has to notice, and more.

The emulator runs one CTA after the other, so it has no mistakes in what they do to each
other: turns that nobody waits for, lanes whose sums lie in the same place.
"""

from __future__ import annotations

import dataclasses

from gpu_mutants import GPU
from mutant_list import HOPPER, Mutant, test


def sm90(names: str) -> tuple[str, ...]:
    return test("test_emulated_sm90", names)


BANDS, SOFTCAPS = sm90("bands and 64"), sm90("softcaps and 64")
TALL, LANES = sm90("tall"), sm90("heads_at_a_time")
# Of the kernels on a GPU, and who notices them here.
ALSO_ON_A_GPU = {
    "forward: a key more before the edge of the mask": BANDS,
    "forward: the sink is not in the sum": BANDS,
    "forward: lse of the neighbouring row": BANDS,
    "forward: another group's keys": BANDS,
    "forward: O is not scaled to a new maximum": sm90("references and 256"),
    "forward: lse of the last row is not written": BANDS,
    "forward: both CTAs of a cluster have the same head": sm90("bands and 128"),
    "backward: a window ends a key early": BANDS,
    "backward: dK without the scale": BANDS,
    "backward: the first to come adds to what lies there": BANDS,
    "backward: half of dq without the scale": BANDS,
    "backward: no slope of a softcap": SOFTCAPS,
    "backward: passes over queries that see its last keys": sm90("bands and 128"),
    "backward: the last queries of a tall tile have no dq": TALL,
}
USUAL, ONE_LEAP = sm90("many_tiles and 64 and None"), sm90("one_row_leaps and 64")
BACKWARD, FORWARD = f"{HOPPER}/backward", f"{HOPPER}/forward"
LEAPS, MASKED_LEAPS = sm90("that_leap_are and 64"), sm90("leap_under and 64")
PAGED_LEAPS = test("test_emulated_paged", "share_a_call and leap and rows")
SM90_EMULATED = (
    *(
        dataclasses.replace(
            mutant,
            name=f"{mutant.name}, on a CPU",
            killer=ALSO_ON_A_GPU[mutant.name.removeprefix("Hopper ")],
            objects=(),
        )
        for mutant in GPU
        if mutant.name.removeprefix("Hopper ") in ALSO_ON_A_GPU
    ),
    Mutant(
        "Hopper forward: nobody looks whether a row has outgrown its reference",
        f"{FORWARD}/consumer_trust.cuh",
        "if (__builtin_expect(Outgrew(tile, kOutgrownByMuch), false)) {",
        "if (false) {",
        LEAPS,
    ),
    Mutant(
        "Hopper forward: a row that leaps keeps its sum",
        f"{FORWARD}/consumer_trust.cuh",
        "    rows.sums.sum[half] *= factor[half];\n",
        "",
        LEAPS,
    ),
    Mutant(
        "Hopper forward: probabilities of a row that leaps are those before",
        f"{FORWARD}/consumer_trust.cuh",
        "  PackRows(rows);\n#pragma unroll",
        "#pragma unroll",
        LEAPS,
    ),
    Mutant(
        "Hopper forward: a row that leaps loses the scores of the next tile",
        f"{FORWARD}/consumer_trust.cuh",
        "rows.s()[i] = next[i];",
        ";",
        LEAPS,
    ),
    Mutant(
        "Hopper forward: O is not scaled to scores once more",
        f"{FORWARD}/consumer_trust.cuh",
        "if (Follow(flags, rows, factor)) Rescale<Traits>(rows, factor);",
        "Follow(flags, rows, factor);",
        LEAPS,
    ),
    Mutant(
        "Hopper forward: scores once more are those of other rows",
        f"{FORWARD}/scores_again.cuh",
        "QueryAt<Traits>(p, item, row + 8)};",
        "QueryAt<Traits>(p, item, row)};",
        LEAPS,
    ),
    Mutant(
        "Hopper forward: scores once more are the next tile's",
        f"{FORWARD}/consumer_trust.cuh",
        "ComputeAgain(item, step.stage, rows, tile);",
        "ComputeAgain(item, steps_.stage, rows, tile);",
        LEAPS,
    ),
    Mutant(
        "Hopper forward: scores once more are the next item's",
        f"{FORWARD}/consumer.cuh",
        "      if constexpr (kTrusts) TakeSums(*item, rows, tile);",
        "      if constexpr (kTrusts) TakeSums(*next, rows, tile);",
        LEAPS,
    ),
    Mutant(
        "Hopper forward: a row that leaps in a usual step is not computed again",
        f"{FORWARD}/consumer_usual.cuh",
        "if (Outgrew(tile, kOutgrownByFar)) ComputeAgain(item, before.stage",
        "if (false) ComputeAgain(item, before.stage",
        ONE_LEAP,
    ),
    Mutant(
        "Hopper forward: O stays where a row leaps again in a usual step",
        f"{FORWARD}/consumer_usual.cuh",
        "      Rescale<Traits>(rows, factor);\n    }\n    if (looks",
        "    }\n    if (looks",
        ONE_LEAP,
    ),
    Mutant(
        "Hopper forward: sums stay where a row leaps again in a usual step",
        f"{FORWARD}/consumer_usual.cuh",
        "    rows.sums.sum[0] *= factor[0];\n    rows.sums.sum[1] *= factor[1];\n",
        "",
        ONE_LEAP,
    ),
    Mutant(
        "Hopper forward: warps of a warpgroup part where one does not trust its rows",
        f"{FORWARD}/consumer_usual.cuh",
        "if (IsUnusual(shared_.steps[steps_.stage].flags)) break;",
        "if (IsUnusual(shared_.steps[steps_.stage].flags) || looks != kAtNone) break;",
        ONE_LEAP,
    ),
    Mutant(
        "Hopper forward: masked steps are usual",
        f"{FORWARD}/consumer_usual.cuh",
        "(flags & (Step::kMasked | Step::kStarts | Step::kLast))",
        "(flags & (Step::kStarts | Step::kLast))",
        USUAL,
    ),
    Mutant(
        "Hopper forward: half of the rows keep the sums of their first tile",
        f"{FORWARD}/consumer_usual.cuh",
        "  rows.sums.sum[1] += tile[1];\n",
        "",
        USUAL,
    ),
    Mutant(
        "Hopper forward: rows of another sequence leap",
        f"{FORWARD}/consumer_trust.cuh",
        "if (!own) sums.reference[half] = INFINITY;",
        "",
        test("test_emulated_paged", "with_split and leap and 4000 and rows"),
    ),
    Mutant(
        "Hopper forward: scores once more are not masked",
        f"{FORWARD}/consumer_trust.cuh",
        "  Finish(item, flags, step, rows);\n",
        "",
        MASKED_LEAPS,
    ),
    Mutant(
        "Hopper forward: scores once more are of another head's keys",
        f"{FORWARD}/scores_again.cuh",
        "p.num_kv_heads + item.kv_head) * p.head_dim;",
        "p.num_kv_heads) * p.head_dim;",
        MASKED_LEAPS,
    ),
    Mutant(
        "Hopper forward: sums stay where somebody looks at maxima",
        f"{FORWARD}/consumer.cuh",
        "          rows.sums.sum[0] *= factor[0];\n",
        "",
        MASKED_LEAPS,
    ),
    Mutant(
        "Hopper forward: scores once more are of another page",
        f"{FORWARD}/scores_again.cuh",
        "PageRow(p.k_strides, at), p.unit));",
        "0, p.unit));",
        PAGED_LEAPS,
    ),
    Mutant(
        "Hopper backward: the second lane is not awaited",
        f"{HOPPER}/lanes.h",
        "status != cudaSuccess ? status : cudaStreamWaitEvent(caller_, own_->event, 0)",
        "status",
        test("test_lanes"),
    ),
    Mutant(
        "Hopper backward: the second lane does not wait for the caller",
        f"{HOPPER}/lanes.h",
        "if ((status = cudaStreamWaitEvent(own.stream, own.event, 0)) ==",
        "if (status ==",
        test("test_lanes"),
    ),
    Mutant(
        "Hopper backward: of lists a launch has as few tiles as of none",
        "cpp/host/attention_workspace.h",
        "a.tile_indices != nullptr ? 2 * kLeastDqTiles : kLeastDqTiles",
        "kLeastDqTiles",
        test("test_dq_heads", "lists"),
    ),
    Mutant(
        "Hopper backward: dq of all rounds is that of the first heads",
        f"{BACKWARD}/backward.cu",
        "  p.scale *= MakeDropout(a).scale;\n  p.first_kv_head = heads.first;",
        "  p.scale *= MakeDropout(a).scale;\n  p.first_kv_head = 0;",
        LANES,
    ),
    Mutant(
        "Hopper backward: a cluster's CTA sends its dS to itself",
        f"{BACKWARD}/split_products_cluster.cuh",
        "ScoreTile::kBytes, w.cta.PeerDsFull(), ClusterRank() ^ 1);",
        "ScoreTile::kBytes, w.cta.PeerDsFull(), ClusterRank());",
        sm90("bands and 256"),
    ),
    Mutant(
        "Hopper backward: S is read while its product is under way",
        f"{BACKWARD}/split_keys.cuh",
        "      WgmmaWait<1>();\n      KeepAfter(c);",
        "      KeepAfter(c);",
        BANDS,
    ),
    Mutant(
        "Hopper backward: a cluster's CTA expects less of the other's dS than comes",
        f"{BACKWARD}/split_products_cluster.cuh",
        "BarrierExpect(w.cta.PeerDsFull(), ScoreTile::kBytes);",
        "BarrierExpect(w.cta.PeerDsFull(), ScoreTile::kBytes - 16);",
        sm90("bands and 256"),
    ),
)
