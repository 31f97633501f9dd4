// vLLM's Gumbel noise, and draws with it that look only at tokens that may win.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

namespace gumbel {

inline uint32_t rotl(uint32_t v, int n) { return (v << n) | (v >> (32 - n)); }

// Murmur3, one key further.
inline uint32_t mixed(uint32_t state, uint32_t key) {
  state ^= rotl(key * 0xCC9E2D51u, 15) * 0x1B873593u;
  return rotl(state, 13) * 5u + 0xE6546B64u;
}

// Murmur3 of seed and position.
inline uint32_t prefix(int64_t seed, int64_t position) {
  return mixed(mixed(mixed(0, (uint32_t)seed), (uint32_t)(seed >> 32)),
               (uint32_t)position);
}

// Murmur3 of a token, given the hash of seed and position before it.
inline uint32_t hash32(uint32_t prefix, uint32_t token) {
  uint32_t h = mixed(prefix, token) ^ 16u;
  h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
  h = (h ^ (h >> 13)) * 0xC2B2AE35u;
  return h ^ (h >> 16);
}

// The noise of a token, as `noise.py` defines it, but for the rounding of logarithms.
inline float noise(uint32_t prefix, uint32_t token) {
  const uint32_t h = hash32(prefix, token);
  const float u = (float)(h >> 16) * 0x1p-16f + ((float)(h & 0xffff) + 0.5f) * 0x1p-32f;
  return (float)-std::log(-std::log1p(-std::min((double)u, 1 - 0x1p-24)));
}

// At least e^x for -80 < x <= 0, at most 6.3% more: the chords of 2^y, y = x log2 e.
inline float exp_above(float x) {
  const int32_t bits = (int32_t)((x * 1.442695041f + 127.0f) * 8388608.0f);
  float y;
  static_assert(sizeof(y) == sizeof(bits));
  __builtin_memcpy(&y, &bits, sizeof(y));
  return y * 1.001f;  // more than rounding takes away
}

struct Winner {
  int64_t token;
  float value;
};

// The best of logit / temperature + noise; ties go to the lowest id. `best` has the best
// logit. Noise is -log(-log(1 - u)), which is at most -log(u), so a token that reaches
// `bound` has a u of at most e^(logit - bound); and noise is never above `max_noise`.
inline Winner draw(const float* logits, int64_t size, int64_t best, float temperature,
                   float max_noise, uint32_t prefix) {
  constexpr int64_t kBlock = 256;
  const float top = logits[best] / temperature;
  if (!std::isfinite(top)) return {best, top};
  const float bound = top + noise(prefix, (uint32_t)best), least = bound - max_noise;
  Winner winner{best, bound};
  for (int64_t begin = 0; begin < size; begin += kBlock) {
    const int64_t count = std::min(kBlock, size - begin);
    float values[kBlock];
    int any = 0;
    for (int64_t i = 0; i < count; ++i) {
      values[i] = logits[begin + i] / temperature;
      any |= values[i] > least;
    }
    if (!any) continue;
    uint8_t keep[kBlock];
    any = 0;
    for (int64_t i = 0; i < count; ++i) {
      const float gap = std::min(std::max(values[i], least) - bound, 0.0f);
      const int32_t high = (int32_t)(hash32(prefix, (uint32_t)(begin + i)) >> 8);
      keep[i] = (values[i] > least) & ((float)high * 0x1p-24f <= exp_above(gap));
      any |= keep[i];
    }
    if (!any) continue;
    for (int64_t i = 0; i < count; ++i) {
      if (!keep[i]) continue;
      const int64_t token = begin + i;
      const float value = values[i] + noise(prefix, (uint32_t)token);
      if (value > winner.value || (value == winner.value && token < winner.token))
        winner = {token, value};
    }
  }
  return winner;
}

}  // namespace gumbel
