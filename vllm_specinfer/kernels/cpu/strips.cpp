// x W^T + bias of any number of rows x: a vector holds the weights of one input for as
// many outputs as it has lanes, so that no sum runs across it, and the weights lie in the
// order they are read in. What becomes of a row does not depend on the others.
//
// Legend: M rows, N outputs, K inputs. x [M, K], y [M, N]. W is in strips of S = kOutputs,
// [strips, K, S], with zeros behind the last output; of bfloat16 an output's weights come
// in pairs, [strips, K / 2, S, 2]. x is float32, so that W is converted, or bfloat16 where
// the CPU multiplies pairs, and K counts those.
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include <ATen/Parallel.h>

#include "vectors.cpp"

namespace strips {

using namespace vectors;

constexpr int kVectors = 2;
constexpr int kOutputs = kVectors * kLanes;     // of a strip
constexpr int kMostRows = 3 * kRegisters / 8;   // of a tile: 3 / 4 of registers are sums
constexpr int kAhead = 6144;                    // bytes to the weights that are fetched
// Of a strip that stays cached between its tiles, the next one beside it; with more tiles
// reading it takes hardly any of the time.
constexpr int64_t kCached = 1 << 18;            // bytes
constexpr int64_t kFewTiles = 8;
constexpr int64_t kLeastRows = 2 * kMostRows;   // that a thread takes for itself
constexpr int64_t kTasks = 4;                   // of a thread, or some finish early

template <class TX, class TW, class TY>
struct Product {
  using X = TX;
  using W = TW;
  using Y = TY;
  const X* x;
  const W* w;
  const float* bias;  // [strips * kOutputs] or null
  Y* y;
  int64_t m, n, k;
};

template <class W>
constexpr int kInputs = std::is_same_v<W, c10::BFloat16> ? 2 : 1;  // that lie together
template <class W>
constexpr int64_t kLine = kInputs<W> * kOutputs * sizeof(W);  // bytes of theirs

// The weights that one of these inputs has for as many outputs as a vector has lanes.
template <class W>
Vec load_input(const W* w, int) {
  return load(w);
}
inline Vec load_input(const c10::BFloat16* w, int input) {
  Vec both[2];
  load_pairs(w, both[0], both[1]);
  return both[input];
}

// What a tile fetches: from `at`, `step` bytes on with every line of its own weights;
// `once` where no other tile reads it, so that it takes no room in the outer caches from
// what the host's work and the SSMs' passes find there after the target's.
struct Fetch {
  const char* at;
  int64_t step;
  bool once;
};

// `R` rows from `row` on by a strip.
template <int R, class P>
void tile(const P& p, int64_t row, int64_t strip, Fetch fetch) {
  using W = P::W;
  constexpr int T = kInputs<W>;
  const auto* x = p.x + row * p.k;
  const auto* w = p.w + strip * kOutputs * p.k;
  const int64_t output = strip * kOutputs;
  Vec sums[R][kVectors] = {};
  for (int v = 0; p.bias && v < kVectors; ++v)
    for (int r = 0; r < R; ++r) sums[r][v] = load(p.bias + output + v * kLanes);
  for (int64_t k = 0; k < p.k; k += T, w += T * kOutputs, fetch.at += fetch.step) {
    for (int i = 0; i < kLine<W>; i += 64)
      fetch.once ? __builtin_prefetch(fetch.at + i, 0, 0)
                 : __builtin_prefetch(fetch.at + i);
#pragma GCC unroll 2
    for (int t = 0; t < T; ++t) {
      Vec weights[kVectors];
      for (int v = 0; v < kVectors; ++v) weights[v] = load_input(w + v * T * kLanes, t);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const Vec value = splat(x[r * p.k + k + t]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
          add_product(sums[r][v], value, weights[v], typename P::X());
      }
      asm("" : "+r"(w));  // the next input's weights wait: registers are sums
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) {
      const int64_t first = output + v * kLanes;
      auto* y = p.y + (row + r) * p.n + first;
      if (first + kLanes <= p.n)
        store(y, sums[r][v]);
      else
        for (int i = 0; i < p.n - first; ++i) y[i] = typename P::Y(sums[r][v][i]);
    }
}

template <class P, int... R>
void tile(const P& p, int rows, int64_t row, int64_t strip, Fetch fetch,
          std::integer_sequence<int, R...>) {
  ((rows == R + 1 ? tile<R + 1>(p, row, strip, fetch) : void()), ...);
}

// Rows from `row` to `end` by a strip, in tiles of as equal numbers as there can be. All
// but the first find it in the cache, so that all fetch what the next strip's will read.
template <class P>
void tiles_of(const P& p, int64_t row, int64_t end, int64_t strip) {
  using W = P::W;
  const int64_t tiles = (end - row + kMostRows - 1) / kMostRows;
  const int64_t bytes = kOutputs * p.k * sizeof(W);
  const auto* weights = (const char*)p.w + strip * bytes;
  const bool whole = tiles > 1 && tiles <= kFewTiles && bytes <= kCached;
  for (int64_t t = 0; t < tiles; ++t) {
    const int rows = (end - row) / (tiles - t);
    const Fetch fetch = whole
        ? Fetch{weights + bytes + t * bytes / tiles, kLine<W> / tiles, false}
        : Fetch{weights + kAhead, kLine<W>, tiles == 1};
    tile(p, rows, row, strip, fetch, std::make_integer_sequence<int, kMostRows>());
    row += rows;
  }
}

template <class P>
void run(const P& p) {
  const int64_t strips = (p.n + kOutputs - 1) / kOutputs;
  const int64_t blocks = std::clamp<int64_t>(kTasks * at::get_num_threads() / strips, 1,
                                             1 + p.m / kLeastRows);
  at::parallel_for(0, blocks * strips, 1, [&](int64_t task, int64_t end) {
    for (; task < end; ++task) {
      const int64_t block = task / strips;
      tiles_of(p, p.m * block / blocks, p.m * (block + 1) / blocks, task % strips);
    }
  });
}

}  // namespace strips
