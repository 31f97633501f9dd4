// x W^T of few rows x: the weights are read once, in the order they lie in, and the next
// ones fetched meanwhile, so that the rows of a tree cost little more than one.
//
// Legend as in product.cpp.
#pragma once
#include <cstdint>

#include <ATen/Parallel.h>

#include "product.cpp"
#include "vectors.cpp"

namespace few_rows {

using namespace vectors;
using product::Product;

constexpr int kOutputs = 4, kRows = 6;  // of one tile: 24 sums, 4 + 1 loads, 32 registers
constexpr int64_t kLine = 64;           // bytes

// Sums of four vectors.
inline void sums(const Vec (&v)[4], float (&out)[4]) {
#ifdef __AVX512F__
  __m256 half[4];
  for (int i = 0; i < 4; ++i)
    half[i] = _mm256_add_ps(_mm512_castps512_ps256((__m512)v[i]),
                            _mm512_extractf32x8_ps((__m512)v[i], 1));
  const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]),
                                    _mm256_hadd_ps(half[2], half[3]));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all),
                                _mm256_extractf128_ps(all, 1)));
#else
  for (int i = 0; i < 4; ++i) {
    out[i] = 0;
    for (int lane = 0; lane < kLanes; ++lane) out[i] += v[i][lane];
  }
#endif
}

// `rows` rows from `row` on by `cols` outputs from `col` on. With each step along K,
// `lines` cache lines from `next` on are fetched.
template <int rows, int cols, class T, class X>
void tile(const Product<T, X>& p, int64_t row, int64_t col, const char* next,
          int lines) {
  const X* x = p.x + row * p.k;
  const auto* w = p.w + col * p.k;
  Vec acc[rows][4] = {};
  for (int64_t k = 0; k < p.k; k += kLanes) {
    Vec weights[cols];
#pragma GCC unroll 4
    for (int j = 0; j < cols; ++j) weights[j] = load(w + j * p.k + k);
    for (int i = 0; i < lines; ++i, next += kLine) __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) {
      const Vec value = load(x + i * p.k + k);
#pragma GCC unroll 4
      for (int j = 0; j < cols; ++j) add_product(acc[i][j], value, weights[j], X());
    }
  }
  for (int i = 0; i < rows; ++i) {
    float out[4];
    sums(acc[i], out);
    for (int j = 0; j < cols; ++j)
      p.y[(row + i) * p.n + col + j] =
          T(p.bias ? out[j] + p.bias[col + j] : out[j]);
  }
}

template <int cols, class T, class X>
void tile(const Product<T, X>& p, int rows, int64_t row, int64_t col, const char* next,
          int lines) {
  switch (rows) {
    case 1: return tile<1, cols>(p, row, col, next, lines);
    case 2: return tile<2, cols>(p, row, col, next, lines);
    case 3: return tile<3, cols>(p, row, col, next, lines);
    case 4: return tile<4, cols>(p, row, col, next, lines);
    case 5: return tile<5, cols>(p, row, col, next, lines);
    default: return tile<6, cols>(p, row, col, next, lines);
  }
}

// All rows by the outputs from `col` on; meanwhile `lines` cache lines per step along K
// are fetched from `next` on.
template <class T, class X>
void strip(const Product<T, X>& p, int64_t col, const char* next, int lines) {
  int tiles = (p.m + kRows - 1) / kRows;
  for (int64_t row = 0; row < p.m; --tiles) {
    const int rows = (p.m - row) / tiles;
    const int now = (lines + tiles - 1) / tiles;
    if (col + kOutputs <= p.n) {
      tile<kOutputs>(p, rows, row, col, next, now);
    } else {
      for (int64_t c = col; c < p.n; ++c) tile<1>(p, rows, row, c, next, 0);
    }
    next += now * (p.k / kLanes) * kLine;
    lines -= now;
    row += rows;
  }
}

template <class T, class X>
void run(const Product<T, X>& p) {
  const int64_t strips = (p.n + kOutputs - 1) / kOutputs;
  const int lines = kOutputs * kLanes * sizeof(*p.w) / kLine;
  at::parallel_for(0, strips, 1, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      const auto* next = p.w + (s + 1) * kOutputs * p.k;
      strip(p, s * kOutputs, (const char*)next, s + 1 < end ? lines : 0);
    }
  });
}

}  // namespace few_rows
