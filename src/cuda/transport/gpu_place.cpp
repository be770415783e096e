#include "gpu_place.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "core/test_hooks.h"
#include "rank_memory.h"
#include "waybill/transport/bootstrap.h"

namespace waybill::cuda {
namespace {

bool same_gpu(const cudaUUID_t& a, const cudaUUID_t& b) {
  return std::memcmp(a.bytes, b.bytes, sizeof(a.bytes)) == 0;
}

/// Identifies the namespace in which this process has its number.
std::uint64_t pid_namespace() {
  struct stat of {};
  return stat("/proc/self/ns/pid", &of) == 0 ? of.st_ino : 0;
}

bool same_process(const GpuPlace& a, const GpuPlace& b) {
  return a.host == b.host && a.pids == b.pids && a.process == b.process;
}

cudaUUID_t id_of(int device) {
  cudaDeviceProp properties{};
  cuda_check(cudaGetDeviceProperties(&properties, device), "reading device properties");
  return properties.uuid;
}

bool is_visible(const cudaUUID_t& gpu) {
  int count = 0;
  cuda_check(cudaGetDeviceCount(&count), "counting devices");
  for (int device = 0; device < count; ++device) {
    if (same_gpu(id_of(device), gpu)) return true;
  }
  return false;
}

/// Returns the ranks of [first, first + count) whose GPU this process does not see.
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

std::string why_not(const SharedBlockInfo& page, std::int32_t rank, int device) {
  const std::string what =
      concat("device ", device, " cannot map the memory of rank ", rank,
             ", whose GPU this process does not see (CUDA_VISIBLE_DEVICES, containers): ");
  if (page.size_bytes == 0) return what + "that rank cannot share it";
  if (waybill::detail::test_hooks().unmappable_gpus != 0) return what + "a test refuses it";
  try {
    (void)open_shared(page.handle, rank, device);
  } catch (const CudaError& error) {
    (void)cudaGetLastError();
    return what + error.what();
  }
  return {};
}

}  // namespace

std::vector<GpuPlace> exchange_places(Bootstrap& bootstrap, int device) {
  const GpuPlace mine{std::hash<std::string>{}(host_id()), getpid(), id_of(device),
                      pid_namespace()};
  return all_gather_value(bootstrap, mine, "gpu world: places");
}

int ranks_on_gpu_of(const std::vector<GpuPlace>& places, Rank rank) {
  const cudaUUID_t& mine = places[to_int(rank)].gpu;
  return static_cast<int>(std::ranges::count_if(
      places, [&](const GpuPlace& place) { return same_gpu(place.gpu, mine); }));
}

bool shares_gpu_with_processes(const std::vector<GpuPlace>& places, Rank rank) {
  const GpuPlace& mine = places[to_int(rank)];
  return std::ranges::any_of(places, [&](const GpuPlace& place) {
    return !same_process(place, mine) && same_gpu(place.gpu, mine.gpu);
  });
}

void require_own_processes(const std::vector<GpuPlace>& places, std::string_view who) {
  std::map<std::tuple<std::uint64_t, std::uint64_t, std::int64_t>, std::size_t> rank_in;
  for (std::size_t r = 0; r < places.size(); ++r) {
    const auto [first, fresh] =
        rank_in.emplace(std::tuple(places[r].host, places[r].pids, places[r].process), r);
    if (fresh) continue;
    throw Unsupported(concat(
        who, ": ranks ", first->second, " and ", r, " are both in process ", places[r].process,
        ", expected one process a rank (make_gpu_thread_world is for threads)"));
  }
}

void require_nodes_on_hosts(const std::vector<GpuPlace>& places, std::int32_t ranks_per_node,
                            std::string_view who) {
  const std::size_t size = ranks_per_node;
  for (std::size_t r = 0; r < places.size(); ++r) {
    const std::size_t first = r / size * size;
    if (places[r].host == places[first].host) continue;
    throw Unsupported(concat(who, ": rank ", r, " is on another host than rank ", first,
                             ", but ranks_per_node = ", ranks_per_node,
                             " puts both on one node, expected as many ranks on each host as "
                             "ranks_per_node, numbered host by host"));
  }
}

std::string missing_peer_access(std::span<const GpuPlace> peers, std::int32_t first, int device) {
  int count = 0;
  cuda_check(cudaGetDeviceCount(&count), "counting devices");
  for (int other = 0; other < count; ++other) {
    if (other == device) continue;
    const cudaUUID_t id = id_of(other);
    const auto used =
        std::ranges::find_if(peers, [&](const GpuPlace& place) { return same_gpu(place.gpu, id); });
    if (used == peers.end()) continue;
    int can = 0;
    cuda_check(cudaDeviceCanAccessPeer(&can, device, other), "asking for peer access");
    if (can != 0) continue;
    return concat("device ", device, " cannot reach the memory of device ", other, ", which rank ",
                  first + (used - peers.begin()), " uses");
  }
  return {};
}

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
  SharedBlockInfo mine;  // without memory or a handle there are no bytes to map
  std::shared_ptr<void> page;
  try {
    page = make_shared_block(1, gpu.stream());
    cuda_check(cudaIpcGetMemHandle(&mine.handle, page.get()), "making a handle of memory");
    mine.size_bytes = 1;
  } catch (const CudaError&) {
    (void)cudaGetLastError();  // the ranks that would map it report the error
  }
  const auto pages = all_gather_value(bootstrap, mine, who);
  std::string trouble;
  for (const std::int32_t rank : unseen) {
    trouble = why_not(pages[rank], rank, gpu.device());
    if (!trouble.empty()) break;
  }
  bootstrap.barrier(std::string(who));  // no rank has a page mapped any more
  return trouble;
}

}  // namespace waybill::cuda
