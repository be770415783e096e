#include "copies.h"

#include <algorithm>
#include <string>
#include <utility>

#include "network.h"
#include "rule.h"
#include "runtime/fingerprint.h"
#include "waybill/core/error.h"

namespace waybill::cuda {
namespace {

static_assert(max_copy_parts == max_copy_store_parts);
static_assert(max_copy_tensors == max_copy_store_tensors);

constexpr std::int64_t store_alignment = 256;
constexpr int copy_blocks = 16;  ///< few: they fill the links, and products have the others

/// Bytes of an expert's stream when all of it is added at once.
constexpr std::int64_t whole_stream = std::int64_t{1} << 60;

void check_supported(const Transport& transport, const NetworkPath* path,
                     std::int32_t spare_experts) {
  const std::int32_t ranks = transport.topology().world_size;
  for (std::int32_t r = 0; r < ranks; ++r) {
    if (path == nullptr && transport.reach(Rank{r}) == Reach::network) {
      throw Unsupported(concat("CopyStore: rank ", r, " is on another node, expected one node: ",
                               "this world does not carry rows between nodes"));
    }
  }
  if (std::int64_t{ranks} * spare_experts > max_copies) {
    throw Unsupported(concat("CopyStore: ", spare_experts, " spare experts of each of ", ranks,
                             " ranks, expected at most ", max_copies, " together"));
  }
}

/// Words of the pad: arrivals, stamps, progress; fingerprints follow.
struct PadLayout {
  PadLayout(std::int32_t ranks, std::int32_t spare)
      : stamps(ranks), progress(3 * ranks), total(3 * ranks + spare * copy_stripes) {}
  std::int32_t stamps;
  std::int32_t progress;
  std::int32_t total;
};

class GpuCopyStore final : public CopyStoreExecutor {
 public:
  /// @param network carries what crosses nodes; null: the memory of all ranks is mapped
  GpuCopyStore(Transport& transport, std::shared_ptr<GpuRank> gpu, int share, NetworkPath* network,
               std::int64_t size_bytes, std::int32_t spare_experts, std::string_view name)
      : transport_(transport),
        gpu_(std::move(gpu)),
        share_(share),
        ranks_(transport.topology().world_size),
        node_ranks_(transport.topology().ranks_per_node),
        spare_(spare_experts),
        pad_layout_(ranks_, spare_experts) {
    gpu_->use();
    cuda_check(prepare_copies(), "loading kernels");
    state_ = device_memory(sizeof(CallState), gpu_->stream());
    const std::int64_t held_bytes = std::int64_t{ranks_} * spare_ * std::int64_t{sizeof(HeldCopy)};
    held_ = device_memory(held_bytes, gpu_->stream());
    cuda_check(cudaMemsetAsync(held_.get(), 0xFF, held_bytes, gpu_->stream()), "clearing a table");
    gpu_->wait_for(gpu_->stream(), "clearing a table", "CopyStore");
    const std::int64_t stage_at =
        (size_bytes + store_alignment - 1) / store_alignment * store_alignment;
    const bool crosses = network != nullptr;
    store_ = transport.allocate(crosses ? stage_at + CopyNetwork::stage_bytes() : size_bytes,
                                concat("store", name));
    pad_ = transport.allocate_signals(with_fingerprints(pad_layout_.total, ranks_),
                                      concat("signals", name));
    if (crosses) {
      network_ =
          std::make_unique<CopyNetwork>(transport, gpu_, share, *network, store_, stage_at, name);
    }
  }
  GpuCopyStore(const GpuCopyStore&) = delete;
  GpuCopyStore& operator=(const GpuCopyStore&) = delete;
  /// Frees nothing while kernels of this rank or of others may still use it.
  ~GpuCopyStore() override {
    transport_.defer_release(std::move(store_.memory));
    transport_.defer_release(std::move(pad_.memory));
    transport_.defer_release({state_, held_});
  }

  [[nodiscard]] const SymmetricBuffer& store() const override { return store_; }

  void fetch_weights(const CopyStoreCall& call, const CallFingerprint& fingerprint,
                     const Stream& stream) override {
    begin();
    const CopyParams params = params_of(call, fingerprint, FaultKind::expert_weights);
    if (network_ != nullptr) {
      network_->bring_weights(
          {call, "fetch_weights", FaultKind::expert_weights, fingerprint, stream_of(stream), false},
          params);
    }
    check(launch_fetch_weights(params, num_blocks(), stream_of(stream)), "fetch_weights");
  }

