// What a linear layer multiplies: y = x W^T + bias.
//
// Legend: M rows, N outputs, K inputs. x [M, K], W [N, K], y [M, N] of type T. x is
// float32, so that W is converted, or of the type X of W; both then come in pairs where
// the CPU multiplies those, and K counts pairs.
#pragma once
#include <cstdint>
#include <type_traits>

namespace product {

template <class T, class X>
struct Product {
  using Weight = std::conditional_t<std::is_same_v<X, float>, T, X>;
  const X* x;
  const Weight* w;
  const float* bias;  // may be null
  T* y;
  int64_t m, n, k;
};

}  // namespace product
