// Tiles that are chosen, the middle floor: decode the buffers of one XLA call into a struct of
// kvblock/select.h, check that every buffer has the size that the call implies, and hand it to the
// launcher. Mirrors jax_kvblock/sparse/cuda.py.
#include "ops/select/select_ffi.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "kvblock/select.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

ffi::Error Invalid(const std::string& what) { return ffi::Error::InvalidArgument(what); }

ffi::Error Said(const char* message) {
  return message == nullptr ? ffi::Error::Success() : Invalid(std::string("kvblock_") + message);
}

template <typename Buffer>
bool Has(const Buffer& buffer, std::initializer_list<int64_t> shape) {
  const auto dims = buffer.dimensions();
  return std::equal(shape.begin(), shape.end(), dims.begin(), dims.end());
}

// A kvblock_pieces_dtype; -1 for what is none.
int32_t PoolDtype(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::BF16: return KVBLOCK_PIECES_BF16;
    case ffi::DataType::F16: return KVBLOCK_PIECES_F16;
    case ffi::DataType::F32: return KVBLOCK_PIECES_F32;
    default: return -1;
  }
}

// Operands: x [members, length, width] and ends [members]. Results: means [members, pieces, width],
// float32 or as x, and with `extremes` two more in float32; or, with `normed`, [members, pieces,
// 3 width] in float32.
ffi::Error PoolPieces(void* stream, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> ends,
                      ffi::Result<ffi::AnyBuffer> means, ffi::RemainingRets rets, int32_t side,
                      int32_t normed) {
  const auto dims = x.dimensions(), of_means = means->dimensions();
  const int64_t parts = normed != 0 ? 3 : 1;
  if (dims.size() != 3 || of_means.size() != 3 || of_means[0] != dims[0] ||
      of_means[2] != parts * dims[2] || !Has(ends, {dims[0]}) ||
      (rets.size() != 0 && rets.size() != 2)) {
    return Invalid("kvblock_pool_pieces: an operand or a result has another shape");
  }
  kvblock_pool_pieces call{};
  call.dtype = PoolDtype(x.element_type());
  if (call.dtype < 0) return Invalid("kvblock_pool_pieces: x must be bfloat16, float16 or float32");
  call.normed = normed;
  call.rounded = means->element_type() == x.element_type() && normed == 0;
  if (!call.rounded && means->element_type() != ffi::DataType::F32) {
    return Invalid("kvblock_pool_pieces: means must be float32, or as x");
  }
  call.side = side;
  call.members = dims[0];
  call.length = dims[1];
  call.width = dims[2];
  call.pieces = of_means[1];
  call.x = x.untyped_data();
  call.ends = ends.typed_data();
  call.means = means->untyped_data();
  float** const places[] = {&call.largest, &call.smallest};
  for (size_t i = 0; i < rets.size(); ++i) {
    auto more = rets.get<ffi::Buffer<ffi::F32>>(i);
    if (!more.has_value() || !Has(**more, {of_means[0], of_means[1], of_means[2]})) {
      return Invalid("kvblock_pool_pieces: a result has another shape or dtype");
    }
    *places[i] = (*more)->typed_data();
  }
  return Said(kvblock_pool_pieces_cuda(&call, stream));
}

