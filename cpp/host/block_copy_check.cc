#include "host/block_copy_check.h"

#include <cstdint>
#include <string>

#include "host/message.h"

namespace kvblock {
namespace {

// Sums of products of untrusted int64 values: sticks at "overflowed" instead of wrapping.
class Checked {
 public:
  explicit Checked(int64_t value) : value_(value) {}
  void AddProduct(int64_t a, int64_t b) {
    int64_t product = 0;
    overflowed_ |= __builtin_mul_overflow(a, b, &product);
    overflowed_ |= __builtin_add_overflow(value_, product, &value_);
  }
  bool Exceeds(int64_t limit) const { return overflowed_ || value_ > limit; }

 private:
  int64_t value_;
  bool overflowed_ = false;
};

bool AnyNegative(const int64_t* values, int64_t n) {
  for (int64_t k = 0; k < n; ++k) {
    if (values[k] < 0) return true;
  }
  return false;
}

uint64_t AddressBits(const kvblock_side& side, int64_t rank) {
  uint64_t bits = static_cast<uint64_t>(side.offset);
  for (int64_t i = 0; i < side.num_buffers; ++i) {
    bits |= reinterpret_cast<uintptr_t>(side.buffers[i]);
  }
  for (int64_t k = 0; k < rank; ++k) bits |= static_cast<uint64_t>(side.strides[k]);
  if (side.ids != nullptr)
    bits |= static_cast<uint64_t>(side.id_outer_stride | side.id_inner_stride);
  if (side.start != nullptr) bits |= static_cast<uint64_t>(side.start_stride);
  return bits;
}

// The buffers' addresses and the operands that are read by index.
std::string CheckPointers(const kvblock_side& side) {
  if (side.num_buffers < 1 || side.buffers == nullptr) return "no buffers";
  if (side.buffer_bytes < 0) {
    return "buffer_bytes must not be negative, got " + std::to_string(side.buffer_bytes);
  }
  // Buffers without bytes may have no address.
  for (int64_t i = 0; side.buffer_bytes > 0 && i < side.num_buffers; ++i) {
    if (side.buffers[i] == nullptr) return "buffers[" + std::to_string(i) + "] is NULL";
  }
  if ((reinterpret_cast<uintptr_t>(side.ids) | reinterpret_cast<uintptr_t>(side.start)) % 4 != 0) {
    return "ids and start must be aligned to 4 bytes";
  }
  return "";
}

std::string CheckSide(const kvblock_copy& copy, const kvblock_side& side, const std::string& name) {
  const std::string pointers = CheckPointers(side);
  if (!pointers.empty()) return name + ": " + pointers;
  if (side.offset < 0 || AnyNegative(side.strides, copy.rank) ||
      AnyNegative(side.table_strides, copy.rank)) {
    return name + ": offset and strides must not be negative";
  }
  // A unit is moved as one machine word: every address must be a multiple of it.
  if ((AddressBits(side, copy.rank) & static_cast<uint64_t>(copy.unit - 1)) != 0) {
    return name + ": addresses, offset and strides must be multiples of the unit, " +
           std::to_string(copy.unit) + " bytes";
  }
  if (side.ids != nullptr && (side.id_limit < 0 || side.id_inner < 1 || side.id_inner > INT32_MAX ||
                              side.id_outer_stride < 0 || side.id_inner_stride < 0 ||
                              side.strides[0] != 0 || side.table_strides[0] != 0)) {
    return name +
           ": with ids, dim 0 has stride 0, id_inner is 1 to 2^31 - 1 and id strides are not "
           "negative";
  }
  if (side.start != nullptr &&
      (side.start_limit < 0 || side.start_stride < 0 || side.start_table_stride < 0)) {
    return name + ": start_limit and start strides must not be negative";
  }
  // With nothing in range no address is formed, but buffers are still counted.
  const bool nothing = (side.ids != nullptr && side.id_limit == 0) ||
                       (side.start != nullptr && side.start_limit == 0);
  Checked last_byte(side.offset);  // one past the last byte that can be touched
  last_byte.AddProduct(copy.unit, 1);
  Checked last_buffer(0);
  for (int64_t k = 0; k < copy.rank; ++k) {
    last_byte.AddProduct(copy.dims[k] - 1, side.strides[k]);
    last_buffer.AddProduct(copy.dims[k] - 1, side.table_strides[k]);
  }
  if (side.ids != nullptr && side.id_limit > 0) {
    last_byte.AddProduct((side.id_limit - 1) / side.id_inner, side.id_outer_stride);
    last_byte.AddProduct(side.id_inner - 1, side.id_inner_stride);
  }
  if (side.start != nullptr && side.start_limit > 0) {
    last_byte.AddProduct(side.start_limit - 1, side.start_stride);
    last_buffer.AddProduct(side.start_limit - 1, side.start_table_stride);
  }
  if (!nothing && last_byte.Exceeds(side.buffer_bytes)) {
    return name + ": strides reach past the end of a buffer of " +
           std::to_string(side.buffer_bytes) + " bytes";
  }
  if (last_buffer.Exceeds(side.num_buffers - 1)) {
    return name + ": table strides reach past the " + std::to_string(side.num_buffers) + " buffers";
  }
  return "";
}

// A copy of more elements than its destination holds would write some of them twice.
bool Overfills(const kvblock_copy& copy, int64_t bytes) {
  const int64_t items = copy.dst.ids != nullptr ? copy.dims[0] : 1;
  int64_t room = 0;
  if (__builtin_mul_overflow(copy.dst.buffer_bytes, copy.dst.num_buffers, &room)) return false;
  return bytes / items > room;
}

bool WalksWith(const kvblock_side& side, int outer, int inner, int64_t inner_dim) {
  int64_t bytes = 0, table = 0;
  return !__builtin_mul_overflow(side.strides[inner], inner_dim, &bytes) &&
         !__builtin_mul_overflow(side.table_strides[inner], inner_dim, &table) &&
         side.strides[outer] == bytes && side.table_strides[outer] == table;
}

void MoveDim(kvblock_copy* copy, int to, int from) {
  copy->dims[to] = copy->dims[from];
  for (kvblock_side* side : {&copy->src, &copy->dst}) {
    side->strides[to] = side->strides[from];
    side->table_strides[to] = side->table_strides[from];
  }
}

// The largest power of two up to `limit` that divides everything OR-ed into `bits`.
int64_t LargestUnit(uint64_t bits, int64_t limit) {
  int64_t unit = limit;
  while (unit > 1 && (bits & static_cast<uint64_t>(unit - 1)) != 0) unit /= 2;
  return unit;
}

}  // namespace

int64_t CommonUnit(const kvblock_side& side, int64_t rank, int64_t run_bytes) {
  return LargestUnit(AddressBits(side, rank) | static_cast<uint64_t>(run_bytes), 16);
}

int64_t NumCoordinates(const kvblock_copy& copy) {
  int64_t count = 1;
  for (int64_t k = 0; k < copy.rank; ++k) count *= copy.dims[k];
  return count;
}

kvblock_copy Simplify(const kvblock_copy& original, int64_t max_unit) {
  kvblock_copy copy = original;
  const bool keep_first = copy.src.ids != nullptr || copy.dst.ids != nullptr;
  int rank = 0;
  for (int k = 0; k < original.rank; ++k) {
    if (original.dims[k] == 1 && !(k == 0 && keep_first)) continue;
    MoveDim(&copy, rank++, k);
  }
  copy.rank = rank;
  // Merge from the innermost outwards.
  for (int k = static_cast<int>(copy.rank) - 2; k >= (keep_first ? 1 : 0); --k) {
    const int64_t inner = copy.dims[k + 1];
    if (!WalksWith(copy.src, k, k + 1, inner) || !WalksWith(copy.dst, k, k + 1, inner)) continue;
    const int64_t merged = copy.dims[k] * inner;
    MoveDim(&copy, k, k + 1);
    copy.dims[k] = merged;
    for (int j = k + 1; j + 1 < copy.rank; ++j) MoveDim(&copy, j, j + 1);
    --copy.rank;
  }
  // Widen: an innermost dim that both sides walk byte after byte is a run.
  const int last = static_cast<int>(copy.rank) - 1;
  const bool run = copy.rank > (keep_first ? 1 : 0) && copy.src.strides[last] == copy.unit &&
                   copy.dst.strides[last] == copy.unit && copy.src.table_strides[last] == 0 &&
                   copy.dst.table_strides[last] == 0;
  if (run) {
    const int64_t bytes = copy.dims[last] * copy.unit;
    const uint64_t bits =
        static_cast<uint64_t>(bytes) | AddressBits(copy.src, last) | AddressBits(copy.dst, last);
    copy.unit = LargestUnit(bits, max_unit);
    copy.dims[last] = bytes / copy.unit;
    copy.src.strides[last] = copy.dst.strides[last] = copy.unit;
  }
  if (copy.rank == 0) {  // a single element
    copy.rank = 1;
    copy.dims[0] = 1;
    copy.src.strides[0] = copy.dst.strides[0] = 0;
    copy.src.table_strides[0] = copy.dst.table_strides[0] = 0;
  }
  return copy;
}

}  // namespace kvblock

