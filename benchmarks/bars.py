"""The bars: what the numbers of a results file must reach, in one table.

`python benchmarks/bars.py results.json ...` prints the table with what was measured.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections.abc import Sequence
from typing import Any

OURS = "jax_kvblock"
# One cudaMemcpyAsync of the same bytes, taking turns with what it judges.
COPY = "peer copy"
# The best rate of one cudaMemcpyAsync alone, between events.
DEVICE_COPY = "ceiling / device copy"
TO_HOST = "ceiling / device to pinned host"
TO_DEVICE = "ceiling / pinned host to device"
# PyTorch's scaled_dot_product_attention by its flash backend.
FA2 = "peer torch flash attention 2"
FA3 = "peer flash attention 3"  # by dew-flash-attn-cu13
CUDNN = "peer cudnn in jax"
CUDNN_IN_TORCH = "peer cudnn in torch"  # where jax.nn's refuses the shape
GENERIC = rf"^{OURS}, cuda$"  # the attention kernels for sm_80 and newer
MIB = 1 << 20

# Efficiency over so many GPUs, forward and both passes, by tokens.
OVER_GPUS = {
    2: {16384: (0.92, 0.92), 32768: (0.96, 0.96), 131072: (0.985, 0.98)},
    4: {16384: (0.82, 0.84), 32768: (0.92, 0.92), 131072: (0.97, 0.96)},
}
DOCUMENTS_OVER_GPUS = {2: 0.90, 4: 0.85}

MOVES = r"^(gather|scatter), | to (NHD|HND|universal|operational)$"
PAGED = r"^{}, (NHD|HND|universal) pool$"


@dataclasses.dataclass(frozen=True)
class Bar:
    """One bar: which rows it judges, what they are divided by, and the limit.

    Attributes:
      text: how tables call it.
      work, shape, implementation: regular expressions of the rows it judges.
      metric: of those rows.
      against: the case of a ceiling, "peer NAME" for the best of that peer's rows on
        the same case, "row IMPLEMENTATION" for that row of it, "ours SHAPE" for the
        same implementation's row of the same work on another shape, or "metric NAME"
        for another metric of the same row; None judges the value itself.
      limit: the least ratio or value; the greatest one when `at_most`.
      best: of each case the best row alone.
      runs: for which run lengths, in bytes.
      platform: "gpu", "cpu" or None for both.
    """

    text: str
    work: str
    metric: str
    against: str | None
    limit: float
    at_most: bool = False
    shape: str = ""
    # By default only the plain name and its pool form: a backend that was asked for by
    # name is there to be compared.
    implementation: str = rf"^{OURS}(, layered pool)?$"
    best: bool = False
    runs: tuple[float, float] = (0, math.inf)
    platform: str | None = "gpu"


BARS = (
    Bar("runs of 256 B or more / copy rate", MOVES, "bandwidth", DEVICE_COPY, 0.95,
        runs=(256, math.inf)),
    Bar("runs of 128 B / copy rate", MOVES, "bandwidth", DEVICE_COPY, 0.93,
        runs=(128, 128)),
    Bar("runs under 16 B / copy rate", MOVES, "bandwidth", DEVICE_COPY, 0.40,
        runs=(1, 15)),
    Bar("runs of 256 B or more / a copy taking turns", MOVES, "bandwidth", COPY, 0.95,
        runs=(256, math.inf)),
    Bar("runs of 128 B / a copy taking turns", MOVES, "bandwidth", COPY, 0.93,
        runs=(128, 128)),
    Bar("runs under 16 B / a copy taking turns", MOVES, "bandwidth", COPY, 0.40,
        runs=(1, 15)),
    # The shapes whose XLA rates the bars were set by: 32 layers of 8 heads of 128.
    Bar("paged gather / XLA's best", r"^gather, (NHD|HND) pool$", "bandwidth",
        "peer xla", 4.6, shape="^llama-8b"),
    Bar("paged scatter / XLA's best", r"^scatter, (NHD|HND) pool$", "bandwidth",
        "peer xla", 7.5, shape="^llama-8b"),
    Bar("device to pinned host / memcpy", "^to host", "bandwidth", TO_HOST, 0.92),
    Bar("pinned host to device / memcpy", "^to device", "bandwidth", TO_DEVICE, 0.92),
    Bar("offload to pinned host / memcpy", "^offload", "bandwidth", TO_HOST, 0.9),
    Bar("onboard from pinned host / memcpy", "^onboard", "bandwidth", TO_DEVICE, 0.9),
    Bar("steps beside a transfer slowed by, %", "^(offload|onboard), beside steps$",
        "step slowed by", None, 5, at_most=True),
    Bar("the KVBM kernels' work / KVBM", "universal", "bandwidth", "peer kvbm", 6.8),
    Bar("temporaries of a pinned transfer, B", "^to (host|device)", "temporaries",
        None, 0, at_most=True, platform=None),
    Bar("temporaries of a conversion, B", f"{MOVES}|scan", "temporaries", None, MIB - 1,
        at_most=True, implementation=f"^{OURS}", platform=None),
    Bar("CPU conversions / XLA:CPU", r" to (NHD|HND|universal|operational)$",
        "bandwidth", "peer xla", 1.0, platform="cpu"),
    Bar("CPU paged gather / XLA:CPU", PAGED.format("gather"), "bandwidth", "peer xla",
        1.5, platform="cpu"),
    Bar("CPU paged scatter / XLA:CPU", PAGED.format("scatter"), "bandwidth", "peer xla",
        1.5, platform="cpu"),
    Bar("sm_80 attention forward / FlashAttention-2 in PyTorch", "^forward$", "rate",
        FA2, 0.95, shape="^B2 H16 S8192 D128 causal$", implementation=GENERIC),
    Bar("sm_80 attention backward / FlashAttention-2 in PyTorch", "^backward$", "rate",
        FA2, 0.95, shape="^B2 H16 S8192 D128 causal$", implementation=GENERIC),
    Bar("sm_80 packed sequences / the same as a batch", "^(forward|backward)$", "rate",
        "ours B8 H16 S2048 D128 causal", 0.9, shape="packed$", implementation=GENERIC),
    Bar("sm_80 time of a window of 1024 / causal, S 8192", "^(forward|backward)$",
        "time", "ours B2 H16 S8192 D128 causal", 1 / 3, at_most=True,
        shape="window 1024$", implementation=GENERIC),
    *(
        Bar(f"{shape}, {work} / cuDNN", f"^{work}$", "rate",
            CUDNN_IN_TORCH if "D192/128" in shape else CUDNN, limit,
            shape=f"^{shape}( float16)?$", implementation=f"^{OURS}$")
        for shape, limits in {
            "B2 H16 S8192 D128 full": (1.10, 1.13),
            "B2 H16 S8192 D128 causal": (1.21, 1.14),
            "B4 H16 S4096 D128 causal": (1.20, 1.22),
            "B32 H16 S512 D128 causal": (1.15, 1.28),
            "B2 H32 S8192 D64 causal": (1.17, 1.29),
            "B2 H32/8 S8192 D128 causal": (1.18, 1.14),
            "B2 H8 S8192 D256 causal": (1.20, 1.15),
            "B2 H16 S16384 D128 full": (1.10, 1.10),
            "B2 H16 S16384 D128 causal": (1.10, 1.10),
            "B2 H16 S8192 D96 causal": (1.05, 1.05),
            "B2 H16 S8192 D192/128 causal": (1.05, 1.05),
        }.items()
        for work, limit in zip(("forward", "backward"), limits, strict=True)
    ),
    *(
        Bar(f"{shape}, {work} / FlashAttention-3", f"^{work}$", "rate", FA3, 1.03,
            shape=f"^{shape}$", implementation=f"^{OURS}$")
        for shape in (
            "B3 H16 S3000 D128 causal", "B16 H16 S1024 D64 full",
            "B4 H16 S4096 D128 causal", "B2 H16 S8192 D128 full",
            "B1 H8 S32768 D128 causal", "B4 H16 S4096 D80 causal",
        )
        for work in ("forward", "backward")
    ),
    Bar("an option that masks nothing / none", "^(forward|backward)$", "time",
        "ours B2 H16 S8192 D128 causal, no option", 1.08, at_most=True,
        shape=", (window|segments|sinks|offsets)$"),
    Bar("softcap / none", "^(forward|backward)$", "time",
        "ours B2 H16 S8192 D128 causal, no option", 1.25, at_most=True,
        shape=", softcap$"),
    Bar("deterministic backward / default", "^backward$", "rate",
        "ours B2 H16 S8192 D128 causal, no option", 0.75, shape=", deterministic$"),
    Bar("ragged packed documents / dense", "^(forward|backward)$", "rate",
        "ours B2 H16 S8192 D128 causal", 0.85, shape=r"packed \d+ to \d+$",
        implementation=f"^{OURS}$"),
    Bar("documents as a mask of tiles / as segments", "^(forward|backward)$", "time",
        f"row {OURS}, segments", 1 / 0.9, at_most=True, shape="documents$",
        implementation=f"^{OURS}, mask$"),
    Bar("a small call / cuDNN's", "^forward$", "time", CUDNN, 1.0, at_most=True,
        shape="^B1 H8 S128 D128 causal$", implementation=f"^{OURS}$"),
    *(
        Bar(f"float32 attention, {precision} / plain JAX in blocks",
            "^(forward|backward|forward and backward)$", "over xla", None, limit,
            shape=f"S8192 .*float32, {precision}$")
        for precision, limit in (("default", 3.0), ("highest", 2.0))
    ),
    *(
        Bar(f"attention in {bits}, {what} / bfloat16", "^forward$", "over bfloat16",
            None, limit, shape="S16384 D128 .*e4m3",
            implementation=f"^{OURS}, {which}{what}$")
        for bits, which in (("e4m3", ""), ("int8 and e4m3", "int8, "))
        for what, limit in (("quantized", 1.55), ("with quantization", 1.4))
    ),
    Bar("attention with dropout / without", "^(forward|forward and backward)$",
        "over none", None, 1.12, at_most=True, implementation=f"^{OURS}, dropout$"),
    *(
        Bar(f"{what} / bfloat16", work, "over bfloat16", None, limit,
            implementation=who)
        for what, work, limit, who in (
            ("a product in 8 bits, quantized", "^product$", 1.75,
             f"^{OURS}, quantized$"),
            ("a product in 8 bits, with quantization", "^product$", 1.5,
             f"^{OURS}, with quantization$"),
            ("a layer in 8 bits", "^layer, forward and backward$", 1.4, f"^{OURS}$"),
            ("a step of training in 8 bits", "^step with AdamW$", 1.25, f"^{OURS}$"),
        )
    ),
    *(
        Bar(f"the last ten losses in 8 bits / bfloat16, {word}", "^300 steps$",
            "mean of the last ten losses", f"row {OURS}, bfloat16", limit,
            at_most=word == "at most", implementation=f"^{OURS}, 8 bits$",
            platform=None)
        for word, limit in (("at least", 0.995), ("at most", 1.005))
    ),
    Bar("casts to 8 bits in both orders / a copy in turns", "^cast$", "over a copy",
        None, 0.9, implementation=f"^{OURS}, cuda$"),
    Bar("casts to 8 bits in both orders / XLA", "^cast$", "bandwidth", "peer xla", 1.1,
        implementation=f"^{OURS}, cuda$"),
    Bar("norms and casts to 8 bits / a copy in turns", "^norm and cast$", "over a copy",
        None, 0.9, implementation=f"^{OURS}, cuda$"),
    Bar("norms and casts to 8 bits / XLA", "^norm and cast$", "bandwidth", "peer xla",
        1.1, implementation=f"^{OURS}, cuda$"),
    Bar("a block, the best of our ways / jitted XLA's best",
        "^forward( and backward)?$", "ours at best over xla's", None, 1.05,
        shape=" block(, decoding)?$", implementation=f"^{OURS}, "),
    # What level "balanced" of jax_kvblock.fusion ships of that block.
    Bar("a block, attention alone by ours / jitted XLA's best",
        "^forward( and backward)?$", "over xla's best", None, 1.05, shape=" block$",
        implementation=f"^{OURS}, attention alone$"),
    *(
        Bar(f"error of {bits} / e4m3 with one scale an array", "^out$", "error",
            "row naive", 0.6, at_most=True, shape="(means|outliers)$",
            implementation=f"^{OURS}{which}$")
        for bits, which in (("e4m3", ""), ("int8 and e4m3", ", int8"))
    ),
    Bar("temporaries of attention forward, B", "^forward$", "temporaries", None, 0,
        at_most=True),
    Bar("temporaries of attention backward / their limit", "^backward$",
        "temporaries over limit", None, 1, at_most=True),
    *(
        Bar(f"an eighth of the tiles, {work} / dense, by pair", f"^{work}$", "rate",
            f"row {OURS}, dense", limit, shape="^tiles", implementation=f"^{OURS}$")
        for work, limit in (("forward", 0.92), ("backward", 0.85))
    ),
    Bar("dense attention / selecting and attending to a tenth", "^whole$",
        "dense over it", None, 6, implementation=f"^{OURS}, "),
    Bar("a selection / selecting and attending", "^selection$", "of the whole", None,
        0.12, at_most=True, implementation=f"^{OURS}, "),
    # At equal tiles, over all texts and layers.
    *(
        Bar(f"recall, {mine} / {others}", " left out$", "recall", f"row {OURS}, {row}",
            1.0, shape="^all, ", implementation=f"^{OURS}, {who}", platform=None)
        for mine, who, others, row in (
            ("a gate", "learned", "a threshold", "threshold, stride 16"),
            ("a threshold", "(threshold, stride|pooled)[^,]*$", "random", "random"),
        )
    ),
    Bar("right answers, a tenth of the tiles / dense", "^questions$", "right answers",
        f"row {OURS}, dense", 0.99, platform=None,
        implementation=f"^{OURS}, (learned|threshold|pooled)"),
    Bar("listed tiles / FlexAttention", "^(forward|backward)$", "rate",
        "peer torch flex attention", 1.5, shape="^peers", implementation=f"^{OURS}$"),
    Bar("listed tiles / FlashInfer", "^forward$", "rate", "peer flashinfer", 1.5,
        shape="^peers", implementation=f"^{OURS}$"),
    Bar("excess perplexity of a plan / the best uniform one's", r"^3\.5 bits$",
        "excess over uniform", None, 0.7, at_most=True, shape="^all$",
        implementation=f"^{OURS}, (gradients|loss)$", platform=None),
    Bar("excess perplexity of a plan / one by entropy", r"^3\.5 bits$", "excess",
        f"row {OURS}, entropy", 1.0, at_most=True, shape="^all$",
        implementation=f"^{OURS}, (gradients|loss)$", platform=None),
    Bar("decode / cuDNN", "^decode$", "bandwidth", CUDNN, 1.0),
    Bar("decode of 32768 keys / cuDNN", "^decode$", "bandwidth", CUDNN, 1.02,
        shape="S32768 "),
    Bar("decode of 131072 keys / cuDNN", "^decode$", "bandwidth", CUDNN, 1.08,
        shape="S131072 "),
    Bar("a decode step / reading its weights and keys once", "^decode step$",
        "over reading", None, 1.25, at_most=True),
    Bar("an empty kernel over a handler in C++, us", "^(captured|launched)$",
        "over xla ffi", None, 2, at_most=True),
    Bar("100 traced scalars over static ones, us", "^traced$", "over static", None, 1,
        at_most=True),
    Bar("20 kernels / a CUDA graph by hand", "^first to last$", "time",
        "row cuda graph", 1.15, at_most=True),
    Bar("NVRTC, on disk, ms", "^on disk$", "time", None, 5, at_most=True,
        platform=None),
    Bar("weights in 4 bits / XLA in bfloat16", r"^\d+ rows$", "time",
        "row xla, bfloat16", 0.5, at_most=True),
    Bar("CPU attention / jax.nn", "^forward", "rate", "peer jax.nn", 1.0,
        platform="cpu"),
    Bar("CPU attention of few queries / jax.nn", "^few queries$", "rate",
        "peer jax.nn", 1.0, platform="cpu"),
    Bar("CPU paged attention / a gather and jax.nn", "^paged$", "rate",
        "peer gather and jax.nn", 1.5, platform="cpu"),
    Bar("CPU paged attention temporaries / the gather's", "^paged$",
        "temporaries over the gather's", None, 0.1, at_most=True, platform="cpu"),
    Bar("CPU attention temporaries / jax.nn", "^forward", "temporaries over jax.nn",
        None, 0.25, at_most=True, platform="cpu"),
    Bar("Layer to torch by DLPack, us", "^layer to torch$", "host time", None, 15,
        at_most=True, platform=None),
    Bar("Prompt of 4096 tokens, open to free, us",
        "^(cold|cached) prompt(, a list of ints)?$", "host time", None, 100,
        at_most=True, shape="^4096 tokens$", platform=None),
    Bar("blocks on disk / plain I/O", "^(write|read)$", "of plain", None, 0.85,
        platform=None),
    *(
        Bar(f"{tokens} tokens over {n} GPUs, {work}, the best way", f"^{work}$",
            "efficiency", None, limit, shape=f" S{tokens} D128 causal$",
            implementation=f"^{OURS}, {n}, (ring|all_gather|auto)$", best=True)
        for n, by_tokens in OVER_GPUS.items()
        for tokens, limits in by_tokens.items()
        for work, limit in zip(("forward", "both"), limits, strict=True)
    ),
    *(
        Bar(f"documents over {n} GPUs, in an even order", "^(forward|both)$",
            "efficiency", None, limit, shape="documents$",
            implementation=f"^{OURS}, {n}, ring, in order$")
        for n, limit in DOCUMENTS_OVER_GPUS.items()
    ),
    *(
        Bar(f"time over {n} GPUs, {peer} / ours", "^(forward|both)$", "time",
            f"row {OURS}, {n}, auto", 1.3, implementation=f"^peer {who}")
        for n in OVER_GPUS
        for peer, who in (
            ("cuDNN gathered", f"cudnn in jax, {n}, all_gather$"),
            ("torch's context_parallel", rf"torch [\d.]+ flash.*, {n}, \w+$"),
        )
    ),
    Bar("a device's bytes / what it holds and two shards", "^both$", "memory", None,
        1.1, at_most=True, implementation=rf"^{OURS}, \d, ring$"),
    Bar("reshard_blocks / ppermute", "^reshard ", "bandwidth", "row ppermute", 0.85,
        implementation=f"^{OURS}$"),
    Bar("decoding one sequence over 4 GPUs / on one", "^decode", "speed over one", None,
        3.2, implementation=f"^{OURS}, 4$"),
    # A step of SmolLM2 is to reach 0.6 of its roofline, reading all once.
    Bar("A server's step of decoding / reading", "^a step of decoding$",
        "over reading", None, 1 / 0.6, at_most=True, shape="^64 requests"),
    Bar("The cache's manager / a server's step", "^the host's part of a step$",
        "the manager's, of a step", None, 0.05, at_most=True, platform=None),
    Bar("The first token by host memory / computed", "^the first token$",
        "of computing it", None, 0.2, at_most=True, shape="^prefix of 32768 tokens$"),
    Bar("A server's new tokens a second, two cores", "^a step of decoding$",
        "new tokens", None, 12, shape="^8 requests$", platform="cpu"),
    # What is lost or leaked of requests and blocks is among what is wrong.
    Bar("Things that are wrong in a soak", "^soak, ", "things that are wrong", None, 0,
        at_most=True, platform=None),
    Bar("Open files at the end of a soak / before", "^soak, ", "files open at the end",
        "metric files open before", 1, at_most=True, platform=None),
    Bar("Memory in a soak's last third / its second", "^soak, ",
        "memory in the last third", "metric memory in the second third", 1.05,
        at_most=True, platform=None),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One row under one bar. `bound` is what its value was divided by."""

    bar: Bar
    case: str
    implementation: str
    value: float
    unit: str
    bound: float | None
    ratio: float

    @property
    def met(self) -> bool:
        if self.bar.at_most:
            return self.ratio <= self.bar.limit
        return self.ratio >= self.bar.limit

    def __str__(self) -> str:
        bound = "" if self.bound is None else f"{self.bound:.4g}"
        sign = "<=" if self.bar.at_most else ">="
        word = "pass" if self.met else "FAIL"
        return (
            f"{word}  {self.case:42} {self.implementation:25} "
            f"{self.value:8.4g} {self.unit:4} {bound:>7} {self.ratio:8.4g} {sign} "
            f"{self.bar.limit:g}"
        )


