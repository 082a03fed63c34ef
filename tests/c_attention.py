"""kvblock/attention.h for ctypes: the struct, and its enums' values.

Imports no jax: compute-sanitizer watches a process that uses this.
"""

from __future__ import annotations

import ctypes

# kvblock_attention_pass, and the launcher of each.
FORWARD, BACKWARD_KV, BACKWARD_Q, BACKWARD_BIAS = range(4)
LAUNCHERS = ("forward", "backward_kv", "backward_q", "backward_bias")


def fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Attention(ctypes.Structure):
    _fields_ = [
        *fields(ctypes.c_int32, "kernels dtype batch num_heads num_kv_heads"),
        *fields(ctypes.c_int64, "q_len kv_len"),
        *fields(ctypes.c_int32, "head_dim value_dim"),
        *fields(ctypes.c_float, "scale softcap"),
        *fields(ctypes.c_int32, "window_left window_right"),
        *fields(ctypes.c_void_p, "q k v cu_q cu_kv q_lens kv_lens shift"),
        *fields(ctypes.c_void_p, "q_segments kv_segments"),
        *fields(ctypes.c_void_p, "q_segment_ranges kv_segment_ranges bias"),
        *fields(ctypes.c_int32, "bias_dtype bias_batch bias_heads"),
        *fields(ctypes.c_void_p, "sinks"),
        *fields(ctypes.c_int32, "sink_batch"),
        *fields(ctypes.c_void_p, "tile_indices tile_counts"),
        *fields(ctypes.c_void_p, "tile_indices_t tile_counts_t"),
        *fields(ctypes.c_int32, "tile_batch tile_heads tile_q tile_kv"),
        *fields(ctypes.c_int32, "max_tiles max_tiles_t"),
        *fields(ctypes.c_void_p, "o lse d_o delta"),
        *fields(ctypes.c_void_p, "dq_accum dq dk dv dbias dq_turns dq_state"),
    ]
