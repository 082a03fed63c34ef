// append, the middle floor: decode the buffers and attributes of one XLA call into a
// kvblock_append, check that every buffer has the size that the call implies, and hand it to the
// launcher.
//
// Operands: those that `present` names (bit i: the i-th of Operand), the pool as num_pool arrays.
// In place of q, k and v, qkv has the heads of all three, one after the other.
// Results: q, the pool's arrays, k_scales and v_scales, as far as the call has them; all but q
// alias their operands. Mirrors jax_kvblock/append/cuda.py.
#include "ops/append/append_ffi.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "kvblock/append.h"
#include "kvblock/block_copy.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

enum Operand {
  kQkv,
  kQ,
  kK,
  kV,
  kPool,
  kKScales,
  kVScales,
  kSlots,
  kPositions,
  kLayer,
  kInvFreq,
  kCosSin,
  kQNorm,
  kKNorm,
  kKScale,
  kVScale,
  kNumOperands,
};

// The numbers of the attribute `pool`, in their order.
enum PoolNumber {
  kLayers,
  kBlocks,
  kBlockSize,
  kKvHeads,
  kFirstLayer,
  kLayersWritten,
  kLayerTableStride,
  kLayerStride,
  kBlockStride,
  kOuterStride,
  kTokenStride,
  kHeadStride,
  kDimStride,
  kNumPoolNumbers,
};

using Numbers = ffi::Span<const int64_t>;
using Shape = std::initializer_list<int64_t>;

ffi::Error Invalid(const std::string& what) {
  return ffi::Error::InvalidArgument("kvblock_append: " + what);
}

int32_t CodeOf(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::BF16: return KVBLOCK_APPEND_BF16;
    case ffi::DataType::F16: return KVBLOCK_APPEND_F16;
    case ffi::DataType::F32: return KVBLOCK_APPEND_F32;
    case ffi::DataType::F8E4M3FN: return KVBLOCK_APPEND_E4M3;
    case ffi::DataType::F8E5M2: return KVBLOCK_APPEND_E5M2;
    case ffi::DataType::S8: return KVBLOCK_APPEND_I8;
    default: return -1;
  }
}

// Takes operands and results one after the other; remembers the first error.
class Reader {
 public:
  Reader(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets)
      : args_(args), rets_(rets) {}

  ffi::AnyBuffer Next(const char* name) {
    auto buffer = args_.get<ffi::AnyBuffer>(next_operand_++);
    if (buffer.has_error()) {
      Fail(std::string(name) + " is missing");
      return ffi::AnyBuffer(&empty_);
    }
    return *buffer;
  }

  ffi::AnyBuffer NextResult(const char* name) {
    auto buffer = rets_.get<ffi::AnyBuffer>(next_result_++);
    if (buffer.has_error()) {
      Fail(std::string("result ") + name + " is missing");
      return ffi::AnyBuffer(&empty_);
    }
    return **buffer;
  }

  void Check(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType type, Shape shape) {
    const auto dims = buffer.dimensions();
    const bool same = buffer.element_type() == type && dims.size() == shape.size() &&
                      std::equal(shape.begin(), shape.end(), dims.begin());
    if (!same) Fail(std::string(name) + " has another shape or dtype than the call implies");
  }

  template <typename T>
  const T* Take(const char* name, ffi::DataType type, Shape shape) {
    const ffi::AnyBuffer buffer = Next(name);
    Check(name, buffer, type, shape);
    return static_cast<const T*>(buffer.untyped_data());
  }

  void Fail(const std::string& what) {
    if (error_.empty()) error_ = what;
  }
  bool failed() const { return !error_.empty(); }

  ffi::Error Finish() {
    if (!failed() && next_operand_ != args_.size()) Fail("too many operands");
    if (!failed() && next_result_ != rets_.size()) Fail("too many results");
    return failed() ? Invalid(error_) : ffi::Error::Success();
  }

 private:
  const ffi::RemainingArgs& args_;
  const ffi::RemainingRets& rets_;
  size_t next_operand_ = 0, next_result_ = 0;
  std::string error_;
  XLA_FFI_Buffer empty_{};
};

