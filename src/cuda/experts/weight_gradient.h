#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "waybill/core/dtype.h"

namespace waybill::cuda {

/// What ExpertGradientInput says; null: not given.
struct WeightGradientParams {
  const std::byte* gradients;  ///< [num_rows, hidden]
  const std::byte* weights;    ///< [num_rows]
  const std::byte* rows;
  std::byte* row_gradients;  ///< may be the gradients
  float* weight_gradients;
  std::int64_t hidden;
  std::int64_t num_rows;
  const std::int32_t* num_recv_rows;  ///< that have arrived
};

cudaError_t prepare_weight_gradient(DType tokens, DType weights);

/// @param wide rows in multiples of 8 elements, all addresses of 16 bytes
cudaError_t launch_weight_gradient(const WeightGradientParams& params, DType tokens, DType weights,
                                   bool wide, int blocks, cudaStream_t stream);

}  // namespace waybill::cuda
