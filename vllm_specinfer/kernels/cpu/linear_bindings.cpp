// Linear layers as PyTorch's operators, which compiled models call.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <optional>

#include "strips.cpp"
#include "tile_rows.cpp"

namespace {

using at::Tensor;

// What a linear layer of so many outputs makes of x [.., K], and its bias as the kernels
// take it; `weight` must be dense strips of `width` outputs, whatever its bytes pass for.
struct Outputs {
  Tensor y, bias;
  int64_t rows, inputs;
  Outputs(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
          int64_t outputs, int64_t width, at::ScalarType stored)
      : inputs(x.size(-1)) {
    const int64_t strips = (outputs + width - 1) / width;
    const size_t bytes = strips * width * inputs * c10::elementSize(stored);
    TORCH_CHECK(weight.is_contiguous() && weight.nbytes() == bytes,
                "weight must be ", strips, " dense strips of ", width, " outputs for x ",
                x.sizes(), ", ", bytes, " bytes; got ", weight.nbytes());
    TORCH_CHECK(!bias || bias->numel() == outputs, "bias must be [", outputs, "]");
    rows = x.numel() / inputs;
    auto shape = x.sizes().vec();
    shape.back() = outputs;
    y = at::empty(shape, x.options());
    if (!bias) return;
    this->bias = at::zeros({strips * width}, x.options().dtype(at::kFloat));
    this->bias.narrow(0, 0, outputs).copy_(*bias);
  }
  const float* offsets() const {
    return bias.defined() ? bias.const_data_ptr<float>() : nullptr;
  }
};

// x weight^T + bias by weights in strips; their bytes are numbers of the type `stored`
// or, for a float32 x, float32: new weights of a compiled model may be no others.
Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
              int64_t outputs, at::ScalarType stored) {
  const auto type = x.scalar_type();
  TORCH_CHECK(type == at::kFloat ||
                  ((type == at::kBFloat16 || type == at::kHalf) && stored == type),
              "x must be float32, or bfloat16 or float16 as the weights; got ", type,
              " and ", stored);
  TORCH_CHECK(stored != at::kBFloat16 || x.size(-1) % 2 == 0,
              "bfloat16 weights come in pairs of inputs; got x ", x.sizes());
  const int64_t padded =
      (outputs + strips::kOutputs - 1) / strips::kOutputs * strips::kOutputs;
  const size_t whole = padded * x.size(-1) * sizeof(float);
  if (type == at::kFloat && weight.nbytes() == whole) stored = at::kFloat;
  const Outputs out(x, weight, bias, outputs, strips::kOutputs, stored);
  auto run = [&]<class X, class W, class Y>(X, W, Y, const Tensor& rows) {
    strips::run(strips::Product<X, W, Y>{
        (const X*)rows.const_data_ptr(), (const W*)weight.const_data_ptr(),
        out.offsets(), out.y.mutable_data_ptr<Y>(), out.rows, outputs,
        int64_t(out.inputs * c10::elementSize(stored) / sizeof(W))});
  };
  using c10::BFloat16, c10::Half;
  if (type == at::kFloat) {
    const Tensor rows = x.contiguous();
    switch (stored) {
      case at::kFloat: run(float(), float(), float(), rows); break;
      case at::kBFloat16: run(float(), BFloat16(), float(), rows); break;
      case at::kHalf: run(float(), Half(), float(), rows); break;
      default: TORCH_CHECK(false, "weights must be float32, bfloat16 or float16");
    }
  } else if (type == at::kHalf) {
    run(float(), Half(), Half(), x.to(at::kFloat).contiguous());
  } else {
#ifdef __AVX512BF16__
    run(vectors::Pair(), vectors::Pair(), BFloat16(), x.contiguous());
#else
    run(float(), BFloat16(), BFloat16(), x.to(at::kFloat).contiguous());
#endif
  }
  return out.y;
}

// The same by weights in tiles.
Tensor linear_in_tiles(const Tensor& x, const Tensor& weight,
                       const std::optional<Tensor>& bias, int64_t outputs) {
#ifdef SPECINFER_TILES
  using tile_rows::BF16;
  TORCH_CHECK(x.scalar_type() == at::kBFloat16 && weight.scalar_type() == at::kBFloat16 &&
                  x.size(-1) % tiles::kDepth == 0,
              "x and weight must be bfloat16, and 32 inputs a tile; got ", x.sizes());
  const Outputs out(x, weight, bias, outputs, tile_rows::kOutputs, at::kBFloat16);
  const Tensor rows = x.contiguous();
  tile_rows::run({rows.const_data_ptr<BF16>(), weight.const_data_ptr<BF16>(),
                  out.offsets(), out.y.mutable_data_ptr<BF16>(), out.rows, outputs,
                  out.inputs});
  return out.y;
#else
  TORCH_CHECK(false, "this CPU does not multiply tiles");
#endif
}

}  // namespace

TORCH_LIBRARY(vllm_specinfer, m) {
  m.def("linear(Tensor x, Tensor weight, Tensor? bias=None, *, int outputs, "
        "ScalarType stored) -> Tensor");
  m.def("linear_in_tiles(Tensor x, Tensor weight, Tensor? bias=None, *, int outputs) "
        "-> Tensor");
}
TORCH_LIBRARY_IMPL(vllm_specinfer, CPU, m) {
  m.impl("linear", &linear);
  m.impl("linear_in_tiles", &linear_in_tiles);
}
