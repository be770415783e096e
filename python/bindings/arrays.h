#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "waybill/core/host_tensor.h"
#include "waybill/core/index_array.h"

namespace waybill::python {

namespace nb = nanobind;

/// An array of indices as it comes from Python: contiguous, in host memory.
using ArrayArg = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

/// A payload as it comes from Python: any strides, host memory. Its dtype travels beside it, since
/// numpy has no name for some: elements come as integers of their size.
using PayloadArg = nb::ndarray<nb::ro, nb::device::cpu>;
using OutputArg = nb::ndarray<nb::device::cpu>;

/// Copies it. @throws InvalidArgument naming the argument for another dtype than the five.
[[nodiscard]] IndexArray index_array(const ArrayArg& array, const char* name);

/// A numpy array over the memory of `array`, which it keeps.
[[nodiscard]] nb::object numpy_array(IndexArray&& array);
[[nodiscard]] nb::object numpy_array(std::vector<std::int64_t>&& values);

/// The same as a DLPack capsule, of which torch makes a tensor in one step.
[[nodiscard]] nb::object dlpack_capsule(IndexArray&& array);

[[nodiscard]] nb::object numpy_or_none(std::optional<IndexArray>&& array);

/// The same for a payload; elements are integers of the dtype's size.
[[nodiscard]] nb::object numpy_array(HostTensor&& tensor);

/// A list of numpy arrays.
[[nodiscard]] nb::list numpy_arrays(std::vector<IndexArray>&& arrays);

/// A read-only numpy view of memory that `owner` keeps.
[[nodiscard]] nb::object numpy_view(std::span<const std::int64_t> values, nb::handle owner);
[[nodiscard]] nb::object numpy_view(std::span<const std::int32_t> values, nb::handle owner);

/// Views of a payload under the dtype that the caller names.
[[nodiscard]] ConstTensorView tensor_view(const PayloadArg& array, std::string_view dtype);
[[nodiscard]] TensorView tensor_view(const OutputArg& array, std::string_view dtype);

}  // namespace waybill::python
