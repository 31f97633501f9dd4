// Which rows attend to which positions at once, and on how many threads.
//
// Legend as in tree_attention.cpp.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace tree {

constexpr int kSplitUnit = 32;      // a KV split is a multiple of this
constexpr int kSplitRows = 16;      // fewer rows are not split
constexpr int kLeastShared = 256;   // positions that several requests read at once
constexpr int kSharedRows = 128;    // rows of theirs: more do not fit beside a tile
constexpr double kSerialWork = 4e5; // multiply-adds below which threads do not pay

struct Batch {
  const int32_t *block_table, *query_start_loc, *seq_lens, *context_lens;
  const bool* is_tree;
  int64_t table_row;  // stride
  int num_reqs, num_kv_heads, group, head_size, block_size;
  int window;  // the last positions of its path that a row sees, 0 for all

  // The first position that some row of a request sees, or one a little before it, in
  // the same block: an earlier one may be another request's by now.
  int first_seen(int req) const {
    if (!window) return 0;
    return std::max(context_lens[req] + 1 - window, 0) / kSplitUnit * kSplitUnit;
  }
};

// The running softmax of M rows over one KV split.
struct State {
  float *out, *max, *sum;  // [M, D], [M], [M]
  State(float* p, int rows, int head_size)
      : out(p), max(p + rows * head_size), sum(max + rows) {}
  static int64_t size(int64_t rows, int head_size) { return rows * (head_size + 2); }
};

// Some rows of one request and one KV head, and where their softmax is to be found.
struct Unit {
  int req, kv_head;
  int begin_row, rows;  // of the M rows
  int first, count;     // Parts
};
struct Part {
  int64_t state;  // offset of a State
  int rows, row;  // its rows, and the first of the unit's
};

// Units that read the same KV, and the positions to read.
struct Item {
  int first, count, rows;
  int begin, end;
  int64_t state;  // offset of its State
};

struct Plan {
  std::vector<Unit> units;
  std::vector<Part> parts;
  std::vector<Item> items;
  int64_t state_size = 0;  // floats of all States
  int max_rows = 0;        // of an item
  int threads = 1;
};

// Requests that read `shared` first positions from the same blocks, 0 for a single one.
struct Sharing {
  int first, count, shared;
};

// Put requests beside each other that begin with the same blocks, as behind one system
// prompt: a position's K/V is then read once for all of them.
inline std::vector<Sharing> find_sharing(const Batch& s, std::vector<int>& reqs) {
  auto blocks = [&](int r) { return s.block_table + r * s.table_row; };
  auto full = [&](int r) { return std::max(s.context_lens[r], 0) / s.block_size; };
  auto rows = [&](int r) {
    return (s.query_start_loc[r + 1] - s.query_start_loc[r]) * s.group;
  };
  std::sort(reqs.begin(), reqs.end(), [&](int a, int b) {
    return std::lexicographical_compare(blocks(a), blocks(a) + full(a), blocks(b),
                                        blocks(b) + full(b));
  });
  std::vector<Sharing> found;
  int group_rows = 0;
  for (int i = 0; i < (int)reqs.size(); ++i) {
    const int r = reqs[i];
    if (!found.empty() && !s.window) {
      Sharing& group = found.back();
      const int leader = reqs[group.first];
      const int most = std::min(full(leader), full(r));
      const auto* end =
          std::mismatch(blocks(r), blocks(r) + most, blocks(leader)).first;
      const int shared = (end - blocks(r)) * s.block_size;
      // Nobody may cost the others more than half of what they share.
      if (shared >= kLeastShared && 2 * shared >= group.shared &&
          group_rows + rows(r) <= kSharedRows) {
        group.shared = shared;  // never more than before: they are sorted
        group.count += 1;
        group_rows += rows(r);
        continue;
      }
    }
    found.push_back({i, 1, 0});
    group_rows = rows(r);
  }
  return found;
}

