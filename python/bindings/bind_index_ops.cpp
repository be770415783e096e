#include <cstdint>

#include "arrays.h"
#include "bindings.h"
#include "waybill/routing/index_ops.h"

namespace waybill::python {

using namespace nb::literals;

void bind_index_ops(nb::module_& m) {
  m.def(
      "exclusive_cumsum",
      [](const ArrayArg& array, std::int64_t dim) {
        return numpy_array(exclusive_cumsum(index_array(array, "exclusive_cumsum: array"), dim));
      },
      "array"_a, "dim"_a);
  m.def(
      "prepend_zero",
      [](const ArrayArg& array, std::int64_t dim) {
        return numpy_array(prepend_zero(index_array(array, "prepend_zero: array"), dim));
      },
      "array"_a, "dim"_a);
  m.def(
      "mask_by_neg",
      [](const ArrayArg& array, const ArrayArg& mask) {
        return numpy_array(mask_by_neg(index_array(array, "mask_by_neg: array"),
                                       index_array(mask, "mask_by_neg: mask")));
      },
      "array"_a, "mask"_a);
  m.def(
      "index_put_with_neg_padding_1d",
      [](const ArrayArg& array, const ArrayArg& src, const ArrayArg& index) {
        return numpy_array(index_put_with_neg_padding_1d(
            index_array(array, "index_put_with_neg_padding_1d: array"),
            index_array(src, "index_put_with_neg_padding_1d: src"),
            index_array(index, "index_put_with_neg_padding_1d: index")));
      },
      "array"_a, "src"_a, "index"_a);
}

}  // namespace waybill::python
