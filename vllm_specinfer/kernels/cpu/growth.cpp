// Trees of a batch, grown level by level; `TreeGrowth` of `drafting/growth.py` says how.
//
// Legend: R requests, C candidates per request, F frontier nodes of one level over all
// requests, K children of each, N nodes of a tree, W 64-bit words per bit row.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

#include "candidates.cpp"

namespace growth {

using candidates::kNone;
using candidates::kRoot;

struct Shape {
  bool best_first;
  int64_t max_depth, max_width, num_nodes, words;
};

// `Worth` of `scheduling/budget.py`.
struct Worth {
  double child, row, level, least;

  double gain(float score) const {
    return (std::exp((double)score) - least) / (1 - least) * child - row;
  }
};

struct Request {
  int64_t capacity, max_depth;
  double least;
  int64_t used = 0;  // slots
};

// A node that the next pass runs.
struct Row {
  int64_t request, place;  // its column in the frontier
  int64_t parent;          // row of the pass before
  int64_t scratch;
  int32_t node;  // the candidate it is
  float score;
};

class Growth {
 public:
  Growth(Shape shape, Worth worth, std::vector<Request> requests)
      : shape_(shape), worth_(worth), requests_(std::move(requests)) {
    const int64_t count = requests_.size();
    found_.resize(count);
    bits_.resize(count * shape_.words);
    for (int64_t r = 0; r < count; ++r) {
      frontier_.push_back({r, 0, r, 0, kRoot, 0});
      row_of_.push_back(r);
    }
  }

  int64_t num_requests() const { return requests_.size(); }
  int64_t num_candidates() const { return found_.empty() ? 0 : found_[0].size(); }
  int64_t depth() const { return depth_; }
  const std::vector<Row>& frontier() const { return frontier_; }
  const std::vector<uint64_t>& bits() const { return bits_; }  // [F, W]
  const candidates::Node& node(int64_t r, int64_t c) const { return found_[r][c]; }

  // Adds the children [F, K] of the frontier and chooses the next one, empty at the end.
  // One whose chance is NaN is none.
  void extend(const float* logprobs, const int64_t* tokens, int64_t k) {
    const int64_t first = num_candidates();
    for (auto& nodes : found_) nodes.resize(first + width_ * k, {0, kRoot, kNone});
    for (const Row& row : frontier_) {
      candidates::Node* child = found_[row.request].data() + first + row.place * k;
      for (int64_t j = 0; j < k; ++j) {
        const float score = *logprobs++ + row.score;
        *child++ = {*tokens++, row.node, std::isnan(score) ? kNone : score};
      }
    }
    ++depth_;
    if (depth_ >= shape_.max_depth)
      frontier_.clear();
    else
      advance(first, k);
  }

  // Only the N best of each request stay.
  void cut() {
    const int64_t n = shape_.num_nodes;
    for (auto& nodes : found_) {
      if ((int64_t)nodes.size() <= n) continue;
      const auto order = candidates::ordered(nodes.data(), nodes.size(), nodes.size());
      for (size_t i = n; i < nodes.size(); ++i) nodes[order[i]].score = kNone;
    }
  }

 private:
  void advance(int64_t first, int64_t k) {
    const int64_t num_new = num_candidates() - first;
    const bool all = !shape_.best_first;
    const int64_t width = all ? num_new : std::min(shape_.max_width, num_new);
    std::vector<Row> picked;
    double gained = 0;
    for (int64_t r = 0; r < num_requests(); ++r) {
      if (depth_ > requests_[r].max_depth) continue;
      const candidates::Node* nodes = found_[r].data() + first;
      const float nth = all ? kNone : nth_score(r);
      const auto order = candidates::ordered(nodes, num_new, all ? 0 : width);
      for (int64_t place = 0; place < width; ++place) {
        const int64_t c = order[place];
        const float score = nodes[c].score;
        if (!std::isfinite(score)) continue;
        if (!all && (score < requests_[r].least || score < nth)) continue;
        const double gain = worth_.gain(score);
        if (!(gain > 0)) continue;
        gained += gain;
        const int64_t parent = row_of_[r * width_ + c / k];
        picked.push_back({r, place, parent, 0, int32_t(first + c), score});
      }
    }
    if (!(gained > worth_.level)) picked.clear();
    place_in_pass(picked, width);
  }

  // Those for which there are slots are the next frontier.
  void place_in_pass(const std::vector<Row>& picked, int64_t width) {
    const int64_t words = shape_.words;
    std::vector<uint64_t> bits;
    frontier_.clear();
    width_ = width;
    row_of_.assign(num_requests() * width, 0);
    for (Row row : picked) {
      Request& request = requests_[row.request];
      if (request.used >= request.capacity) continue;
      row.scratch = request.used++;
      row_of_[row.request * width + row.place] = frontier_.size();
      const uint64_t* above = bits_.data() + row.parent * words;
      bits.insert(bits.end(), above, above + words);
      bits[bits.size() - words + row.scratch / 64] |= uint64_t(1) << row.scratch % 64;
      frontier_.push_back(row);
    }
    bits_ = std::move(bits);
  }

  // Of the N-th best candidate.
  float nth_score(int64_t r) const {
    const auto& nodes = found_[r];
    const int64_t n = shape_.num_nodes;
    if ((int64_t)nodes.size() < n) return kNone;
    std::vector<float> scores;
    for (const auto& node : nodes) scores.push_back(node.score);
    std::nth_element(scores.begin(), scores.begin() + n - 1, scores.end(),
                     std::greater<>());
    return scores[n - 1];
  }

  const Shape shape_;
  const Worth worth_;
  std::vector<Request> requests_;
  std::vector<std::vector<candidates::Node>> found_;  // [R, C]
  int64_t depth_ = 0, width_ = 1;                     // most places in a request
  std::vector<Row> frontier_;
  std::vector<int64_t> row_of_;  // [R, width_] rows of the frontier
  std::vector<uint64_t> bits_;
};

}  // namespace growth
