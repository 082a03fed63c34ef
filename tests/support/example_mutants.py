"""The small mistakes in the examples' kernels: the emulator notices them."""

from __future__ import annotations

from mutant_list import Mutant

BETWEEN = "examples/serve/between.cu"
NOTICED = ("tests/serve/test_serve_between.py", "test_between and emulator")
EXAMPLES = (
    Mutant(
        "between: a row's squares of one thread block alone",
        BETWEEN,
        "total += incoming.squares[from * kQuarter + row];",
        "total += incoming.squares[row];",
        NOTICED,
    ),
    Mutant(
        "between: squares of x that is divided by its width twice",
        BETWEEN,
        "rsqrtf(total / kWidth + eps)",
        "rsqrtf(total / kWidth / kWidth + eps)",
        NOTICED,
    ),
    Mutant(
        "between: the norm's epsilon is left out",
        BETWEEN,
        "rsqrtf(total / kWidth + eps)",
        "rsqrtf(total / kWidth)",
        NOTICED,
    ),
    Mutant(
        "between: sums of a cluster without its last thread block",
        BETWEEN,
        "for (int from = 0; from < kCtas; ++from) {\n        const float2 sum",
        "for (int from = 0; from + 1 < kCtas; ++from) {\n        const float2 sum",
        NOTICED,
    ),
    Mutant(
        "between: a cluster's own columns, read by the one before",
        BETWEEN,
        "const int tile = cluster + group * W::kClusters;",
        "const int tile = cluster + group * (W::kClusters - 1);",
        NOTICED,
    ),
    Mutant(
        "between: up is taken for gate",
        BETWEEN,
        "const float2 gate = sum[0], up = sum[1];",
        "const float2 gate = sum[1], up = sum[0];",
        NOTICED,
    ),
    Mutant(
        "between: a tile less of each cluster",
        BETWEEN,
        "return (kAll - cluster + kClusters - 1) / kClusters * kParts;",
        "return (kAll - cluster) / kClusters * kParts;",
        NOTICED,
    ),
    Mutant(
        "between: x as it was before the attention",
        BETWEEN,
        "make_float2(before.x + sum[0].x, before.y + sum[0].y)",
        "make_float2(sum[0].x, sum[0].y)",
        NOTICED,
    ),
    Mutant(
        "between: the next layer's norm is this layer's",
        BETWEEN,
        "of_qkv, x, next_norm, rows, rank)",
        "of_qkv, x, mlp_norm, rows, rank)",
        NOTICED,
    ),
    Mutant(
        "between: rows are sent to who has others",
        BETWEEN,
        "incoming.barrier, row / kQuarter);\n    }\n  }\n}\n\n// Calls",
        "incoming.barrier, (row + 1) / kQuarter % kCtas);\n    }\n  }\n}\n\n// Calls",
        NOTICED,
    ),
    Mutant(
        "between: squares are counted as sums alone",
        BETWEEN,
        "GateUp::BytesSent(kRows, cluster) + kSquares",
        "GateUp::BytesSent(kRows, cluster)",
        NOTICED,
    ),
    Mutant(
        "between: x is read before all have added to it",
        BETWEEN,
        "  GridMeet();\n\n  LoadNormed<GateUp",
        "  __syncthreads();\n\n  LoadNormed<GateUp",
        NOTICED,
    ),
    Mutant(
        "between: hidden rows are read before all are written",
        BETWEEN,
        "  GridMeet();\n\n  LoadRows<Down>",
        "  __syncthreads();\n\n  LoadRows<Down>",
        NOTICED,
    ),
    Mutant(
        "between: x is read for the next layer before all have added to it",
        BETWEEN,
        "  GridMeet();\n\n  LoadNormed<Qkv",
        "  __syncthreads();\n\n  LoadNormed<Qkv",
        NOTICED,
    ),
    Mutant(
        "between: hidden rows are multiplied before they are there",
        BETWEEN,
        "  WaitForCopies<0>();\n",
        "",
        NOTICED,
    ),
    Mutant(
        "between: sums are added up before all are there",
        BETWEEN,
        "  WaitForSent(incoming.barrier);\n",
        "",
        NOTICED,
    ),
    Mutant(
        "between: rows behind the last one are written",
        BETWEEN,
        "if (row >= rows || tile >= W::kAll) continue;",
        "if (tile >= W::kAll) continue;",
        NOTICED,
    ),
)
