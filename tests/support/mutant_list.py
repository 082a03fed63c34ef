"""The small mistakes that mutants.py makes, and what has to notice each."""

from __future__ import annotations

import dataclasses
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """`old` in `file` becomes `new`; `killer` is what has to fail then.

    killer: a file of tests and which of them (pytest's -k). Of a kernel it is arguments
    of attention_sweep.py, and `objects` begin the names of the files that are compiled
    anew: those that CMake makes of an instance's two element types, or a source file.
    """

    name: str
    file: str
    old: str
    new: str
    killer: tuple[str, ...]
    objects: tuple[str, ...] = ()

    @property
    def builds(self) -> bool:
        """Whether something for the CPU is to be compiled anew."""
        emulated = "emulated" in self.killer[0]  # compiles what it runs
        return self.file.startswith("cpp/") and not self.objects and not emulated

    @property
    def of_module(self) -> bool:
        """Whether that is the Python module, and not the library."""
        return self.file.startswith("cpp/objects/")

    def fits(self, root: Path) -> bool:
        """Whether there is one place for it."""
        return (root / self.file).read_text().count(self.old) == 1

    def apply(self, root: Path) -> None:
        path = root / self.file
        text = path.read_text()
        assert self.fits(root), f"{self.name}: {self.file} has changed"
        path.write_text(text.replace(self.old, self.new))


# ---- on the CPU ----------------------------------------------------------------------

PROBLEM = "jax_kvblock/attention/block_problem.py"
BLOCKED, CUDA = "jax_kvblock/attention/blocked.py", "jax_kvblock/attention/cuda.py"
DERIVATIVES = "jax_kvblock/attention/derivatives.py"
FEW = "jax_kvblock/attention/few_queries.py"
TANGENT = "jax_kvblock/attention/tangent.py"
DENSE, PLAN = "jax_kvblock/attention/dense.py", "jax_kvblock/blocks/plan.py"
TRANSFER, MEMORY = "jax_kvblock/blocks/transfer.py", "jax_kvblock/objects/memory.py"
CHECK, COPY_CHECK = "cpp/host/attention_check.cc", "cpp/host/block_copy_check.cc"
COPY = "cpp/ops/block_copy/block_copy_cpu.cc"
ATTENTION = "cpp/ops/attention"
MASK, GENERIC = f"{ATTENTION}/mask", f"{ATTENTION}/generic"
HOPPER = f"{ATTENTION}/hopper"


def test(file: str, names: str = "test") -> tuple[str, ...]:
    (path,) = (ROOT / "tests").glob(f"*/{file}.py")
    return str(path.relative_to(ROOT)), names


