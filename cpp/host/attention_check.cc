// What the attention launchers check before they launch.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "host/attention_call.h"
#include "host/message.h"
#include "kvblock/attention.h"

namespace kvblock {
namespace {

enum class Pass {
  kForward,
  kKv = KVBLOCK_BACKWARD_KV,
  kQ = KVBLOCK_BACKWARD_Q,
  kBias = KVBLOCK_BACKWARD_BIAS
};

// Sums of a position, a shift and a tile must stay inside int32
// (ops/attention/contract/params.cuh).
constexpr int64_t kMaxLength = (int64_t{1} << 30) - 256;

// Of wider rows of float32 the backward kernels' tiles do not fit in shared memory.
constexpr int32_t kMostFloat32BackwardDim = 128;

// Whether an array of this shape has a size in bytes. Nothing larger than an int64 exists, and the
// kernels compute places in such arrays by products like this one.
bool Addressable(std::initializer_list<int64_t> shape) {
  int64_t bytes = 4;  // no element is larger
  for (const int64_t size : shape) {
    if (__builtin_mul_overflow(bytes, size, &bytes)) return false;
  }
  return true;
}

std::string CheckSizes(const AttentionCall& a, Pass pass) {
  if (a.kernels != KVBLOCK_KERNELS_GENERIC && a.kernels != KVBLOCK_KERNELS_SM90) {
    return Got("kernels must be KVBLOCK_KERNELS_GENERIC or KVBLOCK_KERNELS_SM90", a.kernels);
  }
  const bool narrow = IsNarrow(a) && pass == Pass::kForward;
  if (a.dtype != KVBLOCK_BF16 && a.dtype != KVBLOCK_F16 && a.dtype != KVBLOCK_F32 && !narrow) {
    return Got(
        "dtype must be KVBLOCK_BF16, KVBLOCK_F16 or KVBLOCK_F32, or KVBLOCK_E4M3 or KVBLOCK_I8 "
        "in a forward pass",
        a.dtype);
  }
  if (a.dtype == KVBLOCK_F32 && a.kernels != KVBLOCK_KERNELS_GENERIC) {
    return "KVBLOCK_F32 is served by the generic kernels, kernels must be KVBLOCK_KERNELS_GENERIC";
  }
  if (a.precision != KVBLOCK_PRECISION_HIGHEST && a.precision != KVBLOCK_PRECISION_DEFAULT) {
    return Got("precision must be KVBLOCK_PRECISION_HIGHEST or KVBLOCK_PRECISION_DEFAULT",
               a.precision);
  }
  if (a.batch < 0) return Got("batch must not be negative", a.batch);
  if (a.num_heads < 1) return Got("num_heads must be positive", a.num_heads);
  if (a.num_kv_heads < 1 || a.num_heads % a.num_kv_heads != 0) {
    return Got("num_kv_heads must divide num_heads = " + std::to_string(a.num_heads),
               a.num_kv_heads);
  }
  if (a.q_len < 0 || a.q_len > kMaxLength) return Got("q_len must be 0 to 2^30 - 256", a.q_len);
  if (a.kv_len < 0 || a.kv_len > kMaxLength) return Got("kv_len must be 0 to 2^30 - 256", a.kv_len);
  for (const int32_t dim : {a.head_dim, a.value_dim}) {
    if (dim < 8 || dim > 256 || dim % 8 != 0) {
      return Got("head_dim and value_dim must be multiples of 8 from 8 to 256", dim);
    }
  }
  const int32_t wider = std::max(a.head_dim, a.value_dim);
  if (pass != Pass::kForward && a.dtype == KVBLOCK_F32 && wider > kMostFloat32BackwardDim) {
    return Got("gradients of KVBLOCK_F32 are for head_dim and value_dim up to 128", wider);
  }
  const int64_t pairs = int64_t{a.batch} * a.num_heads, longer = std::max(a.q_len, a.kv_len);
  if (pairs > INT32_MAX || !Addressable({pairs, longer, 256})) {
    return "batch * num_heads * length is too large to address";
  }
  if (!std::isfinite(a.scale)) return "scale must be finite";
  if (!(a.softcap >= 0.0f) || !std::isfinite(a.softcap)) {
    return "softcap must be finite and not negative; 0 is none";
  }
  if (a.window_left < -1 || a.window_right < -1) {
    return "window_left and window_right must not be below -1, an open side";
  }
  return "";
}

// A count of rows that batch members share, and a count of heads that is 1 or all.
std::string CheckShared(const AttentionCall& a, const std::string& name, int32_t batch,
                        int32_t heads) {
  if (batch < 1 || a.batch % batch != 0) {
    return Got(name + "_batch must divide batch = " + std::to_string(a.batch), batch);
  }
  if (heads != 1 && heads != a.num_heads) {
    return Got(name + "_heads must be 1 or num_heads = " + std::to_string(a.num_heads), heads);
  }
  return "";
}

// The forward kernels compute tanh by powers of scale / softcap, which have to fit into float32.
// From a softcap of 1024 on they take another way (device/fast_math.cuh).
std::string CheckSoftcap(const AttentionCall& a, Pass pass) {
  if (pass != Pass::kForward || a.softcap >= 1024.0f) return "";
  const float factor = std::abs(a.scale) / a.softcap;
  if (a.softcap == 0.0f || a.scale == 0.0f || (factor >= 1e-6f && factor <= 1e5f)) return "";
  return "scale / softcap must lie between 1e-6 and 1e5 in size, got " + std::to_string(a.scale) +
         " / " + std::to_string(a.softcap);
}

std::string CheckOptions(const AttentionCall& a, Pass pass) {
  const bool packed = a.cu_q != nullptr;
  if (packed != (a.cu_kv != nullptr)) return "cu_q and cu_kv go together";
  const bool segments = a.q_segments != nullptr;
  if (segments != (a.kv_segments != nullptr) || segments != (a.q_segment_ranges != nullptr) ||
      segments != (a.kv_segment_ranges != nullptr)) {
    return "q_segments, kv_segments, q_segment_ranges and kv_segment_ranges go together";
  }
  const bool transposed = pass == Pass::kKv;
  const int32_t* tiles = transposed ? a.tile_indices_t : a.tile_indices;
  const int32_t* counts = transposed ? a.tile_counts_t : a.tile_counts;
  if ((tiles != nullptr) != (counts != nullptr) ||
      (transposed && (a.tile_indices != nullptr) != (tiles != nullptr))) {
    return transposed ? "tile_indices_t and tile_counts_t go together, and with tile_indices"
                      : "tile_indices and tile_counts go together";
  }
  if ((a.tile_map != nullptr) != (a.tile_masks != nullptr)) {
    return "tile_map and tile_masks go together";
  }
  if (a.tile_masks != nullptr && (tiles == nullptr || a.num_tile_masks < 1)) {
    return Got("tile_masks go with tile lists, and num_tile_masks must be positive",
               a.num_tile_masks);
  }
  if (packed && (a.bias || segments || a.q_lens || a.kv_lens || tiles)) {
    return "packed inputs (cu_q, cu_kv) take neither bias, segments, lengths nor tiles";
  }
  if (a.base != nullptr && a.bias == nullptr) {
    return "base is for calls with a bias: without one lse is kept whole, base must be NULL";
  }
  std::string error;
  if (a.batch > 0 && a.bias != nullptr) {
    if (a.bias_dtype != a.dtype && a.bias_dtype != KVBLOCK_F32) {
      return Got("bias_dtype must be dtype or KVBLOCK_F32", a.bias_dtype);
    }
    error = CheckShared(a, "bias", a.bias_batch, a.bias_heads);
    if (error.empty() && !Addressable({a.bias_batch, a.bias_heads, a.q_len, a.kv_len})) {
      return "bias_batch * bias_heads * q_len * kv_len is too large to address";
    }
  }
  if (error.empty() && a.batch > 0 && a.sinks != nullptr) {
    error = CheckShared(a, "sink", a.sink_batch, 1);
  }
  if (error.empty() && a.batch > 0 && tiles != nullptr) {
    error = CheckShared(a, "tile", a.tile_batch, a.tile_heads);
    for (const int32_t tile : {a.tile_q, a.tile_kv}) {
      if (tile < 128 || tile % 128 != 0 || tile > (1 << 30)) {
        return Got("tile_q and tile_kv must be multiples of 128 up to 2^30", tile);
      }
    }
    const int64_t most = transposed ? a.max_tiles_t : a.max_tiles;
    if (most < 0) return Got("max_tiles and max_tiles_t must not be negative", most);
    const int64_t lists = transposed ? a.kv_len / a.tile_kv + 1 : a.q_len / a.tile_q + 1;
    if (error.empty() && !Addressable({a.tile_batch, a.tile_heads, lists, most})) {
      return Got("tile lists are too large to address, max_tiles and max_tiles_t must be smaller",
                 most);
    }
    if (error.empty() && a.tile_masks && std::max(a.tile_q, a.tile_kv) > 1024) {
      return Got("tile_masks are for tiles of at most 1024, tile_q or tile_kv is too large",
                 std::max(a.tile_q, a.tile_kv));
    }
    if (error.empty() && a.tile_masks &&
        !Addressable(
            {a.tile_batch, a.tile_heads, a.q_len / a.tile_q + 1, a.kv_len / a.tile_kv + 1})) {
      return "tile_batch * tile_heads * tiles of tile_map are too large to address";
    }
    if (error.empty() && a.tile_masks &&
        !Addressable({a.num_tile_masks, a.tile_q, a.tile_kv / 32})) {
      return Got("num_tile_masks * tile_q * tile_kv is too large to address", a.num_tile_masks);
    }
  }
  return error;
}

std::string CheckDropout(const AttentionCall& a) {
  if (a.dropout < 0 || a.dropout > 127) return Got("dropout must be 0 to 127", a.dropout);
  if (a.dropout == 0) {
    return a.dropout_keys ? "dropout_keys go with a dropout above 0, they must be NULL" : "";
  }
  const bool members = a.batch > 0;
  if (members && a.dropout_keys == nullptr) return "dropout_keys is NULL, and dropout is not 0";
  if (IsNarrow(a)) return "dropout is not for 8 bits";
  if (a.kernels == KVBLOCK_KERNELS_SM90 &&
      (a.softcap != 0.0f || a.bias || a.tile_indices || !(a.scale > 0.0f))) {
    return "dropout of the sm_90a kernels is for a scale above 0, and neither softcap, bias nor "
           "tiles";
  }
  return "";
}

// Arrays without elements may have no address.
std::string CheckOperands(const AttentionCall& a, Pass pass) {
  const bool members = a.batch > 0 || a.cu_q != nullptr;
  const bool queries = members && a.q_len > 0, keys = members && a.kv_len > 0;
  const auto missing = [](bool needed, const void* operand) { return needed && !operand; };
  if (missing(queries, a.q)) return "q is NULL";
  if (missing(keys, a.k)) return "k is NULL";
  if (missing(keys, a.v)) return "v is NULL";
  if (pass == Pass::kForward) return missing(queries, a.o) ? "o is NULL" : "";
  if (missing(queries, a.lse)) return "lse is NULL";
  if (missing(queries, a.d_o)) return "d_o is NULL";
  if (missing(queries, a.delta)) return "delta is NULL";
  switch (pass) {
    case Pass::kKv:
      if (missing(keys, a.dk)) return "dk is NULL";
      if (missing(keys, a.dv)) return "dv is NULL";
      if (a.kernels == KVBLOCK_KERNELS_SM90 &&
          missing(queries && a.dq && a.batch > 0, a.workspace)) {
        return "workspace is NULL, and dq is not";
      }
      break;
    case Pass::kQ:
      if (missing(queries, a.dq)) return "dq is NULL";
      break;
    default:
      if (a.bias == nullptr) return "bias is NULL: there is no dbias to compute";
      if (missing(queries && keys, a.dbias)) return "dbias is NULL";
  }
  return "";
}

std::string CheckAlignment(const AttentionCall& a) {
  if (Misaligned({a.workspace}, 16)) return "workspace must be aligned to 16 bytes";
  // Rows are copied 16 bytes at a time.
  if (Misaligned({a.q, a.k, a.v, a.o, a.d_o, a.dq, a.dk, a.dv, a.dq_accum}, 16)) {
    return "q, k, v, o and their gradients must be aligned to 16 bytes";
  }
  if (Misaligned({a.q_segment_ranges, a.kv_segment_ranges}, 8)) {  // read as pairs
    return "q_segment_ranges and kv_segment_ranges must be aligned to 8 bytes";
  }
  if (Misaligned({a.dropout_keys}, 8)) {
    return "dropout_keys must be aligned to 8 bytes";
  }
  if (Misaligned({a.bias, a.dbias}, a.bias_dtype == KVBLOCK_F32 ? 4 : 2) ||
      Misaligned({a.cu_q, a.cu_kv, a.q_lens, a.kv_lens, a.shift, a.q_segments, a.kv_segments}, 4) ||
      Misaligned({a.tile_indices, a.tile_counts, a.tile_indices_t, a.tile_counts_t}, 4) ||
      Misaligned({a.tile_map, a.tile_masks}, 4) ||
      Misaligned({a.sinks, a.lse, a.base, a.delta}, 4)) {
    return "arrays of int32 and float32, bias and dbias must be aligned to their elements";
  }
  return "";
}

const char* Check(const AttentionCall& a, Pass pass) {
  std::string error = CheckSizes(a, pass);
  if (error.empty()) error = CheckSoftcap(a, pass);
  if (error.empty()) error = CheckOptions(a, pass);
  if (error.empty()) error = CheckDropout(a);
  if (error.empty()) error = CheckOperands(a, pass);
  if (error.empty()) error = CheckAlignment(a);
  return error.empty() ? nullptr : Message("attention: " + error);
}

// Which calls may be joined with what their results hold. Of wide heads there is no room in shared
// memory for that.
constexpr int32_t kMostJoinedDim = 128;
const char* CheckJoins(const kvblock_forward& a) {
  if (!a.joins) return nullptr;
  const kvblock_attention& call = a.call;
  if (call.kernels != KVBLOCK_KERNELS_SM90) {
    return Message("attention: joins is for the sm_90a kernels");
  }
  if (call.head_dim > kMostJoinedDim || call.value_dim > kMostJoinedDim) {
    return Message(Got("attention: joins is for head dims up to 128",
                       std::max(call.head_dim, call.value_dim)));
  }
  if (call.bias || call.sinks || call.tile_indices || call.softcap != 0.0f || call.dropout ||
      !(call.scale > 0.0f)) {
    return Message(
        "attention: joins is for a scale above 0, and neither softcap, bias, sinks, tiles nor "
        "dropout");
  }
  const bool queries = call.q_len > 0 && (call.batch > 0 || call.cu_q);
  return queries && !a.lse ? Message("attention: joins needs an lse") : nullptr;
}

// Calls of 8 bits, and the scales that only these have.
constexpr int32_t kMostNarrowDim = 128, kNarrowDims = 16;
std::string CheckScales(const kvblock_attention& a, const char* name, const kvblock_block_scales& s,
                        int64_t rows) {  // 0: they are whole heads'
  const std::string of(name);
  if (s.scales == nullptr) return of + " is NULL";
  if (reinterpret_cast<uintptr_t>(s.scales) % 4 != 0) return of + " must be aligned to 4 bytes";
  if (s.batch < 1 || a.batch % s.batch != 0) {
    return Got(of + ".batch must divide batch = " + std::to_string(a.batch), s.batch);
  }
  const int64_t blocks = (rows + KVBLOCK_ATTENTION_SCALE_ROWS - 1) / KVBLOCK_ATTENTION_SCALE_ROWS;
  if (s.blocks != 1 && (rows == 0 || s.blocks != blocks)) {
    return Got(of + ".blocks must be 1" +
                   (rows == 0 ? "" : ", or one for each 128 rows: " + std::to_string(blocks)),
               s.blocks);
  }
  return "";
}
std::string CheckNarrowCall(const kvblock_forward& a) {
  const kvblock_attention& call = a.call;
  if (call.kernels != KVBLOCK_KERNELS_SM90) {
    return "8 bits are for the sm_90a kernels";
  }
  for (const int32_t dim : {call.head_dim, call.value_dim}) {
    if (dim % kNarrowDims != 0 || dim > kMostNarrowDim) {
      return Got("8 bits are for head dims that are multiples of 16 up to 128", dim);
    }
  }
  if (call.cu_q || call.bias || call.tile_indices || call.softcap != 0.0f || a.joins ||
      !(call.scale > 0.0f)) {
    return "8 bits are for a scale above 0, and neither cu_q, softcap, bias, tiles nor joins";
  }
  if (call.batch == 0) return "";
  if (call.kv_len > 0 && a.workspace == nullptr) return "8 bits need a workspace";
  std::string error = CheckScales(call, "q_scales", a.q_scales, call.q_len);
  if (error.empty()) error = CheckScales(call, "k_scales", a.k_scales, call.kv_len);
  if (error.empty()) error = CheckScales(call, "v_scales", a.v_scales, 0);
  return error;
}
const char* CheckNarrow(const kvblock_forward& a) {
  if (!IsNarrow(a.call)) {
    if (!a.q_scales.scales && !a.k_scales.scales && !a.v_scales.scales) return nullptr;
    return Message("attention: q_scales, k_scales and v_scales are for 8 bits");
  }
  const std::string error = CheckNarrowCall(a);
  return error.empty() ? nullptr : Message("attention: " + error);
}

// How backward_kv is to compute dq.
const char* CheckDq(const kvblock_backward& a) {
  const bool sm90 = a.call.kernels == KVBLOCK_KERNELS_SM90;
  if (sm90 && a.dq_accum) return Message("attention: dq_accum is for the generic kernels");
  if (a.joins && !(sm90 && a.dq)) {
    return Message("attention: joins is for the sm_90a kernels and their dq");
  }
  if (!a.deterministic) return nullptr;
  if (!sm90) {
    return Message(
        "attention: deterministic is for the sm_90a kernels; backward_q computes the same dq every "
        "time");
  }
  // Whose turn it is follows from the band and the lengths alone.
  if (a.call.q_segments || a.call.tile_indices) {
    return Message("attention: deterministic is for calls without segments and tiles");
  }
  return nullptr;
}

}  // namespace
}  // namespace kvblock

extern "C" const char* kvblock_attention_check_forward(const kvblock_forward* a) {
  using namespace kvblock;
  if (a == nullptr) return Message("attention: the struct is NULL");
  if (const char* error = Check(CallOf(*a), Pass::kForward)) return error;
  if (const char* error = CheckNarrow(*a)) return error;
  return CheckJoins(*a);
}

extern "C" const char* kvblock_attention_check_backward(const kvblock_backward* a,
                                                        kvblock_backward_pass pass) {
  using namespace kvblock;
  if (a == nullptr) return Message("attention: the struct is NULL");
  const auto number = static_cast<int32_t>(pass);  // an enum may be unsigned
  if (number < KVBLOCK_BACKWARD_KV || number > KVBLOCK_BACKWARD_BIAS) {
    return Message(Got("attention: pass must be a kvblock_backward_pass", number));
  }
  if (const char* error = Check(CallOf(*a), static_cast<Pass>(number))) return error;
  if (number == KVBLOCK_BACKWARD_KV) return CheckDq(*a);
  return a->joins ? Message("attention: joins is for backward_kv") : nullptr;
}
