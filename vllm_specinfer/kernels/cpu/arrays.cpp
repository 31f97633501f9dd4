// What works on NumPy arrays: draws, and all that makes trees.
//
// Legend: R requests, C candidates per request, F frontier nodes of one level over all
// requests, K children of each, N nodes of a tree, W 64-bit words per bit row.
#pragma once
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "candidates.cpp"
#include "coupled.cpp"
#include "growth.cpp"
#include "gumbel.cpp"

namespace arrays {

namespace py = pybind11;

template <class T>
using Rows = py::array_t<T, py::array::c_style | py::array::forcecast>;

// `noised_argmax` of `kernels/cpu/gumbel.py`, given the best logits' tokens.
py::tuple gumbel_argmax(const Rows<float>& logits, const Rows<int64_t>& best,
                        const Rows<float>& temperatures, const Rows<int64_t>& seeds,
                        const Rows<int64_t>& positions, float max_noise) {
  TORCH_CHECK(logits.ndim() == 2, "logits must be [L, V]");
  const int64_t count = logits.shape(0), size = logits.shape(1);
  for (const int64_t n : {best.size(), temperatures.size(), seeds.size(), positions.size()})
    TORCH_CHECK(n == count, "every parameter must be [", count, "]; got ", n);
  Rows<int64_t> winners(count);
  Rows<float> values(count);
  int64_t* winner = winners.mutable_data();
  float* value = values.mutable_data();
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float* row = logits.data() + i * size;
      const int64_t token = best.data()[i];
      const float temperature = temperatures.data()[i];
      gumbel::Winner found{token, row[token]};
      if (temperature != 0)
        found = gumbel::draw(row, size, token, temperature, max_noise,
                             gumbel::prefix(seeds.data()[i], positions.data()[i]));
      winner[i] = found.token;
      value[i] = found.value;
    }
  });
  return py::make_tuple(winners, values);
}

// `coupled_children` of `drafting/children.py`.
py::tuple coupled_children(const Rows<float>& logprobs, const Rows<int64_t>& tokens,
                           const Rows<int64_t>& seeds, const Rows<int64_t>& positions,
                           const Rows<float>& temperatures, const Rows<int64_t>& top_k,
                           const Rows<float>& top_p, const Rows<float>& min_p,
                           int64_t k) {
  TORCH_CHECK(logprobs.ndim() == 2 && tokens.ndim() == 2, "rows must be [F, M]");
  const int64_t f = logprobs.shape(0), m = logprobs.shape(1);
  TORCH_CHECK(tokens.shape(0) == f && tokens.shape(1) == m && k >= 0 && k <= m,
              "tokens must be [", f, ", ", m, "], children at most ", m, "; got ", k);
  for (const int64_t size : {seeds.size(), positions.size(), temperatures.size(),
                             top_k.size(), top_p.size(), min_p.size()})
    TORCH_CHECK(size == f, "every parameter must be [", f, "]; got ", size);
  Rows<float> scores({f, k});
  Rows<int64_t> chosen({f, k});
  for (int64_t i = 0; i < f; ++i)
    coupled::children(logprobs.data() + i * m, tokens.data() + i * m, m,
                      {seeds.data()[i], positions.data()[i], temperatures.data()[i],
                       top_p.data()[i], min_p.data()[i], top_k.data()[i]},
                      k, scores.mutable_data() + i * k, chosen.mutable_data() + i * k);
  return py::make_tuple(scores, chosen);
}

// R requests' candidates.
struct Candidates {
  Rows<int64_t> tokens;
  Rows<int32_t> parents;
  Rows<float> scores;

  Candidates(int64_t r, int64_t c) : tokens({r, c}), parents({r, c}), scores({r, c}) {}

  explicit Candidates(const py::tuple& given)
      : tokens(given[0].cast<Rows<int64_t>>()),
        parents(given[1].cast<Rows<int32_t>>()),
        scores(given[2].cast<Rows<float>>()) {
    TORCH_CHECK(tokens.ndim() == 2 && parents.ndim() == 2 && scores.ndim() == 2,
                "candidates must be [R, C]");
    for (int64_t i = 0; i < 2; ++i)
      TORCH_CHECK(parents.shape(i) == tokens.shape(i) &&
                      scores.shape(i) == tokens.shape(i),
                  "tokens, parents and scores must have one shape");
  }

  int64_t num_requests() const { return tokens.shape(0); }
  int64_t size() const { return tokens.shape(1); }

  std::vector<candidates::Node> of(int64_t r) const {
    std::vector<candidates::Node> nodes;
    for (int64_t i = r * size(); i < (r + 1) * size(); ++i)
      nodes.push_back({tokens.data()[i], parents.data()[i], scores.data()[i]});
    return nodes;
  }

  void set(int64_t r, int64_t c, const candidates::Node& node) {
    const int64_t i = r * size() + c;
    tokens.mutable_data()[i] = node.token;
    parents.mutable_data()[i] = node.parent;
    scores.mutable_data()[i] = node.score;
  }

  py::tuple arrays() const { return py::make_tuple(tokens, parents, scores); }
};

