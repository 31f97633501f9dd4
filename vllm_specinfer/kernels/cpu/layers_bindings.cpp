// Attention layers of compiled models: vLLM's operators by another name, which run a
// pass over trees here and have vLLM run any other one, in Python.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace attention {

using at::Tensor;

// In attention_bindings.cpp.
void tree_attention(const Tensor& query, const Tensor& kv_cache, const Tensor& out,
                    const Tensor& block_table, const Tensor& query_start_loc,
                    const Tensor& seq_lens, const Tensor& is_tree,
                    const Tensor& context_lens, const Tensor& ancestor_bits,
                    double scale, double softcap, const std::optional<Tensor>& sinks,
                    double k_scale, double v_scale, int64_t window, bool in_tiles);
void write_kv(const Tensor& key, const Tensor& value, const Tensor& kv_cache,
              const Tensor& slots, bool in_tiles);

}  // namespace attention

namespace {

using at::Tensor;
using torch::jit::Stack;

// What a layer has in every pass.
struct Constants {
  double scale, softcap;
  std::optional<Tensor> sinks;
  double k_scale, v_scale;
  int64_t window;
  bool in_tiles;
};

// What layers with one block table have in one pass.
struct Rows {
  Tensor block_table, query_start_loc, seq_lens, is_tree, context_lens, ancestor_bits;
  std::optional<Tensor> slots;  // none: vLLM writes K and V
};

// The layers of a model.
class Layers {
 public:
  using Pass = std::tuple<std::shared_ptr<Constants>, Tensor, std::shared_ptr<Rows>>;

  explicit Layers(const std::vector<std::string>& names) {
    for (size_t i = 0; i < names.size(); ++i) index_.emplace(names[i], i);
  }

  // A pass of this thread begins: of each layer what it has of it, or vLLM runs it,
  // as it runs all of them where there are none.
  void begin(std::vector<std::optional<Pass>> passes) {
    TORCH_CHECK(passes.empty() || passes.size() == index_.size(), "there are ",
                index_.size(), " layers; got passes of ", passes.size());
    passes_ = std::move(passes);
    current = this;
  }

  void end() {
    current = nullptr;
    passes_.clear();
    raised_ = pybind11::none();
  }

  // What the layer has now; null where vLLM is to run it.
  static const Pass* find(const std::string& name) {
    if (!current || current->passes_.empty()) return nullptr;
    const auto i = current->index_.find(name);
    if (i == current->index_.end()) return nullptr;
    const auto& pass = current->passes_[i->second];
    return pass ? &*pass : nullptr;
  }

  static void keep(const pybind11::error_already_set& error) {
    const pybind11::gil_scoped_acquire gil;
    if (current) current->raised_ = error.value();
  }

  // What an operator of vLLM's has raised in this pass, or None.
  pybind11::object raised() const { return raised_; }

 private:
  static thread_local Layers* current;
  std::unordered_map<std::string, size_t> index_;
  std::vector<std::optional<Pass>> passes_;
  pybind11::object raised_ = pybind11::none();
};

thread_local Layers* Layers::current = nullptr;

template <const char* name>
void call_vllm(Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  try {
    op.callBoxed(stack);
  } catch (const pybind11::error_already_set& error) {
    Layers::keep(error);
    throw;
  }
}

constexpr char kWrite[] = "vllm::unified_kv_cache_update";
constexpr char kAttend[] = "vllm::unified_attention_with_output";

// (key, value, layer_name) -> an empty tensor, for the order of operators
void unified_kv_cache_update(const c10::OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const auto args = torch::jit::last(*stack, count);
  const Layers::Pass* pass = Layers::find(args[2].toStringRef());
  if (!pass) return call_vllm<kWrite>(stack);
  const auto& [constants, kv_cache, rows] = *pass;
  const Tensor& key = args[0].toTensor();
  if (!rows->slots || key.scalar_type() != kv_cache.scalar_type())
    return call_vllm<kWrite>(stack);
  attention::write_kv(key, args[1].toTensor(), kv_cache, *rows->slots,
                      constants->in_tiles);
  Tensor order = key.new_empty({0});
  torch::jit::drop(*stack, count);
  torch::jit::push(*stack, std::move(order));
}

// (query, key, value, output, layer_name, ..)
void unified_attention_with_output(const c10::OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const auto args = torch::jit::last(*stack, count);
  const Layers::Pass* pass = Layers::find(args[4].toStringRef());
  if (!pass) return call_vllm<kAttend>(stack);
  const auto& [constants, kv_cache, rows] = *pass;
  const Tensor &query = args[0].toTensor(), &out = args[3].toTensor();
  attention::tree_attention(
      query, kv_cache, out.dim() == 3 ? out : out.view(query.sizes()),
      rows->block_table, rows->query_start_loc, rows->seq_lens, rows->is_tree,
      rows->context_lens, rows->ancestor_bits, constants->scale, constants->softcap,
      constants->sinks, constants->k_scale, constants->v_scale, constants->window,
      constants->in_tiles);
  torch::jit::drop(*stack, count);
}

}  // namespace

namespace layers {

void define(pybind11::module_& m) {
  using std::optional;
  pybind11::class_<Constants, std::shared_ptr<Constants>>(m, "Constants")
      .def(pybind11::init<double, double, optional<Tensor>, double, double, int64_t,
                          bool>());
  pybind11::class_<Rows, std::shared_ptr<Rows>>(m, "Rows")
      .def(pybind11::init<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
                          optional<Tensor>>());
  pybind11::class_<Layers>(m, "Layers")
      .def(pybind11::init<std::vector<std::string>>())
      .def("begin", &Layers::begin)
      .def("raised", &Layers::raised)
      .def("end", &Layers::end);
}

}  // namespace layers

// Their schemas are vLLM's, of the release that runs (compiled_attention.py).
TORCH_LIBRARY_IMPL(vllm_specinfer, CPU, m) {
  m.impl("unified_kv_cache_update",
         torch::CppFunction::makeFromBoxedFunction<&unified_kv_cache_update>());
  m.impl("unified_attention_with_output",
         torch::CppFunction::makeFromBoxedFunction<&unified_attention_with_output>());
}
