#include "arrays.h"

#include <array>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "waybill/core/error.h"

namespace waybill::python {
namespace {

using nb::dlpack::dtype_code;

nb::dlpack::dtype dlpack_dtype(dtype_code code, std::int64_t bytes) {
  return {static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(bytes * 8), 1};
}

nb::dlpack::dtype dlpack_dtype(DType dtype) {
  const std::int64_t bytes = dtype_bytes(dtype);
  switch (dtype) {
    case DType::boolean:
      return dlpack_dtype(dtype_code::Bool, bytes);
    case DType::uint32:
    case DType::uint64:
      return dlpack_dtype(dtype_code::UInt, bytes);
    default:
      return dlpack_dtype(dtype_code::Int, bytes);
  }
}

/// numpy has two types of 64-bit integers on Linux; this is the one that people's own arrays have,
/// that torch takes, and that prints without its dtype.
nb::object with_usual_dtype(nb::object array, nb::dlpack::dtype dtype) {
  if (dtype.bits != 64) return array;
  // Looked up once, never destroyed: "view", int64, uint64.
  static const auto* const names = [] {
    const nb::object make = nb::module_::import_("numpy").attr("dtype");
    return new std::array<nb::object, 3>{nb::steal(PyUnicode_InternFromString("view")),
                                         make("int64"), make("uint64")};
  }();
  const bool is_signed = dtype.code == static_cast<std::uint8_t>(dtype_code::Int);
  PyObject* const usual = (*names)[is_signed ? 1 : 2].ptr();
  PyObject* const given[] = {array.ptr(), usual};
  PyObject* const viewed = PyObject_VectorcallMethod((*names)[0].ptr(), given, 2, nullptr);
  if (viewed == nullptr) throw nb::python_error();
  return nb::steal(viewed);
}

Shape shape_of(const auto& array) {
  Shape shape;
  for (std::size_t axis = 0; axis < array.ndim(); ++axis) {
    shape.push_back(static_cast<std::int64_t>(array.shape(axis)));
  }
  return shape;
}

/// An array of `shape` over the memory of `kept`, which moves to the heap; without a Framework it
/// is a DLPack capsule.
template <class... Framework, class Kept>
nb::object keep_and_show(Kept&& kept, nb::dlpack::dtype dtype, const Shape& shape,
                         auto&& first_byte) {
  auto held = std::make_unique<std::remove_cvref_t<Kept>>(std::forward<Kept>(kept));
  void* const data = first_byte(*held);
  const nb::capsule owner(held.get(), [](void* memory) noexcept {
    delete static_cast<std::remove_cvref_t<Kept>*>(memory);
  });
  held.release();  // NOLINT(bugprone-unused-return-value): the capsule has it
  const std::vector<std::size_t> extents(shape.begin(), shape.end());
  return nb::cast(
      nb::ndarray<Framework...>(data, extents.size(), extents.data(), owner, nullptr, dtype));
}

/// The same as a numpy array.
template <class Kept>
nb::object keep_and_view(Kept&& kept, nb::dlpack::dtype dtype, const Shape& shape,
                         auto&& first_byte) {
  return with_usual_dtype(
      keep_and_show<nb::numpy>(std::forward<Kept>(kept), dtype, shape, first_byte), dtype);
}

template <class Element>
nb::object view_of(std::span<const Element> values, nb::handle owner, nb::dlpack::dtype dtype) {
  const std::size_t size = values.size();
  // numpy marks it read-only; nobody writes through this pointer.
  void* const data = const_cast<Element*>(values.data());  // NOLINT
  nb::object array =
      nb::cast(nb::ndarray<nb::numpy, nb::ro>(data, 1, &size, owner, nullptr, dtype));
  return with_usual_dtype(std::move(array), dtype);
}

template <class View>
View view_as(const auto& array, std::string_view dtype) {
  View view;
  view.dtype = dtype_from_name(dtype);
  view.shape = shape_of(array);
  for (std::size_t axis = 0; axis < array.ndim(); ++axis) {
    view.strides.push_back(array.stride(axis));
  }
  view.data = static_cast<decltype(view.data)>(array.data());
  return view;
}

}  // namespace

bool copy_indices(const ArrayArg& array, IndexArray& copy) {
  for (const DType known :
       {DType::int64, DType::int32, DType::uint32, DType::uint64, DType::boolean}) {
    if (dlpack_dtype(known) != array.dtype()) continue;
    copy = IndexArray::copy_of(array.data(), shape_of(array), known);
    return true;
  }
  return false;
}

nb::object numpy_array(IndexArray&& array) {
  const nb::dlpack::dtype dtype = dlpack_dtype(array.dtype());
  const Shape shape = array.shape();
  return keep_and_view(std::move(array), dtype, shape, [](IndexArray& a) { return a.data(); });
}

nb::object dlpack_capsule(IndexArray&& array) {
  const nb::dlpack::dtype dtype = dlpack_dtype(array.dtype());
  const Shape shape = array.shape();
  return keep_and_show(std::move(array), dtype, shape, [](IndexArray& a) { return a.data(); });
}

nb::object numpy_array(std::vector<std::int64_t>&& values) {
  const Shape shape{std::ssize(values)};
  return keep_and_view(std::move(values), dlpack_dtype(DType::int64), shape,
                       [](std::vector<std::int64_t>& v) -> void* { return v.data(); });
}

nb::object numpy_array(HostTensor&& tensor) {
  const nb::dlpack::dtype dtype = dlpack_dtype(dtype_code::Int, dtype_bytes(tensor.dtype()));
  const Shape shape = tensor.shape();
  return keep_and_view(std::move(tensor), dtype, shape,
                       [](HostTensor& t) -> void* { return t.bytes().data(); });
}

std::vector<std::int32_t> int32s_from(const IndexArray& array, const char* who) {
  const Int64View numbers(array);
  std::vector<std::int32_t> result;
  result.reserve(numbers.span().size());
  for (const std::int64_t value : numbers.span()) {
    require(-1 <= value && value <= std::numeric_limits<std::int32_t>::max(), who, ": ", value,
            ", expected -1 or an expert");
    result.push_back(static_cast<std::int32_t>(value));
  }
  return result;
}

nb::object numpy_or_none(std::optional<IndexArray>&& array) {
  return array ? numpy_array(std::move(*array)) : nb::none();
}

nb::object numpy_view(std::span<const std::int64_t> values, nb::handle owner) {
  return view_of(values, owner, dlpack_dtype(DType::int64));
}

nb::object numpy_view(std::span<const std::int32_t> values, nb::handle owner) {
  return view_of(values, owner, dlpack_dtype(DType::int32));
}

ConstTensorView tensor_view(const PayloadArg& array, std::string_view dtype) {
  return view_as<ConstTensorView>(array, dtype);
}

TensorView tensor_view(const OutputArg& array, std::string_view dtype) {
  return view_as<TensorView>(array, dtype);
}

}  // namespace waybill::python
