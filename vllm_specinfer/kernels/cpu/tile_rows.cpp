// x W^T of any number of rows x by weights in tiles: as many rows as a tile has cost what
// one does, which is reading the weights in the order they lie in.
//
// Legend as in strips.cpp; K counts numbers here. The weights of a strip are two tiles for
// every 32 inputs: [K / 32, 2, 16, 16, 2].
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>

#include "tiles.cpp"
#include "vectors.cpp"

#ifdef SPECINFER_TILES
namespace tile_rows {

using namespace tiles;
using namespace vectors;
using BF16 = c10::BFloat16;

constexpr int64_t kOutputs = 2 * kSide;  // of a strip
constexpr int64_t kCached = 3 << 18;     // bytes of rows in the second cache
constexpr int64_t kUncached = 1 << 21;   // numbers of y that it does not hold

struct Product {
  const BF16 *x, *w;  // [M, K], [strips, K, kOutputs]
  const float* bias;  // [strips * kOutputs] or null
  BF16* y;            // [M, N]
  int64_t m, n, k;    // k a multiple of kDepth
};

// 16 or 32 rows by a strip, into sums [rows, kOutputs].
template <bool two>
void multiply(const Product& p, const BF16* x, const BF16* w, float* sums) {
  const BF16* below = x + kSide * p.k;
  const int64_t row = p.k * sizeof *x, line = kOutputs * sizeof *sums;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < p.k; k += kDepth, w += kDepth * kOutputs) {
    // Whichever is used again soon stays in the first cache: the weights of many rows.
    if constexpr (two) {
      _tile_stream_loadd(4, x + k, row);
      _tile_stream_loadd(5, below + k, row);
    } else {
      _tile_loadd(4, x + k, row);
    }
    _tile_loadd(6, w, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (two) _tile_dpbf16ps(2, 5, 6);
    _tile_loadd(7, w + kDepth * kSide, 64);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (two) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, line);
  _tile_stored(1, sums + kSide, line);
  if constexpr (two) {
    _tile_stored(2, sums + kSide * kOutputs, line);
    _tile_stored(3, sums + kSide * kOutputs + kSide, line);
  }
}

// Sums of some rows and of a strip, where they belong: whole lines of the cache, and not
// through it where what follows would not find them there.
inline void put(const Product& p, const float* sums, int64_t row, int rows,
                int64_t output) {
  const bool lines = p.n % kOutputs == 0 && (uintptr_t)p.y % 64 == 0;
  const bool uncached = lines && p.m * p.n > kUncached;
  Vec bias[2] = {};
  for (int i = 0; p.bias && i < 2; ++i) bias[i] = load(p.bias + output + i * kSide);
  for (int r = 0; r < rows; ++r, sums += kOutputs) {
    BF16* y = p.y + (row + r) * p.n + output;
    const auto line = (__m512i)_mm512_cvtne2ps_pbh(
        (__m512)(load(sums + kSide) + bias[1]), (__m512)(load(sums) + bias[0]));
    if (uncached)
      _mm512_stream_si512((__m512i*)y, line);
    else if (output + kOutputs <= p.n)
      _mm512_storeu_si512(y, line);
    else
      _mm512_mask_storeu_epi16(y, (1u << (p.n - output)) - 1, line);
  }
}

inline void run(const Product& p) {
  const int64_t strips = (p.n + kOutputs - 1) / kOutputs;
  const int64_t row_bytes = p.k * sizeof(BF16);
  const int64_t chunk = std::max(kOutputs, kCached / row_bytes / kOutputs * kOutputs);
  // The last rows, with zeros behind them.
  const int64_t whole = p.m / kSide * kSide;
  std::unique_ptr<BF16[]> last;
  if (whole < p.m) {
    last = std::make_unique<BF16[]>(kSide * p.k);
    std::memcpy(last.get(), p.x + whole * p.k, (p.m - whole) * row_bytes);
  }
  at::parallel_for(0, strips, 1, [&](int64_t begin, int64_t end) {
    configure();
    alignas(64) float sums[2 * kSide * kOutputs];
    for (int64_t first = 0; first < p.m; first += chunk)
      for (int64_t s = begin; s < end; ++s) {
        const BF16* w = p.w + s * kOutputs * p.k;
        const int64_t behind = std::min(p.m, first + chunk);
        for (int64_t row = first, rows; row < behind; row += rows) {
          const BF16* x = p.x + row * p.k;
          if (row + 2 * kSide <= std::min(behind, whole)) {
            rows = 2 * kSide;
            multiply<true>(p, x, w, sums);
          } else {
            rows = std::min<int64_t>(kSide, behind - row);
            multiply<false>(p, row < whole ? x : last.get(), w, sums);
          }
          put(p, sums, row, rows, s * kOutputs);
        }
      }
    _mm_sfence();
  });
}

}  // namespace tile_rows
#endif