struct Attributes {
  int64_t present, num_pool;
  Numbers pool;
  int64_t rotary_dim, interleaved, zero_tail;
  float norm_eps;

  bool Has(Operand which) const { return (present >> which & 1) != 0; }
};

struct Decoded {
  kvblock_append a{};
  std::vector<void*> buffers;
  std::vector<ffi::AnyBuffer> updated, results;  // the operands, and what they become
  ffi::DataType type{}, cache_type{};
};

// Queries, then as many heads of keys as the pool has, then the same of values.
void DecodeJoined(Reader* in, int64_t num_kv_heads, Decoded* out) {
  kvblock_append& a = out->a;
  const ffi::AnyBuffer qkv = in->Next("qkv");
  if (in->failed()) return;
  const auto dims = qkv.dimensions();
  if (dims.size() != 3 || num_kv_heads < 1 || num_kv_heads > (dims[1] - 1) / 2) {
    return in->Fail("qkv is [tokens, N + 2 K, D]");
  }
  out->type = qkv.element_type();
  a.dtype = CodeOf(out->type);
  a.tokens = dims[0];
  a.num_kv_heads = static_cast<int32_t>(num_kv_heads);
  a.num_heads = static_cast<int32_t>(dims[1] - 2 * num_kv_heads);
  a.head_dim = static_cast<int32_t>(dims[2]);
  a.num_outer = 2;
  a.q_token_stride = a.kv_token_stride = dims[1] * dims[2];
  const auto element = static_cast<int64_t>(ffi::ByteWidth(out->type));
  const char* const q = static_cast<const char*>(qkv.untyped_data());
  const char* const k = q + a.num_heads * dims[2] * element;
  a.q = q;
  a.k = k;
  a.v = k + num_kv_heads * dims[2] * element;
}

void DecodeTokens(Reader* in, const Attributes& attributes, Decoded* out) {
  kvblock_append& a = out->a;
  std::optional<ffi::AnyBuffer> q;
  if (attributes.Has(kQ)) q = in->Next("q");
  const ffi::AnyBuffer k = in->Next("k");
  if (in->failed()) return;
  const auto dims = k.dimensions();
  const bool all = a.layers > 1 || dims.size() == 4;
  if (dims.size() != (all ? 4u : 3u) || (all && dims[0] != a.layers)) {
    return in->Fail("k is [tokens, K, D], or with all layers in front");
  }
  const size_t lead = all;
  out->type = k.element_type();
  a.dtype = CodeOf(out->type);
  a.tokens = dims[lead];
  a.num_kv_heads = static_cast<int32_t>(dims[lead + 1]);
  a.head_dim = static_cast<int32_t>(dims[lead + 2]);
  a.k = k.untyped_data();
  if (q) {
    const auto of = q->dimensions();
    if (of.size() != 3) return in->Fail("q is [tokens, N, D]");
    in->Check("q", *q, out->type, {a.tokens, of[1], a.head_dim});
    a.num_heads = static_cast<int32_t>(of[1]);
    a.q = q->untyped_data();
  }
  a.num_outer = attributes.Has(kV) ? 2 : 1;
  if (!attributes.Has(kV)) return;
  const ffi::AnyBuffer v = in->Next("v");
  const auto of = v.dimensions();
  if (v.element_type() != out->type ||
      !std::equal(of.begin(), of.end(), dims.begin(), dims.end())) {
    return in->Fail("v has k's shape and dtype");
  }
  a.v = v.untyped_data();
}

void DecodePool(Reader* in, const Attributes& attributes, Decoded* out) {
  kvblock_append& a = out->a;
  for (int64_t i = 0; i < attributes.num_pool && !in->failed(); ++i) {
    const ffi::AnyBuffer pool = in->Next("pool");
    out->updated.push_back(pool);
    if (i == 0) out->cache_type = pool.element_type();
    if (pool.element_type() != out->cache_type) in->Fail("the pool's arrays have one dtype");
    const auto bytes = static_cast<int64_t>(pool.size_bytes());
    a.buffer_bytes = i == 0 ? bytes : std::min(a.buffer_bytes, bytes);
  }
  a.cache_dtype = CodeOf(out->cache_type);
}

