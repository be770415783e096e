#include "network.h"

#include <algorithm>
#include <utility>

#include "../../device/arrive_kernels.h"
#include "core/hash.h"
#include "core/test_hooks.h"
#include "moe/gradient_sum.h"
#include "runtime/fingerprint.h"
#include "waybill/core/error.h"

namespace waybill::cuda {
namespace {

constexpr std::int64_t default_stage_kb = std::int64_t{32} << 10;
constexpr int network_blocks = 8;
constexpr std::int64_t path_state_at = (sizeof(CallState) + 7) / 8 * 8;

/// A kernel of the path reads it. The puts follow it.
struct PutTable {
  std::int32_t num_puts;
  std::int32_t unused;
  NetworkStep step;
};
static_assert(sizeof(PutTable) % alignof(NetworkPut) == 0);

/// The parts of an expert in its stream: weights, or gradients as they are summed.
std::vector<StreamPart> stream_of_parts(const CopyNetworkCall& call, const std::byte* store) {
  std::vector<StreamPart> parts;
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < call.call.parts.size(); ++i) {
    const auto [elements, dtype] = call.call.parts[i];
    const DType moved = call.sums ? waybill::detail::gradient_sum_dtype(dtype) : dtype;
    const std::int64_t bytes = elements * dtype_bytes(moved);
    parts.push_back({begin, bytes, call.call.copies[i] - store});
    begin = next_in_stream(begin, bytes);
  }
  return parts;
}

}  // namespace

std::int64_t CopyNetwork::stage_bytes() {
  const std::int64_t wanted = waybill::detail::test_hooks().copy_stage_kb;
  return (wanted == 0 ? default_stage_kb : wanted) << 10;
}

CopyNetwork::CopyNetwork(Transport& transport, std::shared_ptr<GpuRank> gpu, int share,
                         NetworkPath& path, const SymmetricBuffer& store, std::int64_t stage_at,
                         std::string_view name)
    : transport_(transport),
      gpu_(std::move(gpu)),
      share_(share),
      path_(path),
      store_(store),
      stage_{stage_at, stage_bytes() / 2} {
  gpu_->use();
  cuda_check(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming), "making an event");
  state_ = device_memory(path_state_at + std::int64_t{sizeof(PathState)}, gpu_->stream());
  const std::int32_t ranks = transport.topology().world_size;
  pad_ = transport.allocate_signals(with_fingerprints(ranks, ranks), concat("rounds", name));
}

CopyNetwork::~CopyNetwork() {
  transport_.defer_release(std::move(pad_.memory));
  for (PinnedRoom& table : tables_) retired_.push_back(std::move(table.memory));
  retired_.push_back(std::move(plan_.memory));
  retired_.push_back(std::move(state_));
  transport_.defer_release(std::move(retired_));
  (void)cudaEventDestroy(done_);
}

void* PinnedRoom::room_for(std::int64_t wanted, std::vector<std::shared_ptr<void>>& retired) {
  if (wanted > bytes) {
    constexpr std::int64_t least = 4096;
    bytes = std::max({least, wanted, 2 * bytes});
    if (memory != nullptr) retired.push_back(std::move(memory));
    memory = pinned_memory(bytes);
  }
  return memory.get();
}

void CopyNetwork::bring_weights(const CopyNetworkCall& call, const CopyParams& params) {
  const CopyRounds rounds = begin(call, params);
  synchronize(call, {});
  for (std::int64_t r = 0; r < rounds.num_rounds(); ++r) {
    stage(call, params, rounds.staged(rank(), r));
    synchronize(call, rounds.moves(rank(), r));
  }
  end(call);
}

/// Waits until the plan is there, and what earlier calls have queued is done.
CopyRounds CopyNetwork::begin(const CopyNetworkCall& call, const CopyParams& params) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  gpu_->check(cudaStreamIsCapturing(call.stream, &status), "asking a stream", call.operation);
  if (status != cudaStreamCaptureStatusNone) {
    throw Unsupported(concat(call.operation, ": between nodes whose memory is not mapped the host ",
                             "reads the plan, which a graph cannot hold: expected no capture"));
  }
  gpu_->wait_for(done_, "waiting for the last call", call.operation);
  read_plan(call, params);
  next_table_ = 0;
  const CopyTable table{copies_.data(), transport_.topology().world_size, params.homes,
                        params.spare, params.node_ranks};
  CopyRounds rounds(table, stream_of_parts(call, store_.local), call.sums, stage_);
  if (rounds.any() && rounds.range_bytes() == 0) {
    throw InternalError(concat(call.operation, ": ", copies_.size(), " copies have no room in a ",
                               "stage of ", stage_bytes(), " bytes"));
  }
  return rounds;
}

void CopyNetwork::read_plan(const CopyNetworkCall& call, const CopyParams& params) {
  const std::int64_t ranks = transport_.topology().world_size;
  const std::int64_t slots = ranks * params.slots_per_rank;
  const std::int64_t bytes = slots * std::int64_t{sizeof(std::int32_t)};
  auto* const plan = static_cast<std::int32_t*>(plan_.room_for(2 * bytes, retired_));
  const auto copy = [&](std::int32_t* to, const std::int32_t* from) {
    gpu_->check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, call.stream),
                "reading a plan", call.operation);
  };
  copy(plan, call.call.slots);
  const bool has_quotas = call.call.quotas != nullptr;
  if (has_quotas) copy(plan + slots, call.call.quotas);
  gpu_->wait_for(call.stream, "waiting for a plan", call.operation);
  gpu_->throw_fault();
  copies_.clear();
  Hash hash;
  for (std::int64_t r = 0; r < ranks; ++r) {
    for (std::int32_t s = params.homes; s < params.slots_per_rank; ++s) {
      const std::int64_t slot = r * params.slots_per_rank + s;
      const bool moves = !has_quotas || plan[slots + slot] > 0;
      copies_.push_back(moves ? plan[slot] : -1);
      hash.add(copies_.back());
    }
  }
  plan_hash_ = hash.value();
}