APPEND, KERNEL = "jax_kvblock/append", "cpp/ops/append/append_kernel.cuh"
LAUNCH = test("test_attention_launch")
TRANSPOSED = test("test_attention_tile_lists", "test_lists_the_other_way and partial")
LENGTHS = test("test_attention", "test_lengths and float32 and T127")
FEW_QUERIES = test("test_attention_few_queries", "test_every_option")
WINDOWS = test("test_attention_masks", "test_windows and float32")
TILES = test("test_attention_masks", "test_tile_lists and float32")
PAGED_BLOCKED = "jax_kvblock/paged/blocked.py"
DRAFTS = test("test_paged_rows", "every_row and drafts")
CPU = (
    Mutant(
        "paged: bits are counted from the first key of a step",
        PAGED_BLOCKED,
        'mode="clip") >> (new & 31)',
        'mode="clip") >> (key & 31)',
        DRAFTS,
    ),
    Mutant(
        "paged: new tokens beyond the bits are not seen",
        PAGED_BLOCKED,
        "(word < 0) | (word >= words) | (bits & 1 == 1)",
        "(word < 0) | ((word < words) & (bits & 1 == 1))",
        DRAFTS,
    ),
    Mutant(
        "paged: vmap gives all members the ranges of the first",
        "jax_kvblock/paged/primitive.py",
        "else x.ranges.fold(count),",
        "else jnp.tile(x.ranges.fold(count)[:calls], (count, 1, 1)),",
        test("test_paged_rows", "vmap_over_ranges"),
    ),
    Mutant(
        "the scale is left out",
        BLOCKED,
        "scores = config.scale * _products(config, p, i, j)",
        "scores = _products(config, p, i, j)",
        LENGTHS,
    ),
    Mutant(
        "a window ends a key early",
        BLOCKED,
        "allowed &= keys.first <= rows.last",
        "allowed &= keys.first < rows.last",
        WINDOWS,
    ),
    Mutant(
        "the last block of keys is passed over",
        PROBLEM,
        "return order, seen.sum(1, dtype=jnp.int32)",
        "return order, jnp.maximum(seen.sum(1, dtype=jnp.int32) - 1, 1)",
        TILES,
    ),
    Mutant(
        "query heads of a group change places",
        BLOCKED,
        "o = jnp.moveaxis(o.reshape(b, k * g, t, e), 1, 2)[:, : size.q_len]",
        "o = jnp.moveaxis(o.swapaxes(1, 2).reshape(b, k * g, t, e), 1, 2)"
        "[:, : size.q_len]",
        test("test_attention", "test_lengths and T64"),
    ),
    Mutant(
        "lse lacks the maximum",
        BLOCKED,
        "LogSumExp(jnp.where(seen, rest + top, -jnp.inf))",
        "LogSumExp(jnp.where(seen, rest, -jnp.inf))",
        LENGTHS,
    ),
    Mutant(
        "the sink is not in the sum",
        BLOCKED,
        "total = total * shrink + jnp.exp(sinks - base)",
        "total = total * shrink",
        test("test_attention_masks", "test_minus_inf_bias and sinks and float32"),
    ),
    Mutant(
        "scores are not taken relative to their row's base",
        BLOCKED,
        "scores = scores - block_of(rows.base, i, p.block_q, 3)[..., None]",
        "pass",
        test("test_attention_large_bias", "two_large_biases and float32"),
    ),
    Mutant(
        "the base is not kept",
        BLOCKED,
        "base_all = put(base_all, lse.base, at, 3)",
        "pass",
        test("test_attention_large_bias", "two_large_biases and float32"),
    ),
    Mutant(
        "the sums are not scaled to a new maximum",
        BLOCKED,
        "return o, new_top, total * shrink + weights.sum(-1)",
        "return o, new_top, total + weights.sum(-1)",
        TILES,
    ),
    Mutant(
        "keys that the last block shares with the one before count twice",
        FEW,
        "labels._replace(valid=labels.valid & (index >= j * length))",
        "labels._replace(valid=labels.valid & (index >= 0))",
        FEW_QUERIES,
    ),
    Mutant(
        "of few queries, junk beyond the lengths is let in",
        FEW,
        "a = jnp.where(labels.used[..., None, None], a, 0)",
        "pass",
        FEW_QUERIES,
    ),
    Mutant(
        "of few queries, every member has the first one's keys",
        FEW,
        "a = _slice(a, (first, start, 0, 0), shape)",
        "a = _slice(a, (0, start, 0, 0), shape)",
        FEW_QUERIES,
    ),
    Mutant(
        "of few queries, every member has the first one's bias",
        FEW,
        "row = first // members_of_a_row(x.q.shape[0], bias.shape[0])",
        "row = 0",
        FEW_QUERIES,
    ),
    Mutant(
        "of few queries, 16 bits are widened before they are cut",
        FEW,
        "if a.dtype.itemsize != 2:",
        "if True:",
        test("test_attention_few_queries", "nothing_of_the_size"),
    ),
    Mutant(
        "gradients without delta",
        BLOCKED,
        "ds = weights * (dw - block_of(rows.delta, i, p.block_q, 3)[..., None])",
        "ds = weights * dw",
        LENGTHS,
    ),
    Mutant(
        "gradients without the softcap's slope",
        BLOCKED,
        "ds = jnp.where(allowed, ds * slope, 0)",
        "ds = jnp.where(allowed, ds, 0)",
        test("test_attention_options", "pairs and float32 and softcap and tiles"),
    ),
    Mutant(
        "dbias of one head alone, where heads share it",
        BLOCKED,
        "ds = ds.sum(1, keepdims=True)",
        "ds = ds[:, :1]",
        test("test_attention_options", "pairs and float32 and shared and sinks"),
    ),
    Mutant(
        "segments are not looked at",
        BLOCKED,
        "allowed &= rows.segment == keys.segment",
        "allowed &= rows.valid",
        test("test_attention_masks", "test_any_segment_ids and float32"),
    ),
    Mutant(
        "a large score stands still",
        BLOCKED,
        "most = MOST_ABOVE_BASE + (scores - jax.lax.stop_gradient(scores))",
        "most = MOST_ABOVE_BASE",
        test("test_attention_derivatives", "wherever_the_base_is"),
    ),
    Mutant(
        "out moves as if lse stood still",
        TANGENT,
        'o_moves = made["o"] - beside_o(lse_moves) * o.astype(lse_moves.dtype)',
        'o_moves = made["o"]',
        test("test_attention_derivatives", "float64"),
    ),
    Mutant(
        "a sink's share stands still",
        DERIVATIVES,
        "moves = per_row(config, sinks_move, share) - lse_moves",
        "moves = per_row(config, sinks_move, share)",
        test("test_attention_derivatives", "float64"),
    ),
    Mutant(
        "a second derivative without out's own",
        DERIVATIVES,
        'beside += beside_o(lse_moves) * at.moves["o"].astype(acc)',
        "pass",
        test("test_attention_derivatives", "float64"),
    ),
    Mutant(
        "a shift to the other side",
        DENSE,
        "last = saturating_add(shift, jnp.int32(config.window_right))",
        "last = saturating_add(-shift, jnp.int32(config.window_right))",
        WINDOWS,
    ),
    Mutant(
        "the sides of a window change places for the launcher",
        CUDA,
        "window_right=np.int64(min(config.window_right, 2**31 - 1)),",
        "window_right=np.int64(min(config.window_left, 2**31 - 1)),",
        LAUNCH,
    ),
    Mutant(
        "the launcher is told another scale",
        CUDA,
        "scale=np.float32(config.scale),",
        "scale=np.float32(1.0),",
        LAUNCH,
    ),
    Mutant(
        "one counter less for dq",
        "cpp/host/attention_workspace.h",
        "kDqCounters = 2;",
        "kDqCounters = 1;",
        LAUNCH,
    ),
    Mutant(
        "the wrong kernels",
        CUDA,
        'KERNELS = {"cuda": 0, "cuda_sm90": 1}',
        'KERNELS = {"cuda": 1, "cuda_sm90": 0}',
        LAUNCH,
    ),
    Mutant(
        "the lists of tiles are not transposed",
        CUDA,
        "tiles = jnp.swapaxes(tile_map(config, x, size.kv_len), 2, 3)",
        "tiles = tile_map(config, x, size.kv_len)",
        LAUNCH,
    ),
    Mutant(
        "lists that are transposed lose their last entry",
        CUDA,
        "tile_lists.list_tiles(listed, width=listed.shape[-1])",
        "tile_lists.list_tiles(listed, width=max(listed.shape[-1] - 1, 1))",
        TRANSPOSED,
    ),
    Mutant(
        "what lies behind a list is a partial tile",
        CUDA,
        "partial = (order >= 0) & (kinds >= 0)",
        "partial = kinds >= 0",
        TRANSPOSED,
    ),
    Mutant(
        "lists of any length are made by the kernel",
        "jax_kvblock/attention/tile_lists.py",
        "return 0 not in kept.shape and kept.shape[-1] <= MOST_COLUMNS",
        "return 0 not in kept.shape",
        test("test_attention_tile_lists", "test_gradients_over_lists_sort_nothing"),
    ),
    Mutant(
        "any dtype is served",
        CUDA,
        "elif x.q.dtype not in DTYPES:",
        "elif x.q.dtype == jnp.int32:",
        LAUNCH,
    ),
    Mutant(
        "a side begins at its first head, whatever it was told",
        PLAN,
        "offset = sum(first * strides[axis] for axis, first in side.first)",
        "offset = 0",
        test("test_pool", "test_gather"),
    ),
    Mutant(
        "token slots as if a block had one token less",
        PLAN,
        "id_inner = sizes[side.index[1]]",
        "id_inner = sizes[side.index[1]] - 1",
        test("test_append", "test_append_to_a_static_layer"),
    ),
    Mutant(
        "a traced layer may be one past the last",
        PLAN,
        "return dict(side.sizes)[side.start] - extent + 1",
        "return dict(side.sizes)[side.start] - extent + 2",
        test("test_append"),
    ),
    Mutant(
        "a head range on the wrong side of a transfer",
        TRANSFER,
        "start if src == full else None,",
        "start if dst == full else None,",
        test("test_pool", "test_transfer_of_a_head_range"),
    ),
    Mutant(
        "an export does not hold up a donation",
        MEMORY,
        "if not self.free_list.num_exports:\n            return\n        if",
        "if True:\n            return\n        if",
        test("test_dlpack", "update or donat"),
    ),
    Mutant(
        "an id one past the last is in range",
        COPY,
        "if (id < 0 || id >= side.id_limit) return {0, 0, false};",
        "if (id < 0 || id > side.id_limit) return {0, 0, false};",
        test("test_pool", "test_gather"),
    ),
    Mutant(
        "what a bad id reads is not zeroed",
        COPY,
        "if (to != nullptr && from == nullptr) ZeroBox(box, to);",
        "",
        test("test_pool", "test_gather"),
    ),
    Mutant(
        "the last box is as long as the others",
        COPY,
        "if (cut != nullptr) *cut = std::min(cut_each_, "
        "cut_count_ - coord[outer_ - 1] * cut_each_);",
        "",
        test("test_header", "test_runs_of_every_length or test_lent_threads"),
    ),
    Mutant(
        "dims are merged that the source does not walk in one stride",
        COPY_CHECK,
        "if (!WalksWith(copy.src, k, k + 1, inner) || "
        "!WalksWith(copy.dst, k, k + 1, inner)) continue;",
        "if (!WalksWith(copy.dst, k, k + 1, inner)) continue;",
        test("test_convert", "test_between_any_two_layouts"),
    ),
    Mutant(
        "a copy may end a unit behind its buffer",
        COPY_CHECK,
        "last_byte.AddProduct(copy.unit, 1);",
        "",
        test("test_copy_check"),
    ),
    Mutant(
        "turns beside segments",
        CHECK,
        "if (a.call.q_segments || a.call.tile_indices) {",
        "if (a.call.tile_indices) {",
        test("test_attention_check"),
    ),
    Mutant(
        "a softcap that is served is refused",
        CHECK,
        '(factor >= 1e-6f && factor <= 1e5f)) return "";',
        '(factor >= 1e-5f && factor <= 1e5f)) return "";',
        test("test_attention_check"),
    ),
    Mutant(
        "a row of zeros has a scale of zero",
        f"{APPEND}/plain.py",
        "return jnp.maximum(size.max(-1) / largest, SMALLEST_SCALE)",
        "return size.max(-1) / largest",
        test("test_append_truth", "test_append_kv and combined"),
    ),
    Mutant(
        "a layer that is not there has scales",
        f"{APPEND}/plain.py",
        "slots = jnp.where((start >= 0) & (start < call.num_layers), slots, -1)",
        "pass",
        test("test_append_truth", "test_rope_append and beyond"),
    ),
    Mutant(
        "scales of given layers are those of the first",
        f"{APPEND}/plain.py",
        'side = dataclasses.replace(side, first=(("L", call.layer),))',
        'side = dataclasses.replace(side, first=(("L", 0),))',
        test("test_append_truth", "test_rope_append and computed"),
    ),
    Mutant(
        "the last byte of a cache lies behind its buffer",
        "cpp/host/append_check.cc",
        "if (end > a.buffer_bytes) {",
        "if (end > a.buffer_bytes + 1) {",
        test("test_append_check", "test_every_number"),
    ),
    Mutant(
        "the second half of a unit turns as the first",
        KERNEL,
        "angles[(W + i) / 4 * units]",
        "angles[i / 4 * units]",
        test("test_append_emulated", "test_rope_append and pairs"),
    ),
    Mutant(
        "rows of any stride are read as vectors",
        "cpp/ops/append/append_cuda.cu",
        "QTokenStride(a) % W == 0 && KvTokenStride(a) % W == 0 &&",
        "",
        test("test_append_emulated", "test_rope_append and padded"),
    ),
    Mutant(
        "keys lie as queries do",
        KERNEL,
        "static_cast<const T*>(p.k) + number * p.kv_token_stride",
        "static_cast<const T*>(p.k) + number * p.q_token_stride",
        test("test_append_emulated", "test_rope_append and halves"),
    ),
    Mutant(
        "joined arrays stay joined where heads are cut",
        f"{APPEND}/primitive.py",
        "call.joined and is_partitioned(ctx)",
        "False",
        test("test_append_transforms", "test_joined"),
    ),
    Mutant(
        "zeros fall on what others write",
        KERNEL,
        "if ((written[n / 32] >> n % 32 & 1) == 0)",
        "if (n > 0)",
        test("test_append_emulated", "test_rope_append and behind"),
    ),
    Mutant(
        "values have the scale of keys",
        KERNEL,
        "p_.v_scale[row.head * p_.v_scale_stride]",
        "p_.k_scale[row.head * p_.k_scale_stride]",
        test("test_append_emulated", "test_append_kv and heads"),
    ),
    Mutant(
        "a thread block's tokens have the angles of its first one",
        KERNEL,
        "lane(p, angles + own * (W / 2) * AngleUnits<W>(p))",
        "lane(p, angles)",
        test("test_append_emulated", "test_many_tokens and CTA"),
    ),
    Mutant(
        "a group works on the row that it had",
        KERNEL,
        "    loaded = ahead;\n",
        "",
        test("test_append_emulated", "test_many_tokens and rows"),
    ),
    Mutant(
        "a prompt's block is taken for whole",
        KERNEL,
        "if (all) return false;",
        "if (all || next > 0) return false;",
        test("test_append_emulated", "test_many_tokens and zeros"),
    ),
    Mutant(
        "the first of a thread block's tokens has its zeros alone",
        KERNEL,
        "for (int i = 0; i < p.tokens_each; ++i) {",
        "for (int i = 0; i < 1; ++i) {",
        test("test_append_emulated", "test_many_tokens and zeros"),
    ),
    Mutant(
        "who is not there stores a scale",
        KERNEL,
        "if (kept != nullptr && r.there) {",
        "if (kept != nullptr) {",
        test("test_append_emulated", "test_rope_append and computed"),
    ),
    Mutant(
        "the sum of a norm lacks a lane",
        KERNEL,
        "for (int step = lanes / 2; step > 0; step /= 2) "
        "x += __shfl_xor_sync(0xffffffff, x, step);",
        "for (int step = lanes / 2; step > 1; step /= 2) "
        "x += __shfl_xor_sync(0xffffffff, x, step);",
        test("test_append_emulated", "test_rope_append and norms"),
    ),
    Mutant(
        "a tie rounds up",
        "cpp/device/narrow.cuh",
        "(1u << (kDropped - 1)) - 1 + (size >> kDropped & 1)",
        "(1u << (kDropped - 1))",
        test("test_append_emulated", "test_conversions"),
    ),
    Mutant(
        "an angle lacks its small part",
        "cpp/device/angle.cuh",
        "return __fadd_rn(__fsub_rn(whole, rintf(whole)), part);",
        "return __fsub_rn(whole, rintf(whole));",
        test("test_append_emulated", "test_angles"),
    ),
)
