#include "map_trial.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>

#include "../rank/cuda_check.h"
#include "core/test_hooks.h"
#include "share_by_handle.h"
#include "waybill/transport/agree.h"

namespace waybill::cuda {
namespace {

/// A page that a rank offers; without memory or handle there is nothing to map.
struct Offer {
  bool is_there = false;
  cudaIpcMemHandle_t handle{};
};

/// Ranks of [first, first + count) whose GPU this process does not see.
std::vector<std::int32_t> unseen_ranks(const std::vector<GpuPlace>& places, std::int32_t first,
                                       std::int32_t count, Rank me) {
  std::vector<std::int32_t> ranks;
  const waybill::detail::TestHooks& hooks = waybill::detail::test_hooks();
  const bool none_seen = hooks.unseen_gpus != 0 || hooks.unmappable_gpus != 0;
  for (std::int32_t r = first; r < first + count; ++r) {
    if (r == to_int(me)) continue;
    if (none_seen || !is_visible(places[r].gpu)) ranks.push_back(r);
  }
  return ranks;
}

std::string why_not(const Offer& offer, std::int32_t rank, int device) {
  const std::string what =
      concat("device ", device, " cannot map the memory of rank ", rank,
             ", whose GPU this process does not see (CUDA_VISIBLE_DEVICES, containers): ");
  if (!offer.is_there) return what + "that rank cannot share it";
  if (waybill::detail::test_hooks().unmappable_gpus != 0) return what + "a test refuses it";
  try {
    (void)open_shared(offer.handle, rank, device);
  } catch (const CudaError& error) {
    (void)cudaGetLastError();
    return what + error.what();
  }
  return {};
}

}  // namespace

std::string try_to_map(Bootstrap& bootstrap, std::string_view who,
                       const std::vector<GpuPlace>& places, std::int32_t first, std::int32_t count,
                       const GpuRank& gpu) {
  std::vector<std::int32_t> unseen;
  run_collectively(bootstrap, who, [&] {
    gpu.use();
    unseen = unseen_ranks(places, first, count, bootstrap.rank());
  });
  const auto tries = all_gather_value(bootstrap, std::ssize(unseen), who);
  if (std::ranges::all_of(tries, [](std::ptrdiff_t num) { return num == 0; })) return {};
  Offer mine;
  std::shared_ptr<void> page;
  try {
    page = make_shared_block(1, gpu.stream());
    cuda_check(cudaIpcGetMemHandle(&mine.handle, page.get()), "making a handle of memory");
    mine.is_there = true;
  } catch (const CudaError&) {
    (void)cudaGetLastError();  // those that would map it say so
  }
  const auto offers = all_gather_value(bootstrap, mine, who);
  std::string trouble;
  for (const std::int32_t rank : unseen) {
    trouble = why_not(offers[rank], rank, gpu.device());
    if (!trouble.empty()) break;
  }
  bootstrap.barrier(std::string(who));  // nobody has a page mapped any more
  return trouble;
}

}  // namespace waybill::cuda
