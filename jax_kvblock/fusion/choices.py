"""The choices, what was measured of each, and which ships where.

A choice ships at `BALANCED` where a row of its table says that it was faster. A row
comes of a results file of `benchmarks/`, which it names. Without a row XLA's way ships.
"""

from __future__ import annotations

import dataclasses

from jax_kvblock.fusion.config import FusionConfig, FusionStrategy, OptimizationLevel

LEAST = 1.02  # times as fast, for what is timed in turns differs by a percent or two
OURS, XLA = "ours", "xla"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """How many times as fast as XLA's a choice was.

    Attributes:
      device: the kind of device, `device.device_kind`.
      dtype: what was computed in.
      lengths: the shortest and the longest sequence that were measured.
      forward, training: the least ratio over these, of forward alone and of forward
        with backward; None where it was not measured.
      against: whose time it is a ratio of.
      file: the results, below `benchmarks/results/`.
    """

    device: str
    dtype: str
    lengths: tuple[int, int]
    forward: float
    training: float | None
    against: str
    file: str

    @property
    def least(self) -> float:
        return min(self.forward, self.training or self.forward)


@dataclasses.dataclass(frozen=True)
class Choice:
    """One thing that can be computed in two ways.

    Attributes:
      name: how reports call it.
      ours: what it is when it is fused; empty where there is no way but XLA's.
      xla: what it is otherwise.
      measured: what is known of it.
    """

    name: str
    ours: str
    xla: str
    measured: tuple[Measurement, ...] = ()


CHOICES: dict[str, Choice] = {
    choice.name: choice
    for choice in (
        Choice(
            "qkv",
            ours="one product of the weights, joined in each call",
            xla="three products, of which XLA joins small ones itself",
            measured=(
                Measurement(
                    device="NVIDIA H100 80GB HBM3",
                    dtype="bfloat16",
                    lengths=(4096, 4096),
                    forward=0.918,
                    training=0.937,
                    against="three products, of 4 sequences and width 4096",
                    file="nvidia-h100-80gb-hbm3/fusion-2026-11-26.json",
                ),
                Measurement(
                    device="NVIDIA H200",
                    dtype="bfloat16",
                    lengths=(4096, 4096),
                    forward=0.917,
                    training=0.972,
                    against="three products, of 4 sequences and width 4096",
                    file="nvidia-h200/fusion-2026-11-28.json",
                ),
            ),
        ),
        Choice(
            "attention",
            ours="flash_attention",
            xla="the layer's own attention",
            measured=(
                # Of ten shapes, causal and full, head dims of 64 to 256.
                Measurement(
                    device="NVIDIA H200",
                    dtype="bfloat16",
                    lengths=(512, 16384),
                    forward=1.157,
                    training=1.145,
                    against="cuDNN's attention by jax.nn, causal and full",
                    file="nvidia-h200/attention-2026-11-22.json",
                ),
                Measurement(
                    device="NVIDIA H100 80GB HBM3",
                    dtype="bfloat16",
                    lengths=(4096, 4096),
                    forward=1.218,
                    training=1.239,
                    against="cuDNN's attention by jax.nn, causal, 32 and 8 heads",
                    file="nvidia-h100-80gb-hbm3/fusion-2026-11-26.json",
                ),
            ),
        ),
        Choice(
            "gelu",
            ours="GELU that keeps its input alone",
            xla="jax.nn.gelu, into the product's epilogue where XLA can",
            measured=(
                Measurement(
                    device="NVIDIA H200",
                    dtype="bfloat16",
                    lengths=(4096, 4096),
                    forward=0.973,
                    training=1.012,
                    against="jax.nn.gelu of a product of 4 sequences and width 4096",
                    file="nvidia-h200/fusion-2026-11-28.json",
                ),
            ),
        ),
        Choice("norm", ours="", xla="the residual's sum and the norm in one loop"),
        Choice(
            "rope",
            ours="",
            xla="a rotation; there is no cache to append to (rope_append)",
        ),
    )
}

# Which choices a strategy looks at.
LOOKED_AT: dict[FusionStrategy, tuple[str, ...]] = {
    FusionStrategy.FULL_BLOCK: tuple(CHOICES),
    FusionStrategy.ATTENTION_ONLY: ("attention",),
    FusionStrategy.QKV_ONLY: ("qkv",),
    FusionStrategy.FEED_FORWARD_ONLY: ("gelu",),
}


@dataclasses.dataclass(frozen=True)
class FusionDecision:
    """One row of a report: what became of one choice in one place of a model.

    Attributes:
      path: of the module, by attributes and keys; empty for the model itself.
      choice: a name of the table.
      used: "ours" or "xla".
      reason: why.
      ratio: how many times as fast ours was measured to be, the least one; None where
        nothing was measured.
      measured: the device and the results file that the ratio comes from; empty where
        there is none.
    """

    path: str
    choice: str
    used: str
    reason: str
    ratio: float | None = None
    measured: str = ""

    def __str__(self) -> str:
        ratio = "" if self.ratio is None else f" ({self.ratio:g} x, {self.measured})"
        place = self.path or "the model"
        return f"{place}: {self.choice} by {self.used}: {self.reason}{ratio}"


def decide(
    name: str, path: str, config: FusionConfig, device: str, dtype: str
) -> FusionDecision:
    """Who computes a choice, of a kind of device and a dtype, and why."""
    choice, length = CHOICES[name], config.target_sequence_length
    level = config.optimization_level
    row = _measured(choice, device, dtype, length)
    known = (row.least, f"{row.device}, {row.file}") if row else (None, "")
    here = f"on {device} in {dtype} at {length} tokens"

    def made(used: str, reason: str) -> FusionDecision:
        return FusionDecision(path, name, used, reason, *known)

    if not choice.ours:
        return made(XLA, f"{choice.xla}; there is no other way here")
    if name == "gelu" and not config.enable_memory_optimization:
        return made(XLA, "enable_memory_optimization is False")
    if level is OptimizationLevel.CONSERVATIVE:
        return made(
            XLA, f"{choice.ours} may round differently; CONSERVATIVE keeps bits"
        )
    if level is OptimizationLevel.AGGRESSIVE:
        if row is None:
            return made(
                OURS, f"{choice.ours}; not measured {here}, asked for all the same"
            )
        return made(OURS, f"{choice.ours}, beside {row.against}")
    if row is None:
        return made(XLA, f"{choice.xla}; {choice.ours} is not measured {here}")
    if row.least < LEAST:
        return made(XLA, f"{choice.xla}; {choice.ours} is no faster")
    return made(OURS, f"{choice.ours}, beside {row.against}")


def _measured(
    choice: Choice, device: str, dtype: str, length: int
) -> Measurement | None:
    """The row for a kind of device, a dtype and a length."""
    for row in choice.measured:
        first, last = row.lengths
        if (row.device, row.dtype) == (device, dtype) and first <= length <= last:
            return row
    return None
