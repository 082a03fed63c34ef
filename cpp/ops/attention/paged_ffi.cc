// paged attention, the middle floor: decode the buffers and attributes of one XLA call into a
// kvblock_paged_attention, check that every buffer has the size that the call implies and that no
// key leaves its array, and hand it to the launcher.
//
// Operands: q, block_tables, kv_lens, then those of Optional that `present` names, then the arrays
// of the cache: one, one for each layer, or with `pair` keys and values. Results: o, lse and a
// workspace. Mirrors jax_kvblock/paged/cuda.py.
#include "ops/attention/paged_ffi.h"

#include <cstdint>
#include <string>
#include <vector>

#include "kvblock/paged_attention.h"
#include "ops/attention/ffi_reader.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace kvblock {

// The attributes of a call; offsets and strides in bytes.
struct PagedAttributes {
  int64_t present, pair, num_kv_heads, value_dim, num_blocks, block_size, num_layers;
  int64_t window_left, window_right, layer_stride, scale_layer, split_size, values_in_keys;
  int64_t narrow_queries;
  int64_t k_offset, k_block, k_token, k_head, v_offset, v_block, v_token, v_head;
  float scale, softcap;
};

}  // namespace kvblock

// Their names, in the order of the struct.
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    kvblock::PagedAttributes, StructMember<int64_t>("present"), StructMember<int64_t>("pair"),
    StructMember<int64_t>("num_kv_heads"), StructMember<int64_t>("value_dim"),
    StructMember<int64_t>("num_blocks"), StructMember<int64_t>("block_size"),
    StructMember<int64_t>("num_layers"), StructMember<int64_t>("window_left"),
    StructMember<int64_t>("window_right"), StructMember<int64_t>("layer_stride"),
    StructMember<int64_t>("scale_layer"), StructMember<int64_t>("split_size"),
    StructMember<int64_t>("values_in_keys"), StructMember<int64_t>("narrow_queries"),
    StructMember<int64_t>("k_offset"), StructMember<int64_t>("k_block"),
    StructMember<int64_t>("k_token"), StructMember<int64_t>("k_head"),
    StructMember<int64_t>("v_offset"), StructMember<int64_t>("v_block"),
    StructMember<int64_t>("v_token"), StructMember<int64_t>("v_head"), StructMember<float>("scale"),
    StructMember<float>("softcap"));