// What is to be done for a step.
inline Plan make_plan(const Batch& s) {
  Plan plan;
  auto queries = [&](int r) { return s.query_start_loc[r + 1] - s.query_start_loc[r]; };
  std::vector<int> reqs;
  for (int r = 0; r < s.num_reqs; ++r)
    if (s.is_tree[r] && queries(r) && s.seq_lens[r]) reqs.push_back(r);
  if (reqs.empty()) return plan;
  const std::vector<Sharing> groups = find_sharing(s, reqs);

  // Where the positions begin that a request reads alone.
  auto own_begin = [&](int r, const Sharing& group) {
    return std::max(group.shared, s.first_seen(r));
  };
  double work = 0;  // row-positions, and one more row for reading the KV
  std::vector<int> group_queries;
  for (const Sharing& group : groups) {
    int& sum = group_queries.emplace_back(0);
    for (int i = group.first; i < group.first + group.count; ++i) {
      sum += queries(reqs[i]);
      work += (queries(reqs[i]) + 1.0) * (s.seq_lens[reqs[i]] - own_begin(reqs[i], group));
    }
    work += (sum + 1.0) * group.shared;
  }
  const double cost = work * s.num_kv_heads * s.group * s.head_size * 2;
  plan.threads = cost < kSerialWork ? 1 : omp_get_max_threads();
  // Two or more items per thread, so that no thread waits long for another.
  const double share = work * s.num_kv_heads / (plan.threads > 1 ? 2 * plan.threads : 1);
  auto items_of = [&](int n, int length) {
    return (int)std::ceil((n + 1.0) * length / share);
  };
  auto splits_of = [](int wanted, int length) {
    return std::clamp(wanted, 1, std::max(1, length / (2 * kSplitUnit)));
  };

  auto& units = plan.units;
  auto& parts = plan.parts;
  // Splits of positions begin..end for units first..first + count; their k-th one is
  // the units' part first_part + k.
  auto split = [&](int first, int count, int begin, int end, int splits,
                   int first_part) {
    int rows = 0;
    for (int u = first; u < first + count; ++u) rows += units[u].rows;
    const int steps = (end - begin + kSplitUnit - 1) / kSplitUnit;
    for (int k = 0; k < splits; ++k) {
      plan.items.push_back({first, count, rows, begin + steps * k / splits * kSplitUnit,
                            std::min(end, begin + steps * (k + 1) / splits * kSplitUnit),
                            plan.state_size});
      int row = 0;
      for (int u = first; u < first + count; row += units[u++].rows)
        parts[units[u].first + first_part + k] = {plan.state_size, rows, row};
      plan.state_size += State::size(rows, s.head_size);
    }
    plan.max_rows = std::max(plan.max_rows, rows);
  };
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto [begin, count, shared] = groups[g];
    const int shared_splits =
        shared ? splits_of(items_of(group_queries[g], shared), shared) : 0;
    for (int kv_head = 0; kv_head < s.num_kv_heads; ++kv_head) {
      const int first = units.size();
      for (int i = begin; i < begin + count; ++i) {
        const int r = reqs[i], rows = queries(r) * s.group;
        const int own = s.seq_lens[r] - own_begin(r, groups[g]);
        const int wanted = items_of(queries(r), own);
        // Splits of rows need no joining but read the KV again: only of many rows.
        const int row_splits =
            shared ? 1 : std::clamp(wanted, 1, std::max(1, rows / kSplitRows));
        const int splits = splits_of((wanted + row_splits - 1) / row_splits, own);
        for (int part = 0; part < row_splits; ++part) {
          const int begin_row = rows * part / row_splits;
          units.push_back({r, kv_head, begin_row,
                           rows * (part + 1) / row_splits - begin_row,
                           (int)parts.size(), shared_splits + splits});
          parts.resize(parts.size() + units.back().count);
        }
      }
      if (shared) split(first, units.size() - first, 0, shared, shared_splits, 0);
      for (int u = first; u < (int)units.size(); ++u)
        split(u, 1, own_begin(units[u].req, groups[g]), s.seq_lens[units[u].req],
              units[u].count - shared_splits, shared_splits);
    }
  }
  return plan;
}

}  // namespace tree
