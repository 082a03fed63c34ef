// attention, the middle floor: decode the buffers and attributes of one XLA call into a
// kvblock_forward or kvblock_backward, check that every buffer has the size that the call implies,
// and hand it to a launcher.
//
// Operands: q, k, v, then the optional ones that `present` names (bit i: the i-th of Optional),
// then, backward, lse, with a bias base, delta and d_o. Results: o and perhaps lse, and with a bias
// base, and perhaps a workspace; or dk, dv and perhaps dq_accum (the sm_90a kernels: dq and a
// workspace); or dq; or dbias. With `joins`, o and lse, or dq, are operands, too, the last ones,
// and the results lie in their place. Mirrors jax_kvblock/attention/cuda.py.
#include "ops/attention/attention_ffi.h"

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

#include "host/attention_workspace.h"
#include "kvblock/attention.h"
#include "ops/attention/ffi_reader.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace kvblock {

// The attributes of a call.
struct AttentionAttributes {
  int64_t kernels, precision, present, packed, deterministic, joins, window_left, window_right,
      tile_q, tile_kv, dropout;
  float scale, softcap;
};

}  // namespace kvblock

// Their names, in the order of the struct.
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    kvblock::AttentionAttributes, StructMember<int64_t>("kernels"),
    StructMember<int64_t>("precision"), StructMember<int64_t>("present"),
    StructMember<int64_t>("packed"), StructMember<int64_t>("deterministic"),
    StructMember<int64_t>("joins"), StructMember<int64_t>("window_left"),
    StructMember<int64_t>("window_right"), StructMember<int64_t>("tile_q"),
    StructMember<int64_t>("tile_kv"), StructMember<int64_t>("dropout"),
    StructMember<float>("scale"), StructMember<float>("softcap"));

