#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "../../device/params.h"
#include "../../network/network_path.h"
#include "../../rank/gpu_rank.h"
#include "experts/expert_executor.h"
#include "transport/transport.h"
#include "waybill/core/dtype.h"

namespace waybill::cuda {

inline constexpr std::int32_t max_copy_parts = 16;     ///< tensors of an expert
inline constexpr std::int32_t max_copy_tensors = 256;  ///< those of a rank's home experts
inline constexpr std::int32_t max_copies = 2048;       ///< spare slots of all ranks

/// One tensor of an expert.
struct CopyPart {
  std::int64_t elements;
  std::int64_t copies_at;    ///< bytes from the store's first to [spare, elements]
  std::int32_t first_chunk;  ///< among the expert's chunks of weights
  DType dtype;
};

/// A copy that lies in a store, on any rank.
struct HeldCopy {
  std::int64_t expert;  ///< owner << 32 | expert; -1: nothing that is known
  std::int64_t stamp;   ///< its home's weights have it
};

/// Parameters of both kernels. R ranks, P home experts and S slots each.
struct CopyParams {
  ArriveParams arrive;  ///< its slots are the first of a pad, which has stamps and progress as well
  std::int32_t stamps_at;    ///< words from the first slot to [2, R]: by parity of the call
  std::int32_t progress_at;  ///< words to [store_spare, copy_stripes]: see progress_word()
  // The plan, on the device.
  const std::int32_t* slots;   ///< [R, S]: expert of a slot; -1: empty
  const std::int32_t* quotas;  ///< [R, S]: a slot without rows has no copy. Null: rows do not count
  std::int32_t slots_per_rank;
  std::int32_t homes;
  std::int32_t spare;        ///< S - homes
  std::int32_t store_spare;  ///< spare slots of the store, at least `spare`
  std::int32_t node_ranks;   ///< ranks per node: an expert comes once to each
  HeldCopy* held;            ///< [R, store_spare]: what lies in the store, the same on all ranks
  std::int64_t owner;        ///< number of the module that calls
  std::int64_t stamp;        ///< this rank's weights have it
  std::int32_t fresh;        ///< 1: copies that lie there come again
  std::int32_t num_parts;
  std::int32_t num_chunks;  ///< the weights of an expert have so many
  /// Nodes whose memory is not mapped: all ranks have met, and what crosses nodes has come.
  bool over_network;
  // Gradients: bytes of an expert's stream that are added, and of copies on other nodes the places
  // where these have landed, range_bytes each.
  std::int64_t range_begin;
  std::int64_t range_bytes;
  const std::byte* landed;
  std::byte* own_store;
  NearPeers<std::byte> stores;
  CopyPart parts[max_copy_parts];
  std::byte* home[max_copy_tensors];  ///< [P, parts]: weights, or gradients
};
static_assert(sizeof(CopyParams) <= 4096);

/// Loads both kernels, see kernels.h.
cudaError_t prepare_copies();

/// Weights from their homes into the stores: over a network, to ranks of the node alone. It ends on
/// a rank when that rank's copies are there and what it sends has left.
/// @param blocks fit on the device together
cudaError_t launch_fetch_weights(const CopyParams& params, int blocks, cudaStream_t stream);

/// Adds the gradients that lie in the stores, or have landed, to those of home. It takes two
/// epochs, and ends when all ranks have read what they need; over a network it takes none, and
/// waits for nobody. @param blocks as above
cudaError_t launch_add_gradients(const CopyParams& params, int blocks, cudaStream_t stream);

/// Makes the store of copies of a rank of a GPU world. Collective.
/// @param share ranks on this device
/// @param path to other nodes, which outlives the store; null: there are none
/// @throws Unsupported for too many copies
[[nodiscard]] std::unique_ptr<CopyStoreExecutor> make_gpu_copy_store(
    Transport& transport, std::shared_ptr<GpuRank> gpu, int share, NetworkPath* path,
    std::int64_t size_bytes, std::int32_t spare_experts, std::string_view name);

}  // namespace waybill::cuda