float* ScalesOf(Reader* in, const Attributes& attributes, Decoded* out, Operand which,
                const char* name) {
  kvblock_append& a = out->a;
  if (!attributes.Has(which)) return nullptr;
  const ffi::AnyBuffer scales = in->Next(name);
  if (scales.dimensions().size() == 4) {
    a.scale_layers = static_cast<int32_t>(a.num_layers);
    in->Check(name, scales, ffi::DataType::F32,
              {a.num_layers, a.num_blocks, a.block_size, a.num_kv_heads});
  } else {
    a.scale_layers = 1;
    in->Check(name, scales, ffi::DataType::F32, {a.num_blocks, a.block_size, a.num_kv_heads});
  }
  out->updated.push_back(scales);
  return static_cast<float*>(scales.untyped_data());
}

void DecodeRotation(Reader* in, const Attributes& attributes, Decoded* out) {
  kvblock_append& a = out->a;
  a.rotary_dim = static_cast<int32_t>(attributes.rotary_dim);
  a.interleaved = attributes.interleaved != 0;
  if (attributes.Has(kInvFreq)) {
    a.inv_freq = in->Take<float>("inv_freq", ffi::DataType::F32, {attributes.rotary_dim / 2});
  }
  if (attributes.Has(kCosSin)) {
    const ffi::AnyBuffer table = in->Next("cos_sin");
    if (table.dimensions().size() != 2) return in->Fail("cos_sin is [rows, rotary_dim]");
    a.cos_sin_rows = table.dimensions()[0];
    in->Check("cos_sin", table, ffi::DataType::F32, {a.cos_sin_rows, attributes.rotary_dim});
    a.cos_sin = static_cast<const float*>(table.untyped_data());
  }
}

// Weights in q's dtype or float32.
const void* NormOf(Reader* in, const Decoded& d, const char* name, int32_t* dtype) {
  const ffi::AnyBuffer weights = in->Next(name);
  *dtype = CodeOf(weights.element_type());
  in->Check(name, weights, *dtype == d.a.dtype ? d.type : ffi::DataType::F32, {d.a.head_dim});
  return weights.untyped_data();
}

// One number, or one for each head.
const float* ScaleOf(Reader* in, const Decoded& d, const char* name, int32_t* heads) {
  const ffi::AnyBuffer scale = in->Next(name);
  *heads = scale.dimensions().size() == 1 ? d.a.num_kv_heads : 1;
  if (scale.dimensions().size() == 1) {
    in->Check(name, scale, ffi::DataType::F32, {d.a.num_kv_heads});
  } else {
    in->Check(name, scale, ffi::DataType::F32, {});
  }
  return static_cast<const float*>(scale.untyped_data());
}

void DecodeOperands(Reader* in, const Attributes& attributes, Decoded* out) {
  kvblock_append& a = out->a;
  const auto ints = ffi::DataType::S32;
  a.k_scales = ScalesOf(in, attributes, out, kKScales, "k_scales");
  a.v_scales = ScalesOf(in, attributes, out, kVScales, "v_scales");
  a.slots = in->Take<int32_t>("slots", ints, {a.tokens});
  if (attributes.Has(kPositions)) {
    a.positions = in->Take<int32_t>("positions", ints, {a.tokens});
  }
  if (attributes.Has(kLayer)) a.layer_at = in->Take<int32_t>("layer", ints, {});
  DecodeRotation(in, attributes, out);
  a.q_norm_dtype = a.k_norm_dtype = a.dtype;
  if (attributes.Has(kQNorm)) a.q_norm = NormOf(in, *out, "q_norm", &a.q_norm_dtype);
  if (attributes.Has(kKNorm)) a.k_norm = NormOf(in, *out, "k_norm", &a.k_norm_dtype);
  if (attributes.Has(kKScale)) a.k_scale = ScaleOf(in, *out, "k_scale", &a.k_scale_heads);
  if (attributes.Has(kVScale)) a.v_scale = ScaleOf(in, *out, "v_scale", &a.v_scale_heads);
}

