#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace waybill::cuda {

/// Rows of one tensor whose elements say where they belong: element e of row r of a rank's tensor
/// is codes[number], with the number drawn from (rank, tensor, r, e) in first..first + span - 1.
struct TrialRows {
  unsigned char* data = nullptr;  ///< contiguous
  std::int64_t rows = 0;
  std::int64_t row_elements = 0;
  int element_bytes = 1;
  int tensor = 0;
  const std::uint64_t* codes = nullptr;  ///< on the device: numbers in the dtype
  std::uint32_t first = 0;
  std::uint32_t span = 256;
};

/// Where a row came from, in one word, and in how many copies; -1: not written.
inline constexpr int self_test_rank_shift = 44;
struct TrialSources {
  const std::int64_t* place = nullptr;   ///< [rows]: rank above, row below
  const std::int32_t* copies = nullptr;  ///< [rows]: the number is multiplied by it; null: by 1
};

cudaError_t launch_fill_self_test(const TrialRows& to, std::int32_t rank, cudaStream_t stream);

/// Adds the elements that differ to *wrong, on the device.
cudaError_t launch_check_self_test(const TrialRows& rows, const TrialSources& sources,
                                   unsigned long long* wrong, cudaStream_t stream);

}  // namespace waybill::cuda
