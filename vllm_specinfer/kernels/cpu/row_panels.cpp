// x W^T of tens to thousands of rows x: a vector holds one input of many rows, so that no
// sum runs across it, and the weights are read as they lie.
//
// Legend as in product.cpp. The rows of a panel fill H half vectors; it lies as
// [K, H * half a vector's lanes].
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

constexpr int kHalf = kLanes / 2;
constexpr int kMostHalves = 8;
// Outputs, whose sums fit into registers with a row of the panel.
template <int H>
constexpr int kTile = 24 / ((H + 1) / 2);
constexpr int kOutputs = 48;  // a multiple of every tile
constexpr int kChunk = 2;     // times as many outputs: weights in the second cache
constexpr int kInputs = 128;  // that are converted at a time
constexpr int kGroup = 4;     // panels that a thread multiplies together

struct Panel {
  int64_t row;  // its first one
  int rows, halves;
};

// As few as there can be, but where threads have panels of their own as many for each.
inline std::vector<Panel> panels_of(int64_t m, int64_t threads) {
  const int64_t halves = (m + kHalf - 1) / kHalf;
  int64_t count = (halves + kMostHalves - 1) / kMostHalves;
  if (count >= threads) count = (count + threads - 1) / threads * threads;
  std::vector<Panel> panels;
  for (int64_t i = 0, row = 0; i < count; ++i) {
    const int size = halves * (i + 1) / count - halves * i / count;
    const int rows = std::min<int64_t>(size * kHalf, m - row);
    panels.push_back({row, rows, size});
    row += rows;
  }
  return panels;
}

// As many inputs as a vector has lanes, of x at those of the panel's first row, into the
// panel; what is no row is some other one's.
inline void fill(const float* x, int64_t k, const Panel& p, float* panel) {
  const int stride = p.halves * kHalf;
  for (int first = 0; first < p.rows; first += kLanes) {
    const int rows = p.rows - first;
    const float* from = x + first * k;
    if (rows >= kLanes) {
      transpose(from, k, panel + first, stride);
      continue;
    }
    float block[kLanes * kLanes], columns[kLanes * kLanes];
    for (int r = 0; r < kLanes; ++r)
      store(block + r * kLanes, load(from + std::min(r, rows - 1) * k));
    transpose(block, kLanes, columns, kLanes);
    for (int i = 0; i < kLanes; ++i) {
      const Vec column = load(columns + i * kLanes);
      if (rows <= kHalf)
        store(panel + i * stride + first, lower(column));
      else
        store(panel + i * stride + first, column);
    }
  }
}

// `outs` outputs of a panel into sums [outs, H * kHalf], while the weights behind them
// are fetched.
template <int H, int outs, class T, class X>
void tile(const Product<T, X>& p, const float* panel, int64_t output, float* sums) {
  constexpr int V = H / 2;
  const auto* w = p.w + output * p.k;
  Vec acc[outs][V + 1];  // the compiler drops what is not used
  HalfVec half[outs];
  for (int j = 0; j < outs; ++j) {
    const Vec start = splat(p.bias ? p.bias[output + j] : 0);
    for (int v = 0; v < V; ++v) acc[j][v] = start;
    half[j] = lower(start);
  }
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
    for (int i = 0; i < inputs; ++i, panel += H * kHalf) {
      if (i % kLanes == 0)
#pragma GCC unroll 24
        for (int j = 0; j < outs; ++j)
          __builtin_prefetch(w + (outs + j) * p.k + k + i, 0, 2);
      Vec values[V + 1];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) values[v] = load(panel + v * kLanes);
      HalfVec last;
      if constexpr (H % 2) last = load_half(panel + V * kLanes);
#pragma GCC unroll 24
      for (int j = 0; j < outs; ++j) {
        const Vec weight = splat(weights[j * stride + i]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) add_product(acc[j][v], values[v], weight, X());
        if constexpr (H % 2) add_product(half[j], last, lower(weight), X());
      }
    }
  }
  for (int j = 0; j < outs; ++j) {
    for (int v = 0; v < V; ++v) store(sums + j * H * kHalf + v * kLanes, acc[j][v]);
    if constexpr (H % 2) store(sums + j * H * kHalf + V * kLanes, half[j]);
  }
}

