#include "copy_engine.h"

#include <algorithm>

#include "call_params.h"
#include "cuda_check.h"
#include "waybill/core/at.h"

namespace waybill::cuda {

using waybill::detail::at;

CopyEngine::~CopyEngine() {
  for (cudaStream_t queue : queues_) (void)cudaStreamDestroy(queue);
  for (cudaEvent_t event : done_) (void)cudaEventDestroy(event);
  if (begun_ != nullptr) (void)cudaEventDestroy(begun_);
}

void CopyEngine::make_queues(std::int32_t world_size) {
  const auto new_event = [&](cudaEvent_t& event) {
    gpu_->check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event",
                "dispatch");
  };
  if (begun_ == nullptr) new_event(begun_);
  while (std::ssize(queues_) < world_size) {
    gpu_->check(cudaStreamCreateWithFlags(&queues_.emplace_back(), cudaStreamNonBlocking),
                "making a stream", "dispatch");
    new_event(done_.emplace_back());
  }
}

/// The plan's chunks in larger pieces again, by destination: what continues both in the tensor and
/// in the window is one copy.
std::vector<std::vector<CopyEngine::Copy>> CopyEngine::copies_of(const SequenceCall& call) const {
  const SequencePlan& plan = *call.plan;
  std::vector<std::vector<Copy>> copies(at(plan.world_size));
  for (const RowChunk& chunk : plan.chunks) {
    const ConstTensorView& input = call.inputs[at(chunk.tensor)];
    const std::int64_t pitch = pitch_of(input);
    const std::byte* const from = input.data + chunk.row * pitch + chunk.col_bytes;
    const bool one_piece = chunk.rows == 1 || pitch == chunk.part_bytes;
    const std::int64_t bytes =
        one_piece ? std::int64_t{chunk.rows} * chunk.part_bytes : chunk.part_bytes;
    const std::int64_t rows = one_piece ? 1 : chunk.rows;
    for (std::int32_t p = 0; p < chunk.num_places; ++p) {
      const std::uint64_t place = plan.places[at(chunk.first_place + p)];
      auto& to_rank = copies[at(static_cast<std::int64_t>(place >> place_rank_shift))];
      std::byte* const to =
          call.window->peers[at(static_cast<std::int64_t>(place >> place_rank_shift))] +
          (place & place_offset_mask);
      if (!to_rank.empty()) {
        Copy& last = to_rank.back();
        const bool next_to = last.to + last.rows * last.bytes == to;
        if (next_to && rows == 1 && last.rows == 1 && last.from + last.bytes == from) {
          last.bytes += bytes;
          continue;
        }
        if (next_to && last.bytes == bytes && (last.rows == 1 || last.pitch == pitch) &&
            pitch == from - (last.from + (last.rows - 1) * last.pitch)) {
          last.rows += rows;
          last.pitch = pitch;
          continue;
        }
      }
      to_rank.push_back({to, from, bytes, rows, pitch});
    }
  }
  return copies;
}

void CopyEngine::queue(const Copy& copy, cudaStream_t stream) const {
  const cudaError_t status =
      copy.rows == 1
          ? cudaMemcpyAsync(copy.to, copy.from, at(copy.bytes), cudaMemcpyDeviceToDevice, stream)
          : cudaMemcpy2DAsync(copy.to, at(copy.bytes), copy.from, at(copy.pitch), at(copy.bytes),
                              at(copy.rows), cudaMemcpyDeviceToDevice, stream);
  gpu_->check(status, "copying rows", "dispatch");
}

void CopyEngine::send(const SequenceCall& call) {
  make_queues(call.plan->world_size);
  auto* const stream = static_cast<cudaStream_t>(call.stream.handle);
  const auto copies = copies_of(call);
  gpu_->check(cudaEventRecord(begun_, stream), "recording an event", "dispatch");
  const std::int32_t world = call.plan->world_size;
  for (std::int32_t k = 1; k <= world; ++k) {
    const auto r = at((to_int(call.plan->rank) + k) % world);
    if (copies[r].empty()) continue;
    gpu_->check(cudaStreamWaitEvent(queues_[r], begun_, 0), "ordering streams", "dispatch");
    for (const Copy& copy : copies[r]) queue(copy, queues_[r]);
    gpu_->check(cudaEventRecord(done_[r], queues_[r]), "recording an event", "dispatch");
    gpu_->check(cudaStreamWaitEvent(stream, done_[r], 0), "ordering streams", "dispatch");
  }
}

}  // namespace waybill::cuda
