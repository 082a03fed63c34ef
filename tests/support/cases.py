"""Named shapes that tests and benchmarks share, each from a model or a paper."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    """One KV-cache block: layers, outer, tokens, KV heads, head dim, element type."""

    name: str
    num_layers: int
    num_outer: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"

    @property
    def dims(self) -> tuple[int, int, int, int, int]:
        """(nl, no, nt, nh, hd)"""
        return (
            self.num_layers,
            self.num_outer,
            self.block_size,
            self.num_kv_heads,
            self.head_dim,
        )

    @property
    def run_bytes(self) -> int:
        """Bytes that stay together between NHD and universal."""
        sizes = {"bfloat16": 2, "float32": 4, "float8_e4m3fn": 1}
        return self.head_dim * sizes[self.dtype]


# Speed: the shapes of the bars in README and docs/block_copy_performance.md.
LLAMA_8B_16 = Case("llama-8b, 16 tokens", 32, 2, 16, 8, 128)
LLAMA_8B_64 = Case("llama-8b, 64 tokens", 32, 2, 64, 8, 128)
LLAMA_70B_TP8_16 = Case("llama-70b TP8, 16 tokens", 80, 2, 16, 1, 128)
LLAMA_70B_TP8_64 = Case("llama-70b TP8, 64 tokens", 80, 2, 64, 1, 128)
HEAD_DIM_64 = Case("24 layers, hd 64", 24, 2, 16, 8, 64)
SHORT_RUNS = Case("runs of 10 bytes", 24, 2, 16, 8, 5)
SPEED = (LLAMA_8B_16, LLAMA_8B_64, LLAMA_70B_TP8_16, LLAMA_70B_TP8_64, HEAD_DIM_64)

# Correctness: small, odd, degenerate.
SOURCE_TEST = Case("the layouts' source test", 3, 2, 2, 4, 5, "float32")
ONE = Case("one element", 1, 1, 1, 1, 1, "float32")
LATENT = Case("latent cache", 4, 1, 16, 1, 72)
SMOLLM2 = Case("SmolLM2-135M", 30, 2, 16, 3, 64, "float32")
FP8 = Case("fp8 cache", 2, 2, 8, 3, 48, "float8_e4m3fn")
ODD_RUN = Case("runs of 6 bytes", 5, 2, 7, 3, 3)
SMALL = (SOURCE_TEST, ONE, LATENT, FP8, ODD_RUN, Case("vectors", 2, 2, 4, 2, 64))


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """One attention: batch, query heads, key heads, length, head dim."""

    batch: int
    num_heads: int
    num_kv_heads: int
    length: int
    head_dim: int
    causal: bool = True
    window: int | None = None  # to the left
    packed: bool = False  # the same batch as packed sequences
    value_dim: int | None = None  # where it is not head_dim
    dtype: str = "bfloat16"
    lengths: tuple[
        int, ...
    ] = ()  # packed, of these lengths; they sum to batch * length
    option: str = ""  # of OPTIONS, that masks nothing here

    @property
    def name(self) -> str:
        heads = f"H{self.num_heads}"
        if self.num_kv_heads != self.num_heads:
            heads += f"/{self.num_kv_heads}"
        mask = "causal" if self.causal else "full"
        if self.window is not None:
            mask = f"window {self.window}"
        packed = " packed" if self.packed else ""
        if self.lengths:
            packed = f" packed {min(self.lengths)} to {max(self.lengths)}"
        dims = f"{self.head_dim}"
        if self.value_dim is not None:
            dims += f"/{self.value_dim}"
        shape = f"B{self.batch} {heads} S{self.length} D{dims}"
        dtype = "" if self.dtype == "bfloat16" else f" {self.dtype}"
        option = f", {self.option}" if self.option else ""
        return f"{shape} {mask}{packed}{dtype}{option}"

    @property
    def flops(self) -> float:
        """Of the forward pass, as papers count: causal counts half."""
        pairs = self.batch * self.length * self.length * (0.5 if self.causal else 1.0)
        if self.lengths:
            pairs = sum(n * n for n in self.lengths) * (0.5 if self.causal else 1.0)
        if self.window is not None:
            pairs = self.batch * self.length * min(self.window + 1, self.length)
        dims = self.head_dim + (self.value_dim or self.head_dim)
        return 2.0 * self.num_heads * dims * pairs


ATTENTION_MAIN = AttentionCase(2, 16, 16, 8192, 128)
ATTENTION_WINDOW = AttentionCase(2, 16, 16, 8192, 128, window=1024)
ATTENTION_BATCH = AttentionCase(8, 16, 16, 2048, 128)
ATTENTION_PACKED = AttentionCase(8, 16, 16, 2048, 128, packed=True)
# Documents as they come: many short ones, few long ones.
RAGGED = (8192, 64, 5121, 130, 2777, 333, 1024, 97, 4096, 700, 1500, 4500, 250, 3984)
ATTENTION_RAGGED = AttentionCase(
    1, 16, 16, sum(RAGGED), 128, packed=True, lengths=RAGGED
)
ATTENTION_SMALL = AttentionCase(1, 8, 8, 128, 128)
_SHAPES = (
    AttentionCase(2, 16, 16, 8192, 128, causal=False),
    ATTENTION_MAIN,
    AttentionCase(4, 16, 16, 4096, 128),
    AttentionCase(32, 16, 16, 512, 128),
    AttentionCase(2, 32, 32, 8192, 64),
    AttentionCase(2, 32, 8, 8192, 128),
    AttentionCase(2, 8, 8, 8192, 256),
    AttentionCase(2, 16, 16, 16384, 128, causal=False),
    AttentionCase(2, 16, 16, 16384, 128),
)
# Lengths that tiles do not divide, short rows of few columns, and others beside which
# FlashAttention-3 has been fast.
ATTENTION_UNEVEN = (
    AttentionCase(3, 16, 16, 3000, 128),
    AttentionCase(16, 16, 16, 1024, 64, causal=False),
    AttentionCase(1, 8, 8, 32768, 128),
    AttentionCase(4, 16, 16, 4096, 80),
)
# Where the best known rates have been published or measured.
ATTENTION_BEST_KNOWN = _SHAPES[:7]
ATTENTION_SPEED = (
    *_SHAPES,
    AttentionCase(2, 16, 16, 8192, 96),
    AttentionCase(2, 16, 16, 8192, 192, value_dim=128),
    *(dataclasses.replace(case, dtype="float16") for case in _SHAPES[1:7:3]),
    ATTENTION_WINDOW,
    ATTENTION_BATCH,
    ATTENTION_PACKED,
    ATTENTION_RAGGED,
    ATTENTION_SMALL,
    *ATTENTION_UNEVEN,
)
# Where the kernels for sm_80 and newer have bars of their own.
ATTENTION_GENERIC = (
    ATTENTION_MAIN,
    ATTENTION_WINDOW,
    ATTENTION_BATCH,
    ATTENTION_PACKED,
)
ATTENTION_OPTIONS = (
    "window",
    "segments",
    "sinks",
    "offsets",
    "softcap",
    "deterministic",
)
