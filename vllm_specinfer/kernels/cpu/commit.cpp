// Move the K/V of accepted tree nodes to the slots of the committed sequence.
#include <cstdint>
#include <vector>

#include "pages.cpp"

namespace commit {

using pages::Cache;

struct Move {
  int64_t src_block, src_offset, dst_block, dst_offset;
};

// All sources are read before one is written: moves overlap.
template <class T>
void move_head(const Cache& cache, int head, const std::vector<Move>& moves, T* stash) {
  auto page = [&](int64_t block) { return cache.page<T>(block, head); };
  for (int64_t d = 0; d < cache.head_size; ++d) {
    T* out = stash;
    for (const Move& m : moves) {
      *out++ = page(m.src_block)[cache.key(d, m.src_offset)];
      *out++ = page(m.src_block)[cache.value(d, m.src_offset)];
    }
    out = stash;
    for (const Move& m : moves) {
      page(m.dst_block)[cache.key(d, m.dst_offset)] = *out++;
      page(m.dst_block)[cache.value(d, m.dst_offset)] = *out++;
    }
  }
}

inline void run(const std::vector<Cache>& caches, const std::vector<Move>& moves) {
  constexpr int64_t kSerialElements = 1 << 14;
  int64_t elements = 0;
  for (const Cache& cache : caches)
    elements += (int64_t)cache.num_heads * cache.head_size * moves.size() * 2;
#pragma omp parallel if (elements > kSerialElements)
  {
    std::vector<uint32_t> stash(moves.size() * 2);
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
