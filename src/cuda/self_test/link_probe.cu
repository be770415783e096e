#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

#include "../device/bulk.cuh"
#include "../rank/device_limits.h"
#include "../rank/gpu_rank.h"
#include "cuda/self_test/self_test.h"

namespace waybill {
namespace {

constexpr int max_gpus = 8;
constexpr int chunk_bytes = 8192;
constexpr int stages = 4;
constexpr int warps = 6;
constexpr int vector_chunk_bytes = 65536;

void check(cudaError_t status, const char* doing) { cuda::cuda_check(status, doing); }

/// One GPU's sources and destinations, by peer. Peers alternate, the next GPU first.
struct Pairs {
  const char* from[max_gpus];
  char* to[max_gpus];
  int me;
  int num_gpus;
};

__device__ int peer_of(const Pairs& p, std::int64_t chunk) {
  return (p.me + 1 + static_cast<int>(chunk % (p.num_gpus - 1))) % p.num_gpus;
}

__global__ void __launch_bounds__(1024, 1) copy_vector(Pairs p, std::int64_t bytes) {
  const std::int64_t total = bytes / vector_chunk_bytes * (p.num_gpus - 1);
  for (std::int64_t c = blockIdx.x; c < total; c += gridDim.x) {
    const std::int64_t offset = c / (p.num_gpus - 1) * vector_chunk_bytes;
    const auto* const from = reinterpret_cast<const int4*>(p.from[peer_of(p, c)] + offset);
    auto* const to = reinterpret_cast<int4*>(p.to[peer_of(p, c)] + offset);
    int4 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = __ldcs(from + threadIdx.x + i * 1024);
#pragma unroll
    for (int i = 0; i < 4; ++i) __stcs(to + threadIdx.x + i * 1024, words[i]);
  }
}

__global__ void __launch_bounds__(warps * 32, 1) copy_bulk(Pairs p, std::int64_t bytes) {
  extern __shared__ __align__(128) char shared[];
  __shared__ __align__(8) std::uint64_t barriers[warps][stages];
  const int warp = static_cast<int>(threadIdx.x / 32);
  if (threadIdx.x % 32 != 0) return;
  char* const stage = shared + warp * stages * chunk_bytes;
  for (int s = 0; s < stages; ++s) cuda::barrier_init(&barriers[warp][s]);
  cuda::fence_barrier_init();
  const std::int64_t total = bytes / chunk_bytes * (p.num_gpus - 1);
  const std::int64_t step = std::int64_t{gridDim.x} * warps;
  const std::int64_t first = blockIdx.x + std::int64_t{warp} * gridDim.x;
  const auto load = [&](std::int64_t i) {
    const std::int64_t c = first + i * step;
    if (c >= total) return;
    std::uint64_t* const barrier = &barriers[warp][i % stages];
    cuda::barrier_expect(barrier, chunk_bytes);
    cuda::bulk_load_to_copy(stage + i % stages * chunk_bytes,
                            p.from[peer_of(p, c)] + c / (p.num_gpus - 1) * chunk_bytes, chunk_bytes,
                            barrier);
  };
  for (int i = 0; i < stages - 1; ++i) load(i);
  for (std::int64_t i = 0; first + i * step < total; ++i) {
    const std::int64_t c = first + i * step;
    cuda::barrier_wait(&barriers[warp][i % stages], static_cast<std::uint32_t>(i / stages % 2));
    cuda::bulk_store(p.to[peer_of(p, c)] + c / (p.num_gpus - 1) * chunk_bytes,
                     stage + i % stages * chunk_bytes, chunk_bytes);
    cuda::bulk_commit();
    cuda::bulk_wait_read_but_one();
    load(i + stages - 1);
  }
  cuda::bulk_wait_all();
}

/// The memory, streams and events of all GPUs for one size.
class Probe {
 public:
  Probe(int num_gpus, std::int64_t bytes) : num_gpus_(num_gpus), bytes_(bytes), gpus_(num_gpus) {
    const auto size = static_cast<std::size_t>(bytes * num_gpus);
    for (int i = 0; i < num_gpus; ++i) {
      Gpu& gpu = gpus_[i];
      check(cudaSetDevice(i), "choosing a device");
      for (int j = 0; j < num_gpus; ++j) {
        if (j != i && cudaDeviceEnablePeerAccess(j, 0) != cudaSuccess) (void)cudaGetLastError();
      }
      check(cudaMalloc(&gpu.from, size), "allocating");
      check(cudaMalloc(&gpu.to, size), "allocating");
      check(cudaMemset(gpu.from, i + 1, size), "filling");
      check(cudaMemset(gpu.to, 0, size), "filling");
      for (cudaStream_t& stream : gpu.streams) {
        check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
      }
      check(cudaEventCreate(&gpu.begun), "making an event");
      check(cudaEventCreate(&gpu.ended), "making an event");
      for (cudaEvent_t& event : gpu.copied) {
        check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
      }
      if (cuda::has_bulk_copies(i)) {
        check(cudaFuncSetAttribute(copy_bulk, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   warps * stages * chunk_bytes),
              "preparing a kernel");
      } else {
        has_bulk_copies_ = false;
      }
      check(cudaDeviceSynchronize(), "filling");
    }
  }
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;
  ~Probe() {
    for (int i = 0; i < num_gpus_; ++i) {
      (void)cudaSetDevice(i);
      (void)cudaFree(gpus_[i].from);
      (void)cudaFree(gpus_[i].to);
      for (cudaStream_t stream : gpus_[i].streams) (void)cudaStreamDestroy(stream);
    }
  }

