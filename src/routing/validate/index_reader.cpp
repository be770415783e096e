#include "index_reader.h"

#include <algorithm>

#include "waybill/core/dtype.h"
#include "waybill/core/host_tensor.h"

namespace waybill::validation {
namespace {

template <class T>
std::vector<std::int64_t> widen(const IndexArray& array) {
  const auto* first = static_cast<const T*>(array.data());
  std::vector<std::int64_t> values(array.size());
  std::transform(first, first + array.size(), values.begin(), [](T value) {
    return std::in_range<std::int64_t>(value) ? static_cast<std::int64_t>(value) : INT64_MAX;
  });
  return values;
}

}  // namespace

IndexReader::IndexReader(const IndexArray& array) {
  switch (array.dtype()) {
    case DType::int64:
      values_ = array.i64();
      return;
    case DType::int32:
      converted_ = widen<std::int32_t>(array);
      break;
    case DType::uint32:
      converted_ = widen<std::uint32_t>(array);
      break;
    case DType::uint64:
      converted_ = widen<std::uint64_t>(array);
      break;
    default:
      converted_ = widen<std::uint8_t>(array);  // bool: one byte each
      break;
  }
  values_ = converted_;
}

bool check_shape(const char* table, const char* field, const IndexArray& array,
                 const Shape& expected, Findings& findings) {
  if (array.shape() == expected) return true;
  findings.add(FindingKind::shape, table, field, {}, to_string(array.shape()), to_string(expected));
  return false;
}

void check_dtype(const char* table, const char* field, const IndexArray& array, DType expected,
                 const char* why, Findings& findings) {
  if (array.dtype() == expected) return;
  findings.add(FindingKind::normalization, table, field, {}, array.dtype(),
               concat(expected, " (", why, ")"));
}

}  // namespace waybill::validation
