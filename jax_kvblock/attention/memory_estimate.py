"""What attention on `[B, H, N, D]` takes of memory, told without compiling it."""

from __future__ import annotations

import jax.numpy as jnp

from jax_kvblock.attention import arguments, block_problem, cuda
from jax_kvblock.attention.config import AttentionConfig, Sizes
from jax_kvblock.attention.tile_sizes import find_tile
from jax_kvblock.core import ffi
from jax_kvblock.core.checks import check_positive


def estimate_memory_usage(
    batch_size: int,
    num_heads: int,
    seq_len: int,
    head_dim: int,
    use_half: bool = False,
    *,
    Bc: int = 32,
    Br: int = 32,
) -> dict[str, float]:
    """Bytes that `flash_attention_forward` takes on the default device.

    Computed from the sizes of the blocks, without compiling anything. On a CPU,
    `internal_memory` is within 5 % of what `compiled.memory_analysis()` gives for its
    temporaries, where there is more than one block of queries and of keys and more
    than one head; `backward_memory` is within a third there. On a GPU with a tile of
    its kernels and `use_half`, `internal_memory` is within 5 %, and `backward_memory`
    too where "cuda_sm90" serves. Others are rougher. (XLA decides which buffers share
    memory: the tests compare with what it decides.)

    Args:
      batch_size, num_heads, seq_len, head_dim: B, H, N and D.
      use_half: for float16 inputs; float32 otherwise.
      Bc, Br: the tile.

    Returns:
      `input_memory` of Q, K and V, `internal_memory` of the forward pass's temporaries,
      `output_memory` of O, `total_memory` of these three, `total_memory_mb`, the same
      in MiB, and `backward_memory`, the temporaries of `flash_attention_backward`.

    Raises:
      ValueError: a size below 1, or a head dim or a tile that is not served.
      TypeError: Bc or Br is no integer, or use_half no bool.

    Example:
      >>> used = estimate_memory_usage(8, 16, 1024, 64, use_half=True)
      >>> print(f"{used['total_memory_mb']:.1f} MB")
    """
    where = "estimate_memory_usage"
    batch_size, num_heads, seq_len, head_dim = check_positive(
        where,
        batch_size=batch_size,
        num_heads=num_heads,
        seq_len=seq_len,
        head_dim=head_dim,
    )
    arguments.check_flags(where, use_half=use_half)
    dtype = jnp.float16 if use_half else jnp.float32
    Bc, Br, implementation = find_tile(where, Bc, Br, head_dim, dtype)
    size = Sizes(batch_size, seq_len, seq_len, num_heads, num_heads, head_dim, head_dim)
    rows = batch_size * num_heads
    one = rows * seq_len * head_dim * (2 if use_half else 4)
    blocked = AttentionConfig(1.0, xla_block_q=Br, xla_block_kv=Bc)
    on_gpu = ffi.platform_of(ffi.default_device()) in ("cuda", "rocm")
    if implementation != "xla" and on_gpu:
        # The kernels read [B, N, H, D]: Q, K and V, and dO, are transposed where there
        # are several heads. Beside them there are, on the way back, lse, delta and what
        # dQ is summed up in.
        row = rows * seq_len * 4
        transposed = one if num_heads > 1 else 0
        internal = 3 * transposed
        sums = rows * -(-seq_len // 8) * 8 * head_dim * 4  # of "cuda"
        if use_half:
            sums = cuda.workspace_bytes("cuda_sm90", dtype, size, 0, True)
        backward = 4 * transposed + sums + 2 * row
        if not use_half and head_dim > cuda.MOST_FLOAT32_BACKWARD_DIM:
            _, backward = _blocked_memory(blocked, size, use_half)
    else:
        internal, backward = _blocked_memory(blocked, size, use_half)
    total = 3 * one + internal + one
    return {
        "input_memory": 3 * one,
        "internal_memory": internal,
        "output_memory": one,
        "total_memory": total,
        "total_memory_mb": total / 2**20,
        "backward_memory": backward,
    }


def _blocked_memory(
    config: AttentionConfig, size: Sizes, use_half: bool
) -> tuple[int, int]:
    """Temporaries of "xla" on `[B, H, N, D]`, forward and backward.

    Operands are copied where they are widened to float32 (use_half) or filled up to
    whole blocks. Beside them live the blocks of one step, and the list of visited
    blocks. How many blocks are alive at once was read from XLA's buffer assignments
    (jax 0.10.2 and 0.12.0 agree).
    """
    block_q, block_kv = block_problem.block_sizes(config, size, None)
    rows = size.batch * size.num_heads
    t = -(-size.q_len // block_q) * block_q
    s = -(-size.kv_len // block_kv) * block_kv
    queries, keys = (rows * length * size.head_dim * 4 for length in (t, s))
    scores = rows * block_q * block_kv * 4
    q_block, kv_block = (
        rows * length * size.head_dim * 4 for length in (block_q, block_kv)
    )
    visits = (t // block_q) * (s // block_kv)

    copied_q = queries if use_half or t != size.q_len else 0
    copied_k = keys if use_half or s != size.kv_len else 0
    filled = max(queries * (t != size.q_len), keys * (s != size.kv_len))
    width = 2 if use_half else 4
    out = 0 if t == size.q_len else queries * width // 4
    if s > block_kv:
        step = max(
            2 * scores + 2 * q_block + kv_block, scores + 2 * q_block + 2 * kv_block
        )
        if kv_block <= q_block and q_block >= 2**20:
            step = 2 * (scores + q_block + kv_block)
    elif t > block_q:
        step = 2 * scores + 2 * q_block
    else:
        step, out = 2 * scores + q_block, 0
    listed = max(step + 4 * visits, 9 * visits) + 2 * size.batch * t  # sorted once
    forward = copied_q + 2 * copied_k + out + max(listed, filled)

    step = 3 * scores + 3 * q_block + 4 * kv_block + 3 * rows * t * 4 + 4 * visits
    # q, dO and dQ; K and V; dK and dV where they have to be cut.
    backward = 3 * copied_q + 2 * copied_k
    backward += 0 if s == size.kv_len else 2 * keys * width // 4
    backward += max(step, filled, queries * use_half)
    return forward, backward