def best(
    rows: Sequence[dict[str, Any]], case: str, who: str = "", metric: str = "bandwidth"
) -> float | None:
    """The best rate that `who` (or anyone) reached on a case."""
    values = [
        row["value"]
        for row in rows
        if row["case"] == case
        and row["metric"] == metric
        and (not who or row["implementation"].split(",")[0] == who)
    ]
    return max(values, default=None)


def _bound(
    bar: Bar, rows: Sequence[dict[str, Any]], row: dict[str, Any], work: str
) -> float | None:
    """What a row is divided by, None when it was not in this run."""
    kind, _, name = (bar.against or "").partition(" ")
    if kind == "peer":
        return best(rows, row["case"], name, row["metric"])
    if kind == "row":
        named = [r for r in rows if r["implementation"] == name]
        return best(named, row["case"], metric=row["metric"])
    mine = [r for r in rows if r["implementation"] == row["implementation"]]
    if kind == "ours":
        return best(mine, f"{name} / {work}", metric=row["metric"])
    if kind == "metric":
        return best(mine, row["case"], metric=name)
    return best(rows, bar.against or "")


def judge(document: dict[str, Any]) -> list[Verdict]:
    """Every row that a bar speaks of, with its ratio."""
    rows = document["rows"]
    runs = {row["case"]: row["value"] for row in rows if row["metric"] == "run"}
    verdicts: list[Verdict] = []
    for bar in BARS:
        own: list[Verdict] = []
        if bar.platform not in (None, document["versions"]["platform"]):
            continue
        for row in rows:
            shape, _, work = row["case"].partition(" / ")
            if not (
                row["metric"] == bar.metric
                and re.search(bar.implementation, row["implementation"])
                and re.search(bar.work, work)
                and re.search(bar.shape, shape)
                and bar.runs[0] <= runs.get(row["case"], 0) <= bar.runs[1]
            ):
                continue
            bound = None
            if bar.against is not None:
                bound = _bound(bar, rows, row, work)
                if bound is None:  # that peer or ceiling was not in this run
                    continue
            ratio = row["value"] if bound is None else row["value"] / bound
            name, value, unit = row["implementation"], row["value"], row["unit"]
            own.append(Verdict(bar, row["case"], name, value, unit, bound, ratio))
        verdicts += _best_of_each_case(own) if bar.best else own
    return verdicts


