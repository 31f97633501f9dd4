// Attention of token trees over vLLM's paged CPU cache, one pass, online softmax.
//
// Legend: R requests, T query rows of the step, N rows of one request, H query heads,
// G query heads per KV head, M = N * G rows that share one KV head, D head size.
// A (block, KV head) page holds K as [D, block_size], then V as [block_size, D].
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#ifdef __AVX512F__
#include <immintrin.h>
constexpr int kLanes = 16, kMaxRows = 8;  // 8 x 2 accumulators fill 32 registers
#else
constexpr int kLanes = 8, kMaxRows = 4;
#endif

namespace tree {

constexpr int kTile = 64;           // KV positions per softmax update
constexpr int kSplitUnit = 32;      // a KV split is a multiple of this
constexpr double kSerialWork = 4e5; // multiply-adds below which threads do not pay

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HVec __attribute__((vector_size(2 * kLanes)));

inline Vec splat(float x) { return Vec{} + x; }

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline Vec load(const c10::BFloat16* p) {
  HVec h;
  std::memcpy(&h, p, sizeof h);
  return (Vec)(__builtin_convertvector(h, IVec) << 16);
}
inline Vec load(const c10::Half* p) {
#ifdef __AVX512F__
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#else
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = p[i];
  return v;
#endif
}
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
inline void store(c10::BFloat16* p, Vec v) {
  IVec bits = (IVec)v;  // round to nearest even; the result of a softmax is finite
  HVec h = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, HVec);
  std::memcpy(p, &h, sizeof h);
}
inline void store(c10::Half* p, Vec v) {
  for (int i = 0; i < kLanes; ++i) p[i] = c10::Half(v[i]);
}

// 2^x, relative error 2e-7; exactly 0 below -126.
inline Vec exp2(Vec x) {
  x = x < -127.0f ? splat(-127.0f) : x;
  x = x > 126.0f ? splat(126.0f) : x;
  const float magic = 12582912.0f;  // adding it rounds to an integer
  Vec shifted = x + magic;
  Vec f = x - (shifted - magic);
  Vec p = splat(1.535336188e-4f);
  p = p * f + 1.339887440e-3f;
  p = p * f + 9.618437357e-3f;
  p = p * f + 5.550332548e-2f;
  p = p * f + 2.402264791e-1f;
  p = p * f + 6.931472028e-1f;
  p = p * f + 1.0f;
  IVec n = (IVec)shifted - (IVec)splat(magic);
  return p * (Vec)((n + 127) << 23);
}
inline Vec tanh(Vec x) { return 1.0f - 2.0f / (exp2(x * 2.885390082f) + 1.0f); }

inline float reduce_max(Vec v) {
  float m = v[0];
  for (int i = 1; i < kLanes; ++i) m = std::max(m, v[i]);
  return m;
}
inline float reduce_add(Vec v) {
  float s = 0;
  for (int i = 0; i < kLanes; ++i) s += v[i];
  return s;
}

// C[R, n] = alpha[R] * C + A[R, k] @ B[k, n], V vectors of columns at a time.
template <int R, int V, class T>
inline int gemm_columns(int col, int n, const float* a, int lda, const T* b,
                        int64_t ldb, float* c, int ldc, int k, const float* alpha) {
  for (; col + V * kLanes <= n; col += V * kLanes) {
    Vec acc[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v)
        acc[r][v] =
            alpha ? load(c + r * ldc + col + v * kLanes) * alpha[r] : Vec{};
    const T* row = b + col;
    for (int i = 0; i < k; ++i, row += ldb) {
      Vec x[V];
      for (int v = 0; v < V; ++v) x[v] = load(row + v * kLanes);
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) acc[r][v] += x[v] * a[r * lda + i];
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) store(c + r * ldc + col + v * kLanes, acc[r][v]);
  }
  return col;
}
template <int R, class T>
void gemm_rows(const float* a, int lda, const T* b, int64_t ldb, float* c, int ldc,
               int k, int n, const float* alpha) {
  // Few rows need more columns in flight to hide the latency of multiply-add.
  int col = gemm_columns<R, (R <= 4 ? 4 : 2)>(0, n, a, lda, b, ldb, c, ldc, k, alpha);
  gemm_columns<R, 1>(col, n, a, lda, b, ldb, c, ldc, k, alpha);
}
template <class T, class... Args>
void gemm(int rows, Args... args) {
  switch (rows) {
    case 1: return gemm_rows<1, T>(args...);
    case 2: return gemm_rows<2, T>(args...);
    case 3: return gemm_rows<3, T>(args...);
    case 4: return gemm_rows<4, T>(args...);
#ifdef __AVX512F__
    case 5: return gemm_rows<5, T>(args...);
    case 6: return gemm_rows<6, T>(args...);
    case 7: return gemm_rows<7, T>(args...);
    case 8: return gemm_rows<8, T>(args...);
#endif
  }
}

