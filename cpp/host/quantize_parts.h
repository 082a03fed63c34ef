// Into how many parts the rows of an array are cut where a sum or a largest is found before, and
// what lies in the workspace of a call.
#ifndef KVBLOCK_HOST_QUANTIZE_PARTS_H_
#define KVBLOCK_HOST_QUANTIZE_PARTS_H_

#include <cstdint>

#include "kvblock/quantize.h"

namespace kvblock {

// Of a head's rows. All CTAs that write read what comes of every part, so there are few; and enough
// that the launch in front fills a GPU.
constexpr int64_t kMostQuantizeParts = 32;

inline int64_t QuantizeBlockCount(const kvblock_quantize_array& a) {
  const int64_t blocks = (a.rows + KVBLOCK_QUANTIZE_ROWS - 1) / KVBLOCK_QUANTIZE_ROWS;
  return blocks > 0 ? blocks : 1;
}
inline int64_t QuantizePartBlocks(const kvblock_quantize_array& a) {
  return (QuantizeBlockCount(a) + kMostQuantizeParts - 1) / kMostQuantizeParts;
}
inline int64_t QuantizePartCount(const kvblock_quantize_array& a) {
  const int64_t each = QuantizePartBlocks(a);
  return (QuantizeBlockCount(a) + each - 1) / each;
}

// float32 numbers: the sums of each part, [batch, heads, parts, dim], and, of an array that turns,
// these turned; the largest size of each part, [batch, heads, parts].
inline int64_t QuantizeSumCount(const kvblock_quantize& call, const kvblock_quantize_array& a) {
  return a.mean == nullptr ? 0 : call.batch * a.heads * QuantizePartCount(a) * a.dim;
}
inline int64_t QuantizeLargestCount(const kvblock_quantize& call, const kvblock_quantize_array& a) {
  return a.shared == KVBLOCK_QUANTIZE_BLOCK ? 0 : call.batch * a.heads * QuantizePartCount(a);
}

}  // namespace kvblock

#endif  // KVBLOCK_HOST_QUANTIZE_PARTS_H_
