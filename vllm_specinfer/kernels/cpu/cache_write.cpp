// Write K and V of a few tokens into the cache.
#pragma once
#include <cstdint>

#include "pages.cpp"

namespace cache_write {

// K or V [T, Hkv, D], dense in D.
template <class T>
struct Rows {
  const T* data;
  int64_t row, head;  // strides
};

// Row i goes to slot i; a negative one is padding.
template <class T>
void run(const pages::Cache& cache, Rows<T> key, Rows<T> value, const int64_t* slots,
         int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (slots[i] < 0) continue;
    const int64_t block = slots[i] / cache.block_size, p = slots[i] % cache.block_size;
    for (int head = 0; head < cache.num_heads; ++head) {
      T* page = cache.page<T>(block, head);
      const T* k = key.data + i * key.row + head * key.head;
      const T* v = value.data + i * value.row + head * value.head;
      for (int64_t d = 0; d < cache.head_size; ++d) page[cache.key(d, p)] = k[d];
      for (int64_t d = 0; d < cache.head_size; ++d) page[cache.value(d, p)] = v[d];
    }
  }
}

}  // namespace cache_write
