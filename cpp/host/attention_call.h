// A call of either pass, as everything behind the C interface takes it.
#ifndef KVBLOCK_HOST_ATTENTION_CALL_H_
#define KVBLOCK_HOST_ATTENTION_CALL_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "host/attention_workspace.h"
#include "kvblock/attention.h"

namespace kvblock {

// The members of kvblock_attention, then those of kvblock_forward and kvblock_backward; what the
// other pass has is NULL. attention.h says what each one is. The list is flat because kernels take
// it by value: of nested structs the compiler loads the members in another order.
struct AttentionArrays {
  int32_t kernels, dtype, batch, num_heads, num_kv_heads, precision;
  int64_t q_len, kv_len;
  int32_t head_dim, value_dim;
  float scale, softcap;
  int32_t window_left, window_right;
  const void *q, *k, *v;
  const int32_t *cu_q, *cu_kv, *q_lens, *kv_lens, *shift;
  const int32_t *q_segments, *kv_segments, *q_segment_ranges, *kv_segment_ranges;
  const void* bias;
  int32_t bias_dtype, bias_batch, bias_heads;
  const float* sinks;
  int32_t sink_batch;
  const int32_t *tile_indices, *tile_counts, *tile_indices_t, *tile_counts_t;
  int32_t tile_batch, tile_heads, tile_q, tile_kv, max_tiles, max_tiles_t;
  const int32_t* tile_map;
  const uint32_t* tile_masks;
  int32_t num_tile_masks;

  void* o;
  float *lse, *base;  // forward written, backward read
  const void* d_o;
  const float* delta;
  float* dq_accum;  // this, dq_turns and dq_state of the sm_90a kernels: places in the workspace
  void *dq, *dk, *dv, *dbias;
  int32_t *dq_turns, *dq_state;
  void* workspace;
  int32_t joins;
  kvblock_block_scales q_scales, k_scales, v_scales;  // of 8 bits
};
// Dropout comes last: kernels without it do not take it.
struct AttentionCall : AttentionArrays {
  int32_t dropout;
  const uint32_t* dropout_keys;
};
static_assert(offsetof(AttentionArrays, num_tile_masks) ==
              offsetof(kvblock_attention, num_tile_masks));

inline AttentionCall CallOf(const kvblock_attention& shared) {
  AttentionCall call{};
  std::memcpy(static_cast<AttentionArrays*>(&call), &shared, offsetof(kvblock_attention, dropout));
  call.dropout = shared.dropout;
  call.dropout_keys = shared.dropout_keys;
  return call;
}

inline AttentionCall CallOf(const kvblock_forward& a) {
  AttentionCall call = CallOf(a.call);
  call.o = a.o;
  call.lse = a.lse;
  call.base = a.base;
  call.workspace = a.workspace;
  call.joins = a.joins;
  call.q_scales = a.q_scales;
  call.k_scales = a.k_scales;
  call.v_scales = a.v_scales;
  return call;
}

inline AttentionCall CallOf(const kvblock_backward& a) {
  AttentionCall call = CallOf(a.call);
  call.lse = const_cast<float*>(a.lse);
  call.base = const_cast<float*>(a.base);
  call.d_o = a.d_o;
  call.delta = a.delta;
  call.dq_accum = a.dq_accum;
  call.dq = a.dq;
  call.dk = a.dk;
  call.dv = a.dv;
  call.dbias = a.dbias;
  call.workspace = a.workspace;
  call.joins = a.joins;
  return call;
}

// The same for backward_kv of the sm_90a kernels: with its places in the workspace, if there is a
// dq to compute. The sizes have been checked.
inline AttentionCall CallWithDqOf(const kvblock_backward& a) {
  AttentionCall call = CallOf(a);
  call.dq_accum = nullptr;
  if (a.dq == nullptr || a.workspace == nullptr) return call;
  const DqPlaces places(a.call);
  char* const bytes = static_cast<char*>(a.workspace);
  call.dq_accum = reinterpret_cast<float*>(bytes);
  call.dq_state = reinterpret_cast<int32_t*>(bytes + places.state);
  if (a.deterministic) call.dq_turns = reinterpret_cast<int32_t*>(bytes + places.turns);
  return call;
}

}  // namespace kvblock

#endif  // KVBLOCK_HOST_ATTENTION_CALL_H_
