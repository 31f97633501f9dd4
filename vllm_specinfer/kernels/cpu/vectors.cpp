// Vectors of floats, and their loads from every type that weights and K/V come in.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include <c10/util/BFloat16.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e5m2.h>
#include <c10/util/Half.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace vectors {

#ifdef __AVX512F__
constexpr int kLanes = 16, kRegisters = 32;
#else
constexpr int kLanes = 8, kRegisters = 16;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t UVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HVec __attribute__((vector_size(2 * kLanes)));
typedef uint8_t BVec __attribute__((vector_size(kLanes)));

inline Vec splat(float x) { return x - Vec{}; }  // which is x, unlike x + 0

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void add_product(Vec& sum, Vec a, Vec b, float) { sum += a * b; }
#ifdef __AVX512BF16__
// Two factors in a lane, for CPUs that multiply them as they are.
struct Pair {
  c10::BFloat16 first, second;
};
inline Vec splat(Pair p) {
  int32_t bits;
  std::memcpy(&bits, &p, sizeof bits);
  return (Vec)_mm512_set1_epi32(bits);
}
inline Vec load(const Pair* p) { return load((const float*)p); }
inline void add_product(Vec& sum, Vec a, Vec b, Pair) {
  sum = (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#endif
inline Vec load(const c10::BFloat16* p) {
  HVec h;
  std::memcpy(&h, p, sizeof h);
#ifdef __AVX512F__
  return (Vec)((IVec)_mm512_cvtepu16_epi32((__m256i)h) << 16);
#else
  return (Vec)(__builtin_convertvector(h, IVec) << 16);
#endif
}
inline Vec from_half(HVec h) {
#ifdef __AVX512F__
  return (Vec)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
  return (Vec)_mm256_cvtph_ps((__m128i)h);
#else
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = c10::Half(h[i], c10::Half::from_bits());
  return v;
#endif
}
inline Vec load(const c10::Half* p) {
  HVec h;
  std::memcpy(&h, p, sizeof h);
  return from_half(h);
}
// Eight bits are the upper ones of a half: e5m2 as they are, e4m3 with an exponent that
// is 8 too small and a bit further down; NaN is only the largest one.
inline Vec from_bytes(HVec b, c10::Float8_e5m2) { return from_half(b << 8); }
inline Vec from_bytes(HVec b, c10::Float8_e4m3fn) {
  const HVec nan = (HVec)((b & 0x7f) == 0x7f) & 0x7e00;
  return from_half((b & 0x80) << 8 | (b & 0x7f) << 7 | nan);
}
template <class T>
  requires(sizeof(T) == 1)
inline Vec load(const T* p) {
  BVec b;
  std::memcpy(&b, p, sizeof b);
  return from_bytes(__builtin_convertvector(b, HVec), T());
}
// Two vectors whose numbers take turns.
inline void load_pairs(const c10::BFloat16* p, Vec& first, Vec& second) {
  IVec both;
  std::memcpy(&both, p, sizeof both);
  first = (Vec)(both << 16);
  second = (Vec)(both & (int32_t)0xffff0000);
}
template <class T>
  requires(sizeof(T) == 1)
inline void load_pairs(const T* p, Vec& first, Vec& second) {
  HVec both;
  std::memcpy(&both, p, sizeof both);
  first = from_bytes(both & 0xff, T());
  second = from_bytes(both >> 8, T());
}
// What `load` makes of a number times this is the number.
template <class T>
constexpr float kUnit = 1;
template <>
constexpr float kUnit<c10::Float8_e4m3fn> = 256;
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
inline void store(c10::BFloat16* p, Vec v) {
  IVec bits = (IVec)v;  // round to nearest even; the result of a softmax is finite
  HVec h = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, HVec);
  std::memcpy(p, &h, sizeof h);
}
inline void store(c10::Half* p, Vec v) {
#ifdef __AVX512F__
  const HVec h = (HVec)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
  const HVec h = (HVec)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
#else
  HVec h;
  for (int i = 0; i < kLanes; ++i) h[i] = c10::Half(v[i]).x;
#endif
  std::memcpy(p, &h, sizeof h);
}

// 2^x for x <= 126, relative error 2e-7; 0 at -127 and below.
inline Vec exp2(Vec x) {
  x = x < -127.0f ? splat(-127.0f) : x;
  const float magic = 12582912.0f;  // adding it leaves round(x) in the low bits
  Vec shifted = x + magic;
  Vec f = x - (shifted - magic);
  Vec p = splat(1.535336188e-4f);
  p = p * f + 1.339887440e-3f;
  p = p * f + 9.618437357e-3f;
  p = p * f + 5.550332548e-2f;
  p = p * f + 2.402264791e-1f;
  p = p * f + 6.931472028e-1f;
  p = p * f + 1.0f;
  return (Vec)((UVec)p + ((UVec)shifted << 23));
}
inline Vec tanh(Vec x) {
  x = x > 40.0f ? splat(40.0f) : x;
  return 1.0f - 2.0f / (exp2(x * 2.885390082f) + 1.0f);
}

inline float reduce_max(Vec v) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps((__m512)v);
#else
  float m = v[0];
  for (int i = 1; i < kLanes; ++i) m = std::max(m, v[i]);
  return m;
#endif
}
inline float reduce_add(Vec v) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)v);
#else
  float s = 0;
  for (int i = 0; i < kLanes; ++i) s += v[i];
  return s;
#endif
}

}  // namespace vectors