template <class T>
struct Step {
  const T* query;  // [T, H, D]
  const T* cache;  // [B, Hkv, 2 * block_size * D]
  T* out;          // [T, H, D]
  const int32_t *block_table, *query_start_loc, *seq_lens, *context_lens;
  const bool* is_tree;
  const int64_t* ancestor_bits;  // [T, W]
  const float* sinks;            // [H] or null
  int64_t query_row, query_head, out_row, out_head;  // strides in elements
  int64_t cache_block, cache_head, table_row, bits_row;
  int num_reqs, num_kv_heads, group, head_size, block_size, num_words;
  float scale, softcap;
};

// The running softmax of M rows over one KV split.
struct State {
  float *out, *max, *sum;  // [M, D], [M], [M]
  State(float* p, int rows, int head_size)
      : out(p), max(p + rows * head_size), sum(max + rows) {}
  static int64_t size(int64_t rows, int head_size) { return rows * (head_size + 2); }
};

struct Item {
  int req, kv_head, begin, end;  // KV positions [begin, end)
  int first, count;              // the splits of this (request, KV head)
  int64_t state;                 // offset of its State
};

// Bit i is set if the row sees position `position + i`.
inline uint32_t visible(const int64_t* words, int num_words, int position, int context,
                        int end) {
  uint32_t all = (1ull << kLanes) - 1;
  int left = end - position;
  if (left < kLanes) all &= (1u << std::max(left, 0)) - 1;
  int j = position - context;
  if (j + kLanes <= 0) return all;
  int lead = std::max(-j, 0);  // positions of the context before the tree
  j = std::max(j, 0);
  auto word = [&](int w) { return w < num_words ? (uint64_t)words[w] : 0; };
  uint64_t bits = word(j / 64) >> (j % 64);
  if (j % 64) bits |= word(j / 64 + 1) << (64 - j % 64);
  return all & ((uint32_t)(bits << lead) | ((1u << lead) - 1));
}

template <class T>
void attend(const Step<T>& s, const Item& item, State state, float* query) {
  const int begin_row = s.query_start_loc[item.req];
  const int rows = (s.query_start_loc[item.req + 1] - begin_row) * s.group;
  const int D = s.head_size, context = s.context_lens[item.req];
  const int32_t* table = s.block_table + item.req * s.table_row;
  IVec lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;

  for (int m = 0; m < rows; ++m) {
    const T* q = s.query + (begin_row + m / s.group) * s.query_row +
                 (item.kv_head * s.group + m % s.group) * s.query_head;
    for (int d = 0; d < D; d += kLanes) store(query + m * D + d, load(q + d));
  }
  std::fill(state.out, state.out + rows * D, 0.0f);
  std::fill(state.max, state.max + rows, -1e30f);  // finite: inf - inf is NaN
  std::fill(state.sum, state.sum + rows, 0.0f);

  const float log2e = 1.442695041f;
  const float scale = s.softcap ? s.scale / s.softcap : s.scale * log2e;
  const int groups = (rows + kMaxRows - 1) / kMaxRows;
  alignas(64) float scores[kMaxRows * kTile];
  for (int t = item.begin, n; t < item.end; t += n) {
    const int offset = t % s.block_size;
    n = std::min({kTile, s.block_size - offset, item.end - t});
    const int width = (n + kLanes - 1) / kLanes * kLanes;
    const T* page = s.cache + table[t / s.block_size] * s.cache_block +
                    item.kv_head * s.cache_head;
    const T* keys = page + offset;                            // [D, block_size]
    const T* values = page + (s.block_size + offset) * D;     // [n, D]
    const bool masked = t + n > context || n < width;

    for (int g = 0; g < groups; ++g) {
      const int m0 = rows * g / groups, size = rows * (g + 1) / groups - m0;
      gemm<T>(size, query + m0 * D, D, keys, (int64_t)s.block_size, scores, kTile, D,
              width, nullptr);
      float alpha[kMaxRows];
      for (int r = 0; r < size; ++r) {
        float* x = scores + r * kTile;
        const int64_t* words =
            s.ancestor_bits + (begin_row + (m0 + r) / s.group) * s.bits_row;
        Vec top = splat(-INFINITY);
        for (int i = 0; i < width; i += kLanes) {
          Vec v = load(x + i) * scale;
          if (s.softcap) v = tanh(v) * (s.softcap * log2e);
          if (masked) {
            int bits = visible(words, s.num_words, t + i, context, item.end);
            v = (((IVec{} + bits) >> lane) & 1) != 0 ? v : splat(-INFINITY);
          }
          store(x + i, v);
          top = top > v ? top : v;
        }
        float& max = state.max[m0 + r];
        const float next = std::max(max, reduce_max(top));
        Vec sum{};
        for (int i = 0; i < width; i += kLanes) {
          Vec p = exp2(load(x + i) - next);
          store(x + i, p);
          sum += p;
        }
        alpha[r] = std::exp2(max - next);
        state.sum[m0 + r] = state.sum[m0 + r] * alpha[r] + reduce_add(sum);
        max = next;
      }
      gemm<T>(size, scores, kTile, values, (int64_t)D, state.out + m0 * D, D, n, D,
              alpha);
    }
  }
}

