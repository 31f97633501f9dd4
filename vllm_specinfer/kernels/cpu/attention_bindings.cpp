// Attention, K/V writes and commits on tensors: checks them, takes their pointers and
// strides, runs the kernels.
#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <unordered_set>

#include "cache_write.cpp"
#include "commit.cpp"
#include "tree_attention.cpp"

namespace attention {

using at::Tensor;

void tree_attention(const Tensor& query, const Tensor& kv_cache, const Tensor& out,
                    const Tensor& block_table, const Tensor& query_start_loc,
                    const Tensor& seq_lens, const Tensor& is_tree,
                    const Tensor& context_lens, const Tensor& ancestor_bits,
                    double scale, double softcap, const std::optional<Tensor>& sinks,
                    double k_scale, double v_scale, int64_t window, bool in_tiles) {
  const int64_t R = is_tree.size(0), D = query.size(2);
  const auto type = query.scalar_type();
  for (const Tensor* t : {&block_table, &query_start_loc, &seq_lens, &context_lens})
    TORCH_CHECK(t->scalar_type() == at::kInt && t->stride(-1) == 1,
                "index tensors must be contiguous int32; got ", t->scalar_type());
  TORCH_CHECK(ancestor_bits.scalar_type() == at::kLong && ancestor_bits.dim() == 2 &&
                  ancestor_bits.stride(1) == 1 &&
                  ancestor_bits.size(0) <= query.size(0),
              "ancestor_bits must be int64 [T, W] with T <= ", query.size(0));
  TORCH_CHECK(is_tree.scalar_type() == at::kBool && is_tree.is_contiguous(),
              "is_tree must be contiguous bool; got ", is_tree.scalar_type());
  TORCH_CHECK(query_start_loc.size(0) > R && seq_lens.size(0) >= R &&
                  context_lens.size(0) >= R && block_table.size(0) >= R,
              "every request tensor must have a row for each of ", R, " requests");
  const auto* starts = query_start_loc.const_data_ptr<int32_t>();
  for (int64_t r = 0; r < R; ++r) {
    if (!is_tree.const_data_ptr<bool>()[r] || starts[r] == starts[r + 1]) continue;
    const int length = seq_lens.const_data_ptr<int32_t>()[r];
    TORCH_CHECK(starts[r + 1] <= ancestor_bits.size(0) &&
                    length <= block_table.size(1) * kv_cache.size(2),
                "a tree's rows must end before ", ancestor_bits.size(0),
                " and its blocks hold ", length, " positions; got ", starts[r + 1],
                " and ", block_table.size(1), " blocks");
  }
  TORCH_CHECK(kv_cache.dim() == 4 && kv_cache.size(3) == 2 * D &&
                  kv_cache.stride(3) == 1 && kv_cache.stride(2) == 2 * D &&
                  kv_cache.size(2) % 16 == 0 && D % 16 == 0,
              "kv_cache must be [B, Hkv, bs, 2 * ", D, "] with whole pages; got ",
              kv_cache.sizes());
  const auto cache_type = kv_cache.scalar_type();
  TORCH_CHECK(out.scalar_type() == type && (cache_type == type ||
                                            cache_type == at::kFloat8_e4m3fn ||
                                            cache_type == at::kFloat8_e5m2),
              "out must be ", type, ", kv_cache that or fp8; got ", out.scalar_type(),
              " and ", cache_type);
  TORCH_CHECK(query.stride(2) == 1 && out.dim() == 3 && out.stride(2) == 1 &&
                  out.sizes() == query.sizes(),
              "query and out must be [T, H, D] with dense heads");
  TORCH_CHECK(query.size(1) % kv_cache.size(1) == 0, "query heads must be a multiple",
              " of ", kv_cache.size(1), "; got ", query.size(1));
  TORCH_CHECK(!sinks || sinks->numel() == query.size(1), "sinks must be [",
              query.size(1), "]; got ", sinks ? sinks->numel() : 0);
  const auto float_sinks = sinks ? sinks->to(at::kFloat).contiguous() : Tensor();
  TORCH_CHECK(window == 0 || window >= 64 * ancestor_bits.size(1),
              "window must be 0 or at least ", 64 * ancestor_bits.size(1), "; got ",
              window);
  const tree::Batch batch{
      block_table.const_data_ptr<int32_t>(), query_start_loc.const_data_ptr<int32_t>(),
      seq_lens.const_data_ptr<int32_t>(), context_lens.const_data_ptr<int32_t>(),
      is_tree.const_data_ptr<bool>(), block_table.stride(0), (int)R,
      (int)kv_cache.size(1), (int)(query.size(1) / kv_cache.size(1)), (int)D,
      (int)kv_cache.size(2), (int)window};
  auto run_on = [&]<template <class> class M, class T, class K>(T* output,
                                                                const K* cache) {
    tree::Step<T, K, M> step{
        batch, query.const_data_ptr<T>(), cache, output,
        ancestor_bits.const_data_ptr<int64_t>(),
        sinks ? float_sinks.const_data_ptr<float>() : nullptr, query.stride(0),
        query.stride(1), out.stride(0), out.stride(1), kv_cache.stride(0),
        kv_cache.stride(1), ancestor_bits.stride(0), (int)ancestor_bits.size(1),
        (float)(scale * k_scale), (float)softcap, (float)v_scale};
    tree::run(step);
  };
  auto run = [&]<class T, class K>(T* output, const K* cache) {
#ifdef __AVX512F__
    if constexpr (std::is_same_v<T, c10::BFloat16>)
      if (in_tiles) return run_on.template operator()<tree::Tiles>(output, cache);
#endif
    TORCH_CHECK(!in_tiles, "only queries of bfloat16 have K/V in tiles");
    run_on.template operator()<tree::Rows>(output, cache);
  };
  auto run_as = [&]<class T>(T* output) {
    if (cache_type == at::kFloat8_e4m3fn)
      run(output, kv_cache.const_data_ptr<c10::Float8_e4m3fn>());
    else if (cache_type == at::kFloat8_e5m2)
      run(output, kv_cache.const_data_ptr<c10::Float8_e5m2>());
    else
      run(output, kv_cache.const_data_ptr<T>());
  };
  switch (type) {
    case at::kFloat: return run_as(out.mutable_data_ptr<float>());
    case at::kBFloat16: return run_as(out.mutable_data_ptr<c10::BFloat16>());
    case at::kHalf: return run_as(out.mutable_data_ptr<c10::Half>());
    default: TORCH_CHECK(false, "query must be float32, bfloat16 or float16");
  }
}

static pages::Cache cache_of(const Tensor& t, bool in_tiles) {
  const int64_t item = t.element_size();
  TORCH_CHECK(t.dim() == 4 && t.stride(3) == 1 && t.stride(2) == t.size(3) &&
                  (item <= 2 || item == 4),
              "a kv_cache must be [B, Hkv, block_size, 2 * D] of 1, 2 or 4 byte items "
              "with whole pages; got ", t.sizes());
  return {(char*)t.data_ptr(), t.stride(0) * item, t.stride(1) * item,
          (int)t.size(1), (int)t.size(3) / 2, (int)t.size(2), (int)item, in_tiles};
}

void write_kv(const Tensor& key, const Tensor& value, const Tensor& kv_cache,
              const Tensor& slots, bool in_tiles) {
  const pages::Cache cache = cache_of(kv_cache, in_tiles);
  const int64_t count = std::min(slots.numel(), key.size(0));
  for (const Tensor* t : {&key, &value})
    TORCH_CHECK(t->dim() == 3 && t->size(0) >= count && t->size(1) == cache.num_heads &&
                    t->size(2) == cache.head_size && t->stride(2) == 1 &&
                    t->scalar_type() == kv_cache.scalar_type(),
                "key and value must be [T, ", cache.num_heads, ", ", cache.head_size,
                "] of the cache's type; got ", t->sizes(), " ", t->scalar_type());
  TORCH_CHECK(slots.scalar_type() == at::kLong && slots.is_contiguous(),
              "slots must be contiguous int64");
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  const int64_t num_slots = kv_cache.size(0) * cache.block_size;
  for (int64_t i = 0; i < count; ++i)
    TORCH_CHECK(slot[i] < num_slots, "slots must be below ", num_slots, "; got ", slot[i]);
  auto rows = [&]<class T>(const Tensor& t, T) {
    return cache_write::Rows<T>{(const T*)t.const_data_ptr(), t.stride(0), t.stride(1)};
  };
  auto run = [&](auto item) {
    cache_write::run(cache, rows(key, item), rows(value, item), slot, count);
  };
  switch (cache.item_bytes) {
    case 2: return run(uint16_t());
    case 4: return run(uint32_t());
    default: TORCH_CHECK(false, "items of a byte are vLLM's to round");
  }
}

static void commit_kv(const std::vector<Tensor>& kv_caches, const Tensor& src_slots,
                      const Tensor& dst_slots, int64_t block_size,
                      const std::vector<bool>& in_tiles) {
  TORCH_CHECK(src_slots.scalar_type() == at::kLong && src_slots.is_contiguous() &&
                  dst_slots.scalar_type() == at::kLong && dst_slots.is_contiguous() &&
                  src_slots.numel() == dst_slots.numel(),
              "src_slots and dst_slots must be contiguous int64 of one length");
  std::vector<commit::Move> moves;
  int64_t num_slots = INT64_MAX;
  for (const Tensor& cache : kv_caches)
    num_slots = std::min(num_slots, cache.size(0) * block_size);
  const int64_t *src = src_slots.const_data_ptr<int64_t>(),
                *dst = dst_slots.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < src_slots.numel(); ++i) {
    if (src[i] == dst[i] || src[i] < 0 || dst[i] < 0) continue;
    TORCH_CHECK(src[i] < num_slots && dst[i] < num_slots, "slots must be below ",
                num_slots, "; got ", src[i], " -> ", dst[i]);
    moves.push_back({src[i] / block_size, src[i] % block_size, dst[i] / block_size,
                     dst[i] % block_size});
  }
  if (moves.empty()) return;
  std::vector<pages::Cache> caches;
  std::unordered_set<const void*> seen;
  for (size_t i = 0; i < kv_caches.size(); ++i) {
    const Tensor& t = kv_caches[i];
    const pages::Cache cache = cache_of(t, in_tiles.at(i));
    TORCH_CHECK(cache.block_size == block_size, "a kv_cache must have blocks of ",
                block_size, "; got ", t.sizes());
    if (seen.insert(t.data_ptr()).second) caches.push_back(cache);
  }
  commit::run(caches, moves);
}

void define(pybind11::module_& m) {
  const pybind11::call_guard<pybind11::gil_scoped_release> without_gil;
  m.def("tree_attention", &tree_attention, without_gil);
  m.def("commit_kv", &commit_kv, without_gil);
  m.def("write_kv", &write_kv);
}

}  // namespace attention