  /// Returns the milliseconds of the slowest GPU.
  float run(LinkWay way, int num_sms) {
    for (int i = 0; i < num_gpus_; ++i) {
      check(cudaSetDevice(i), "choosing a device");
      check(cudaEventRecord(gpus_[i].begun, gpus_[i].streams[i]), "timing");
      start(i, way, num_sms);
      check(cudaEventRecord(gpus_[i].ended, gpus_[i].streams[i]), "timing");
    }
    float slowest = 0;
    for (int i = 0; i < num_gpus_; ++i) {
      check(cudaSetDevice(i), "choosing a device");
      check(cudaStreamSynchronize(gpus_[i].streams[i]), "copying");
      float ms = 0;
      check(cudaEventElapsedTime(&ms, gpus_[i].begun, gpus_[i].ended), "timing");
      slowest = std::max(slowest, ms);
    }
    return slowest;
  }

 private:
  struct Gpu {
    char* from = nullptr;
    char* to = nullptr;
    cudaStream_t streams[max_gpus] = {};
    cudaEvent_t begun = nullptr;
    cudaEvent_t ended = nullptr;
    cudaEvent_t copied[max_gpus] = {};
  };

  Pairs pairs_of(int me, bool pull) const {
    Pairs pairs{{}, {}, me, num_gpus_};
    for (int j = 0; j < num_gpus_; ++j) {
      pairs.from[j] = pull ? gpus_[j].from + bytes_ * me : gpus_[me].from + bytes_ * j;
      pairs.to[j] = pull ? gpus_[me].to + bytes_ * j : gpus_[j].to + bytes_ * me;
    }
    return pairs;
  }

  void start(int me, LinkWay way, int num_sms) {
    Gpu& gpu = gpus_[me];
    const auto blocks = static_cast<unsigned>(num_sms);
    const Pairs pairs = pairs_of(me, way == LinkWay::pull_bulk);
    const bool bulk = way == LinkWay::push_bulk || way == LinkWay::pull_bulk;
    if (way == LinkWay::push_vector || (bulk && !has_bulk_copies_)) {
      copy_vector<<<blocks, 1024, 0, gpu.streams[me]>>>(pairs, bytes_);
    } else if (way != LinkWay::copy_engines) {
      copy_bulk<<<blocks, warps * 32, warps * stages * chunk_bytes, gpu.streams[me]>>>(pairs,
                                                                                       bytes_);
    } else {
      for (int k = 1; k < num_gpus_; ++k) {
        const int peer = (me + k) % num_gpus_;
        check(cudaStreamWaitEvent(gpu.streams[peer], gpu.begun, 0), "ordering");
        check(cudaMemcpyAsync(pairs.to[peer], pairs.from[peer], static_cast<std::size_t>(bytes_),
                              cudaMemcpyDeviceToDevice, gpu.streams[peer]),
              "copying");
        check(cudaEventRecord(gpu.copied[peer], gpu.streams[peer]), "ordering");
        check(cudaStreamWaitEvent(gpu.streams[me], gpu.copied[peer], 0), "ordering");
      }
    }
    check(cudaGetLastError(), "launching");
  }