namespace {

using Attributes = kvblock::PagedAttributes;
using kvblock::Reader;
constexpr char kCall[] = "kvblock_paged_attention";

enum Optional {
  kQueryStart,
  kQLens,
  kLayer,
  kSinks,
  kRanges,
  kTreeMask,
  kKScale,
  kVScale,
  kTableFirst,
  kNumOptional
};

bool Has(const Attributes& attributes, Optional which) {
  return ((attributes.present >> which) & 1) != 0;
}

void DecodeSequences(Reader* in, const Attributes& attributes, kvblock_paged_attention* a) {
  const ffi::AnyBuffer q = in->Operand("q"), tables = in->Operand("block_tables");
  const ffi::AnyBuffer lens = in->Operand("kv_lens");
  const auto dims = q.dimensions(), table_dims = tables.dimensions(), len_dims = lens.dimensions();
  const bool flat = Has(attributes, kTableFirst);
  if (dims.size() != 4 || table_dims.size() != (flat ? 1 : 2) || len_dims.size() != 1 ||
      tables.element_type() != ffi::DataType::S32 || lens.element_type() != ffi::DataType::S32 ||
      (!flat && table_dims[0] != len_dims[0])) {
    return in->Fail("q has rank 4, kv_lens is int32 [B], and block_tables is int32 [B, W], or [W]");
  }
  const ffi::DataType type = q.element_type();
  if (type != ffi::DataType::BF16 && type != ffi::DataType::F16) {
    return in->Fail("q is bfloat16 or float16");
  }
  a->dtype = type == ffi::DataType::BF16 ? KVBLOCK_BF16 : KVBLOCK_F16;
  const int64_t calls = dims[0], members = len_dims[0], width = table_dims.back();
  if (calls < 1 || calls > INT32_MAX || members > INT32_MAX || members % calls != 0 ||
      width > INT32_MAX || dims[2] > INT32_MAX || dims[3] > INT32_MAX) {
    return in->Fail("kv_lens has entries for each call of q, and sizes are int32");
  }
  a->calls = static_cast<int32_t>(calls);
  a->sequences = static_cast<int32_t>(members / calls);
  a->rows = dims[1];
  a->num_heads = static_cast<int32_t>(dims[2]);
  a->head_dim = static_cast<int32_t>(dims[3]);
  a->table_width = static_cast<int32_t>(width);
  a->q = q.untyped_data();
  a->block_tables = static_cast<const int32_t*>(tables.untyped_data());
  const auto ints = [&](const char* name, std::initializer_list<int64_t> shape) {
    return static_cast<const int32_t*>(in->Operand(name, ffi::DataType::S32, shape));
  };
  a->kv_lens = static_cast<const int32_t*>(lens.untyped_data());
  if (Has(attributes, kQueryStart)) {
    a->query_start = ints("query_start", {calls, a->sequences + int64_t{1}});
  }
  if (Has(attributes, kQLens)) a->q_lens = ints("q_lens", {calls});
  if (Has(attributes, kLayer)) {
    const ffi::AnyBuffer layer = in->Operand("layer");
    if (layer.element_type() != ffi::DataType::S32 || layer.dimensions().size() != 1) {
      return in->Fail("layer is int32 [1] or [C]");
    }
    a->layer = static_cast<const int32_t*>(layer.untyped_data());
    a->layer_batch = static_cast<int32_t>(layer.element_count());
  }
  if (Has(attributes, kSinks)) {
    const ffi::AnyBuffer sinks = in->Operand("sinks");
    const auto sink_dims = sinks.dimensions();
    if (sink_dims.size() != 2 || sink_dims[1] != a->num_heads ||
        sinks.element_type() != ffi::DataType::F32) {
      return in->Fail("sinks are float32 [batch, N]");
    }
    a->sinks = static_cast<const float*>(sinks.untyped_data());
    a->sink_batch = static_cast<int32_t>(sink_dims[0]);
  }
  if (Has(attributes, kRanges)) a->ranges = ints("ranges", {calls, a->rows, 2});
  if (Has(attributes, kTreeMask)) {
    const ffi::AnyBuffer bits = in->Operand("tree_mask");
    const auto bit_dims = bits.dimensions();
    if (bit_dims.size() != 3 || bit_dims[0] != calls || bit_dims[1] != a->rows || bit_dims[2] < 1 ||
        bit_dims[2] > INT32_MAX || bits.element_type() != ffi::DataType::S32) {
      return in->Fail("tree_mask is int32 [C, R, W]");
    }
    a->tree_mask = static_cast<const uint32_t*>(bits.untyped_data());
    a->tree_words = static_cast<int32_t>(bit_dims[2]);
  }
}

// A scale of all, or of each KV head; of each token and head of a layer; or those of all layers, of
// which the static one, if the layer is, comes first.
kvblock_scales DecodeScales(Reader* in, const Attributes& attributes, const char* name) {
  kvblock_scales scales{};
  const ffi::AnyBuffer buffer = in->Operand(name);
  const auto dims = buffer.dimensions();
  if (buffer.element_type() != ffi::DataType::F32) {
    in->Fail(std::string(name) + " is float32");
    return scales;
  }
  scales.data = static_cast<const float*>(buffer.untyped_data());
  const int64_t heads = attributes.num_kv_heads;
  if (dims.size() == 1 && (dims[0] == 1 || dims[0] == heads)) {
    scales.head = dims[0] == heads && heads > 1 ? 1 : 0;
    return scales;
  }
  const size_t lead = dims.size() == 4 ? 1 : 0;
  if (dims.size() != 3 + lead || dims[lead] != attributes.num_blocks ||
      dims[lead + 1] != attributes.block_size || dims[lead + 2] != heads) {
    in->Fail(std::string(name) + " is [1], [K], [P, T, K] or [L, P, T, K]");
    return scales;
  }
  scales.each = 1;
  scales.head = 1;
  scales.token = static_cast<int32_t>(heads);
  scales.block = attributes.block_size * heads;
  if (lead == 1) {
    const bool traced = Has(attributes, kLayer);
    const int64_t first = traced ? 0 : attributes.scale_layer;
    const int64_t last = traced ? attributes.num_layers - 1 : first;
    if (first < 0 || last >= dims[0]) in->Fail(std::string(name) + " has each layer");
    scales.layer = attributes.num_blocks * scales.block;
    scales.data += first * scales.layer;
  }
  return scales;
}

// Where the last byte of some rows ends; -1 where that is no number.
int64_t EndOf(const kvblock_paged_attention& a, const kvblock_page_strides& strides, int64_t offset,
              int64_t layers, int64_t row_bytes) {
  int64_t end = offset;
  const auto add = [&](int64_t count, int64_t stride) {
    int64_t bytes;
    const bool wrong = stride < 0 || __builtin_mul_overflow(count - 1, stride, &bytes) ||
                       __builtin_add_overflow(end, bytes, &end);
    return !wrong;
  };
  const bool fits = offset >= 0 && add(layers, a.layer_stride) &&
                    add(a.num_blocks, strides.block) && add(a.block_size, strides.token) &&
                    add(a.num_kv_heads, strides.head);
  return fits ? end + row_bytes : -1;
}

// The arrays of keys and of values, with the addresses that `a` points to.
void DecodePages(Reader* in, const Attributes& attributes, size_t arrays,
                 kvblock_paged_attention* a, std::vector<const void*>* k,
                 std::vector<const void*>* v) {
  a->num_kv_heads = static_cast<int32_t>(attributes.num_kv_heads);
  a->value_dim = static_cast<int32_t>(attributes.value_dim);
  a->num_blocks = attributes.num_blocks;
  a->block_size = static_cast<int32_t>(attributes.block_size);
  a->num_layers = static_cast<int32_t>(attributes.num_layers);
  a->layer_stride = attributes.layer_stride;
  a->values_in_keys = attributes.values_in_keys != 0;
  a->narrow_queries = attributes.narrow_queries != 0;
  a->k_strides = {attributes.k_block, attributes.k_token, attributes.k_head};
  a->v_strides = {attributes.v_block, attributes.v_token, attributes.v_head};
  for (const int64_t size : {attributes.num_kv_heads, attributes.num_blocks, attributes.block_size,
                             attributes.num_layers}) {
    if (size < 1 || size > INT32_MAX) return in->Fail("the cache's sizes are positive int32");
  }
  const bool pair = attributes.pair != 0;
  if (arrays < 1 || (pair && arrays != 2)) return in->Fail("the cache has arrays");
  const int64_t layers = arrays == 1 ? attributes.num_layers : 1;
  const ffi::DataType type = a->dtype == KVBLOCK_BF16 ? ffi::DataType::BF16 : ffi::DataType::F16;
  for (size_t i = 0; i < arrays; ++i) {
    const ffi::AnyBuffer array = in->Operand("pages");
    if (in->failed()) return;
    const ffi::DataType of = array.element_type();
    const int32_t stored = of == type                      ? a->dtype
                           : of == ffi::DataType::F8E4M3FN ? KVBLOCK_E4M3
                           : of == ffi::DataType::F8E5M2   ? KVBLOCK_E5M2
                           : of == ffi::DataType::S8       ? KVBLOCK_I8
                                                           : -1;
    if (stored < 0 || (i > 0 && stored != a->cache_dtype)) {
      return in->Fail("the cache has q's dtype, or one of 8 bits");
    }
    a->cache_dtype = stored;
    const auto* base = static_cast<const char*>(array.untyped_data());
    const auto take = [&](std::vector<const void*>* to, const kvblock_page_strides& strides,
                          int64_t offset, int64_t dim) {
      const int64_t end = EndOf(*a, strides, offset, layers, dim * (stored == a->dtype ? 2 : 1));
      if (end < 0 || end > static_cast<int64_t>(array.size_bytes())) {
        return in->Fail("strides lead out of an array of the cache");
      }
      to->push_back(base + offset);
    };
    if (!pair || i == 0) take(k, a->k_strides, attributes.k_offset, a->head_dim);
    if (a->values_in_keys) continue;
    if (!pair || i == 1) take(v, a->v_strides, attributes.v_offset, a->value_dim);
  }
  a->num_arrays = static_cast<int32_t>(k->size());
  a->k = k->data();
  a->v = v->data();
}

ffi::Error Forward(void* stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   const Attributes& attributes) {
  Reader in(args, rets, kCall);
  kvblock_paged_attention a{};
  std::vector<const void*> k, v;
  a.scale = attributes.scale;
  a.softcap = attributes.softcap;
  for (int64_t side : {attributes.window_left, attributes.window_right}) {
    if (side < -1 || side > INT32_MAX) in.Fail("a window's side is an int32, -1 where it is open");
  }
  a.window_left = static_cast<int32_t>(attributes.window_left);
  a.window_right = static_cast<int32_t>(attributes.window_right);
  if (attributes.split_size < 0 || attributes.split_size > INT32_MAX) {
    in.Fail("split_size is an int32 that is not negative");
  }
  a.split_size = static_cast<int32_t>(attributes.split_size);
  if (attributes.present >> kNumOptional) in.Fail("unknown operands");
  DecodeSequences(&in, attributes, &a);
  if (!in.failed() && Has(attributes, kKScale))
    a.k_scale = DecodeScales(&in, attributes, "k_scale");
  if (!in.failed() && Has(attributes, kVScale))
    a.v_scale = DecodeScales(&in, attributes, "v_scale");
  if (!in.failed() && Has(attributes, kTableFirst)) {
    a.table_first = static_cast<const int32_t*>(
        in.Operand("table_first", ffi::DataType::S32, {int64_t{a.calls} * a.sequences}));
  }
  if (!in.failed()) DecodePages(&in, attributes, in.operands_left(), &a, &k, &v);
  if (!in.failed()) {
    const auto type = a.dtype == KVBLOCK_BF16 ? ffi::DataType::BF16 : ffi::DataType::F16;
    a.o = in.Result("o", type, {a.calls, a.rows, a.num_heads, a.value_dim});
    a.lse =
        static_cast<float*>(in.Result("lse", ffi::DataType::F32, {a.calls, a.rows, a.num_heads}));
    const int64_t bytes = kvblock_paged_attention_workspace(&a);
    a.workspace = in.Result("workspace", ffi::DataType::U8, {bytes});
  }
  if (ffi::Error error = in.Finish(); error.failure()) return error;
  const char* const message = kvblock_paged_attention_forward(&a, stream);
  if (message == nullptr) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(std::string(kCall) + ": " + message);
}

}  // namespace

int64_t PagedAttentionWorkspace(int32_t calls, int32_t sequences, int64_t rows, int32_t num_heads,
                                int32_t num_kv_heads, int32_t value_dim, bool narrow,
                                int32_t split_size, int32_t table_width, int32_t block_size,
                                int32_t head_dim, bool narrow_queries) {
  kvblock_paged_attention a{};
  a.calls = calls;
  a.sequences = sequences;
  a.rows = rows;
  a.num_heads = num_heads;
  a.num_kv_heads = num_kv_heads;
  a.value_dim = value_dim;
  a.cache_dtype = narrow ? KVBLOCK_E4M3 : KVBLOCK_BF16;
  a.split_size = split_size;
  a.table_width = table_width;
  a.block_size = block_size;
  a.head_dim = head_dim;
  a.narrow_queries = narrow_queries;
  return kvblock_paged_attention_workspace(&a);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(KvblockPagedAttention, Forward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<Attributes>(),
                              {ffi::Traits::kCmdBufferCompatible});
