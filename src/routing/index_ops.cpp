#include "waybill/routing/index_ops.h"

#include <algorithm>
#include <array>

#include "waybill/core/error.h"

namespace waybill {
namespace {

/// The extents before an axis, its own, and those after it, multiplied: [outer, extent, inner].
std::array<std::int64_t, 3> split_at(const IndexArray& array, std::int64_t dim, const char* who) {
  require(array.ndim() >= 1, who, ": got a scalar, expected at least one dimension");
  const auto axis = static_cast<std::size_t>(normalize_dim(dim, array.ndim(), who));
  std::array<std::int64_t, 3> split{1, 1, 1};
  for (std::size_t i = 0; i < array.shape().size(); ++i)
    split[i < axis ? 0 : i == axis ? 1 : 2] *= array.shape()[i];
  return split;
}

}  // namespace

IndexArray exclusive_cumsum(const IndexArray& array, std::int64_t dim) {
  const auto [outer, extent, inner] = split_at(array, dim, "exclusive_cumsum");
  const Int64View source(array);
  IndexArray result(array.shape());
  const auto target = result.i64();
  for (std::int64_t o = 0; o < outer; ++o) {
    for (std::int64_t k = 0; k + 1 < extent; ++k) {
      for (std::int64_t i = 0; i < inner; ++i) {
        const std::int64_t at = (o * extent + k) * inner + i;
        std::int64_t& next = target[at + inner];
        const bool overflow = __builtin_add_overflow(target[at], source[at], &next);
        require(!overflow, "exclusive_cumsum: the sum up to element ", at,
                " does not fit int64 (value ", source[at], ")");
      }
    }
  }
  return result;
}

IndexArray prepend_zero(const IndexArray& array, std::int64_t dim) {
  const auto [outer, extent, inner] = split_at(array, dim, "prepend_zero");
  Shape shape = array.shape();
  shape[static_cast<std::size_t>(normalize_dim(dim, array.ndim(), "prepend_zero"))] += 1;
  const Int64View source(array);
  IndexArray result(shape);
  const std::int64_t block = extent * inner;
  for (std::int64_t o = 0; o < outer; ++o) {
    std::copy_n(source.span().begin() + o * block, block,
                result.i64().begin() + o * (block + inner) + inner);
  }
  return array.dtype() == DType::int64 ? result : result.to(array.dtype());
}

IndexArray mask_by_neg(const IndexArray& array, const IndexArray& mask) {
  require(array.shape() == mask.shape(), "mask_by_neg: mask has shape ", to_string(mask.shape()),
          ", expected ", to_string(array.shape()));
  const Int64View source(array);
  const Int64View keep(mask);
  IndexArray result(array.shape());
  const auto target = result.i64();
  for (std::size_t i = 0; i < target.size(); ++i) {
    target[i] = keep.span()[i] != 0 ? source.span()[i] : -1;
  }
  return result;
}

IndexArray index_put_with_neg_padding_1d(const IndexArray& array, const IndexArray& src,
                                         const IndexArray& index) {
  require(src.size() == index.size() || src.size() == 1, "index_put_with_neg_padding_1d: src has ",
          src.size(), " elements, expected ", index.size(), " (as index) or 1");
  const Int64View values(src);
  const Int64View places(index);
  const std::int64_t size = array.size();
  for (std::int64_t i = 0; i < index.size(); ++i) {
    require(-1 <= places[i] && places[i] < size, "index_put_with_neg_padding_1d: index[", i,
            "] = ", places[i], ", expected -1 (dropped) or 0..", size - 1);
  }
  IndexArray result(array.shape(), array.to_vector());
  const auto target = result.i64();
  for (std::int64_t i = 0; i < index.size(); ++i) {
    if (places[i] >= 0) {
      target[places[i]] = values[src.size() == 1 ? 0 : i];
    }
  }
  return result;
}

}  // namespace waybill