// At most `kOutputs` outputs of a panel, from `begin` on.
template <int H, class T, class X>
void outputs(const Product<T, X>& p, const Panel& rows, const float* panel,
             int64_t begin) {
  constexpr int kStride = H * kHalf;
  const int count = std::min<int64_t>(kOutputs, p.n - begin);
  float sums[kOutputs * kStride + kHalf], block[kLanes * kLanes];
  int j = 0;
  for (; j + kTile<H> <= count; j += kTile<H>) {
    // Where the outputs go, a part with every tile.
    for (int r = rows.rows * j / count; r < rows.rows * (j + kTile<H>) / count; ++r)
      for (int i = 0; i < count; i += kLanes)
        __builtin_prefetch(p.y + (rows.row + r) * p.n + begin + i, 1, 2);
    tile<H, kTile<H>>(p, panel, begin + j, sums + j * kStride);
  }
  for (; j < count; ++j) tile<H, 1>(p, panel, begin + j, sums + j * kStride);
  for (j = 0; j < count; j += kLanes)
    for (int first = 0; first < rows.rows; first += kLanes) {
      transpose(sums + j * kStride + first, kStride, block, kLanes);
      for (int r = 0; r < std::min(kLanes, rows.rows - first); ++r) {
        T* y = p.y + (rows.row + first + r) * p.n + begin + j;
        if (j + kLanes <= count)
          store(y, load(block + r * kLanes));
        else
          for (int i = 0; i < count - j; ++i) y[i] = T(block[r * kLanes + i]);
      }
    }
}

template <class T, class X, int... H>
void outputs(const Product<T, X>& p, const Panel& rows, const float* panel,
             int64_t begin, std::integer_sequence<int, H...>) {
  ((rows.halves == H + 1 ? outputs<H + 1>(p, rows, panel, begin) : void()), ...);
}

// Outputs of panels, in chunks whose weights stay in the second cache.
template <class T, class X>
void outputs(const Product<T, X>& p, const Panel* first, const Panel* last,
             const float* x, int64_t begin, int64_t end) {
  for (int64_t chunk = begin; chunk < end; chunk += kChunk)
    for (const Panel* panel = first; panel < last; ++panel)
      for (int64_t i = chunk; i < std::min(end, chunk + kChunk); ++i)
        outputs(p, *panel, x + panel->row * p.k, i * kOutputs,
                std::make_integer_sequence<int, kMostHalves>());
}

template <class T, class X>
void run(const Product<T, X>& p) {
  static_assert(sizeof(X) == sizeof(float));
  const int64_t threads = at::get_num_threads();
  const std::vector<Panel> panels = panels_of(p.m, threads);
  const Panel *first = panels.data(), *last = first + panels.size();
  const int64_t halves = (p.m + kHalf - 1) / kHalf;
  const int64_t blocks = p.k / kLanes, parts = (p.n + kOutputs - 1) / kOutputs;
  const auto x = std::make_unique_for_overwrite<float[]>(halves * kHalf * p.k);
  const auto fill_blocks = [&](const Panel* panel, const Panel* end, int64_t begin_block,
                               int64_t end_block) {
    for (; panel < end; ++panel)
      for (int64_t k = begin_block * kLanes; k < end_block * kLanes; k += kLanes)
        fill((const float*)p.x + panel->row * p.k + k, p.k, *panel,
             x.get() + panel->row * p.k + k * panel->halves * kHalf);
  };
  if (last - first >= threads) {
    // Each thread has rows of its own, which it alone fetches.
    at::parallel_for(0, last - first, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i += kGroup) {
        const Panel* group_end = first + std::min(end, i + kGroup);
        fill_blocks(first + i, group_end, 0, blocks);
        outputs(p, first + i, group_end, x.get(), 0, parts);
      }
    });
    return;
  }
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    fill_blocks(first, last, begin, end);
  });
  at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    outputs(p, first, last, x.get(), begin, end);
  });
}

}  // namespace row_panels
