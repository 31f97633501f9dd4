// The module of all kernels but the operators in linear_bindings.cpp.
#include <pybind11/pybind11.h>

#include "arrays.cpp"
#include "strips.cpp"
#include "tiles.cpp"

namespace attention {
void define(pybind11::module_& m);
}
namespace layers {
void define(pybind11::module_& m);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  attention::define(m);
  layers::define(m);
  arrays::define(m);
  m.attr("strip") = strips::kOutputs;
#ifdef SPECINFER_TILES
  m.attr("tile_rows") = tiles::kSide;
#else
  m.attr("tile_rows") = 0;
#endif
}
