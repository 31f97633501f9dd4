// What several sources propose, as one tree, and its best nodes; `tree/candidates.py`
// defines both.
//
// Legend: C candidates of a request, N nodes of a tree.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <unordered_map>
#include <vector>

namespace candidates {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr int32_t kRoot = -1;

struct Node {
  int64_t token;
  int32_t parent;
  float score;
};

// Numbers up to a count, those of the best `best` scores first; ties go to the elder.
template <class Score>
std::vector<int64_t> ordered(int64_t count, int64_t best, Score score) {
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  if (best == 0) return order;
  std::partial_sort(order.begin(), order.begin() + best, order.end(),
                    [&](int64_t a, int64_t b) {
                      const auto x = score(a), y = score(b);
                      return x > y || (x == y && a < b);
                    });
  return order;
}
inline std::vector<int64_t> ordered(const Node* nodes, int64_t count, int64_t best) {
  return ordered(count, best, [&](int64_t i) { return nodes[i].score; });
}

// The union of one request's candidates by whole path.
class Trie {
 public:
  // Nodes [C] of a source, parents first; `column` [C] hears which node each became.
  void add(const Node* nodes, int64_t count, int64_t* column) {
    for (int64_t c = 0; c < count; ++c) {
      const Node& node = nodes[c];
      if (!std::isfinite(node.score)) continue;
      const int32_t parent = node.parent == kRoot ? kRoot : (int32_t)column[node.parent];
      const uint64_t path = uint64_t(parent + 1) << 32 | uint32_t(node.token);
      const auto [found, is_new] = numbers_.try_emplace(path, (int64_t)nodes_.size());
      if (is_new) {
        nodes_.push_back({node.token, parent, 0});
        misses_.push_back(1);
      }
      column[c] = found->second;
      misses_[column[c]] *= 1 - std::exp((double)node.score);
    }
  }

  int64_t size() const { return nodes_.size(); }

  // Accepted where any source is right.
  Node node(int64_t i) const {
    return {nodes_[i].token, nodes_[i].parent, (float)std::log1p(-misses_[i])};
  }

 private:
  std::unordered_map<uint64_t, int64_t> numbers_;  // by parent and token
  std::vector<Node> nodes_;
  std::vector<double> misses_;  // the chance that all sources are wrong
};

}  // namespace candidates