// `merge` of `tree/candidates.py`: the union, and each source's columns in it.
py::tuple merge(const std::vector<py::tuple>& given) {
  std::vector<Candidates> sources(given.begin(), given.end());
  const int64_t num_reqs = sources.at(0).num_requests();
  std::vector<candidates::Trie> tries(num_reqs);
  std::vector<Rows<int64_t>> columns;
  int64_t width = 0;
  for (const Candidates& source : sources) {
    TORCH_CHECK(source.num_requests() == num_reqs, "sources must have ", num_reqs,
                " requests; got ", source.num_requests());
    auto& column = columns.emplace_back(py::array::ShapeContainer{num_reqs, source.size()});
    std::fill_n(column.mutable_data(), column.size(), -1);
    for (int64_t r = 0; r < num_reqs; ++r) {
      tries[r].add(source.of(r).data(), source.size(),
                   column.mutable_data() + r * source.size());
      width = std::max(width, tries[r].size());
    }
  }
  for (auto& column : columns)
    std::replace(column.mutable_data(), column.mutable_data() + column.size(),
                 int64_t(-1), width);
  Candidates all(num_reqs, width);
  for (int64_t r = 0; r < num_reqs; ++r)
    for (int64_t c = 0; c < width; ++c)
      all.set(r, c, c < tries[r].size() ? tries[r].node(c)
                                        : candidates::Node{0, candidates::kRoot,
                                                           candidates::kNone});
  return py::make_tuple(all.arrays(), columns);
}

// `Candidates.best` of `tree/candidates.py`: the trees, and each candidate's place.
py::tuple best(const py::tuple& of, int64_t num_nodes, double least, int64_t most,
               int64_t no_token) {
  const Candidates given(of);
  const int64_t num_reqs = given.num_requests(), size = given.size();
  Candidates trees(num_reqs, num_nodes);
  Rows<int64_t> places({num_reqs, size + 1});
  std::fill_n(places.mutable_data(), places.size(), num_nodes);
  const int64_t sorted = std::min({size, num_nodes, most});
  for (int64_t r = 0; r < num_reqs; ++r) {
    const auto nodes = given.of(r);
    const auto order = candidates::ordered(nodes.data(), size, sorted);
    int64_t* place = places.mutable_data() + r * (size + 1);
    for (int64_t n = 0; n < num_nodes; ++n) {
      candidates::Node node{no_token, candidates::kRoot, candidates::kNone};
      if (n < sorted && std::isfinite(nodes[order[n]].score) &&
          nodes[order[n]].score >= least) {
        node = nodes[order[n]];
        place[order[n]] = n;
        if (node.parent != candidates::kRoot) node.parent = (int32_t)place[node.parent];
      }
      trees.set(r, n, node);
    }
  }
  return py::make_tuple(trees.tokens, trees.parents, trees.scores, places);
}

// The frontier as [F] request, token, candidate, parent, slot, and [F, W] bits; None at
// the end.
py::object frontier(const growth::Growth& grown) {
  const auto& rows = grown.frontier();
  const int64_t f = rows.size();
  if (f == 0) return py::none();
  Rows<int64_t> requests(f), tokens(f), parents(f), scratch(f);
  Rows<int32_t> nodes(f);
  Rows<int64_t> bits({f, int64_t(grown.bits().size()) / f});
  for (int64_t i = 0; i < f; ++i) {
    requests.mutable_data()[i] = rows[i].request;
    tokens.mutable_data()[i] = grown.node(rows[i].request, rows[i].node).token;
    nodes.mutable_data()[i] = rows[i].node;
    parents.mutable_data()[i] = rows[i].parent;
    scratch.mutable_data()[i] = rows[i].scratch;
  }
  std::copy(grown.bits().begin(), grown.bits().end(), bits.mutable_data());
  return py::make_tuple(requests, tokens, nodes, parents, grown.depth(), scratch, bits);
}

// `TreeGrowth` of `drafting/growth.py`.
growth::Growth start_growth(const Rows<int64_t>& capacity, const Rows<int64_t>& max_depth,
                            const Rows<double>& least, bool best_first, int64_t depth,
                            int64_t max_width, int64_t num_nodes, int64_t words,
                            double child, double row, double level, double worthless) {
  std::vector<growth::Request> requests;
  TORCH_CHECK(max_depth.size() == capacity.size() && least.size() == capacity.size(),
              "capacity, max_depth and least must be [R]");
  for (int64_t r = 0; r < capacity.size(); ++r)
    requests.push_back({capacity.data()[r], max_depth.data()[r], least.data()[r]});
  return {{best_first, depth, max_width, num_nodes, words}, {child, row, level, worthless},
          std::move(requests)};
}

py::object extend(growth::Growth& grown, const Rows<float>& logprobs,
                  const Rows<int64_t>& tokens) {
  TORCH_CHECK(logprobs.ndim() == 2 && tokens.ndim() == 2 &&
                  logprobs.shape(0) == (int64_t)grown.frontier().size() &&
                  tokens.shape(0) == logprobs.shape(0) &&
                  tokens.shape(1) == logprobs.shape(1),
              "logprobs and tokens must be [", grown.frontier().size(), ", K]");
  grown.extend(logprobs.data(), tokens.data(), tokens.shape(1));
  return frontier(grown);
}

py::tuple finish(growth::Growth& grown) {
  grown.cut();
  Candidates found(grown.num_requests(), grown.num_candidates());
  for (int64_t r = 0; r < found.num_requests(); ++r)
    for (int64_t c = 0; c < found.size(); ++c) found.set(r, c, grown.node(r, c));
  return found.arrays();
}

void define(py::module_& m) {
  m.def("gumbel_argmax", &gumbel_argmax);
  m.def("coupled_children", &coupled_children);
  m.def("merge", &merge);
  m.def("best", &best);
  py::class_<growth::Growth>(m, "Growth")
      .def(py::init(&start_growth))
      .def("extend", &extend)
      .def("finish", &finish);
}

}  // namespace arrays