// Join the splits of one (request, KV head) and write its rows.
template <class T>
void finish(const Step<T>& s, const Item* items, int count, float* states) {
  const int begin_row = s.query_start_loc[items->req];
  const int rows = (s.query_start_loc[items->req + 1] - begin_row) * s.group;
  const int D = s.head_size;
  std::vector<float> weight(count);
  for (int m = 0; m < rows; ++m) {
    const int head = items->kv_head * s.group + m % s.group;
    const float sink = s.sinks ? s.sinks[head] * 1.442695041f : -1e30f;
    float max = sink;
    for (int i = 0; i < count; ++i)
      max = std::max(max, State(states + items[i].state, rows, D).max[m]);
    float sum = s.sinks ? std::exp2(sink - max) : 0.0f;
    for (int i = 0; i < count; ++i) {
      State part(states + items[i].state, rows, D);
      weight[i] = std::exp2(part.max[m] - max);
      sum += weight[i] * part.sum[m];
    }
    const float inverse = sum > 0 ? 1.0f / sum : 0.0f;
    T* out = s.out + (begin_row + m / s.group) * s.out_row + head * s.out_head;
    for (int d = 0; d < D; d += kLanes) {
      Vec v{};
      for (int i = 0; i < count; ++i)
        v += load(states + items[i].state + m * D + d) * weight[i];
      store(out + d, v * inverse);
    }
  }
}

template <class T>
void run(const Step<T>& s) {
  double work = 0;
  for (int r = 0; r < s.num_reqs; ++r)
    if (s.is_tree[r])
      work += (double)(s.query_start_loc[r + 1] - s.query_start_loc[r] + 1) *
              s.seq_lens[r];
  const double per_row = 2.0 * s.group * s.head_size;  // QK and PV
  const int max_threads = omp_get_max_threads();
  const int threads =
      work * per_row * s.num_kv_heads < kSerialWork ? 1 : max_threads;
  // About two items per thread, more only where there are more KV heads.
  const double share = work * s.num_kv_heads / (threads > 1 ? 2 * threads : 1);

  std::vector<Item> items;
  int64_t state_size = 0;
  int max_rows = 0;
  for (int r = 0; r < s.num_reqs; ++r) {
    const int rows = s.query_start_loc[r + 1] - s.query_start_loc[r];
    const int seq = s.seq_lens[r];
    if (!s.is_tree[r] || rows == 0 || seq == 0) continue;
    max_rows = std::max(max_rows, rows * s.group);
    int splits = threads > 1 ? (int)std::ceil((rows + 1.0) * seq / share) : 1;
    const int units = (seq + kSplitUnit - 1) / kSplitUnit;
    splits = std::clamp(splits, 1, std::max(1, units / 2));
    for (int h = 0; h < s.num_kv_heads; ++h) {
      const int first = items.size();
      for (int i = 0; i < splits; ++i) {
        const int begin = units * i / splits * kSplitUnit;
        const int end = std::min(seq, units * (i + 1) / splits * kSplitUnit);
        items.push_back({r, h, begin, end, first, splits, state_size});
        state_size += State::size(rows * s.group, s.head_size);
      }
    }
  }
  if (items.empty()) return;

  static thread_local std::vector<float> states;
  if ((int64_t)states.size() < state_size) states.resize(state_size);
  float* all_states = states.data();
  const int num_items = items.size();
  std::unique_ptr<std::atomic<int>[]> done(new std::atomic<int>[num_items]());
  std::atomic<int> next{0};
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    static thread_local std::vector<float> query;
    if ((int)query.size() < max_rows * s.head_size)
      query.resize(max_rows * s.head_size);
    for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_items;) {
      const Item& item = items[i];
      const int rows = (s.query_start_loc[item.req + 1] -
                        s.query_start_loc[item.req]) * s.group;
      attend(s, item, State(all_states + item.state, rows, s.head_size),
             query.data());
      // The last split to end joins them all: no barrier.
      if (done[item.first].fetch_add(1) + 1 == item.count)
        finish(s, &items[item.first], item.count, all_states);
    }
  }
}

}  // namespace tree
