#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <new>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "waybill/core/host_tensor.h"
#include "waybill/core/index_array.h"

namespace waybill::python {

namespace nb = nanobind;

/// An array of indices as it comes from Python: contiguous, in host memory.
using ArrayArg = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

/// A payload as it comes from Python: any strides, host memory. Its dtype travels with it, since
/// numpy has no name for some: elements come as integers of their size.
using PayloadArg = nb::ndarray<nb::ro, nb::device::cpu>;
using OutputArg = nb::ndarray<nb::device::cpu>;

/// @return false, without a copy, for another dtype than the five
[[nodiscard]] bool copy_indices(const ArrayArg& array, IndexArray& copy);

/// Experts, slots or ids. @param who argument in errors
/// @throws InvalidArgument for a number below -1 or of more than 32 bits
[[nodiscard]] std::vector<std::int32_t> int32s_from(const IndexArray& array, const char* who);

/// A numpy array over the memory of `array`, which it keeps.
[[nodiscard]] nb::object numpy_array(IndexArray&& array);
[[nodiscard]] nb::object numpy_array(std::vector<std::int64_t>&& values);

/// The same as a DLPack capsule, of which torch makes a tensor in one step.
[[nodiscard]] nb::object dlpack_capsule(IndexArray&& array);

[[nodiscard]] nb::object numpy_or_none(std::optional<IndexArray>&& array);

/// The same for a payload; elements are integers of the dtype's size.
[[nodiscard]] nb::object numpy_array(HostTensor&& tensor);

/// A list of numpy arrays, from arrays or payloads.
template <class Array>
[[nodiscard]] nb::list numpy_arrays(std::vector<Array>&& arrays) {
  nb::list result;
  for (Array& array : arrays) result.append(numpy_array(std::move(array)));
  return result;
}

/// A read-only numpy view of memory that `owner` keeps.
[[nodiscard]] nb::object numpy_view(std::span<const std::int64_t> values, nb::handle owner);
[[nodiscard]] nb::object numpy_view(std::span<const std::int32_t> values, nb::handle owner);

/// A property: such a view of a table of the object.
template <class Owner, class Table>
void add_table(nb::class_<Owner>& type, const char* name, Table Owner::*table) {
  type.def_prop_ro(name, [table](nb::handle self) {
    const Table& values = nb::cast<const Owner&>(self).*table;
    return numpy_view(std::span(values.data(), values.size()), self);
  });
}

/// Views of a payload under the dtype that the caller names.
[[nodiscard]] ConstTensorView tensor_view(const PayloadArg& array, std::string_view dtype);
[[nodiscard]] TensorView tensor_view(const OutputArg& array, std::string_view dtype);

}  // namespace waybill::python

/// An IndexArray is copied from an array of one of the five dtypes, and becomes one of numpy.
template <>
struct nanobind::detail::type_caster<waybill::IndexArray> {
  NB_TYPE_CASTER(waybill::IndexArray, const_name("numpy.typing.NDArray"))

  bool from_python(handle source, std::uint8_t flags, cleanup_list* cleanup) noexcept try {
    make_caster<waybill::python::ArrayArg> array;
    return array.from_python(source, flags, cleanup) &&
           waybill::python::copy_indices(array.value, value);
  } catch (const std::bad_alloc&) {
    return false;
  }

  static handle from_cpp(waybill::IndexArray&& array, rv_policy /*policy*/,
                         cleanup_list* /*cleanup*/) noexcept try {
    return waybill::python::numpy_array(std::move(array)).release();
  } catch (python_error& error) {
    error.restore();
    return {};
  }
};
