// Pages of vLLM's CPU cache. That of a (block, head) holds K as [D, block_size], then V
// as [block_size, D], row by row or in tiles (tree_attention.cpp).
#pragma once
#include <cstdint>

namespace pages {

constexpr int64_t kTile = 16;  // columns of a tile

struct Cache {
  char* data;
  int64_t block_bytes, head_bytes;  // strides
  int num_heads, head_size, block_size, item_bytes;
  bool in_tiles;

  template <class T>
  T* page(int64_t block, int head) const {
    return reinterpret_cast<T*>(data + block * block_bytes + head * head_bytes);
  }
  // Where a page has item d of the K or of the V at this position.
  int64_t key(int64_t d, int64_t p) const {
    if (!in_tiles) return d * block_size + p;
    return p / kTile * kTile * head_size + d / 2 * 2 * kTile + p % kTile * 2 + d % 2;
  }
  int64_t value(int64_t d, int64_t p) const {
    const int64_t begin = (int64_t)block_size * head_size;
    if (!in_tiles) return begin + p * head_size + d;
    return begin + d / kTile * kTile * block_size + p / 2 * 2 * kTile + d % kTile * 2 +
           p % 2;
  }
};

}  // namespace pages
