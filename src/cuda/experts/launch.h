#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "params.h"
#include "waybill/core/dtype.h"

namespace waybill::cuda {

/// Launches a kernel.
/// @param early the kernel may take its place on the device before the previous kernel on the
///   stream has ended; it calls wait_earlier_kernel() before it reads what that one writes
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

/// Loads kernels into the context of the current device.
/// @return cudaErrorInvalidValue if a kernel is null
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

// Each prepare_ function loads kernels into the context of the current device. A launch that loads
// its kernel would wait for the device, on which the kernel of another rank may wait for this one.
// All blocks of kernels that synchronize must fit on the device at once.

/// Upper limit of experts: their counts must fit into shared memory.
[[nodiscard]] int max_experts_on_gpu(int world_size);

/// Number of blocks of a route: few for few tokens, at most num_sms. With several nodes this is the
/// number per source, at least one, and at most num_sms for all sources together.
[[nodiscard]] int route_blocks(const MoeShape& shape, int num_sms);

cudaError_t prepare_route(bool nodes);

/// Counts, exchanges counts with the other ranks, places the topk slots and fills the tables. It
/// begins and ends an epoch.
cudaError_t launch_route(const RouteParams& params, int blocks, cudaStream_t stream);

/// Whether a layer may use the low-latency route: it has one node, and the counts and ids of all
/// ranks fit into shared memory. All ranks get the same answer.
[[nodiscard]] bool low_latency_route_fits(const MoeShape& shape);

cudaError_t prepare_low_latency_route();

[[nodiscard]] int low_latency_route_blocks(const MoeShape& shape, int num_sms);

/// Does the work of launch_route(), but from the ids of all ranks. This is faster for few tokens.
cudaError_t launch_low_latency_route(const RouteParams& params, int blocks, bool early,
                                     cudaStream_t stream);

/// Begins a dispatch with an earlier routing: synchronizes with the other ranks, and sends the
/// weights if there are any.
cudaError_t launch_enter(const EnterParams& params, int blocks, bool early, cudaStream_t stream);

/// Brings the parities of dispatches and combines to those of the next calls. If they are off,
/// because a graph held an odd number of either, it makes an empty call. One node only.
cudaError_t launch_realign(const MoeArrive& arrive, std::uint32_t next_dispatch,
                           std::uint32_t next_combine, cudaStream_t stream);

/// Cuts rows into pieces.
/// @param bulk rows and scales have multiples of 16 bytes and start at such addresses
[[nodiscard]] RowCuts cut_rows(std::int64_t row_bytes, std::int32_t scale_bytes, bool bulk,
                               int word_bytes);

cudaError_t prepare_rows(bool bulk);

/// Sends rows to the windows of all ranks, and ends when the rows of all ranks have arrived here.
/// It belongs to the epoch of the route or enter before it.
/// @param bulk bulk copies (sm_90 and later), with cuts made for them
cudaError_t launch_rows(const RowsParams& params, bool bulk, bool early, int blocks,
                        cudaStream_t stream);

cudaError_t prepare_combine(DType tokens, DType weights, bool bulk);

/// Pulls the rows of each token from the combine windows and sums them. It begins and ends an
/// epoch.
/// @param bulk bulk copies (sm_90 and later); rows have multiples of 16 bytes
cudaError_t launch_combine(const CombineParams& params, DType tokens, DType weights, bool bulk,
                           int blocks, bool early, cudaStream_t stream);

cudaError_t prepare_push_combine(DType tokens, PushWay way);

/// Sums the rows of each token after each rank has pushed its rows to slabs on the tokens' home
/// ranks. It begins and ends an epoch.
cudaError_t launch_push_combine(const PushParams& params, DType tokens, PushWay way, int blocks,
                                bool early, cudaStream_t stream);

cudaError_t prepare_stage(DType dtype, DType weights);

/// Checks that the input has all rows that have arrived. If it does not, the kernel reports that
/// and ends the context. The next two kernels check it themselves.
cudaError_t launch_check_rows(const StageParams& params, cudaStream_t stream);

/// Copies all received rows from the input to the window.
cudaError_t launch_copy_rows(const StageParams& params, int word_bytes, int blocks,
                             cudaStream_t stream);

/// Sums the rows of each token into its primary row, with weights if the parameters have them.
/// @param wide words of 16 bytes
cudaError_t launch_sum_rows(const StageParams& params, DType dtype, DType weights, bool wide,
                            int blocks, cudaStream_t stream);

/// @return cudaErrorInvalidValue if there is no kernel for the format with this name
cudaError_t prepare_quantize(std::string_view format, DType dtype);

/// Converts rows of `dtype` to a format, bit for bit as quantize_row(). It waits for nobody.
cudaError_t launch_quantize(const QuantizeParams& params, std::string_view format, DType dtype,
                            cudaStream_t stream);

/// Loads the barrier's kernel, see above.
cudaError_t prepare_barrier();

cudaError_t launch_barrier(const BarrierParams& params, cudaStream_t stream);

cudaError_t prepare_weight_gradient(DType tokens, DType weights);

/// Computes the gradients of a weighted combine.
/// @param wide rows have multiples of 8 elements, and all addresses are multiples of 16 bytes
cudaError_t launch_weight_gradient(const WeightGradientParams& params, DType tokens, DType weights,
                                   bool wide, int blocks, cudaStream_t stream);

}  // namespace waybill::cuda
