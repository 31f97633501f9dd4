// Attention of token trees over vLLM's paged CPU cache, one pass, online softmax.
//
// Legend: R requests, T query rows of the step, N rows of one request, H query heads,
// G query heads per KV head, M = N * G rows that share one KV head, D head size.
// A (block, KV head) page holds K as [D, block_size], then V as [block_size, D], each
// row by row or, where vLLM's own kernel multiplies in tiles (AMX), as `Tiles`.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "attention_plan.cpp"
#include "matrices.cpp"

namespace tree {

using namespace matrices;
using namespace vectors;

constexpr int kTile = 128;  // KV positions per softmax update

// Queries and output of type T, a cache of type K: T's or one of eight bits, its K and V
// as matrices of type M.
template <class T, class K, template <class> class M>
struct Step : Batch {
  using Matrix = M<K>;
  const T* query;  // [T, H, D]
  const K* cache;  // [B, Hkv, 2 * block_size * D]
  T* out;          // [T, H, D]
  const int64_t* ancestor_bits;  // [T, W]
  const float* sinks;            // [H] or null
  int64_t query_row, query_head, out_row, out_head;  // strides in elements
  int64_t cache_block, cache_head, bits_row;
  int num_words;
  float scale, softcap, value_scale;

  // K [D, positions] and V [positions, D] of a page from this position on.
  Matrix keys(const K* page, int offset) const {
    if constexpr (std::is_same_v<Matrix, Tiles<K>>)
      return {page + offset * head_size, (int64_t)kLanes * head_size};
    return {page + offset, (int64_t)block_size};
  }
  Matrix values(const K* page, int offset) const {
    page += block_size * head_size;
    if constexpr (std::is_same_v<Matrix, Tiles<K>>)
      return {page + offset * kLanes, (int64_t)kLanes * block_size};
    return {page + offset * head_size, (int64_t)head_size};
  }
};

// Bit i is set if the row sees position `position + i`; none do beyond the sequence.
inline uint32_t visible(const int64_t* words, int num_words, int position,
                        int context) {
  int j = position - context;
  if (j + kLanes <= 0) return ~0u;
  int lead = std::max(-j, 0);  // positions of the context before the tree
  j = std::max(j, 0);
  auto word = [&](int w) { return w < num_words ? (uint64_t)words[w] : 0; };
  uint64_t bits = word(j / 64) >> (j % 64);
  if (j % 64) bits |= word(j / 64 + 1) << (64 - j % 64);
  return (uint32_t)(bits << lead) | ((1u << lead) - 1);
}

// Bit i is set where i >= n.
inline uint32_t from(int n) { return n <= 0 ? ~0u : n < 32 ? ~0u << n : 0; }

// Rows on the path that ends with this one, its root's included.
inline int path_length(const int64_t* words, int num_words) {
  int count = 0;
  for (int w = 0; w < num_words; ++w) count += __builtin_popcountll(words[w]);
  return count;
}

template <class T, class K, template <class> class M>
void attend(const Step<T, K, M>& s, const Item& item, const Unit* units, State state,
            typename M<K>::Factor* query) {
  using Factor = typename M<K>::Factor;
  using Matrix = M<K>;
  constexpr int kMaxRows = M<K>::kMaxRows;
  constexpr bool kScalesLater = !std::is_same_v<Factor, float>;  // queries stay exact
  const Unit& leader = *units;
  const int first_row = s.query_start_loc[leader.req];
  const int D = s.head_size, context = s.context_lens[leader.req];
  const int32_t* table = s.block_table + leader.req * s.table_row;
  auto page_of = [&](int position) {
    return s.cache + table[position / s.block_size] * s.cache_block +
           leader.kv_head * s.cache_head;
  };
  const float log2e = 1.442695041f;
  const float scale = (s.softcap ? s.scale / s.softcap : s.scale * log2e) * kUnit<K>;
  // What scores are still to be multiplied with, before and without softcap.
  const float unscaled = kScalesLater ? scale : 1, factor = s.softcap ? 1 : unscaled;
  IVec lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;

  Factor* to = query;
  for (const Unit* u = units; u < units + item.count; ++u)
    for (int m = u->begin_row; m < u->begin_row + u->rows; ++m, to += D) {
      const T* q = s.query +
                   (s.query_start_loc[u->req] + m / s.group) * s.query_row +
                   (u->kv_head * s.group + m % s.group) * s.query_head;
      for (int d = 0; d < D; d += kLanes)
        store(to + d, kScalesLater ? load(q + d) : load(q + d) * scale);
    }
  std::fill(state.out, state.out + item.rows * D, 0.0f);
  std::fill(state.max, state.max + item.rows, -1e30f);  // finite: inf - inf is NaN
  std::fill(state.sum, state.sum + item.rows, 0.0f);

  const int groups = (item.rows + kMaxRows - 1) / kMaxRows;
  alignas(64) float scores[kMaxRows * kTile];
  alignas(64) float alpha[kLanes] = {};
  alignas(64) Factor weights[kMaxRows * kTile] = {};
  for (int t = item.begin, n; t < item.end; t += n) {
    const int offset = t % s.block_size;
    n = std::min({kTile, s.block_size - offset, item.end - t});
    const int width = (n + kLanes - 1) / kLanes * kLanes;
    const K* page = page_of(t);
    const auto keys = s.keys(page, offset), values = s.values(page, offset);
    // The next tile is fetched meanwhile, unless it is a smaller one.
    const int64_t ahead = t + 2 * n <= item.end ? page_of(t + n) - page : 0;
    auto multiply = [&](int rows, const Factor* a, int lda, const Matrix& b, auto... c) {
      if constexpr (!kScalesLater)  // not tried where the CPU multiplies tiles
        if (ahead) return gemm(rows, a, lda, Fetching<Matrix>{b, ahead}, c...);
      gemm(rows, a, lda, b, c...);
    };
    // Never where there are several units: those end before any request's tree.
    const bool masked = t + n > context || n < width;
    // A window is longer than any path of a tree: it begins in the context.
    const bool leaves = s.window && t < context + 64 * s.num_words - s.window;

    for (int g = 0; g < groups; ++g) {
      const int m0 = item.rows * g / groups;
      const int rows = item.rows * (g + 1) / groups - m0;
      multiply(rows, query + m0 * D, D, keys, scores, kTile, D, width, nullptr);
      for (int r = 0; r < rows; ++r) {
        float* x = scores + r * kTile;
        if (s.softcap)
          for (int i = 0; i < width; i += kLanes)
            store(x + i, tanh(load(x + i) * unscaled) * (s.softcap * log2e));
        if (masked || leaves) {
          const int row = first_row + (leader.begin_row + m0 + r) / s.group;
          const int64_t* words = s.ancestor_bits + row * s.bits_row;
          const int left =
              s.window ? context + path_length(words, s.num_words) - s.window - t : 0;
          for (int i = 0; i < width; i += kLanes) {
            int bits = visible(words, s.num_words, t + i, context) & from(left - i);
            store(x + i, ((IVec{} + bits) >> lane & 1) != 0 ? load(x + i)
                                                            : splat(-INFINITY));
          }
        }
        Vec top = load(x);
        for (int i = kLanes; i < width; i += kLanes) {
          Vec v = load(x + i);
          top = top > v ? top : v;
        }
        const float max = std::max(state.max[m0 + r], reduce_max(top) * factor);
        alpha[r] = state.max[m0 + r] - max;
        state.max[m0 + r] = max;
      }
      store(alpha, exp2(load(alpha)));
      for (int r = 0; r < rows; ++r) {
        Vec sum{};
        for (int i = 0; i < width; i += kLanes) {
          Vec p = exp2(load(scores + r * kTile + i) * factor - state.max[m0 + r]);
          store(weights + r * kTile + i, p);
          sum += p;
        }
        // A product in tiles reads twice as many at a time, also those of another page.
        if (kScalesLater && width % (2 * kLanes))
          store(weights + r * kTile + width, Vec{});
        float& total = state.sum[m0 + r];
        total = total * alpha[r] + reduce_add(sum);
      }
      multiply(rows, weights, kTile, values, state.out + m0 * D, D, n, D, alpha);
    }
  }
}

// Join the parts of some rows and write them.
template <class T, class K, template <class> class M>
void finish(const Step<T, K, M>& s, const Unit& unit, const Part* parts, float* states) {
  const int first_row = s.query_start_loc[unit.req];
  const int count = unit.count, D = s.head_size;
  std::vector<float> weight(count);
  for (int i = 0; i < unit.rows; ++i) {
    const int m = unit.begin_row + i;
    const int head = unit.kv_head * s.group + m % s.group;
    const float sink = s.sinks ? s.sinks[head] * 1.442695041f : -1e30f;
    auto part = [&](int k) { return State(states + parts[k].state, parts[k].rows, D); };
    float max = sink;
    for (int k = 0; k < count; ++k) max = std::max(max, part(k).max[parts[k].row + i]);
    float sum = s.sinks ? std::exp2(sink - max) : 0.0f;
    for (int k = 0; k < count; ++k) {
      weight[k] = std::exp2(part(k).max[parts[k].row + i] - max);
      sum += weight[k] * part(k).sum[parts[k].row + i];
    }
    const float inverse = sum > 0 ? s.value_scale * kUnit<K> / sum : 0.0f;
    T* out = s.out + (first_row + m / s.group) * s.out_row + head * s.out_head;
    for (int d = 0; d < D; d += kLanes) {
      Vec v{};
      for (int k = 0; k < count; ++k)
        v += load(part(k).out + (parts[k].row + i) * D + d) * weight[k];
      store(out + d, v * inverse);
    }
  }
}

template <class T, class K, template <class> class M>
void run(const Step<T, K, M>& s) {
  const Plan plan = make_plan(s);
  if (plan.items.empty()) return;
  static thread_local std::vector<float> states;
  if ((int64_t)states.size() < plan.state_size) states.resize(plan.state_size);
  float* all_states = states.data();
  const int num_items = plan.items.size();
  std::unique_ptr<std::atomic<int>[]> done(new std::atomic<int>[plan.units.size()]());
  std::atomic<int> next{0};
#pragma omp parallel num_threads(plan.threads) if (plan.threads > 1)
  {
    static thread_local std::vector<typename M<K>::Factor> query;
    // Of the last rows as many are read as there may be at once.
    const size_t size = (plan.max_rows + M<K>::kMaxRows) * s.head_size;
    if (query.size() < size) query.resize(size);
    M<K>::prepare();
    for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_items;) {
      const Item& item = plan.items[i];
      attend(s, item, &plan.units[item.first],
             State(all_states + item.state, item.rows, s.head_size), query.data());
      // The last part to end joins them all: no barrier.
      for (int u = item.first; u < item.first + item.count; ++u)
        if (const Unit& unit = plan.units[u]; done[u].fetch_add(1) + 1 == unit.count)
          finish(s, unit, &plan.parts[unit.first], all_states);
    }
  }
}

}  // namespace tree
