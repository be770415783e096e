#include "gpu_place.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "../executor/cuda_check.h"
#include "waybill/core/at.h"

namespace waybill::cuda {
namespace {

bool same_gpu(const cudaUUID_t& a, const cudaUUID_t& b) {
  return std::memcmp(a.bytes, b.bytes, sizeof(a.bytes)) == 0;
}

cudaUUID_t id_of(int device) {
  cudaDeviceProp properties{};
  cuda_check(cudaGetDeviceProperties(&properties, device), "reading device properties");
  return properties.uuid;
}

}  // namespace

std::vector<GpuPlace> exchange_places(Bootstrap& bootstrap, int device) {
  const GpuPlace mine{getpid(), id_of(device)};
  return all_gather_value(bootstrap, mine, "gpu world: places");
}

int ranks_on_gpu_of(const std::vector<GpuPlace>& places, Rank rank) {
  const cudaUUID_t& mine = places[waybill::detail::at(to_int(rank))].gpu;
  return static_cast<int>(std::ranges::count_if(
      places, [&](const GpuPlace& place) { return same_gpu(place.gpu, mine); }));
}

bool shares_gpu_with_processes(const std::vector<GpuPlace>& places, Rank rank) {
  const GpuPlace& mine = places[waybill::detail::at(to_int(rank))];
  return std::ranges::any_of(places, [&](const GpuPlace& place) {
    return place.process != mine.process && same_gpu(place.gpu, mine.gpu);
  });
}

void require_own_processes(const std::vector<GpuPlace>& places, std::string_view who) {
  std::map<std::int64_t, std::size_t> rank_in;
  for (std::size_t r = 0; r < places.size(); ++r) {
    const auto [first, fresh] = rank_in.emplace(places[r].process, r);
    if (fresh) continue;
    throw Unsupported(concat(
        who, ": ranks ", first->second, " and ", r, " are both in process ", places[r].process,
        ", expected one process a rank (make_gpu_thread_world is for threads)"));
  }
}

void require_peer_access(const std::vector<GpuPlace>& places, int device, std::string_view who) {
  int count = 0;
  cuda_check(cudaGetDeviceCount(&count), "counting devices");
  for (int other = 0; other < count; ++other) {
    if (other == device) continue;
    const cudaUUID_t id = id_of(other);
    const auto used = std::ranges::find_if(
        places, [&](const GpuPlace& place) { return same_gpu(place.gpu, id); });
    if (used == places.end()) continue;
    int can = 0;
    cuda_check(cudaDeviceCanAccessPeer(&can, device, other), "asking for peer access");
    if (can != 0) continue;
    throw Unsupported(concat(who, ": device ", device, " cannot reach the memory of device ", other,
                             ", which rank ", used - places.begin(), " uses"));
  }
}

}  // namespace waybill::cuda
