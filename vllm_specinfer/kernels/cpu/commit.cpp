// Move the K/V of accepted tree nodes to the slots of the committed sequence.
//
// A (block, head) page holds K as [D, block_size], then V as [block_size, D].
#include <omp.h>

#include <cstdint>
#include <cstring>
#include <vector>

namespace commit {

struct Cache {
  char* data;
  int64_t block_bytes, head_bytes;  // strides
  int num_heads, head_size, block_size, item_bytes;
};

struct Move {
  int64_t src_block, src_offset, dst_block, dst_offset;
};

// All sources of a K row (or of V) are read before one is written: moves overlap.
template <class T>
void move_head(const Cache& cache, int head, const std::vector<Move>& moves, T* stash) {
  const int64_t D = cache.head_size, size = cache.block_size;
  auto page = [&](int64_t block) {
    return reinterpret_cast<T*>(cache.data + block * cache.block_bytes +
                                head * cache.head_bytes);
  };
  for (int64_t d = 0; d < D; ++d) {
    T* out = stash;
    for (const Move& m : moves) *out++ = page(m.src_block)[d * size + m.src_offset];
    out = stash;
    for (const Move& m : moves) page(m.dst_block)[d * size + m.dst_offset] = *out++;
  }
  T* out = stash;
  for (const Move& m : moves) {
    std::memcpy(out, page(m.src_block) + (size + m.src_offset) * D, D * sizeof(T));
    out += D;
  }
  out = stash;
  for (const Move& m : moves) {
    std::memcpy(page(m.dst_block) + (size + m.dst_offset) * D, out, D * sizeof(T));
    out += D;
  }
}

inline void run(const std::vector<Cache>& caches, const std::vector<Move>& moves) {
  constexpr int64_t kSerialElements = 1 << 14;
  int64_t elements = 0, max_head_size = 0;
  for (const Cache& cache : caches) {
    elements += (int64_t)cache.num_heads * cache.head_size * moves.size() * 2;
    if (cache.head_size > max_head_size) max_head_size = cache.head_size;
  }
#pragma omp parallel if (elements > kSerialElements)
  {
    std::vector<uint32_t> stash(moves.size() * max_head_size);
#pragma omp for schedule(static)
    for (size_t i = 0; i < caches.size(); ++i)
      for (int head = 0; head < caches[i].num_heads; ++head) {
        if (caches[i].item_bytes == 1)
          move_head(caches[i], head, moves, reinterpret_cast<uint8_t*>(stash.data()));
        else if (caches[i].item_bytes == 2)
          move_head(caches[i], head, moves, reinterpret_cast<uint16_t*>(stash.data()));
        else
          move_head(caches[i], head, moves, stash.data());
      }
  }
}

}  // namespace commit