// What is written is the results' memory, which is the operands'.
void DecodeResults(Reader* in, const Attributes& attributes, Decoded* out) {
  kvblock_append& a = out->a;
  if (attributes.Has(kQ) || attributes.Has(kQkv)) {
    const ffi::AnyBuffer q = in->NextResult("q");
    in->Check("result q", q, out->type, {a.tokens, a.num_heads, a.head_dim});
    a.q_out = q.untyped_data();
  }
  for (int64_t i = 0; i < attributes.num_pool && !in->failed(); ++i) {
    const ffi::AnyBuffer pool = in->NextResult("pool");
    if (static_cast<int64_t>(pool.size_bytes()) < a.buffer_bytes) in->Fail("a pool is too small");
    out->buffers.push_back(pool.untyped_data());
    out->results.push_back(pool);
  }
  a.buffers = out->buffers.data();
  a.num_buffers = attributes.num_pool;
  for (float** scales : {&a.k_scales, &a.v_scales}) {
    if (*scales == nullptr) continue;
    out->results.push_back(in->NextResult("scales"));
    *scales = static_cast<float*>(out->results.back().untyped_data());
  }
  for (size_t i = 0; i < out->results.size() && !in->failed(); ++i) {
    if (out->results[i].size_bytes() != out->updated[i].size_bytes()) {
      in->Fail("a result has another size than the operand that it updates");
    }
  }
}

ffi::Error Append(void* stream, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t present,
                  int64_t num_pool, Numbers pool, int64_t rotary_dim, int64_t interleaved,
                  int64_t zero_tail, float norm_eps) {
  const Attributes attributes{present,     num_pool,  pool,    rotary_dim,
                              interleaved, zero_tail, norm_eps};
  if (present < 0 || present >> kNumOperands != 0 || num_pool < 1 ||
      pool.size() != kNumPoolNumbers || rotary_dim < 0 || rotary_dim > INT32_MAX ||
      attributes.Has(kK) == attributes.Has(kQkv) || !attributes.Has(kPool) ||
      !attributes.Has(kSlots)) {
    return Invalid("the attributes do not fit");
  }
  if (attributes.Has(kQkv) && (attributes.Has(kQ) || attributes.Has(kV))) {
    return Invalid("q and v are within qkv");
  }
  Decoded d;
  kvblock_append& a = d.a;
  a.num_layers = pool[kLayers];
  a.num_blocks = pool[kBlocks];
  a.block_size = pool[kBlockSize];
  a.layer = pool[kFirstLayer];
  a.layers = pool[kLayersWritten];
  a.layer_table_stride = pool[kLayerTableStride];
  a.layer_stride = pool[kLayerStride];
  a.block_stride = pool[kBlockStride];
  a.outer_stride = pool[kOuterStride];
  a.token_stride = pool[kTokenStride];
  a.head_stride = pool[kHeadStride];
  a.dim_stride = pool[kDimStride];
  a.zero_tail = zero_tail != 0;
  a.norm_eps = norm_eps;
  Reader in(args, rets);
  if (attributes.Has(kQkv)) {
    DecodeJoined(&in, pool[kKvHeads], &d);
  } else {
    DecodeTokens(&in, attributes, &d);
  }
  if (!in.failed()) DecodePool(&in, attributes, &d);
  if (!in.failed()) DecodeOperands(&in, attributes, &d);
  if (!in.failed()) DecodeResults(&in, attributes, &d);
  if (ffi::Error error = in.Finish(); error.failure()) return error;
  // Where XLA gives a result other memory all the same, it begins as a copy of the operand.
  for (size_t i = 0; i < d.updated.size(); ++i) {
    const auto bytes = static_cast<int64_t>(d.updated[i].size_bytes());
    const void* const from = d.updated[i].untyped_data();
    void* const to = d.results[i].untyped_data();
    if (const char* error = kvblock_copy_bytes_cuda(to, from, bytes, stream)) {
      return Invalid(error);
    }
  }
  const char* const message = kvblock_append_cuda(&a, stream);
  return message == nullptr ? ffi::Error::Success() : Invalid(message);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KvblockAppend, Append,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("present")
                                  .Attr<int64_t>("num_pool")
                                  .Attr<Numbers>("pool")
                                  .Attr<int64_t>("rotary_dim")
                                  .Attr<int64_t>("interleaved")
                                  .Attr<int64_t>("zero_tail")
                                  .Attr<float>("norm_eps"),
                              {ffi::Traits::kCmdBufferCompatible});
