// The parameters of paged attention's kernels for few queries.
#pragma once

#include <cstdint>

#include "host/paged_call.h"
#include "ops/attention/generic/split/plan.h"
#include "ops/attention/schedule/paged_members.h"

namespace kvblock::generic {

inline PagedParams MakePagedParams(const kvblock_paged_attention& a, const SplitWork& work,
                                   const Cut& cut, int32_t most_rows) {
  PagedParams p{};
  static_cast<ShareParams&>(p) = MakeShareParams(MembersOf(a), work, cut);
  SetPages(a, &p);
  p.most_rows = most_rows;
  p.piece_ctas = 1;
  return p;
}

}  // namespace kvblock::generic
