"""What drop-ins cannot serve, and what does not fit, is told by the owner's names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kvblock import dropins

Q, NEW = np.zeros((5, 4, 16), np.float32), np.zeros((5, 2, 16), np.float32)
CACHE = np.zeros((9, 8, 2, 2, 16), np.float32)  # [P, page, 2K / pack, pack, D]
LENS, FLAT = np.zeros(3, np.int32), np.zeros(6, np.int32)
STARTS, DISTRIBUTION = np.zeros(4, np.int32), np.zeros(3, np.int32)
STEP = {
    "queries": Q,
    "keys": NEW,
    "values": NEW,
    "kv_cache": CACHE,
    "kv_lens": LENS,
    "page_indices": FLAT,
    "cu_q_lens": STARTS,
    "distribution": DISTRIBUTION,
}
GIVEN: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "rpa_v3": (dropins.rpa_v3.ragged_paged_attention, STEP),
    "rpa_v3_hd64": (
        dropins.rpa_v3_hd64.ragged_paged_attention_hd64,
        STEP | {"kv_cache": np.zeros((9, 8, 1, 2, 32), np.float32)},
    ),
    "tokamax": (dropins.tokamax.ragged_paged_attention, STEP),
    "sglang": (
        dropins.sglang.ragged_paged_attention,
        {
            **{n: x for n, x in STEP.items() if n != "kv_cache"},
            "kv_cache_fused": CACHE,
            "cu_kv_lens": STARTS,
            "custom_mask": None,
        },
    ),
    "rpa_v2": (
        dropins.rpa_v2.ragged_paged_attention,
        {
            "q": Q,
            "kv_pages": CACHE.reshape(9, 8, 4, 16),
            "kv_lens": LENS,
            "page_indices": FLAT.reshape(3, 2),
            "cu_q_lens": STARTS,
            "num_seqs": np.array([3]),
        },
    ),
    "ejkernel": (
        dropins.ejkernel.unified_attention,
        {
            "queries": Q,
            "key_cache": CACHE[:, :, 0],
            "value_cache": CACHE[:, :, 0],
            "kv_lens": LENS,
            "block_tables": FLAT.reshape(3, 2),
            "query_start_loc": STARTS,
            "alibi_slopes": None,
            "qq_bias": None,
            "softmax_aux": None,
        },
    ),
    "pallas_gpu": (
        dropins.pallas_gpu.paged_attention,
        {
            "q": Q[:3],
            "k_pages": np.zeros((2, 9, 8, 16), np.float32),
            "v_pages": np.zeros((2, 9, 8, 16), np.float32),
            "block_tables": FLAT.reshape(3, 2),
            "lengths": LENS,
        },
    ),
}
SLOPES = np.zeros(4, np.float32)
Wrong = tuple[str, dict[str, Any], type[Exception], str]
WRONG: list[Wrong] = [
    # What is not served.
    (
        "sglang",
        {"custom_mask": np.zeros(9, bool)},
        NotImplementedError,
        r"custom_mask is not served, got bool\[9\]; .*flash_attention",
    ),
    ("sglang", {"causal": 0}, NotImplementedError, "causal must be 1, got 0; .*masks"),
    (
        "ejkernel",
        {"alibi_slopes": SLOPES},
        NotImplementedError,
        r"alibi_slopes is not served, got float32\[4\]; .*bias=",
    ),
    (
        "ejkernel",
        {"qq_bias": np.zeros((5, 5))},
        NotImplementedError,
        "qq_bias is not served",
    ),
    (
        "ejkernel",
        {"platform": "triton"},
        NotImplementedError,
        "platform is not served, got 'triton'; ejkernel itself",
    ),
    (
        "ejkernel",
        {"mesh": jax.sharding.Mesh(jax.devices()[:1], "x")},
        NotImplementedError,
        "mesh is not served, got .*jax.shard_map",
    ),
    (
        "tokamax",
        {"use_per_token_scale": True},
        NotImplementedError,
        "use_per_token_scale is not served, got True; .*k_scale and v_scale",
    ),
    (
        "tokamax",
        {"dynamic_k_scale": SLOPES},
        NotImplementedError,
        "dynamic_k_scale is not served",
    ),
    (
        "tokamax",
        {"cp_group_size": 2},
        NotImplementedError,
        "cp_group_size is not served, got 2; .*merge_attention",
    ),
    (
        "tokamax",
        {"implementation": "mosaic_tpu"},
        NotImplementedError,
        "implementation is not served, got 'mosaic_tpu'; tokamax itself",
    ),
    (
        "tokamax",
        {"kv_layout": "SEQ_ALONG_LANE"},
        NotImplementedError,
        "kv_layout must be 'head_along_sublane', got 'SEQ_ALONG_LANE'",
    ),
    (
        "tokamax",
        {"attention_scope": "new_tokens_only"},
        NotImplementedError,
        "attention_scope must be 'full' or 'cache_only', got .*flash_attention",
    ),
    (
        "tokamax",
        {"attention_scope": "cache_only", "sliding_window": 3},
        NotImplementedError,
        "sliding_window is not served with attention_scope",
    ),
    # What does not fit.
    ("rpa_v3", {"queries": Q[0]}, ValueError, r"queries must be \[tokens, N, D\], got"),
    (
        "rpa_v3",
        {"queries": Q.astype(np.int8)},
        TypeError,
        "queries must be floats of 16 bits or more",
    ),
    (
        "rpa_v3",
        {"keys": NEW[:4]},
        ValueError,
        r"keys must be \[5, K, 16\], a row for each of queries",
    ),
    (
        "rpa_v3",
        {"keys": np.zeros((5, 3, 16), np.float32)},
        ValueError,
        "keys must have a number of heads that divides the 4 of queries",
    ),
    (
        "rpa_v3",
        {"values": NEW.astype(np.float16)},
        TypeError,
        r"values must have the cache's dtype, float32, got .*cast it with .astype",
    ),
    ("rpa_v3", {"values": NEW[:, :1]}, ValueError, "keys and values must be alike"),
    (
        "rpa_v3",
        {"kv_cache": CACHE[0]},
        ValueError,
        r"kv_cache must be \[P, page, 2 K / pack, pack, D\], got float32\[8",
    ),
    (
        "rpa_v3",
        {"kv_cache": CACHE.astype(np.int16)},
        TypeError,
        "kv_cache must hold floats of 8 bits or more, or int8, got int16",
    ),
    (
        "rpa_v3",
        {"kv_cache": CACHE[:, :, :1]},
        ValueError,
        "kv_cache must have room for 4 heads, K and V by turns, of head dim 16",
    ),
    (
        "rpa_v3_hd64",
        {"kv_cache": CACHE},
        ValueError,
        "kv_cache must have room for 2 heads, whose rows are a key and a value",
    ),
    (
        "rpa_v3",
        {"page_indices": FLAT[:5]},
        ValueError,
        "page_indices must have as many entries for each of the 3 sequences",
    ),
    (
        "rpa_v3",
        {"page_indices": FLAT.reshape(3, 2)},
        ValueError,
        r"page_indices must be int32\[S W\]",
    ),
    ("rpa_v3", {"kv_lens": 3}, ValueError, r"kv_lens must be int32\[S\], the keys of"),
    (
        "rpa_v3",
        {"cu_q_lens": STARTS[:3]},
        ValueError,
        r"cu_q_lens must be int32\[4\], the start of each of the 3 sequences",
    ),
    (
        "rpa_v3",
        {"distribution": DISTRIBUTION[:2]},
        ValueError,
        r"distribution must be int32\[3\]",
    ),
    ("rpa_v3", {"use_causal_mask": 1}, TypeError, "use_causal_mask must be True or"),
    (
        "rpa_v3",
        {"sliding_window": 0},
        ValueError,
        "sliding_window must be at least 1, the query's own position, got 0",
    ),
    ("rpa_v3", {"soft_cap": 0.0}, ValueError, "soft_cap must be positive, got 0.0"),
    ("rpa_v3", {"q_scale": 0.0}, ValueError, "q_scale must not be 0; pass None"),
    ("rpa_v3", {"sm_scale": "1"}, TypeError, "sm_scale must be a .*number"),
    (
        "sglang",
        {"cu_kv_lens": STARTS[:2]},
        ValueError,
        r"cu_kv_lens must be int32\[4\]",
    ),
    (
        "sglang",
        {"attention_sink": SLOPES[:3]},
        ValueError,
        r"attention_sink must be float32\[4\], one for each query head",
    ),
    (
        "sglang",
        {"xai_temperature_len": 1},
        ValueError,
        "xai_temperature_len must be above 1",
    ),
    (
        "rpa_v2",
        {"q": Q[:, :3]},
        ValueError,
        "q must have a multiple of the 2 KV heads of kv_pages",
    ),
    ("rpa_v2", {"num_seqs": np.array([1, 2])}, ValueError, "num_seqs must be int32.1"),
    (
        "rpa_v2",
        {"kv_lens": LENS[:2]},
        ValueError,
        r"kv_lens must be int32\[3\], a length for each",
    ),
    (
        "ejkernel",
        {"queries": Q[..., :8]},
        ValueError,
        "queries must have a multiple of the caches' 2 heads and their head dim, 16",
    ),
    (
        "ejkernel",
        {"key_cache": CACHE},
        ValueError,
        "pages must have the dims P T H D, got shape",
    ),
    ("pallas_gpu", {"q": Q}, ValueError, r"block_tables must be int32\[5, W\]"),
    (
        "pallas_gpu",
        {"k_scales_pages": np.ones((2, 9, 7), np.float32)},
        ValueError,
        r"k_scales_pages must be floats\[2, 9, 8\]",
    ),
    (
        "pallas_gpu",
        {"attn_logits_soft_cap": -1.0},
        ValueError,
        "attn_logits_soft_cap must be positive",
    ),
]


@pytest.mark.parametrize(
    ("owner", "changes", "error", "message"),
    WRONG,
    ids=[f"{owner}-{'-'.join(changes)}" for owner, changes, *_ in WRONG],
)
def test_messages(owner, changes, error, message):
    with pytest.raises(error, match=rf"^dropins\.{owner}\.\w+: .*{message}"):
        call(owner, changes)


def call(owner: str, changes: dict[str, Any]) -> Any:
    function, given = GIVEN[owner]
    arguments = given | changes
    only = inspect.Parameter.POSITIONAL_ONLY
    first = [
        arguments.pop(p.name)
        for p in inspect.signature(function).parameters.values()
        if p.kind == only
    ]
    return jax.eval_shape(lambda: function(*first, **arguments))


WITHOUT_EFFECT = {
    "pallas_gpu": {
        "block_h": 7,
        "pages_per_compute_block": 3,
        "k_splits": 5,
        "num_warps": 1,
        "num_stages": 9,
        "interpret": True,
        "debug": True,
        "mask_value": 0.0,
    },
    "rpa_v2": {
        "mask_value": 0.0,
        "num_kv_pages_per_block": 3,
        "num_queries_per_block": 5,
        "vmem_limit_bytes": 7,
    },
    "rpa_v3": {
        "skip_kv_mask": True,
        "mask_value": 0.0,
        "chunk_prefill_size": 3,
        "d_block_sizes": (1, 2, 3, 4),
        "p_block_sizes": (1, 2, 3, 4),
        "m_block_sizes": (1, 2, 3, 4),
        "vmem_limit_bytes": 7,
        "disable_bounds_checks": False,
        "disable_semaphore_checks": False,
    },
    "rpa_v3_hd64": {"num_queries_per_block": 3, "chunk_prefill_size": 3},
    "tokamax": {
        "decode_block_sizes": object(),
        "prefill_block_sizes": object(),
        "decode_query_size": 4,
        "per_token_scale_dtype": jnp.float32,
    },
    "sglang": {"softmax_dtype": jnp.bfloat16, "mask_aligned_to_cu_kv": True},
    "ejkernel": {"seq_threshold_3d": 3, "cfg": object(), "platform": "auto"},
}


@pytest.mark.parametrize("owner", WITHOUT_EFFECT)
def test_arguments_without_a_meaning_here_are_taken(owner):
    function, given = GIVEN[owner]
    plain, made = call(owner, {}), call(owner, WITHOUT_EFFECT[owner])
    assert jax.tree.map(lambda x, y: x == y, plain, made)
    names = set(inspect.signature(function).parameters)
    assert set(WITHOUT_EFFECT[owner]) <= names and set(given) <= names