void CopyNetwork::stage(const CopyNetworkCall& call, const CopyParams& params,
                        std::span<const StagedRange> ranges) const {
  for (const StagedRange& one : ranges) {
    const std::byte* const from = params.home[one.home * params.num_parts + one.part] + one.offset;
    gpu_->check(cudaMemcpyAsync(store_.local + one.to, from, one.bytes, cudaMemcpyDeviceToDevice,
                                call.stream),
                "copying weights", call.operation);
  }
}

/// Puts, and waits until those of all ranks have arrived.
void CopyNetwork::synchronize(const CopyNetworkCall& call, std::span<const WindowMove> moves) {
  ++epoch_;
  auto* const state = static_cast<std::byte*>(state_.get());
  const ArriveParams params = arrive(call);
  NetworkPhase phase;
  PathTables tables{};
  if (path_.needs_phases()) {
    phase = phase_of(moves);
  } else {
    tables = tables_of(moves);
  }
  path_.start({.operation = call.operation,
               .kind = call.kind,
               .arrival = PathArrival::last,
               .tables = tables,
               .state = reinterpret_cast<PathState*>(state + path_state_at),
               .phases = std::span(&phase, 1),
               .window = &store_,
               .slots = &pad_,
               .first_slot = 0,
               .arrivals = &pad_,
               .fingerprint = params.fingerprint,
               .epoch = epoch_,
               .num_sms = std::max(1, std::min(network_blocks, gpu_->num_sms() / share_)),
               .stream = call.stream});
  path_.join(call.stream);
  gpu_->check(launch_arrive_and_wait(params, call.stream), "launching a kernel", call.operation);
}

void CopyNetwork::end(const CopyNetworkCall& call) const {
  gpu_->check(cudaEventRecord(done_, call.stream), "recording an event", call.operation);
}

/// The puts of this rank, without signals: the path's arrival says that they are there.
PathTables CopyNetwork::tables_of(std::span<const WindowMove> moves) {
  std::vector<NetworkPut> puts;
  for (const WindowMove& move : moves) {
    if (move.source != rank()) continue;
    for (std::int64_t done = 0; done < move.bytes; done += max_put_bytes) {
      puts.push_back({move.from + done, move.to + done, std::min(max_put_bytes, move.bytes - done),
                      move.target, 0});
    }
  }
  if (next_table_ == tables_.size()) tables_.emplace_back();
  const std::int64_t bytes =
      std::int64_t{sizeof(PutTable)} + std::ssize(puts) * std::int64_t{sizeof(NetworkPut)};
  auto* const table = static_cast<PutTable*>(tables_[next_table_++].room_for(bytes, retired_));
  table->num_puts = static_cast<std::int32_t>(puts.size());
  table->step = {.num_puts = table->num_puts};
  auto* const to = reinterpret_cast<NetworkPut*>(table + 1);
  std::ranges::copy(puts, to);
  PathTables tables{};
  tables.num_puts = &table->num_puts;
  tables.steps = &table->step;
  tables.puts = to;
  return tables;
}

/// The same where both ends name what moves. A rank from which nothing comes says only that it has
/// come.
NetworkPhase CopyNetwork::phase_of(std::span<const WindowMove> moves) const {
  NetworkPhase phase;
  const Topology& topology = transport_.topology();
  std::vector<bool> sends(topology.world_size);
  std::vector<bool> receives(topology.world_size);
  for (const WindowMove& move : moves) {
    const bool sent = move.source == rank();
    (sent ? sends : receives)[sent ? move.target : move.source] = true;
    (sent ? phase.sent : phase.received)
        .push_back({sent ? move.from : move.to, move.bytes, sent ? move.target : move.source});
  }
  for (std::int32_t r = 0; r < topology.world_size; ++r) {
    if (topology.node(Rank{r}) == topology.node(transport_.rank())) continue;
    if (!sends[r]) phase.sent.push_back({0, 0, r});
    if (!receives[r]) phase.received.push_back({0, 0, r});
    phase.arrived.push_back(r);
  }
  return phase;
}

ArriveParams CopyNetwork::arrive(const CopyNetworkCall& call) const {
  const Topology& topology = transport_.topology();
  ArriveParams params{};
  params.rank = rank();
  params.world_size = topology.world_size;
  params.parity = static_cast<std::uint32_t>(epoch_ % 2);
  params.kind = call.kind;
  params.state = static_cast<CallState*>(state_.get());
  params.sink = gpu_->sink(share_);
  params.node_ranks = topology.ranks_per_node;
  params.first_rank = rank() / topology.ranks_per_node * topology.ranks_per_node;
  params.own_arrivals = pad_.local;
  params.arrivals = near_peers_of<std::uint64_t>(pad_, 0, 0, topology.world_size);
  CallFingerprint fingerprint = call.fingerprint;
  fingerprint.plan = Hash().add(fingerprint.plan).add(plan_hash_).value();
  std::ranges::copy(pack_fingerprint(fingerprint), params.fingerprint.words);
  params.fingerprint.first_slot =
      static_cast<std::int32_t>(first_fingerprint_slot(topology.world_size));
  params.fingerprint.crosses_nodes = true;
  return params;
}

}  // namespace waybill::cuda