  void add_gradients(const CopyStoreCall& call, const CallFingerprint& fingerprint,
                     const Stream& stream) override {
    begin();
    const auto add = [&](const CopyParams& params) {
      check(launch_add_gradients(params, num_blocks(), stream_of(stream)), "add_gradients");
    };
    const CopyParams params = params_of(call, fingerprint, FaultKind::expert_gradients);
    if (network_ == nullptr) return add(params);
    network_->take_gradients(
        {call, "add_gradients", FaultKind::expert_gradients, fingerprint, stream_of(stream), true},
        params, add);
  }

  void release() override {
    gpu_->use();
    transport_.release(store_);
    transport_.release(pad_);
    if (network_ != nullptr) network_->release();
  }

 private:
  void begin() const {
    gpu_->use();
    gpu_->throw_fault();
  }

  void check(cudaError_t status, const char* operation) const {
    gpu_->check(status, "launching a kernel", operation);
  }

  /// Ranks that share a device wait for each other, so their blocks must fit on it together.
  [[nodiscard]] int num_blocks() const {
    return std::max(1, std::min(copy_blocks, gpu_->num_sms() / share_));
  }

  [[nodiscard]] ArriveParams arrive(const CallFingerprint& fingerprint, FaultKind kind) const {
    ArriveParams params{};
    params.rank = to_int(transport_.rank());
    params.world_size = ranks_;
    params.kind = kind;
    params.state = static_cast<CallState*>(state_.get());
    params.sink = gpu_->sink(share_);
    params.node_ranks = ranks_;
    params.own_arrivals = pad_.local;
    params.arrivals = near_peers_of<std::uint64_t>(pad_, 0, 0, ranks_);
    std::ranges::copy(pack_fingerprint(fingerprint), params.fingerprint.words);
    params.fingerprint.first_slot =
        static_cast<std::int32_t>(first_fingerprint_slot(pad_layout_.total));
    return params;
  }

  [[nodiscard]] CopyParams params_of(const CopyStoreCall& call, const CallFingerprint& fingerprint,
                                     FaultKind kind) const {
    CopyParams params{};
    params.arrive = arrive(fingerprint, kind);
    params.stamps_at = pad_layout_.stamps;
    params.progress_at = pad_layout_.progress;
    params.slots = call.slots;
    params.quotas = call.quotas;
    params.homes = call.num_experts / ranks_;
    params.spare = call.spare_experts;
    params.slots_per_rank = params.homes + params.spare;
    params.store_spare = spare_;
    params.node_ranks = node_ranks_;
    params.held = static_cast<HeldCopy*>(held_.get());
    params.owner = call.owner;
    params.stamp = call.stamp;
    // Over a network nobody tells other nodes its stamp, and all copies come in each call.
    params.fresh = call.fresh || network_ != nullptr ? 1 : 0;
    params.over_network = network_ != nullptr;
    params.range_bytes = whole_stream;
    params.own_store = store_.local;
    params.stores = near_peers_of<std::byte>(store_, 0, 0, ranks_);
    std::ranges::copy(call.home, params.home);
    std::int64_t chunks = 0;
    for (const ExpertPart& part : call.parts) {
      params.parts[params.num_parts] = {part.elements, call.copies[params.num_parts] - store_.local,
                                        static_cast<std::int32_t>(chunks), part.dtype};
      chunks += copy_chunks(part.elements * dtype_bytes(part.dtype));
      ++params.num_parts;
    }
    params.num_chunks = static_cast<std::int32_t>(chunks);
    return params;
  }

  Transport& transport_;
  std::shared_ptr<GpuRank> gpu_;
  int share_;
  std::int32_t ranks_;
  std::int32_t node_ranks_;
  std::int32_t spare_;
  PadLayout pad_layout_;
  std::shared_ptr<void> state_;
  std::shared_ptr<void> held_;  ///< [R, spare] HeldCopy
  SymmetricBuffer store_;
  SignalPad pad_;
  std::unique_ptr<CopyNetwork> network_;  ///< null: the memory of all ranks is mapped
};

}  // namespace

std::unique_ptr<CopyStoreExecutor> make_gpu_copy_store(Transport& transport,
                                                       std::shared_ptr<GpuRank> gpu, int share,
                                                       NetworkPath* path, std::int64_t size_bytes,
                                                       std::int32_t spare_experts,
                                                       std::string_view name) {
  check_supported(transport, path, spare_experts);
  NetworkPath* const network = path == nullptr || path->maps_peers() ? nullptr : path;
  return std::make_unique<GpuCopyStore>(transport, std::move(gpu), share, network, size_bytes,
                                        spare_experts, name);
}

}  // namespace waybill::cuda
