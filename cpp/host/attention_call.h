// A call of either pass, as everything behind the C interface takes it.
#ifndef KVBLOCK_HOST_ATTENTION_CALL_H_
#define KVBLOCK_HOST_ATTENTION_CALL_H_

#include "kvblock/attention.h"

namespace kvblock {

// What the other pass has is NULL. attention.h says what each member is.
struct AttentionCall : kvblock_attention {
  void* o;
  float* lse;   // forward written, backward read
  float* base;  // the same
  const void* d_o;
  const float* delta;
  float* dq_accum;
  void *dq, *dk, *dv;
  void* dbias;
  int32_t* dq_turns;
  int32_t* dq_state;
};

inline AttentionCall CallOf(const kvblock_forward& a) {
  AttentionCall call{};
  static_cast<kvblock_attention&>(call) = a.call;
  call.o = a.o;
  call.lse = a.lse;
  call.base = a.base;
  return call;
}

inline AttentionCall CallOf(const kvblock_backward& a) {
  AttentionCall call{};
  static_cast<kvblock_attention&>(call) = a.call;
  call.lse = const_cast<float*>(a.lse);
  call.base = const_cast<float*>(a.base);
  call.d_o = a.d_o;
  call.delta = a.delta;
  call.dq_accum = a.dq_accum;
  call.dq = a.dq;
  call.dk = a.dk;
  call.dv = a.dv;
  call.dbias = a.dbias;
  call.dq_turns = a.dq_turns;
  call.dq_state = a.dq_state;
  return call;
}

}  // namespace kvblock

#endif  // KVBLOCK_HOST_ATTENTION_CALL_H_
