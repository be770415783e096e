#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "params.h"
#include "waybill/core/dtype.h"

namespace waybill::cuda {

inline constexpr int max_bulk_chunk_bytes = 8192;      ///< of a chunk that is sent
inline constexpr int max_gradient_chunk_bytes = 2048;  ///< of a chunk that is summed

/// Each loads a kernel into the context of the current device, so that no launch has to wait for a
/// device on which another rank's kernel waits for this one's.
cudaError_t prepare_dispatch_tma();
cudaError_t prepare_dispatch_vector();
cudaError_t prepare_kv_gradient(bool bulk);
cudaError_t prepare_expand_plan();
cudaError_t prepare_widen_rows();

/// Sends the chunks with bulk copies (sm_90 and later): tensors, pitches and rows are multiples of
/// 16 bytes, no chunk over max_bulk_chunk_bytes.
/// @param batched whether the plan has batches
cudaError_t launch_dispatch_tma(const SequenceParams& params, bool batched, int num_sms,
                                cudaStream_t stream);

/// The same with loads and stores of the threads, for any address and size.
cudaError_t launch_dispatch_vector(const SequenceParams& params, bool batched, int num_sms,
                                   cudaStream_t stream);

struct GradientKernel {
  DType from;
  DType to;
  bool bulk;     ///< needs what launch_dispatch_tma needs, of windows and outputs; chunks up to
                 ///< max_gradient_chunk_bytes. Without it elements must be aligned to their size.
  bool batched;  ///< whether the plan has batches
};

/// Sums the chunks; the windows hold the addends once all ranks have come to this call.
cudaError_t launch_kv_gradient(const SequenceParams& params, const GradientKernel& which,
                               int num_sms, cudaStream_t stream);

/// Rows of 16-bit numbers that become float32; elements are aligned to their size.
struct WidenParams {
  const std::byte* from;
  std::byte* to;
  std::int64_t from_pitch;  ///< bytes
  std::int64_t to_pitch;
  std::int64_t rows;
  std::int64_t elements;  ///< of a row
};

/// @param from float16 or bfloat16
cudaError_t launch_widen_rows(const WidenParams& params, DType from, int num_sms,
                              cudaStream_t stream);

/// Makes the chunks and addresses of a plan, as expand_chunks() of the runtime does.
cudaError_t launch_expand_plan(const ExpandParams& params, std::int64_t num_segments,
                               cudaStream_t stream);

}  // namespace waybill::cuda