  int num_gpus_;
  std::int64_t bytes_;
  std::vector<Gpu> gpus_;
  bool has_bulk_copies_ = true;  ///< all of them
};

}  // namespace

double link_gb_s(int num_gpus, LinkWay way, int num_sms, std::int64_t bytes_per_peer, int repeats) {
  if (num_gpus < 2) return 0;
  Probe probe(std::min(num_gpus, max_gpus), bytes_per_peer);
  for (int i = 0; i < 3; ++i) (void)probe.run(way, num_sms);
  std::vector<float> times;
  for (int i = 0; i < repeats; ++i) times.push_back(probe.run(way, num_sms));
  std::sort(times.begin(), times.end());
  const double ms = times[times.size() / 2];
  return static_cast<double>(bytes_per_peer) * (std::min(num_gpus, max_gpus) - 1) / ms / 1e6;
}

LinkSpeeds measure_links(int num_gpus, const LinkSpeeds& known) {
  constexpr const char* who = "measure_links";
  if (num_gpus < 2) throw Unsupported(concat(who, ": ", num_gpus, " GPUs, expected two or more"));
  for (int from = 0; from < num_gpus; ++from) {
    for (int to = 0; to < num_gpus; ++to) {
      int can = 1;
      if (from != to) check(cudaDeviceCanAccessPeer(&can, from, to), "asking for peer access");
      if (can != 0) continue;
      throw Unsupported(concat(who, ": GPU ", from, " cannot reach the memory of GPU ", to));
    }
  }
  constexpr std::int64_t bytes = std::int64_t{64} << 20;
  constexpr int few = 4;  // too few to fill the links
  const auto rate = [&](int sms) {
    return link_gb_s(num_gpus, LinkWay::push_bulk, sms, bytes) * 1e9;
  };
  LinkSpeeds links = known;
  links.block_bytes_per_second = rate(few) / few;
  links.nvlink_bytes_per_second = 0;
  for (const int sms : {8, 16, 32, 64}) {
    links.nvlink_bytes_per_second = std::max(links.nvlink_bytes_per_second, rate(sms));
  }
  return links;
}

double local_copy_gb_s(std::int64_t bytes) {
  const auto size = static_cast<std::size_t>(bytes);
  char* memory = nullptr;
  cudaEvent_t begun = nullptr;
  cudaEvent_t ended = nullptr;
  check(cudaSetDevice(0), "choosing a device");
  check(cudaMalloc(&memory, size * 2), "allocating");
  check(cudaMemset(memory, 1, size * 2), "filling");
  check(cudaEventCreate(&begun), "making an event");
  check(cudaEventCreate(&ended), "making an event");
  std::vector<float> times;
  for (int i = 0; i < 13; ++i) {
    check(cudaEventRecord(begun), "timing");
    check(cudaMemcpyAsync(memory + size, memory, size, cudaMemcpyDeviceToDevice), "copying");
    check(cudaEventRecord(ended), "timing");
    check(cudaEventSynchronize(ended), "copying");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begun, ended), "timing");
    if (i >= 3) times.push_back(ms);
  }
  check(cudaFree(memory), "freeing");
  std::sort(times.begin(), times.end());
  return 2.0 * static_cast<double>(bytes) / times[times.size() / 2] / 1e6;
}

}  // namespace waybill
