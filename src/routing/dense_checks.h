#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "waybill/core/error.h"
#include "waybill/core/index_array.h"
#include "waybill/core/topology.h"

namespace waybill::detail {

/// No sum of rows may exceed this: offsets of copies are products of two of them at most.
inline constexpr std::int64_t max_total_rows = std::int64_t{1} << 40;

/// A table of any type of integers as int64. @throws InvalidArgument naming the value that does not
/// fit.
inline IndexArray to_int64(const char* who, const char* name, const IndexArray& array) {
  require(array.dtype() != DType::boolean, who, ": ", name, " has dtype bool, expected integers");
  return array.to(DType::int64, concat(who, ": ", name).c_str());
}

/// The same without a copy where it is int64 already: then it must outlive this.
class Int64Table {
 public:
  Int64Table(const char* who, const char* name, const IndexArray& array)
      : converted_(array.dtype() == DType::int64 ? IndexArray() : to_int64(who, name, array)),
        table_(array.dtype() == DType::int64 ? array : converted_),
        values_(table_.i64()) {}
  Int64Table(const Int64Table&) = delete;
  Int64Table& operator=(const Int64Table&) = delete;

  [[nodiscard]] const IndexArray& operator*() const noexcept { return table_; }
  [[nodiscard]] const IndexArray* operator->() const noexcept { return &table_; }
  /// Element of the flat table.
  [[nodiscard]] std::int64_t operator[](std::int64_t idx) const { return values_[idx]; }

 private:
  IndexArray converted_;
  const IndexArray& table_;
  std::span<const std::int64_t> values_;
};

/// [W, S] of a matrix, with 1 <= W; S is the largest number of shards on a rank.
inline std::pair<std::int64_t, std::int64_t> check_world_matrix(const char* who, const char* name,
                                                                const IndexArray& array) {
  require(array.ndim() == 2, who, ": ", name, " has shape ", to_string(array.shape()),
          ", expected [W, S]");
  require(1 <= array.dim(0) && array.dim(0) <= max_world_size, who, ": world_size = ", array.dim(0),
          " (first extent of ", name, "), expected 1..", max_world_size);
  return {array.dim(0), array.dim(1)};
}

inline void check_same_shape(const char* who, const char* name, const IndexArray& array,
                             const Shape& expected) {
  require(array.shape() == expected, who, ": ", name, " has shape ", to_string(array.shape()),
          ", expected ", to_string(expected));
}

/// Every element within [low, high]; otherwise names the rank (row) and the place in it.
inline void check_range(const char* who, const char* name, const IndexArray& array,
                        std::int64_t low, std::int64_t high, const char* expected) {
  const auto values = array.i64();
  const std::int64_t row_size =
      array.ndim() == 0 || array.dim(0) == 0 ? 1 : array.size() / array.dim(0);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto at = static_cast<std::int64_t>(i);
    require(low <= values[i] && values[i] <= high, who, ": ", name, " of rank ", at / row_size,
            ", entry ", at % row_size, " = ", values[i], ", expected ", expected);
  }
}

/// Destinations: a rank, or -1.
inline void check_ranks(const char* who, const char* name, const IndexArray& array,
                        std::int64_t world_size) {
  const auto values = array.i64();
  const bool good = std::all_of(values.begin(), values.end(),
                                [&](std::int64_t rank) { return -1 <= rank && rank < world_size; });
  if (good) return;  // the text is built only for the bad path
  const std::string expected = concat("-1 (none) or 0..", world_size - 1);
  check_range(who, name, array, -1, world_size - 1, expected.c_str());
}

/// Lengths: not negative, and all together at most max_total_rows.
inline void check_lengths(const char* who, const char* name, const IndexArray& array) {
  const auto values = array.i64();
  std::int64_t total = 0;
  bool good = true;  // each at most 2^40, so that the sum cannot overflow where all are good
  for (const std::int64_t rows : values) {
    good = good && 0 <= rows && rows <= max_total_rows && total <= max_total_rows;
    total += good ? rows : 0;
  }
  if (good && total <= max_total_rows) return;
  check_range(who, name, array, 0, max_total_rows, "0..2^40 rows");
  throw_invalid(who, ": the sum of ", name, " exceeds 2^40 rows; no such buffer exists");
}

/// seq_recv_mask: which copies of a dispatch have a destination.
inline IndexArray used_copies(const IndexArray& dst_rank) {
  IndexArray mask(dst_rank.shape(), DType::boolean);
  const auto ranks = dst_rank.i64();
  std::transform(ranks.begin(), ranks.end(), static_cast<std::uint8_t*>(mask.data()),
                 [](std::int64_t rank) -> std::uint8_t { return rank >= 0 ? 1 : 0; });
  return mask;
}

}  // namespace waybill::detail
