// Products of a few rows with K or V as a page has them.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "tiles.cpp"
#include "vectors.cpp"

namespace matrices {

using namespace vectors;

// Rows of a product at once: two vectors of sums each leave registers for the factors.
constexpr int kMostRows = kRegisters == 32 ? 8 : 6;

// A matrix that lies row by row, `step` apart.
template <class T>
struct Rows {
  using Factor = float;  // what it is multiplied with
  static constexpr int kMaxRows = kMostRows;
  static void prepare() {}
  const T* data;
  int64_t step;
  void two(int row, int col, Vec& first, Vec& second) const {
    first = one(row, col);
    second = one(row + 1, col);
  }
  Vec one(int row, int col) const { return load(data + row * step + col); }
  void fetch_two(int row, int col, int64_t ahead) const {
    __builtin_prefetch(data + row * step + col + ahead);
    __builtin_prefetch(data + (row + 1) * step + col + ahead);
  }
};

// A matrix in tiles of 16 columns, `step` apart, of which rows 2i and 2i + 1 take turns.
template <class T>
struct Tiles {
#ifdef SPECINFER_TILES
  static constexpr bool kMultiplied = std::is_same_v<T, c10::BFloat16>;
#else
  static constexpr bool kMultiplied = false;
#endif
  using Factor = std::conditional_t<kMultiplied, T, float>;
  static constexpr int kMaxRows = kMultiplied ? 16 : kMostRows;
  const T* data;
  int64_t step;
  const T* at(int row, int col) const { return data + col / 16 * step + row * 16; }
  void two(int row, int col, Vec& first, Vec& second) const {
    load_pairs(at(row, col), first, second);
  }
  void fetch_two(int row, int col, int64_t ahead) const {
    __builtin_prefetch(at(row, col) + ahead);
  }
  Vec one(int row, int col) const {
    Vec first, second;
    two(row, col, first, second);
    return first;
  }
  // Of the thread that multiplies.
  static void prepare() {
#ifdef SPECINFER_TILES
    if (kMultiplied) tiles::configure();
#endif
  }
};

// A matrix, and how far behind it that one lies that is read next.
template <class B>
struct Fetching : B {
  int64_t ahead;
  void two(int row, int col, Vec& first, Vec& second) const {
    B::two(row, col, first, second);
    B::fetch_two(row, col, ahead);
  }
};

// C[R, n] = alpha[R] * C + A[R, k] @ B[k, n], V vectors of columns at a time.
template <int R, int V, class B>
inline int gemm_columns(int col, int n, const float* a, int lda, const B& b, float* c,
                        int ldc, int k, const float* alpha) {
  for (; col + V * kLanes <= n; col += V * kLanes) {
    Vec acc[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v)
        acc[r][v] =
            alpha ? load(c + r * ldc + col + v * kLanes) * alpha[r] : Vec{};
    Vec x[V], y[V];
    int i = 0;
    for (; i + 1 < k; i += 2) {
      for (int v = 0; v < V; ++v) b.two(i, col + v * kLanes, x[v], y[v]);
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) {
          acc[r][v] += x[v] * a[r * lda + i];
          acc[r][v] += y[v] * a[r * lda + i + 1];
        }
    }
    if (i < k) {
      for (int v = 0; v < V; ++v) x[v] = b.one(i, col + v * kLanes);
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) acc[r][v] += x[v] * a[r * lda + i];
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) store(c + r * ldc + col + v * kLanes, acc[r][v]);
  }
  return col;
}
template <int R, class B>
void gemm_rows(const float* a, int lda, const B& b, float* c, int ldc, int k, int n,
               const float* alpha) {
  // Few rows need more columns in flight to hide the latency of multiply-add.
  int col = gemm_columns<R, (R <= kMostRows / 2 ? 4 : 2)>(0, n, a, lda, b, c, ldc, k, alpha);
  gemm_columns<R, 1>(col, n, a, lda, b, c, ldc, k, alpha);
}
template <class B>
void gemm(int rows, const float* a, int lda, const B& b, float* c, int ldc, int k, int n,
          const float* alpha) {
  auto run = [&]<int R>() { gemm_rows<R>(a, lda, b, c, ldc, k, n, alpha); };
  switch (rows) {
    case 1: return run.template operator()<1>();
    case 2: return run.template operator()<2>();
    case 3: return run.template operator()<3>();
    case 4: return run.template operator()<4>();
    case 5: return run.template operator()<5>();
    case 6: return run.template operator()<6>();
#ifdef __AVX512F__
    case 7: return run.template operator()<7>();
    case 8: return run.template operator()<8>();
#endif
  }
}

#ifdef SPECINFER_TILES
using tiles::kDepth;

// Rows i.. of a tile whose first k - i there are; behind them may be anything.
inline const c10::BFloat16* whole_tile(const c10::BFloat16* from, int rows,
                                       c10::BFloat16* copy) {
  if (rows >= kDepth) return from;
  std::memset(copy, 0, kDepth * 16 * sizeof *copy);
  std::memcpy(copy, from, rows / 2 * 2 * 16 * sizeof *copy);
  for (int j = (rows - 1) * 16; rows % 2 && j < (rows + 1) * 16; j += 2)
    copy[j] = from[j];
  return copy;
}

// The same where the CPU multiplies tiles. A and C have 16 rows, whatever is in those
// that are not asked for, and A finite numbers in a multiple of 32 columns.
inline void gemm(int rows, const c10::BFloat16* a, int lda,
                 const Tiles<c10::BFloat16>& b, float* c, int ldc, int k, int n,
                 const float* alpha) {
  alignas(64) c10::BFloat16 copy[kDepth * 16];
  alignas(64) float product[16 * 16];
  auto put = [&](int col) {
    for (int r = 0; r < rows; ++r) {
      float* out = c + r * ldc + col;
      store(out, load(out) * alpha[r] + load(product + r * 16));
    }
  };
  for (int col = 0; col < n; col += 32) {
    const bool two = col + 16 < n;
    _tile_zero(0);
    _tile_zero(1);
    for (int i = 0; i < k; i += kDepth) {
      _tile_loadd(2, a + i, lda * sizeof *a);
      _tile_loadd(3, whole_tile(b.at(i, col), k - i, copy), 64);
      _tile_dpbf16ps(0, 2, 3);
      if (two) {
        _tile_loadd(4, whole_tile(b.at(i, col + 16), k - i, copy), 64);
        _tile_dpbf16ps(1, 2, 4);
      }
    }
    if (!alpha) {
      _tile_stored(0, c + col, ldc * sizeof *c);
      if (two) _tile_stored(1, c + col + 16, ldc * sizeof *c);
      continue;
    }
    _tile_stored(0, product, 64);
    put(col);
    if (two) {
      _tile_stored(1, product, 64);
      put(col + 16);
    }
  }
}
#endif

}  // namespace matrices