namespace {

using Attributes = kvblock::AttentionAttributes;
using kvblock::Reader;
constexpr char kCall[] = "kvblock_attention";

enum Optional {
  kBias,
  kSinks,
  kQSegments,
  kKvSegments,
  kQSegmentRanges,
  kKvSegmentRanges,
  kQLens,
  kKvLens,
  kShift,
  kCuQ,
  kCuKv,
  kTileIndices,
  kTileCounts,
  kTileIndicesT,
  kTileCountsT,
  kTileMap,
  kTileMasks,
  kQScales,
  kKScales,
  kVScales,
  kDropoutKeys,
  kNumOptional,
};

// What a call has is told by this alone: an array without elements may have no address.
bool Has(const Attributes& attributes, Optional which) {
  return ((attributes.present >> which) & 1) != 0;
}

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What every operation has: q, k, v and the optional operands.
struct Decoded {
  kvblock_attention a{};
  kvblock_block_scales q_scales{}, k_scales{}, v_scales{};
  ffi::DataType type{};
  bool packed = false;
};

void DecodeSizes(Reader* in, const Attributes& attributes, Decoded* out) {
  kvblock_attention& a = out->a;
  const ffi::AnyBuffer q = in->Operand("q"), k = in->Operand("k"), v = in->Operand("v");
  const auto qd = q.dimensions(), kd = k.dimensions(), vd = v.dimensions();
  out->type = q.element_type();
  out->packed = attributes.packed != 0;
  const size_t rank = out->packed ? 3 : 4;
  if (qd.size() != rank || kd.size() != rank || vd.size() != rank) {
    return in->Fail("q, k and v have rank 4, or 3 when packed");
  }
  const bool integers = out->type == ffi::DataType::S8;
  const auto of_values = integers ? ffi::DataType::F8E4M3FN : out->type;
  if (k.element_type() != out->type || v.element_type() != of_values) {
    return in->Fail("q, k and v have one dtype, or are int8, int8 and float8_e4m3fn");
  }
  switch (out->type) {
    case ffi::DataType::BF16: a.dtype = KVBLOCK_BF16; break;
    case ffi::DataType::F16: a.dtype = KVBLOCK_F16; break;
    case ffi::DataType::F32: a.dtype = KVBLOCK_F32; break;
    case ffi::DataType::F8E4M3FN: a.dtype = KVBLOCK_E4M3; break;
    case ffi::DataType::S8: a.dtype = KVBLOCK_I8; break;
    default: return in->Fail("q is bfloat16, float16, float32, float8_e4m3fn or int8");
  }
  const size_t lead = rank - 3;
  a.batch = out->packed ? 0 : static_cast<int32_t>(qd[0]);  // packed: from cu_q
  a.q_len = qd[lead];
  a.kv_len = kd[lead];
  a.num_heads = static_cast<int32_t>(qd[lead + 1]);
  a.num_kv_heads = static_cast<int32_t>(kd[lead + 1]);
  a.head_dim = static_cast<int32_t>(qd[lead + 2]);
  a.value_dim = static_cast<int32_t>(vd[lead + 2]);
  bool same = kd[lead + 2] == qd[lead + 2] && vd[lead] == kd[lead] && vd[lead + 1] == kd[lead + 1];
  if (!out->packed) same = same && kd[0] == qd[0] && vd[0] == qd[0];
  if (!same) in->Fail("the shapes of q, k and v do not fit");
  a.q = q.untyped_data();
  a.k = k.untyped_data();
  a.v = v.untyped_data();
}

const int32_t* Ints(Reader* in, const char* name, std::initializer_list<int64_t> shape) {
  return static_cast<const int32_t*>(in->Operand(name, ffi::DataType::S32, shape));
}

void DecodeBias(Reader* in, Decoded* out) {
  kvblock_attention& a = out->a;
  const ffi::AnyBuffer bias = in->Operand("bias");
  const auto dims = bias.dimensions();
  if (dims.size() != 4 || dims[2] != a.q_len || dims[3] != a.kv_len) {
    return in->Fail("bias is [batch, heads, T, S]");
  }
  const ffi::DataType type = bias.element_type();
  if (type != out->type && type != ffi::DataType::F32) {
    return in->Fail("bias has q's dtype or float32");
  }
  a.bias = bias.untyped_data();
  a.bias_dtype = type == ffi::DataType::F32 ? KVBLOCK_F32 : a.dtype;
  a.bias_batch = static_cast<int32_t>(dims[0]);
  a.bias_heads = static_cast<int32_t>(dims[1]);
}

// A list of tiles and its counts; `rows` tiles have a list each.
void DecodeTiles(Reader* in, Decoded* out, const char* name, int64_t rows, const int32_t** indices,
                 const int32_t** counts, int32_t* max_tiles) {
  kvblock_attention& a = out->a;
  const ffi::AnyBuffer buffer = in->Operand(name);
  const auto dims = buffer.dimensions();
  if (dims.size() != 4 || dims[2] != rows || buffer.element_type() != ffi::DataType::S32) {
    return in->Fail(std::string(name) + " is int32 [batch, heads, tiles, entries]");
  }
  a.tile_batch = static_cast<int32_t>(dims[0]);
  a.tile_heads = static_cast<int32_t>(dims[1]);
  *max_tiles = static_cast<int32_t>(dims[3]);
  *indices = static_cast<const int32_t*>(buffer.untyped_data());
  *counts = Ints(in, "tile counts", {dims[0], dims[1], dims[2]});
}

// float32 [batch, heads, blocks].
kvblock_block_scales Scales(Reader* in, const char* name, int32_t heads) {
  const ffi::AnyBuffer scales = in->Operand(name);
  const auto dims = scales.dimensions();
  if (dims.size() != 3 || dims[1] != heads || scales.element_type() != ffi::DataType::F32) {
    in->Fail(std::string(name) + " are float32 [batch, heads, blocks]");
    return {};
  }
  return {static_cast<const float*>(scales.untyped_data()), static_cast<int32_t>(dims[0]),
          static_cast<int32_t>(dims[2])};
}

void DecodeOptional(Reader* in, const Attributes& attributes, Decoded* out) {
  kvblock_attention& a = out->a;
  const auto has = [&](Optional which) { return Has(attributes, which); };
  const auto chunks = [](int64_t length) { return CeilDiv(length, KVBLOCK_ATTENTION_CHUNK); };
  if (out->packed != has(kCuQ) || has(kCuQ) != has(kCuKv)) {
    return in->Fail("packed calls have cu_q and cu_kv");
  }
  if (attributes.present >> kNumOptional) return in->Fail("unknown operands");
  if (has(kTileIndicesT) && !has(kTileIndices)) return in->Fail("tile lists come first");

  if (has(kBias)) DecodeBias(in, out);
  if (has(kSinks)) {
    const ffi::AnyBuffer sinks = in->Operand("sinks");
    const auto dims = sinks.dimensions();
    if (dims.size() != 2 || dims[1] != a.num_heads || sinks.element_type() != ffi::DataType::F32) {
      return in->Fail("sinks are float32 [batch, N]");
    }
    a.sinks = static_cast<const float*>(sinks.untyped_data());
    a.sink_batch = static_cast<int32_t>(dims[0]);
  }
  if (has(kQSegments)) a.q_segments = Ints(in, "q_segments", {a.batch, a.q_len});
  if (has(kKvSegments)) a.kv_segments = Ints(in, "kv_segments", {a.batch, a.kv_len});
  if (has(kQSegmentRanges)) {
    a.q_segment_ranges = Ints(in, "q_segment_ranges", {a.batch, chunks(a.q_len), 2});
  }
  if (has(kKvSegmentRanges)) {
    a.kv_segment_ranges = Ints(in, "kv_segment_ranges", {a.batch, chunks(a.kv_len), 2});
  }
  if (has(kQLens)) a.q_lens = Ints(in, "q_lens", {a.batch});
  if (has(kKvLens)) a.kv_lens = Ints(in, "kv_lens", {a.batch});
  if (has(kShift)) {
    const ffi::AnyBuffer shift = in->Operand("shift");
    if (shift.element_type() != ffi::DataType::S32 || shift.dimensions().size() != 1) {
      return in->Fail("shift is int32 [B]");
    }
    if (out->packed) a.batch = static_cast<int32_t>(shift.element_count());
    if (static_cast<int64_t>(shift.element_count()) != a.batch) return in->Fail("shift is [B]");
    a.shift = static_cast<const int32_t*>(shift.untyped_data());
  }
  if (has(kCuQ)) {
    const ffi::AnyBuffer cu = in->Operand("cu_q");
    if (cu.element_type() != ffi::DataType::S32 || cu.element_count() < 1) {
      return in->Fail("cu_q is int32 [B + 1]");
    }
    const int32_t batch = static_cast<int32_t>(cu.element_count()) - 1;
    if (has(kShift) && batch != a.batch) return in->Fail("cu_q is int32 [B + 1]");
    a.batch = batch;
    a.cu_q = static_cast<const int32_t*>(cu.untyped_data());
    a.cu_kv = Ints(in, "cu_kv", {int64_t{a.batch} + 1});
  }
  if (has(kTileIndices)) {
    const auto fits = [](int64_t tile) { return tile >= 1 && tile <= int64_t{1} << 30; };
    if (!fits(attributes.tile_q) || !fits(attributes.tile_kv)) {
      return in->Fail("tiles have a size");
    }
    a.tile_q = static_cast<int32_t>(attributes.tile_q);
    a.tile_kv = static_cast<int32_t>(attributes.tile_kv);
    DecodeTiles(in, out, "tile_indices", CeilDiv(a.q_len, a.tile_q), &a.tile_indices,
                &a.tile_counts, &a.max_tiles);
  }
  if (has(kTileIndicesT) && !in->failed()) {
    const int32_t batch = a.tile_batch, heads = a.tile_heads;
    DecodeTiles(in, out, "tile_indices_t", CeilDiv(a.kv_len, a.tile_kv), &a.tile_indices_t,
                &a.tile_counts_t, &a.max_tiles_t);
    if (a.tile_batch != batch || a.tile_heads != heads)
      in->Fail("both tile lists are shared alike");
  }
  if (has(kTileMap) != has(kTileMasks) || (has(kTileMap) && !has(kTileIndices))) {
    return in->Fail("tile_map and tile_masks go with tile lists");
  }
  if (has(kTileMap) && !in->failed()) {
    a.tile_map = Ints(
        in, "tile_map",
        {a.tile_batch, a.tile_heads, CeilDiv(a.q_len, a.tile_q), CeilDiv(a.kv_len, a.tile_kv)});
    const ffi::AnyBuffer masks = in->Operand("tile_masks");
    const auto dims = masks.dimensions();
    if (dims.size() != 3 || dims[0] < 1 || dims[0] > INT32_MAX || dims[1] != a.tile_q ||
        dims[2] != CeilDiv(a.tile_kv, 32) || masks.element_type() != ffi::DataType::U32) {
      return in->Fail("tile_masks are uint32 [masks, tile_q, tile_kv / 32]");
    }
    a.tile_masks = static_cast<const uint32_t*>(masks.untyped_data());
    a.num_tile_masks = static_cast<int32_t>(dims[0]);
  }
  if (has(kQScales)) out->q_scales = Scales(in, "q_scales", a.num_heads);
  if (has(kKScales)) out->k_scales = Scales(in, "k_scales", a.num_kv_heads);
  if (has(kVScales)) out->v_scales = Scales(in, "v_scales", a.num_kv_heads);
  if (has(kDropoutKeys)) {
    a.dropout_keys = static_cast<const uint32_t*>(
        in->Operand("dropout_keys", ffi::DataType::U32, {a.batch, a.num_heads, 2}));
  }
}

Decoded Decode(Reader* in, const Attributes& attributes) {
  Decoded out;
  DecodeSizes(in, attributes, &out);
  if (!in->failed()) DecodeOptional(in, attributes, &out);
  for (int64_t side : {attributes.window_left, attributes.window_right}) {
    if (side < -1 || side > INT32_MAX) in->Fail("a window's side is an int32, -1 where it is open");
  }
  out.a.window_left = static_cast<int32_t>(attributes.window_left);
  out.a.window_right = static_cast<int32_t>(attributes.window_right);
  out.a.kernels = static_cast<int32_t>(attributes.kernels);
  out.a.precision = static_cast<int32_t>(attributes.precision);
  out.a.scale = attributes.scale;
  out.a.softcap = attributes.softcap;
  if (attributes.dropout < 0 || attributes.dropout > 127) in->Fail("dropout is 0 to 127");
  out.a.dropout = static_cast<int32_t>(attributes.dropout);
  return out;
}

float* Rows(Reader* in, const Decoded& d, const char* name, bool result) {
  const kvblock_attention& a = d.a;
  const auto type = ffi::DataType::F32;
  if (d.packed) {
    const auto shape = {int64_t{a.num_heads}, a.q_len};
    return static_cast<float*>(result ? in->Result(name, type, shape)
                                      : const_cast<void*>(in->Operand(name, type, shape)));
  }
  const auto shape = {int64_t{a.batch}, int64_t{a.num_heads}, a.q_len};
  return static_cast<float*>(result ? in->Result(name, type, shape)
                                    : const_cast<void*>(in->Operand(name, type, shape)));
}

enum Length { kQueries, kKeys };

// A result or operand of the shape of q, k, v or o.
void* Heads(Reader* in, const Decoded& d, const char* name, Length length, int64_t heads,
            int64_t dim, bool result, ffi::DataType type) {
  const int64_t rows = length == kQueries ? d.a.q_len : d.a.kv_len;
  const auto take = [&](std::initializer_list<int64_t> shape) {
    return result ? in->Result(name, type, shape)
                  : const_cast<void*>(in->Operand(name, type, shape));
  };
  return d.packed ? take({rows, heads, dim}) : take({d.a.batch, rows, heads, dim});
}

// The operands of all backward passes.
kvblock_backward DecodeBackward(Reader* in, const Decoded& d, const Attributes& attributes) {
  kvblock_backward b{};
  b.call = d.a;
  if (in->failed()) return b;
  b.lse = Rows(in, d, "lse", false);
  if (Has(attributes, kBias)) b.base = Rows(in, d, "base", false);
  b.delta = Rows(in, d, "delta", false);
  b.d_o = Heads(in, d, "d_o", kQueries, d.a.num_heads, d.a.value_dim, false, d.type);
  return b;
}

template <typename Call>
ffi::Error Launch(Reader* in, const Call& call, const char* (*launch)(const Call*, void*),
                  void* stream) {
  if (ffi::Error error = in->Finish(); error.failure()) return error;
  const char* const message = launch(&call, stream);
  return message == nullptr ? ffi::Error::Success()
                            : ffi::Error::InvalidArgument(std::string(kCall) + ": " + message);
}

// A result of a call that joins has to lie where the operand does.
void CheckInPlace(Reader* in, const char* name, const void* operand, const void* result) {
  if (operand != result && !in->failed()) in->Fail(std::string(name) + " is joined in place");
}

// The last result is a workspace, where the call has a use for one.
ffi::Error Forward(void* stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   const Attributes& attributes) {
  Reader in(args, rets, kCall);
  const Decoded d = Decode(&in, attributes);
  kvblock_forward f{};
  f.call = d.a;
  f.joins = static_cast<int32_t>(attributes.joins != 0);
  f.q_scales = d.q_scales;
  f.k_scales = d.k_scales;
  f.v_scales = d.v_scales;
  const auto out = kvblock::IsNarrow(d.a) ? ffi::DataType::BF16 : d.type;
  if (!in.failed()) {
    const int64_t bytes = AttentionWorkspace(
        d.a.kernels, d.a.dtype, d.a.batch, d.a.q_len, d.a.kv_len, d.a.num_heads, d.a.num_kv_heads,
        d.a.head_dim, d.a.value_dim, attributes.present, false);
    const void *held_o = nullptr, *held_lse = nullptr;
    if (f.joins) {
      held_o = Heads(&in, d, "o", kQueries, d.a.num_heads, d.a.value_dim, false, d.type);
      held_lse = Rows(&in, d, "lse", false);
    }
    f.o = Heads(&in, d, "o", kQueries, d.a.num_heads, d.a.value_dim, true, out);
    if (in.results_left() > (bytes > 0)) {
      f.lse = Rows(&in, d, "lse", true);
      if (Has(attributes, kBias)) f.base = Rows(&in, d, "base", true);
    }
    if (bytes > 0) f.workspace = in.Result("workspace", ffi::DataType::U8, {bytes});
    if (f.joins) {
      CheckInPlace(&in, "o", held_o, f.o);
      CheckInPlace(&in, "lse", held_lse, f.lse);
    }
  }
  return Launch(&in, f, kvblock_attention_forward, stream);
}

// dq_accum of the generic kernels.
float* BlockedDq(Reader* in, const Decoded& d) {
  const int64_t rows = d.packed ? d.a.q_len : d.a.batch * d.a.q_len;
  return static_cast<float*>(in->Result("dq_accum", ffi::DataType::F32,
                                        {d.a.num_heads, CeilDiv(rows, 8), d.a.head_dim / 8, 8, 8}));
}

ffi::Error BackwardKv(void* stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                      const Attributes& attributes) {
  Reader in(args, rets, kCall);
  const Decoded d = Decode(&in, attributes);
  kvblock_backward b = DecodeBackward(&in, d, attributes);
  if (!in.failed()) {
    b.dk = Heads(&in, d, "dk", kKeys, d.a.num_kv_heads, d.a.head_dim, true, d.type);
    b.dv = Heads(&in, d, "dv", kKeys, d.a.num_kv_heads, d.a.value_dim, true, d.type);
    if (in.results_left() > 0 && d.a.kernels == KVBLOCK_KERNELS_SM90) {
      const auto dq = [&](bool result) {
        return Heads(&in, d, "dq", kQueries, d.a.num_heads, d.a.head_dim, result, d.type);
      };
      b.joins = static_cast<int32_t>(attributes.joins != 0);
      const void* const held = b.joins ? dq(false) : nullptr;
      b.dq = dq(true);
      if (b.joins) CheckInPlace(&in, "dq", held, b.dq);
      const int64_t bytes = AttentionWorkspace(
          d.a.kernels, d.a.dtype, d.a.batch, d.a.q_len, d.a.kv_len, d.a.num_heads, d.a.num_kv_heads,
          d.a.head_dim, d.a.value_dim, attributes.present, true);
      if (bytes > 0) b.workspace = in.Result("workspace", ffi::DataType::U8, {bytes});
      b.deterministic = static_cast<int32_t>(attributes.deterministic);
    } else if (in.results_left() > 0) {
      b.dq_accum = BlockedDq(&in, d);
    }
  }
  return Launch(&in, b, kvblock_attention_backward_kv, stream);
}

ffi::Error BackwardQ(void* stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                     const Attributes& attributes) {
  Reader in(args, rets, kCall);
  const Decoded d = Decode(&in, attributes);
  kvblock_backward b = DecodeBackward(&in, d, attributes);
  if (!in.failed()) {
    b.dq = Heads(&in, d, "dq", kQueries, d.a.num_heads, d.a.head_dim, true, d.type);
  }
  return Launch(&in, b, kvblock_attention_backward_q, stream);
}

ffi::Error BackwardBias(void* stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                        const Attributes& attributes) {
  Reader in(args, rets, kCall);
  const Decoded d = Decode(&in, attributes);
  kvblock_backward b = DecodeBackward(&in, d, attributes);
  if (!in.failed()) {
    const auto type = d.a.bias_dtype == KVBLOCK_F32 ? ffi::DataType::F32 : d.type;
    b.dbias = in.Result("dbias", type, {d.a.bias_batch, d.a.bias_heads, d.a.q_len, d.a.kv_len});
  }
  return Launch(&in, b, kvblock_attention_backward_bias, stream);
}

constexpr auto Binding = [] {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<void*>>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs<Attributes>();
};

}  // namespace

