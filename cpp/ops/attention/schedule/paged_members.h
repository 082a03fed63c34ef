// A call of paged attention as the kernels take it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "host/attention_call.h"
#include "host/paged_call.h"
#include "ops/attention/contract/params.cuh"
#include "ops/attention/schedule/pages.cuh"

namespace kvblock {

static_assert(kMostArrays == KVBLOCK_PAGED_MAX_ARRAYS);

// All sequences are members.
inline AttentionCall MembersOf(const kvblock_paged_attention& a) {
  AttentionCall call{};
  call.dtype = a.dtype;
  call.batch = a.calls * a.sequences;
  call.num_heads = a.num_heads;
  call.num_kv_heads = a.num_kv_heads;
  call.q_len = a.rows;
  call.kv_len = PagedKeysOfTable(a);
  call.head_dim = a.head_dim;
  call.value_dim = a.value_dim;
  call.scale = a.scale;
  call.softcap = a.softcap;
  call.window_left = std::min(a.window_left, kFar);
  call.window_right = std::min(a.window_right, kFar);
  call.q = a.q;
  call.q_lens = a.q_lens;
  call.kv_lens = a.kv_lens;
  call.sinks = a.sinks;
  call.sink_batch = a.sink_batch;
  call.o = a.o;
  call.lse = a.lse;
  call.workspace = a.workspace;
  return call;
}

inline PageStrides StridesOf(const kvblock_page_strides& strides, int64_t unit) {
  const auto units = [&](int64_t bytes) { return static_cast<uint32_t>(bytes / unit); };
  return {units(strides.block), units(strides.token), units(strides.head)};
}

inline ScaleStrides ScalesOf(const kvblock_scales& s) {
  return {s.data, s.layer, s.block, s.token, s.head, s.each != 0};
}

// All of the parameters but for those of a line and of attention.
inline void SetPages(const kvblock_paged_attention& a, PagedParams* p) {
  p->calls = a.calls;
  p->by_sequences = FastDiv(static_cast<uint32_t>(std::max(a.sequences, 1)));
  p->by_rows = FastDiv(static_cast<uint32_t>(a.rows));
  p->query_start = a.query_start;
  p->most_rows = INT32_MAX;
  p->counter = nullptr;
  p->sharing = nullptr;
  p->multiprocessors = 1;
  p->ranges = a.ranges;
  p->tree_mask = a.tree_mask;
  p->tree_words = a.tree_words;
  p->block_tables = a.block_tables;
  p->table_width = a.table_width;
  p->table_first = a.table_first;
  p->num_blocks = static_cast<uint32_t>(a.num_blocks);
  p->block_size = FastDiv(static_cast<uint32_t>(a.block_size));
  const int64_t unit = PageUnit(a);
  p->k_strides = StridesOf(a.k_strides, unit);
  p->v_strides = StridesOf(ValueStrides(a), unit);
  p->unit = static_cast<uint32_t>(unit);
  p->k_scale = ScalesOf(a.k_scale);
  p->v_scale = ScalesOf(a.v_scale);
  p->layer = a.layer;
  p->layer_batch = a.layer_batch;
  p->num_layers = a.num_layers;
  p->num_arrays = a.num_arrays;
  p->layer_stride = a.layer_stride;
  for (int32_t i = 0; i < a.num_arrays; ++i) {
    p->k_arrays[i] = static_cast<const char*>(a.k[i]);
    p->v_arrays[i] = static_cast<const char*>(a.values_in_keys ? a.k[i] : a.v[i]);
  }
}

}  // namespace kvblock
