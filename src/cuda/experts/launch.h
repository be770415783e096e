#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "params.h"
#include "waybill/core/dtype.h"

namespace waybill::cuda {
/// Launches a kernel. @param early it may take its place on the device while the one ahead on the
/// stream ends; before it reads anything it awaits that one (wait_earlier_kernel)
template <class... Params, class... Args>
cudaError_t launch_kernel(void (*kernel)(Params...), dim3 grid, int threads, std::size_t shared,
                          bool early, cudaStream_t stream, const Args&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = static_cast<unsigned>(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

/// Loads kernels into the context of the current device. @return cudaErrorInvalidValue for a null
template <class... Kernels>
cudaError_t load_kernels(Kernels... kernels) {
  cudaFuncAttributes unused{};
  for (const void* kernel : {reinterpret_cast<const void*>(kernels)...}) {
    if (kernel == nullptr) return cudaErrorInvalidValue;
    const cudaError_t status = cudaFuncGetAttributes(&unused, kernel);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

// Each prepare_ loads kernels into the context of the current device, so that no launch has to wait
// for a device on which another rank's kernel waits for this one's. Blocks of kernels that
// synchronize must fit on the device together.

/// The most experts whose counts fit into shared memory.
[[nodiscard]] int max_experts_on_gpu(int world_size);

/// Blocks that counting takes: few for few tokens, at most num_sms. On several nodes of each
/// source: at least one for each, and num_sms of all together.
[[nodiscard]] int route_blocks(const MoeShape& shape, int num_sms);

cudaError_t prepare_route(bool nodes);

/// Counts, synchronizes with the other ranks, places the topk slots, fills the tables. Begins and
/// ends an epoch.
cudaError_t launch_route(const RouteParams& params, int blocks, cudaStream_t stream);

/// Whether a layer is for low latency, which low_latency_route does: on one node, where counts and
/// ids of all ranks fit into shared memory. All ranks say the same.
[[nodiscard]] bool low_latency_route_fits(const MoeShape& shape);

cudaError_t prepare_low_latency_route();

[[nodiscard]] int low_latency_route_blocks(const MoeShape& shape, int num_sms);

/// What launch_route does, by the ids of all ranks: faster for few tokens.
cudaError_t launch_low_latency_route(const RouteParams& params, int blocks, bool early,
                                     cudaStream_t stream);

/// By a routing that is there: synchronizes with the others, and sends the weights if there are
/// any.
cudaError_t launch_enter(const EnterParams& params, int blocks, bool early, cudaStream_t stream);

/// Brings the parities of dispatches and combines to those of the next calls, by an empty call if
/// they are off: a graph may hold an odd number of each. One node.
cudaError_t launch_realign(const MoeArrive& arrive, MoeParities next, cudaStream_t stream);

/// @param bulk rows and scales are multiples of 16 bytes at such addresses
[[nodiscard]] RowCuts cut_rows(std::int64_t row_bytes, std::int32_t scale_bytes, bool bulk,
                               int word_bytes);

cudaError_t prepare_rows(bool bulk);

struct RowsLaunch {
  bool bulk;   ///< sm_90 and later, with cuts made for it
  bool early;  ///< starts on the device while the kernel before it runs
  int blocks;
};

/// Rows into the windows of all ranks; returns when those of all ranks are here. In the epoch of
/// the route or enter before it.
cudaError_t launch_rows(const RowsParams& params, const RowsLaunch& how, cudaStream_t stream);

cudaError_t prepare_combine(DType tokens, DType weights, bool bulk);

/// Sums each token's rows, pulled from the combine windows. Begins and ends an epoch.
/// @param bulk sm_90 and later, rows in multiples of 16 bytes
cudaError_t launch_combine(const CombineParams& params, DType tokens, DType weights, bool bulk,
                           int blocks, bool early, cudaStream_t stream);

cudaError_t prepare_push_combine(DType tokens, PushWay way);

/// The same, pushed: each rank's rows go to slabs at their tokens' homes. Begins and ends an epoch.
cudaError_t launch_push_combine(const PushParams& params, DType tokens, PushWay way, int blocks,
                                bool early, cudaStream_t stream);

cudaError_t prepare_stage(DType dtype, DType weights);

/// Whether the input has all rows that have arrived: else it reports, and the context ends. The
/// next two check it themselves.
cudaError_t launch_check_rows(const StageParams& params, cudaStream_t stream);

/// Received rows, as many as there are, from the input to the window.
cudaError_t launch_copy_rows(const StageParams& params, int word_bytes, int blocks,
                             cudaStream_t stream);

/// Sums of each token's rows into the place of the first one, weighted if the parameters have
/// weights. @param wide 16-byte words
cudaError_t launch_sum_rows(const StageParams& params, DType dtype, DType weights, bool wide,
                            int blocks, cudaStream_t stream);

/// float8_e4m3fn elements with a float32 scale a group of 128, see quantize_row().
cudaError_t launch_quantize(const QuantizeParams& params, DType dtype, int blocks,
                            cudaStream_t stream);

/// Loads the kernel into the context of the current device.
cudaError_t prepare_barrier();

cudaError_t launch_barrier(const BarrierParams& params, cudaStream_t stream);

cudaError_t prepare_weight_gradient(DType tokens, DType weights);

/// @param wide rows in multiples of 8 elements, all addresses of 16 bytes
cudaError_t launch_weight_gradient(const WeightGradientParams& params, DType tokens, DType weights,
                                   bool wide, int blocks, cudaStream_t stream);

}  // namespace waybill::cuda
