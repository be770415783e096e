#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "waybill/core/host_tensor.h"

namespace waybill::detail {

/// Buffers of bytes, one per rank: [rows_r, row_bytes].
class RankBuffers {
 public:
  /// Zeros. `rows` [W]
  RankBuffers(const std::vector<std::int64_t>& rows, std::int64_t row_bytes);

  [[nodiscard]] std::vector<ConstTensorView> sources() const;
  [[nodiscard]] std::vector<TensorView> outputs();
  [[nodiscard]] std::byte* row(std::int64_t rank, std::int64_t row);
  [[nodiscard]] const std::byte* row(std::int64_t rank, std::int64_t row) const;
  [[nodiscard]] std::int64_t row_bytes() const { return row_bytes_; }
  [[nodiscard]] std::int64_t num_rows() const { return first_row_.back(); }
  /// [W + 1]: number of a rank's first row when the rows of all ranks are numbered through.
  [[nodiscard]] const std::vector<std::int64_t>& first_row() const { return first_row_; }

 private:
  std::int64_t row_bytes_;
  std::vector<std::int64_t> first_row_;
  std::vector<HostTensor> tensors_;
};

/// What identify_rows says of a row that is not one of those written.
inline constexpr std::int64_t damaged_row = -1;
inline constexpr std::int64_t untouched_row = -2;

/// Gives every row a pattern of its own, which names its number (see first_row).
void write_identities(RankBuffers& buffers, int num_threads);

/// Reads every byte: the number of each row's pattern if it is intact and below `num_ids`, else
/// damaged_row; untouched_row when all bytes are 0. Rows numbered through.
[[nodiscard]] std::vector<std::int64_t> identify_rows(const RankBuffers& buffers,
                                                      std::int64_t num_ids, int num_threads);

}  // namespace waybill::detail
