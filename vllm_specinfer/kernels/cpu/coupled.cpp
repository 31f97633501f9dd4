// Children of nodes under coupled verification: the tokens whose log-probability plus
// the target's noise is best (`drafting/children.py` says why).
//
// Legend: M likeliest tokens of a row, K children.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "candidates.cpp"
#include "gumbel.cpp"

namespace coupled {

// What a row's request samples with.
struct Sampling {
  int64_t seed, position;
  float temperature, top_p, min_p;
  int64_t top_k;
};

// q [M] of descending log-probabilities, under the request's parameters.
inline void distribution(const float* logprobs, int64_t m, const Sampling& s, double* q) {
  double all = 0, before = 0, kept = 0;
  for (int64_t i = 0; i < m; ++i) {
    q[i] = std::exp((double)(logprobs[i] - logprobs[0]) / s.temperature);
    if (q[i] < s.min_p || i >= s.top_k) q[i] = 0;
    all += q[i];
  }
  for (int64_t i = 0; i < m; ++i) {
    const bool keep = before < s.top_p || s.top_p >= 1;
    before += q[i] / all;
    q[i] = keep ? q[i] / all : 0;
    kept += q[i];
  }
  for (int64_t i = 0; i < m; ++i) q[i] /= kept;
}

// The K best of log q + noise and the log of their shares, K <= M; ties go to the
// likelier one.
inline void children(const float* logprobs, const int64_t* tokens, int64_t m,
                     const Sampling& s, int64_t k, float* scores, int64_t* chosen) {
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  std::vector<double> values(m);
  distribution(logprobs, m, s, values.data());
  const uint32_t prefix = gumbel::prefix(s.seed, s.position);
  double top = kNone, sum = 0;
  for (int64_t i = 0; i < m; ++i) {
    if (values[i] > 0)
      values[i] = std::log(values[i]) + gumbel::noise(prefix, (uint32_t)tokens[i]);
    else
      values[i] = kNone;
    top = std::max(top, values[i]);
  }
  for (double v : values) sum += std::exp(v - top);
  const double total = top + std::log(sum);
  const auto order = candidates::ordered(m, k, [&](int64_t i) { return values[i]; });
  for (int64_t j = 0; j < k; ++j) {
    scores[j] = values[order[j]] - total;
    chosen[j] = tokens[order[j]];
  }
}

}  // namespace coupled
