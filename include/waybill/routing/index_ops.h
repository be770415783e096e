#pragma once

#include <cstdint>
#include <span>

#include "waybill/core/index_array.h"

namespace waybill {

/// Prefix sums along `dim`, shifted by one: the first slice is 0 and the last element never
/// enters. `[0,1,2,3,4,5]` gives `[0,0,1,3,6,10]`. Same shape, int64; an empty axis stays empty.
/// @param dim -ndim..ndim-1
/// @throws InvalidArgument for a scalar, a wrong dim, or a sum that overflows int64.
[[nodiscard]] IndexArray exclusive_cumsum(const IndexArray& array, std::int64_t dim = 0);

/// One slice of zeros in front along `dim`; dtype kept. An empty axis gets length 1.
/// @throws InvalidArgument for a scalar or a wrong dim.
[[nodiscard]] IndexArray prepend_zero(const IndexArray& array, std::int64_t dim = 0);

/// `array` where `mask` is true (not 0), -1 elsewhere. int64.
/// @throws InvalidArgument when the shapes differ.
[[nodiscard]] IndexArray mask_by_neg(const IndexArray& array, const IndexArray& mask);

/// A copy of `array` with `array[index[i]] = src[i]` for all i in order, over flattened elements.
/// Index -1 is dropped; of repeated indices the last wins. int64, shape of `array`.
/// @param src as many elements as `index`, or one element that is used for all
/// @throws InvalidArgument for an index outside -1..size-1, or other sizes of `src`.
[[nodiscard]] IndexArray index_put_with_neg_padding_1d(const IndexArray& array,
                                                       const IndexArray& src,
                                                       const IndexArray& index);

}  // namespace waybill