extern "C" const char* kvblock_copy_check(const kvblock_copy* copy) {
  using kvblock::Message;
  if (copy == nullptr) return Message("copy is NULL");
  if (copy->rank < 1 || copy->rank > KVBLOCK_MAX_RANK) {
    return Message("rank must be 1 to " + std::to_string(KVBLOCK_MAX_RANK) + ", got " +
                   std::to_string(copy->rank));
  }
  if (copy->unit != 1 && copy->unit != 2 && copy->unit != 4 && copy->unit != 8 &&
      copy->unit != 16) {
    return Message("unit must be 1, 2, 4, 8 or 16 bytes, got " + std::to_string(copy->unit));
  }
  int64_t count = 1;
  for (int64_t k = 0; k < copy->rank; ++k) {
    if (copy->dims[k] < 0) return Message("dims must not be negative");
    if (__builtin_mul_overflow(count, copy->dims[k], &count)) return Message("dims overflow");
  }
  int64_t bytes = 0;
  if (__builtin_mul_overflow(count, copy->unit, &bytes)) return Message("dims overflow");
  if (count == 0) return nullptr;
  const std::string src = kvblock::CheckSide(*copy, copy->src, "source");
  if (!src.empty()) return Message(src);
  const std::string dst = kvblock::CheckSide(*copy, copy->dst, "destination");
  if (!dst.empty()) return Message(dst);
  if (kvblock::Overfills(*copy, bytes)) {
    return Message("destination: the copy has more elements than its buffers hold");
  }
  return nullptr;
}
