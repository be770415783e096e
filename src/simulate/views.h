#pragma once

#include <cstdint>
#include <span>

#include "waybill/core/host_tensor.h"

namespace waybill::detail {

/// A usable view with `ndim` axes: shape and strides agree, no negative extent, every address can
/// be computed, memory is there unless the view is empty. @throws InvalidArgument
void check_view(const char* who, const char* name, const ConstTensorView& view, std::int64_t ndim);

/// The stride of an axis in elements. Where the axis has one element it is never used, may be
/// anything, and counts as 0.
[[nodiscard]] inline std::int64_t step_of(const ConstTensorView& view, std::size_t axis) {
  return view.shape[axis] == 1 ? 0 : view.strides[axis];
}

/// No output has two elements at one address, no two outputs share memory, and none with a source.
/// Exact for slices and transposes of ordinary tensors and for views that lie side by side in one;
/// views of another making may be refused though they are fine.
/// @throws InvalidArgument naming the two and their shapes
void check_memory(const char* who, std::span<const ConstTensorView> sources,
                  std::span<const TensorView> outputs);

}  // namespace waybill::detail
