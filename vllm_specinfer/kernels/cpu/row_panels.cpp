// x W^T of tens to hundreds of rows x: a vector holds one input of many rows, so that no
// sum runs across it, and the weights are read as they lie.
//
// Legend as in product.cpp. The rows of a panel fill V vectors; it lies as
// [K, V * lanes].
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include <ATen/Parallel.h>

#include "product.cpp"
#include "vectors.cpp"

namespace row_panels {

using namespace vectors;
using product::Product;

constexpr int kMostVectors = 4;
template <int V>
constexpr int kTile = 24 / V;  // outputs, whose sums fit into registers with V loads
constexpr int kOutputs = 48;   // a multiple of every tile
constexpr int kChunk = 2;      // times as many outputs: weights in the second cache
constexpr int kInputs = 128;   // that are converted at a time

struct Panel {
  int64_t row;  // its first one
  int rows, vectors;
};

inline std::vector<Panel> panels_of(int64_t m) {
  const int64_t vectors = (m + kLanes - 1) / kLanes;
  const int64_t count = (vectors + kMostVectors - 1) / kMostVectors;
  std::vector<Panel> panels;
  for (int64_t i = 0, row = 0; i < count; ++i) {
    const int size = vectors / count + (i < vectors % count);
    const int rows = std::min<int64_t>(size * kLanes, m - row);
    panels.push_back({row, rows, size});
    row += rows;
  }
  return panels;
}

// The rows of a vector into its columns of the panel; what is no row is 0.
template <class X>
void fill(const X* x, int64_t k, const Panel& p, int vector, float* panel) {
  const int first = vector * kLanes, rows = std::min(kLanes, p.rows - first);
  const X* from = x + (p.row + first) * k;
  float block[kLanes * kLanes] = {};
  for (int64_t i = 0; i < k; i += kLanes) {
    for (int r = 0; r < rows; ++r) store(block + r * kLanes, load(from + r * k + i));
    transpose(block, kLanes, panel + (i * p.vectors + vector) * kLanes,
              p.vectors * kLanes);
  }
}

// `outs` outputs of a panel into sums [outs, V * lanes], while the weights behind them
// are fetched.
template <int V, int outs, class T, class X>
void tile(const Product<T, X>& p, const float* panel, int64_t output, float* sums) {
  const auto* w = p.w + output * p.k;
  Vec acc[outs][V];
  for (int j = 0; j < outs; ++j)
    for (int v = 0; v < V; ++v) acc[j][v] = splat(p.bias ? p.bias[output + j] : 0);
  for (int64_t k = 0; k < p.k; k += kInputs) {
    const int inputs = std::min<int64_t>(kInputs, p.k - k);
    const X* weights;
    int64_t stride = p.k;
    X converted[outs * kInputs];
    if constexpr (sizeof(*w) == sizeof(X)) {
      weights = w + k;
    } else {
      for (int j = 0; j < outs; ++j)
        for (int i = 0; i < inputs; i += kLanes)
          store(converted + j * kInputs + i, load(w + j * p.k + k + i));
      weights = converted;
      stride = kInputs;
    }
    for (int i = 0; i < inputs; ++i, panel += V * kLanes) {
      if (i % kLanes == 0)
#pragma GCC unroll 24
        for (int j = 0; j < outs; ++j)
          __builtin_prefetch(w + (outs + j) * p.k + k + i, 0, 2);
      Vec values[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) values[v] = load(panel + v * kLanes);
#pragma GCC unroll 24
      for (int j = 0; j < outs; ++j) {
        const Vec weight = splat(weights[j * stride + i]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) add_product(acc[j][v], values[v], weight, X());
      }
    }
  }
  for (int j = 0; j < outs; ++j)
    for (int v = 0; v < V; ++v) store(sums + (j * V + v) * kLanes, acc[j][v]);
}

// At most `kOutputs` outputs of a panel, from `begin` on.
template <int V, class T, class X>
void outputs(const Product<T, X>& p, const Panel& rows, const float* panel,
             int64_t begin) {
  const int count = std::min<int64_t>(kOutputs, p.n - begin);
  float sums[kOutputs * V * kLanes], block[kLanes * kLanes];
  int j = 0;
  for (; j + kTile<V> <= count; j += kTile<V>)
    tile<V, kTile<V>>(p, panel, begin + j, sums + j * V * kLanes);
  for (; j < count; ++j) tile<V, 1>(p, panel, begin + j, sums + j * V * kLanes);
  for (j = 0; j < count; j += kLanes)
    for (int v = 0; v < V; ++v) {
      transpose(sums + (j * V + v) * kLanes, V * kLanes, block, kLanes);
      for (int r = 0; r < std::min(kLanes, rows.rows - v * kLanes); ++r) {
        T* y = p.y + (rows.row + v * kLanes + r) * p.n + begin + j;
        if (j + kLanes <= count)
          store(y, load(block + r * kLanes));
        else
          for (int i = 0; i < count - j; ++i) y[i] = T(block[r * kLanes + i]);
      }
    }
}

template <class T, class X>
void run(const Product<T, X>& p) {
  const std::vector<Panel> panels = panels_of(p.m);
  const int64_t vectors = (p.m + kLanes - 1) / kLanes;
  const auto x = std::make_unique_for_overwrite<float[]>(vectors * kLanes * p.k);
  at::parallel_for(0, vectors, 1, [&](int64_t begin, int64_t end) {
    for (const Panel& panel : panels)
      for (int v = 0; v < panel.vectors; ++v)
        if (const int64_t i = panel.row / kLanes + v; i >= begin && i < end)
          fill(p.x, p.k, panel, v, x.get() + panel.row * p.k);
  });
  const int64_t parts = (p.n + kOutputs - 1) / kOutputs;
  at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; chunk += kChunk)
      for (const Panel& panel : panels)
        for (int64_t i = chunk; i < std::min(end, chunk + kChunk); ++i) {
          const float* rows = x.get() + panel.row * p.k;
          switch (panel.vectors) {
            case 1: outputs<1>(p, panel, rows, i * kOutputs); break;
            case 2: outputs<2>(p, panel, rows, i * kOutputs); break;
            case 3: outputs<3>(p, panel, rows, i * kOutputs); break;
            default: outputs<4>(p, panel, rows, i * kOutputs);
          }
        }
  });
}

}  // namespace row_panels
