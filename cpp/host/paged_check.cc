// What the launcher of paged attention checks before it launches, and the size of its workspace.
#include <algorithm>
#include <cstdint>
#include <string>

#include "host/message.h"
#include "host/paged_call.h"
#include "kvblock/attention.h"
#include "kvblock/paged_attention.h"

namespace kvblock {
namespace {

constexpr int64_t kMaxLength = (int64_t{1} << 30) - 256;

std::string CheckLatent(const kvblock_paged_attention& a) {
  if (a.values_in_keys != 0 && a.values_in_keys != 1) {
    return Got("values_in_keys must be 0 or 1", a.values_in_keys);
  }
  if (a.values_in_keys == 0) return "";
  if (!IsLatentDims(a.head_dim, a.value_dim)) {
    return "with values_in_keys head_dim and value_dim must be 576 and 512, or 192 and 128, got " +
           std::to_string(a.head_dim) + " and " + std::to_string(a.value_dim);
  }
  if (a.num_kv_heads != 1) return Got("with values_in_keys num_kv_heads must be 1", a.num_kv_heads);
  if (a.cache_dtype != a.dtype) {
    return Got("with values_in_keys cache_dtype must be dtype", a.cache_dtype);
  }
  return "";
}

// What any attention over as many rows and keys checks, but for k and v.
const char* CheckShared(const kvblock_paged_attention& a) {
  kvblock_forward f{};
  f.call.dtype = a.dtype;
  f.call.batch = a.calls;
  f.call.num_heads = a.num_heads;
  f.call.num_kv_heads = a.num_kv_heads;
  f.call.q_len = a.rows;
  f.call.head_dim = a.values_in_keys ? a.value_dim / 8 : a.head_dim;  // CheckLatent knows them
  f.call.value_dim = a.values_in_keys ? a.value_dim / 8 : a.value_dim;
  f.call.scale = a.scale;
  f.call.softcap = a.softcap;
  f.call.window_left = a.window_left;
  f.call.window_right = a.window_right;
  f.call.q = a.q;
  f.call.sinks = a.sinks;
  f.call.sink_batch = a.sink_batch;
  f.o = a.o;
  f.lse = a.lse;
  f.workspace = a.workspace;
  return kvblock_attention_check_forward(&f);
}

std::string CheckSequences(const kvblock_paged_attention& a) {
  if (a.calls < 0) return Got("calls must not be negative", a.calls);
  if (a.sequences < 0) return Got("sequences must not be negative", a.sequences);
  if (int64_t{a.calls} * a.sequences > INT32_MAX) {
    return "calls * sequences must be an int32";
  }
  if (a.rows > 0 && a.calls > INT32_MAX / a.rows) {
    return Got("calls * rows must be an int32, of rows", a.rows);
  }
  if (a.query_start == nullptr && a.sequences != 1 && a.calls > 0) {
    return Got("a call has one sequence without query_start, sequences must be 1", a.sequences);
  }
  if (a.query_start != nullptr && a.q_lens != nullptr) {
    return "query_start and q_lens say the same; one of them must be NULL";
  }
  if (a.rows * (a.num_heads / a.num_kv_heads) > INT32_MAX) {
    return "rows * num_heads / num_kv_heads must be an int32";
  }
  const bool some = a.calls > 0 && a.sequences > 0;
  if (some && a.kv_lens == nullptr) return "kv_lens is NULL";
  if (a.table_width < 0) return Got("table_width must not be negative", a.table_width);
  if (some && a.table_width > 0 && a.block_tables == nullptr) return "block_tables is NULL";
  for (const void* array :
       {a.query_start, a.q_lens, a.kv_lens, a.block_tables, a.table_first, a.layer, a.ranges}) {
    if (Misaligned({array}, 4)) return "arrays of int32 must be aligned to their elements";
  }
  if (Misaligned({a.tree_mask}, 4)) return "tree_mask must be aligned to its elements";
  if (a.tree_mask != nullptr && a.tree_words < 1) {
    return Got("tree_words must be positive with tree_mask", a.tree_words);
  }
  if (a.tree_mask == nullptr && a.tree_words != 0) {
    return Got("tree_words must be 0 without tree_mask", a.tree_words);
  }
  if (a.calls > 0 && a.rows > 0 && a.workspace == nullptr) return "workspace is NULL";
  return "";
}

// A place of a piece is numbered by 32 bits.
std::string CheckSplit(const kvblock_paged_attention& a) {
  if (a.split_size < 0) return Got("split_size must not be negative", a.split_size);
  if (a.split_size == 0) return "";
  if (PagedSplitRows(a) * std::max(a.value_dim, 1) <= int64_t{UINT32_MAX}) return "";
  return Got("with pieces of split_size keys the workspace is too large; split_size must be larger",
             a.split_size);
}

std::string CheckStrides(const std::string& name, const kvblock_page_strides& strides) {
  for (const int64_t stride : {strides.block, strides.token, strides.head}) {
    if (stride < 0 || stride % 16 != 0) {
      return Got(name + " must be multiples of 16 that are not negative", stride);
    }
  }
  return "";
}

std::string CheckCache(const kvblock_paged_attention& a) {
  if (a.cache_dtype == a.dtype) {
    return a.k_scale.data || a.v_scale.data ? "scales are for caches of 8 bits" : "";
  }
  if (a.cache_dtype < KVBLOCK_E4M3 || a.cache_dtype > KVBLOCK_I8) {
    return Got("cache_dtype must be dtype, KVBLOCK_E4M3, KVBLOCK_E5M2 or KVBLOCK_I8",
               a.cache_dtype);
  }
  for (const int32_t dim : {a.head_dim, a.value_dim}) {
    if (dim % 16 != 0) return Got("with a cache of 8 bits head dims must be multiples of 16", dim);
  }
  for (const kvblock_scales& s : {a.k_scale, a.v_scale}) {
    if (Misaligned({s.data}, 4)) return "scales must be aligned to their elements";
    if (s.layer < 0 || s.block < 0 || s.token < 0 || s.head < 0) {
      return "strides of scales must not be negative";
    }
    if (s.each != 0 && s.data == nullptr) return "scales of each token are NULL";
  }
  return "";
}

// The kernel in 8 bits has no other options.
std::string CheckNarrow(const kvblock_paged_attention& a) {
  if (a.narrow_queries != 0 && a.narrow_queries != 1) {
    return Got("narrow_queries must be 0 or 1", a.narrow_queries);
  }
  if (a.narrow_queries == 0) return "";
  if (a.dtype != KVBLOCK_BF16)
    return Got("with narrow_queries dtype must be KVBLOCK_BF16", a.dtype);
  if (a.cache_dtype != KVBLOCK_E4M3) {
    return Got("with narrow_queries cache_dtype must be KVBLOCK_E4M3", a.cache_dtype);
  }
  for (const int32_t dim : {a.head_dim, a.value_dim}) {
    if (dim > 128) return Got("with narrow_queries head dims are at most 128", dim);
  }
  if (!(a.scale > 0.0f)) return "with narrow_queries scale must be above 0";
  if (a.softcap > 0.0f) return "narrow_queries does not go with softcap";
  if (a.ranges != nullptr || a.tree_mask != nullptr) {
    return "narrow_queries does not go with ranges or tree_mask";
  }
  if (a.table_first != nullptr) return "narrow_queries does not go with table_first";
  if (a.k_scale.each != 0 || a.v_scale.each != 0) {
    return "with narrow_queries scales are one of all, or one for each key head";
  }
  if (PagedNarrowRows(a) > INT32_MAX) return "with narrow_queries rows are too many for 32 bits";
  // All of the workspace's terms are products of sizes of 32 bits.
  constexpr double kMost = 1e15;
  const double values = static_cast<double>(PagedPaddedKeys(a)) * a.calls * a.sequences *
                        a.num_kv_heads * a.value_dim;
  const double queries = static_cast<double>(PagedNarrowRows(a)) * a.num_heads * (a.head_dim + 4.0);
  if (values + queries > kMost) return "with narrow_queries the workspace is too large";
  return "";
}

std::string CheckPages(const kvblock_paged_attention& a) {
  if (a.block_size < 1) return Got("block_size must be positive", a.block_size);
  if (a.num_blocks < 0 || a.num_blocks > INT32_MAX) {
    return Got("num_blocks must be an int32 that is not negative", a.num_blocks);
  }
  if (a.num_arrays < 1 || a.num_arrays > KVBLOCK_PAGED_MAX_ARRAYS) {
    return Got("num_arrays must be 1 to 128", a.num_arrays);
  }
  if (a.num_layers < 1) return Got("num_layers must be positive", a.num_layers);
  if (a.num_arrays > 1 && a.num_arrays != a.num_layers) {
    return Got("num_arrays must be 1 or num_layers = " + std::to_string(a.num_layers),
               a.num_arrays);
  }
  if (a.layer != nullptr && a.layer_batch != 1 && a.layer_batch != a.calls) {
    return Got("layer_batch must be 1 or calls = " + std::to_string(a.calls), a.layer_batch);
  }
  if (a.layer_stride < 0 || a.layer_stride % 16 != 0) {
    return Got("layer_stride must be a multiple of 16 that is not negative", a.layer_stride);
  }
  std::string error = CheckStrides("k_strides", a.k_strides);
  if (error.empty()) error = CheckStrides("v_strides", ValueStrides(a));
  if (!error.empty()) return error;
  for (const kvblock_page_strides& s : {a.k_strides, ValueStrides(a)}) {
    int64_t last = 0, part;  // of the units of a layer
    const bool far = __builtin_mul_overflow(s.block, std::max<int64_t>(a.num_blocks, 1), &last) ||
                     __builtin_mul_overflow(s.token, int64_t{a.block_size}, &part) ||
                     __builtin_add_overflow(last, part, &last) ||
                     __builtin_mul_overflow(s.head, int64_t{a.num_kv_heads}, &part) ||
                     __builtin_add_overflow(last, part, &last);
    if (far || last / PageUnit(a) >= int64_t{UINT32_MAX}) {
      return "the strides of k or v reach further than 2^32 of what they are multiples of";
    }
  }
  const void* const* const v = a.values_in_keys ? a.k : a.v;
  if (a.k == nullptr || v == nullptr) return "k or v is NULL";
  for (int32_t i = 0; i < a.num_arrays; ++i) {
    if (a.num_blocks > 0 && (a.k[i] == nullptr || v[i] == nullptr)) {
      return Got("an array of k or v is NULL, of number", i);
    }
    if (Misaligned({a.k[i], v[i]}, 16)) {
      return Got("keys and values must be aligned to 16 bytes, array", i);
    }
  }
  return "";
}

}  // namespace
}  // namespace kvblock

extern "C" const char* kvblock_paged_attention_check(const kvblock_paged_attention* a) {
  using namespace kvblock;
  if (a == nullptr) return Message("paged_attention: the struct is NULL");
  std::string error = CheckLatent(*a);
  if (!error.empty()) return Message("paged_attention: " + error);
  if (const char* shared = CheckShared(*a)) return shared;
  error = CheckSequences(*a);
  if (error.empty()) error = CheckCache(*a);
  if (error.empty()) error = CheckPages(*a);
  if (error.empty()) error = CheckSplit(*a);
  if (error.empty()) error = CheckNarrow(*a);
  return error.empty() ? nullptr : Message("paged_attention: " + error);
}

extern "C" int64_t kvblock_paged_attention_workspace(const kvblock_paged_attention* a) {
  using namespace kvblock;
  if (a == nullptr || a->num_kv_heads < 1) return 0;
  if (a->narrow_queries && SomeMayBeLong(*a)) return NarrowPlaces(*a).bytes;
  return PagedPieceBytes(*a) + LongPieceBytes(*a) + static_cast<int64_t>(sizeof(PagedCounters));
}