int64_t AttentionWorkspace(int32_t kernels, int32_t dtype, int64_t batch, int64_t q_len,
                           int64_t kv_len, int32_t num_heads, int32_t num_kv_heads,
                           int32_t head_dim, int32_t value_dim, int64_t present, bool backward) {
  static const int32_t array[1] = {};
  const auto there = [&](Optional which) { return (present >> which) & 1 ? array : nullptr; };
  kvblock_attention a{};
  a.kernels = kernels;
  a.dtype = dtype;
  a.batch = static_cast<int32_t>(batch);
  a.q_len = q_len;
  a.kv_len = kv_len;
  a.num_heads = num_heads;
  a.num_kv_heads = num_kv_heads;
  a.head_dim = head_dim;
  a.value_dim = value_dim;
  a.bias = there(kBias);
  a.q_segments = there(kQSegments);
  a.q_lens = there(kQLens);
  a.kv_lens = there(kKvLens);
  a.cu_q = there(kCuQ);
  a.tile_indices = there(kTileIndices);
  if ((present >> kDropoutKeys) & 1) a.dropout_keys = reinterpret_cast<const uint32_t*>(array);
  return kvblock_attention_workspace(&a, backward);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(KvblockAttentionForward, Forward, Binding(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(KvblockAttentionBackwardKv, BackwardKv, Binding(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(KvblockAttentionBackwardQ, BackwardQ, Binding(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(KvblockAttentionBackwardBias, BackwardBias, Binding(),
                              {ffi::Traits::kCmdBufferCompatible});
