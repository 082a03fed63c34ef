"""The small mistakes in the examples' kernels: the emulator notices them."""

from __future__ import annotations

from mutant_list import Mutant

BETWEEN = "examples/serve/between.cu"
NOTICED = ("tests/serve/test_serve_between.py", "test_between and emulator")
EXAMPLES = (
    Mutant(
        "between: a row's squares of one thread block alone",
        BETWEEN,
        "total += LoadFrom(squares + row, from);",
        "total += LoadFrom(squares + row, 0);",
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
        "for (int rank = 0; rank < kCtas; ++rank) {\n    const float2 part",
        "for (int rank = 0; rank + 1 < kCtas; ++rank) {\n    const float2 part",
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
        "squares, x, next_norm, rows, rank)",
        "squares, x, mlp_norm, rows, rank)",
        NOTICED,
    ),
    Mutant(
        "between: rows are stored before the others have read theirs",
        BETWEEN,
        "  __syncthreads();  // all are done with the rows\n",
        "",
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
        "between: a cluster reads sums before all are there",
        BETWEEN,
        "  ClusterMeet();\n}\n\n// The sum of two",
        "  __syncthreads();\n}\n\n// The sum of two",
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
