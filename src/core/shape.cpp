#include "waybill/core/shape.h"

#include "waybill/core/error.h"

namespace waybill {

void Shape::throw_too_long() {
  throw_invalid("Shape: more than ", max_axes, " axes, expected at most ", max_axes);
}

std::int64_t num_elements(std::span<const std::int64_t> shape, const char* who) {
  constexpr std::int64_t limit = std::int64_t{1} << 62;
  std::int64_t product = 1;
  for (const std::int64_t extent : shape) {
    if (extent < 0) {
      throw_invalid(who, ": shape = ", to_string(shape), ", expected no negative extent");
    }
  }
  for (const std::int64_t extent : shape) {
    if (extent == 0) return 0;
  }
  for (const std::int64_t extent : shape) {
    if (extent > limit / product) {
      throw_invalid(who, ": shape = ", to_string(shape), ", expected at most 2^62 elements");
    }
    product *= extent;
  }
  return product;
}

std::string to_string(std::span<const std::int64_t> shape) {
  std::string text = "[";
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    if (axis > 0) text += ", ";
    text += std::to_string(shape[axis]);
  }
  return text + "]";
}

std::int64_t normalize_dim(std::int64_t dim, std::int64_t ndim, const char* who) {
  require(-ndim <= dim && dim < ndim, who, ": dim = ", dim, ", expected ", -ndim, "..", ndim - 1,
          " for an array of ", ndim, " dimensions");
  return dim < 0 ? dim + ndim : dim;
}

}  // namespace waybill
