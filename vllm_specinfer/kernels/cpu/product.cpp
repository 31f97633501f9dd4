// What a linear layer multiplies: y = x W^T + bias.
//
// Legend: M rows, N outputs, K inputs. x [M, K] float32, W [N, K], y [M, N] as W.
#pragma once
#include <cstdint>

namespace product {

template <class T>
struct Product {
  const float* x;
  const T* w;
  const float* bias;  // may be null
  T* y;
  int64_t m, n, k;
};

}  // namespace product