// Operands: queries [members, rows * q_pieces, heads, dim], keys [members, columns * kv_pieces,
// kv_heads, dim], bounds [members, rows * q_pieces, 2]; with `factored` factors; with `ranged`
// those of queries and of keys; with `near` places, distance and first. Result: shares [members,
// heads, rows, columns].
ffi::Error WeighTiles(void* stream, ffi::AnyBuffer queries, ffi::AnyBuffer keys,
                      ffi::Buffer<ffi::S32> bounds, ffi::RemainingArgs more,
                      ffi::Result<ffi::Buffer<ffi::F32>> shares, float scale, bool factored,
                      bool ranged, bool near) {
  const auto of_q = queries.dimensions(), of_k = keys.dimensions(), made = shares->dimensions();
  const auto wrong = [] {
    return Invalid("kvblock_weigh_tiles: an operand or a result has another shape or dtype");
  };
  if (of_q.size() != 4 || of_k.size() != 4 || made.size() != 4 || of_q[0] != of_k[0] ||
      of_q[3] != of_k[3] || made[0] != of_q[0] || made[1] != of_q[2] || made[2] == 0 ||
      made[3] == 0 || of_q[1] % made[2] != 0 || of_k[1] % made[3] != 0 ||
      queries.element_type() != keys.element_type() || !Has(bounds, {of_q[0], of_q[1], 2}) ||
      more.size() != (factored ? 1u : 0u) + (ranged ? 2u : 0u) + (near ? 3u : 0u)) {
    return wrong();
  }
  kvblock_weigh_tiles call{};
  call.dtype = PoolDtype(queries.element_type());
  if (call.dtype < 0) return wrong();
  call.scale = scale;
  call.members = of_q[0];
  call.heads = of_q[2];
  call.kv_heads = of_k[2];
  call.dim = of_q[3];
  call.rows = made[2];
  call.columns = made[3];
  call.q_pieces = static_cast<int32_t>(of_q[1] / made[2]);
  call.kv_pieces = static_cast<int32_t>(of_k[1] / made[3]);
  call.queries = queries.untyped_data();
  call.keys = keys.untyped_data();
  call.bounds = bounds.typed_data();
  call.shares = shares->typed_data();
  size_t next = 0;
  const auto take = [&](auto dtype, std::initializer_list<int64_t> shape, auto* to) {
    auto buffer = more.get<ffi::Buffer<decltype(dtype)::value>>(next++);
    if (!buffer.has_value() || !Has(*buffer, shape)) return false;
    *to = buffer->typed_data();
    return true;
  };
  const std::integral_constant<ffi::DataType, ffi::S32> ints;
  const std::integral_constant<ffi::DataType, ffi::F32> floats;
  if (factored && !take(floats, {of_q[0], of_q[2]}, &call.factors)) return wrong();
  if (ranged && (!take(ints, {of_q[0], of_q[1], 2}, &call.q_ranges) ||
                 !take(ints, {of_k[0], of_k[1], 2}, &call.kv_ranges))) {
    return wrong();
  }
  if (near && (!take(ints, {of_q[0], of_q[1]}, &call.places) ||
               !take(floats, {of_q[0], of_q[2], KVBLOCK_DISTANCES}, &call.distance) ||
               !take(floats, {of_q[0], of_q[2]}, &call.first))) {
    return wrong();
  }
  return Said(kvblock_weigh_tiles_cuda(&call, stream));
}

// Operands: scores and states [rows, columns], limits [rows]. Results: the map, and with tau the
// rows' masses.
ffi::Error KeepTiles(void* stream, ffi::Buffer<ffi::F32> scores, ffi::Buffer<ffi::U8> states,
                     ffi::Buffer<ffi::S32> limits, ffi::Result<ffi::Buffer<ffi::PRED>> kept,
                     ffi::RemainingRets rets, float tau) {
  const auto dims = scores.dimensions();
  if (dims.size() != 2) return Invalid("kvblock_keep_tiles: scores must be [rows, columns]");
  kvblock_keep_tiles call{};
  call.rows = dims[0];
  call.columns = dims[1];
  call.tau = tau;
  bool fits = Has(states, {dims[0], dims[1]}) && Has(limits, {dims[0]}) &&
              Has(*kept, {dims[0], dims[1]}) && rets.size() == size_t{tau != 0.0f};
  if (fits && tau != 0.0f) {
    auto masses = rets.get<ffi::Buffer<ffi::F32>>(0);
    fits = masses.has_value() && Has(**masses, {dims[0]});
    if (fits) call.masses = (*masses)->typed_data();
  }
  if (!fits)
    return Invalid("kvblock_keep_tiles: an operand or a result has another shape or dtype");
  call.scores = scores.typed_data();
  call.states = states.typed_data();
  call.limits = limits.typed_data();
  call.kept = reinterpret_cast<uint8_t*>(kept->typed_data());
  return Said(kvblock_keep_tiles_cuda(&call, stream));
}

// Operand: a map [rows, columns]. Results: indices [rows, width] and counts [rows].
ffi::Error ListTiles(void* stream, ffi::Buffer<ffi::PRED> map,
                     ffi::Result<ffi::Buffer<ffi::S32>> indices,
                     ffi::Result<ffi::Buffer<ffi::S32>> counts) {
  const auto dims = map.dimensions(), of_lists = indices->dimensions();
  if (dims.size() != 2 || of_lists.size() != 2 || of_lists[0] != dims[0] ||
      !Has(*counts, {dims[0]})) {
    return Invalid("kvblock_list_tiles: an operand or a result has another shape");
  }
  kvblock_list_tiles call{};
  call.rows = dims[0];
  call.columns = dims[1];
  call.width = of_lists[1];
  call.map = reinterpret_cast<const uint8_t*>(map.typed_data());
  call.indices = indices->typed_data();
  call.counts = counts->typed_data();
  return Said(kvblock_list_tiles_cuda(&call, stream));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KvblockPoolPieces, PoolPieces,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<int32_t>("side")
                                  .Attr<int32_t>("normed"),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(KvblockWeighTiles, WeighTiles,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<bool>("factored")
                                  .Attr<bool>("ranged")
                                  .Attr<bool>("near"),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(KvblockKeepTiles, KeepTiles,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::PRED>>()
                                  .RemainingRets()
                                  .Attr<float>("tau"),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(KvblockListTiles, ListTiles,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>(),
                              {ffi::Traits::kCmdBufferCompatible});
