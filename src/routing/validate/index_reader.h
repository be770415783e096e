#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "findings.h"
#include "waybill/core/index_array.h"

namespace waybill::validation {

/// The elements of an array of any dtype as int64, without copying where they are. Never throws
/// for a value: one over 2^63 - 1 reads as 2^63 - 1, which no check lets pass.
class IndexReader {
 public:
  explicit IndexReader(const IndexArray& array);
  [[nodiscard]] std::int64_t operator[](std::int64_t idx) const { return values_[idx]; }
  [[nodiscard]] std::span<const std::int64_t> span() const { return values_; }
  IndexReader(const IndexReader&) = delete;
  IndexReader& operator=(const IndexReader&) = delete;

 private:
  std::vector<std::int64_t> converted_;
  std::span<const std::int64_t> values_;
};

/// False, and a finding, unless `array` has this shape.
[[nodiscard]] bool check_shape(const char* table, const char* field, const IndexArray& array,
                               const Shape& expected, Findings& findings);

/// A finding unless `array` has this dtype.
void check_dtype(const char* table, const char* field, const IndexArray& array, DType expected,
                 const char* why, Findings& findings);

}  // namespace waybill::validation
