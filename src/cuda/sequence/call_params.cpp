#include "call_params.h"

#include <algorithm>

#include "waybill/core/error.h"

namespace waybill::cuda {
namespace {

constexpr std::int64_t bulk_alignment_bytes = 16;

bool is_bulk_multiple(std::int64_t bytes) { return bytes % bulk_alignment_bytes == 0; }

bool rows_suit_bulk(const ConstTensorView& view, std::int64_t row_bytes) {
  if (view.shape[0] == 0) return true;
  const auto address = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(view.data));
  return is_bulk_multiple(address) && is_bulk_multiple(row_bytes) &&
         (view.shape[0] == 1 || is_bulk_multiple(pitch_of(view)));
}

}  // namespace

std::int64_t pitch_of(const ConstTensorView& view) {
  return view.strides[0] * dtype_bytes(view.dtype);
}

FingerprintParams fingerprint_params(const SequenceCall& call) {
  FingerprintParams params{};
  std::ranges::copy(pack_fingerprint(call.fingerprint), params.words);
  params.first_slot =
      static_cast<std::int32_t>(first_fingerprint_slot(num_arrival_signals(call.plan->world_size)));
  params.crosses_nodes = true;  // with the network path
  return params;
}

ArriveParams arrive_params(const SequenceCall& call, const GpuRank& gpu, FaultKind kind,
                           int share) {
  const std::int32_t world = call.plan->world_size;
  ArriveParams params{};
  params.rank = to_int(call.plan->rank);
  params.world_size = world;
  params.parity = static_cast<std::uint32_t>(call.epoch % 2);
  params.kind = kind;
  params.state = reinterpret_cast<CallState*>(call.arrivals->local + world);
  params.sink = gpu.sink(share);
  params.own_arrivals = call.arrivals->local;
  params.node_ranks = gpu.topology().ranks_per_node;
  params.first_rank = params.rank / params.node_ranks * params.node_ranks;
  params.arrivals = near_peers_of<std::uint64_t>(*call.arrivals, 0, 0, world);
  params.fingerprint = fingerprint_params(call);
  return params;
}

SequenceParams sequence_params(const SequenceCall& call, const GpuRank& gpu, FaultKind kind,
                               int share) {
  if (call.inputs.size() > max_call_tensors) {
    throw Unsupported(concat(call.operation, ": ", call.inputs.size(),
                             " tensors, expected at most ", max_call_tensors));
  }
  SequenceParams params{};
  params.arrive = arrive_params(call, gpu, kind, share);
  params.own_window = call.window->local;
  params.windows = near_peers_of<std::byte>(*call.window, 0, 0, call.plan->world_size);
  if (call.slots != nullptr) {
    params.own_slots = call.slots->local;
    params.slots = near_peers_of<std::uint64_t>(*call.slots, 0, 0, call.plan->world_size);
  }
  for (std::size_t t = 0; t < call.inputs.size(); ++t) {
    // Kernels only read the inputs.
    params.inputs[t] = {const_cast<std::byte*>(call.inputs[t].data), pitch_of(call.inputs[t])};
  }
  for (std::size_t t = 0; t < call.outputs.size(); ++t) {
    params.outputs[t] = {call.outputs[t].data, pitch_of(call.outputs[t])};
  }
  return params;
}

bool suits_bulk(const SequenceCall& call) {
  const bool sends = call.plan->operation == SequenceOperation::dispatch;
  for (std::size_t t = 0; t < call.plan->tensors.size(); ++t) {
    const std::int64_t row_bytes = call.plan->tensors[t].row_bytes();
    // A sum is read from windows, whose tensors are aligned, and written with 16-byte words.
    // Who has no rows of its own may forward some.
    const bool forwards = !call.plan->batches.empty();
    const bool good =
        sends ? rows_suit_bulk(call.inputs[t], row_bytes) &&
                    (!forwards || is_bulk_multiple(row_bytes))
              : rows_suit_bulk(call.outputs[t], row_bytes) && is_bulk_multiple(row_bytes);
    if (!good) return false;
  }
  return true;
}

}  // namespace waybill::cuda
