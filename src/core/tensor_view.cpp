#include "waybill/core/tensor_view.h"

#include "waybill/core/error.h"

namespace waybill::detail {

std::int64_t check_view_as(DType dtype, const Shape& shape, const Shape& strides,
                           std::size_t element_bytes) {
  constexpr const char* who = "TensorView::as";
  require(element_bytes == static_cast<std::size_t>(dtype_bytes(dtype)), who, ": elements of ",
          element_bytes, " bytes, expected ", dtype_bytes(dtype), ", as ", dtype, " has");
  require(strides.size() == shape.size(), who, ": ", strides.size(), " strides, expected ",
          shape.size());
  const std::int64_t count = num_elements(shape, who);
  if (count == 0) return 0;
  const Shape contiguous = TensorView::contiguous_strides(shape);
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    require(shape[axis] == 1 || strides[axis] == contiguous[axis], who, ": strides ",
            to_string(strides), " of shape ", to_string(shape), ", expected a contiguous view");
  }
  return count;
}

}  // namespace waybill::detail