def _best_of_each_case(verdicts: Sequence[Verdict]) -> list[Verdict]:
    found: dict[str, Verdict] = {}
    better = min if verdicts and verdicts[0].bar.at_most else max
    for verdict in verdicts:
        rivals = (found.get(verdict.case, verdict), verdict)
        found[verdict.case] = better(rivals, key=lambda v: v.ratio)
    return list(found.values())


def summary(verdicts: Sequence[Verdict]) -> list[str]:
    """A Markdown table: each bar, how many rows met it, and the worst of them."""
    lines = ["| Bar | Asked | Worst | Where | Met |", "|-|-|-|-|-|"]
    for bar in BARS:
        mine = [v for v in verdicts if v.bar is bar]
        if not mine:
            continue
        worst = (max if bar.at_most else min)(mine, key=lambda v: v.ratio)
        met = sum(v.met for v in mine)
        sign = "≤" if bar.at_most else "≥"
        where = worst.case + worst.implementation.removeprefix(OURS)
        lines.append(
            f"| {bar.text} | {sign} {bar.limit:g} | {worst.ratio:.4g} | {where} | "
            f"{met} of {len(mine)} |"
        )
    return lines


def report(document: dict[str, Any]) -> bool:
    """Prints every verdict and the summary; whether all bars are met."""
    verdicts = judge(document)
    print("\n      measured, its bound, the ratio, the bar")
    for verdict in verdicts:
        if verdict.bar.metric != "temporaries" or not verdict.met:
            print(verdict)
    print(f"\n{document['device']}, {document['date']}, {document['commit']}")
    print("\n".join(summary(verdicts)))
    return all(verdict.met for verdict in verdicts)


def main(paths: Sequence[str]) -> int:
    if not paths:
        print(__doc__)
        return 2
    met = True
    for path in paths:
        with open(path, encoding="utf-8") as file:
            met = report(json.load(file)) and met
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
