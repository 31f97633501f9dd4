// x W^T + bias of any number of rows x: a vector holds the weights of one input for as
// many outputs as it has lanes, so that no sum runs across it, and the weights lie in the
// order they are read in. What becomes of a row does not depend on the others.
//
// Legend: M rows, N outputs, K inputs. x [M, K], y [M, N]. W is in strips of 32 outputs,
// [strips, K, 32], with zeros behind the last one; of bfloat16 an output's weights come in
// pairs, [strips, K / 2, 32, 2]. x is float32, so that W is converted, or bfloat16 where
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

constexpr int kOutputs = 32;                    // of a strip
constexpr int kVectors = kOutputs / kLanes;
constexpr int kMostRows = 24 / kVectors;        // of a tile: 24 sums, 32 registers
constexpr int kAhead = 2048;                    // bytes of weights that are fetched
constexpr int64_t kLeastRows = 2 * kMostRows;   // that a thread takes for itself
constexpr int64_t kTasks = 4;                   // of a thread, or some finish early

template <class TX, class TW, class TY>
struct Product {
  using X = TX;
  using W = TW;
  using Y = TY;
  const X* x;
  const W* w;
  const float* bias;  // [strips * 32] or null
  Y* y;
  int64_t m, n, k;
};

// Weights of as many outputs as a vector has lanes, by inputs.
template <class W>
void load_inputs(const W* w, Vec (&inputs)[1]) {
  inputs[0] = load(w);
}
inline void load_inputs(const c10::BFloat16* w, Vec (&inputs)[2]) {
  load_pairs(w, inputs[0], inputs[1]);
}

// `R` rows from `row` on by `S` strips from `strip` on.
template <int R, int S, class P>
void tile(const P& p, int64_t row, int64_t strip) {
  using W = P::W;
  constexpr int V = S * kVectors;
  constexpr int T = std::is_same_v<W, c10::BFloat16> ? 2 : 1;  // inputs of a vector
  constexpr int kLine = 64 / sizeof(W);
  const auto* x = p.x + row * p.k;
  const auto* w = p.w + strip * kOutputs * p.k;
  const int64_t output = strip * kOutputs;
  Vec sums[R][V] = {};
  for (int v = 0; p.bias && v < V; ++v)
    for (int r = 0; r < R; ++r) sums[r][v] = load(p.bias + output + v * kLanes);
  for (int64_t k = 0; k < p.k; k += T, w += T * kOutputs) {
    Vec weights[V][T];
    for (int s = 0; s < S; ++s) {
      const auto* of_strip = w + s * kOutputs * p.k;
      for (int i = 0; i < T * kOutputs; i += kLine)
        __builtin_prefetch(of_strip + kAhead / sizeof(W) + i);
      for (int v = 0; v < kVectors; ++v)
        load_inputs(of_strip + v * T * kLanes, weights[s * kVectors + v]);
    }
#pragma GCC unroll 2
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const Vec value = splat(x[r * p.k + k + t]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v)
          add_product(sums[r][v], value, weights[v][t], typename P::X());
      }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) {
      const int64_t first = output + v * kLanes;
      auto* y = p.y + (row + r) * p.n + first;
      if (first + kLanes <= p.n)
        store(y, sums[r][v]);
      else
        for (int i = 0; i < p.n - first; ++i) y[i] = typename P::Y(sums[r][v][i]);
    }
}

template <int S, class P, int... R>
void tile(const P& p, int rows, int64_t row, int64_t strip,
          std::integer_sequence<int, R...>) {
  ((rows == R + 1 ? tile<R + 1, S>(p, row, strip) : void()), ...);
}

// Rows from `row` to `end` by `S` strips, in tiles of as equal numbers as there can be.
template <int S, class P>
void tiles_of(const P& p, int64_t row, int64_t end, int64_t strip) {
  constexpr int most = kMostRows / S;
  for (int64_t tiles = (end - row + most - 1) / most; tiles > 0; --tiles) {
    const int rows = (end - row) / tiles;
    tile<S>(p, rows, row, strip, std::make_integer_sequence<int, most>());
    row += rows;
  }
}

template <class P>
void run(const P& p) {
  const int64_t strips = (p.n + kOutputs - 1) / kOutputs;
  const int64_t blocks = std::clamp<int64_t>(kTasks * at::get_num_threads() / strips, 1,
                                             1 + p.m / kLeastRows);
  at::parallel_for(0, blocks * strips, 1, [&](int64_t task, int64_t end) {
    while (task < end) {
      const int64_t block = task / strips, strip = task % strips;
      const int64_t row = p.m * block / blocks, last = p.m * (block + 1) / blocks;
      // Of one strip, all rows may fit into a tile; two share what is read of x.
      if (last - row <= kMostRows || strip + 1 == strips || task + 1 == end) {
        tiles_of<1>(p, row, last, strip);
        task += 1;
      } else {
        tiles_of<2>(p, row, last, strip);
        task += 2;
      }
    }
  });
}

}  // namespace strips
