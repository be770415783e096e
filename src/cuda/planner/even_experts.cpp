#include "even_experts.h"

#include <algorithm>

#include "../rank/gpu_rank.h"
#include "waybill/core/error.h"

namespace waybill::cuda {
namespace {

constexpr auto in_even_experts = "GpuEvenExperts";
constexpr std::int32_t default_pass_warps = 4;  // one per scheduler of an SM

/// Shared memory that a block of the current device may have.
std::int64_t max_shared_bytes() {
  int device = 0, bytes = 0;
  cuda_check(cudaGetDevice(&device), "asking for the current device");
  cuda_check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
             "asking for shared memory");
  return bytes;
}

int shared_bytes_of(const EvenExpertsParams& params) {
  return static_cast<int>(EvenExpertsMemory::words(params, even_experts_threads) * 4);
}

std::int32_t clamped(std::int64_t value) {
  return static_cast<std::int32_t>(std::min<std::int64_t>(value, INT_MAX));
}

template <class Number>
std::vector<Number> download(const std::int32_t* from, std::int64_t count, cudaStream_t stream) {
  std::vector<std::int32_t> values(count);
  cuda_check(cudaMemcpyAsync(values.data(), from, count * sizeof(std::int32_t),
                             cudaMemcpyDeviceToHost, stream),
             "reading a plan");
  cuda_check(cudaStreamSynchronize(stream), "reading a plan");
  return {values.begin(), values.end()};
}

}  // namespace

GpuEvenExperts::GpuEvenExperts(std::int32_t num_ranks, std::int32_t num_experts,
                               const EvenExpertsOptions& options, cudaStream_t stream) {
  (void)EvenExpertsPlanner(num_ranks, num_experts, options);  // checks the values
  if (num_ranks > max_ranks) {
    throw Unsupported(
        concat(in_even_experts, ": num_ranks = ", num_ranks, ", expected at most ", max_ranks));
  }
  if (options.num_nodes > max_even_nodes) {
    throw Unsupported(concat(in_even_experts, ": num_nodes = ", options.num_nodes,
                             ", expected at most ", max_even_nodes));
  }
  params_.num_nodes = options.num_nodes;
  params_.num_ranks = num_ranks;
  params_.num_experts = num_experts;
  params_.homes = num_experts / num_ranks;
  params_.spare = options.spare_experts;
  params_.min_rows = clamped(options.min_rows);
  params_.alignment = clamped(options.alignment);
  params_.limit_factor = options.limit;
  set_pass_warps(default_pass_warps);
  allocate(options, stream);
}

void GpuEvenExperts::set_pass_warps(std::int32_t warps) {
  EvenExpertsParams params = params_;
  const std::int64_t room = max_shared_bytes();
  params.pass_warps = std::clamp(warps, 1, even_experts_threads / warp_lanes - 1);
  while (params.pass_warps > 1 && shared_bytes_of(params) > room) --params.pass_warps;
  const std::int64_t wanted = EvenExpertsMemory::words(params, even_experts_threads) * 4;
  if (wanted > room) {
    throw Unsupported(concat(in_even_experts, ": ", params.num_experts, " experts on ",
                             params.num_ranks, " ranks with ", params.spare, " spare experts need ",
                             wanted, " bytes of shared memory, expected at", " most ", room));
  }
  cuda_check(prepare_even_experts(static_cast<int>(room)), "loading the planner's kernel");
  params_ = params;
}

void GpuEvenExperts::allocate(const EvenExpertsOptions& options, cudaStream_t stream) {
  const std::int64_t slots = std::int64_t{params_.num_ranks} * slots_per_rank();
  const std::int64_t copies = std::ssize(options.present);
  const std::int64_t words =
      4 * slots + std::int64_t{2} * params_.num_ranks + num_even_figures + copies;
  memory_ = device_memory(words * sizeof(std::int32_t), stream);
  auto* at = static_cast<std::int32_t*>(memory_.get());
  const auto take = [&](std::int64_t count) {
    auto* const first = at;
    at += count;
    return first;
  };
  params_.slots = take(slots);
  params_.quotas = take(slots);
  params_.local_rows = take(slots);
  params_.first_row = take(slots);
  params_.weights_out = take(params_.num_ranks);
  params_.weights_in = take(params_.num_ranks);
  params_.figures = take(num_even_figures);
  if (copies == 0) return;
  std::int32_t* const present = take(copies);
  cuda_check(cudaMemcpyAsync(present, options.present.data(), copies * sizeof(std::int32_t),
                             cudaMemcpyHostToDevice, stream),
             "writing the present copies");
  cuda_check(cudaStreamSynchronize(stream), "writing the present copies");
  params_.present = present;
  params_.present_stride = params_.spare;
}

void GpuEvenExperts::launch(const EvenExpertsParams& params, cudaStream_t stream) const {
  cuda_check(launch_even_experts(params, shared_bytes_of(params), stream), "planning copies");
}

void GpuEvenExperts::plan(const std::int32_t* rows, cudaStream_t stream) const {
  EvenExpertsParams params = params_;
  params.rows = rows;
  launch(params, stream);
}

void GpuEvenExperts::plan(const std::int32_t* rows, const std::int32_t* present,
                          std::int64_t stride, cudaStream_t stream) const {
  EvenExpertsParams params = params_;
  params.rows = rows;
  params.present = present;
  params.present_stride = stride;
  launch(params, stream);
}

EvenExperts GpuEvenExperts::read(cudaStream_t stream) const {
  const auto figures = download<std::int32_t>(params_.figures, num_even_figures, stream);
  const auto status = static_cast<EvenExpertsStatus>(figures[figure_status]);
  require(status != EvenExpertsStatus::negative_rows, in_even_experts,
          ": rows has a negative number, expected >= 0");
  require(status != EvenExpertsStatus::too_many_rows, in_even_experts,
          ": all rows are 2^31 - 1 or more, expected fewer");
  require(status != EvenExpertsStatus::wrong_present, in_even_experts,
          ": present names no expert, a home expert of its rank, or one twice");
  const std::int64_t slots = std::int64_t{params_.num_ranks} * slots_per_rank();
  EvenExperts plan;
  plan.num_ranks = params_.num_ranks;
  plan.slots_per_rank = slots_per_rank();
  plan.slots = download<std::int32_t>(params_.slots, slots, stream);
  plan.quotas = download<std::int64_t>(params_.quotas, slots, stream);
  plan.local_rows = download<std::int64_t>(params_.local_rows, slots, stream);
  plan.first_row = download<std::int64_t>(params_.first_row, slots, stream);
  plan.weights_out = download<std::int32_t>(params_.weights_out, params_.num_ranks, stream);
  plan.weights_in = download<std::int32_t>(params_.weights_in, params_.num_ranks, stream);
  plan.max_rows = figures[figure_max_rows];
  plan.mean_rows = static_cast<double>(figures[figure_total]) / params_.num_ranks;
  plan.bound = figures[figure_bound];
  return plan;
}

}  // namespace waybill::cuda
