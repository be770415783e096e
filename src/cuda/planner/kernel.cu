// Copies of hot experts, planned by one block: threads sum the counts, warps try limits and ways
// side by side, the lowest that succeeds wins. The phases are in kernel.h.

#include "even_experts.h"
#include "kernel.h"

namespace waybill::cuda {
namespace {

constexpr unsigned whole_warp = 0xFFFFFFFF;

/// A warp's lanes: a number of each lane is a variable of its thread.
struct DeviceWarp {
  using Int = int;
  using Unsigned = unsigned;
  using Wide = unsigned long long;
  using Mask = bool;

  __device__ static int lane() { return static_cast<int>(threadIdx.x % warp_lanes); }
  __device__ static int gather(const int* base, int idx, bool mask, int otherwise) {
    return mask ? base[idx] : otherwise;
  }
  __device__ static void scatter(int* base, int idx, int value, bool mask) {
    if (mask) base[idx] = value;
  }
  /// All lanes write the same: no lane has to be told apart.
  __device__ static void put(int* at, int value) { *at = value; }
  template <class Number>
  __device__ static Number select(bool mask, Number yes, Number no) {
    return mask ? yes : no;
  }
  __device__ static void add(int* base, int idx, int value, bool mask) {
    if (mask) atomicAdd(base + idx, value);
  }
  template <class Number>
  __device__ static Number larger(Number a, Number b) {
    return a > b ? a : b;
  }
  template <class Number>
  __device__ static Number smaller(Number a, Number b) {
    return a < b ? a : b;
  }
  /// Four words at a multiple of four.
  __device__ static void put_four(int* at, int a, int b, int c, int d, bool mask) {
    if (mask) *reinterpret_cast<int4*>(at) = make_int4(a, b, c, d);
  }

  __device__ static int reduce_min(int value) { return __reduce_min_sync(whole_warp, value); }
  __device__ static unsigned long long reduce_min(unsigned long long value) {
    return ~reduce_max(~value);
  }
  __device__ static int reduce_max(int value) { return __reduce_max_sync(whole_warp, value); }
  __device__ static unsigned reduce_max(unsigned value) {
    return __reduce_max_sync(whole_warp, value);
  }
  __device__ static unsigned long long reduce_max(unsigned long long value) {
    const auto own = static_cast<unsigned>(value >> 32U);
    const unsigned high = __reduce_max_sync(whole_warp, own);
    const unsigned low =
        __reduce_max_sync(whole_warp, own == high ? static_cast<unsigned>(value) : 0U);
    return static_cast<unsigned long long>(high) << 32U | low;
  }
  __device__ static int reduce_add(int value) { return __reduce_add_sync(whole_warp, value); }
  __device__ static std::uint32_t ballot(bool mask) { return __ballot_sync(whole_warp, mask); }
  __device__ static int lowest(std::uint32_t lanes) { return __ffs(static_cast<int>(lanes)) - 1; }
  __device__ static int count(std::uint32_t lanes) { return __popc(lanes); }
  /// Those of `lanes` that are lower than the lane.
  __device__ static int count_below(std::uint32_t lanes) {
    return __popc(lanes & ((1U << static_cast<unsigned>(lane())) - 1U));
  }
  template <class Number>
  __device__ static Number broadcast(Number value, int lane) {
    return __shfl_sync(whole_warp, value, lane);
  }
  template <class Number>
  __device__ static Number exchange(Number value, int step) {
    return __shfl_xor_sync(whole_warp, value, step);
  }
  /// The sum of the lane's number and of those of lower lanes.
  __device__ static int scan(int value) {
    for (int step = 1; step < warp_lanes; step *= 2) {
      const int below = __shfl_up_sync(whole_warp, value, step);
      if (lane() >= step) value += below;
    }
    return value;
  }
  __device__ static int bit_width(unsigned value) { return 32 - __clz(static_cast<int>(value)); }
  __device__ static void sync() { __syncwarp(); }

  /// An address in shared memory that stays in a register: where the compiler knows how it came
  /// about, it computes it again at each use, with a slow read of a special register.
  template <class T>
  __device__ static T* pin(T* shared) {
    auto address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("" : "+r"(address));
    return static_cast<T*>(__cvta_shared_to_generic(address));
  }
  /// A parameter that stays in a register, known to be the same in all lanes: the compiler does not
  /// see through a reduction, and would read the parameter at each use.
  __device__ static int keep(int value) { return reduce_max(value); }
  /// A number that is computed here, not only where it is needed.
  __device__ static int hold(int value) {
    asm volatile("" : "+r"(value));
    return value;
  }
  __device__ static int read(const int* at) { return *static_cast<const volatile int*>(at); }
  /// Another warp may change the number meanwhile: all lanes get the same.
  __device__ static int look(const int* at) { return broadcast(read(at), 0); }
  using Four = int4;
  __device__ static Four read_four(const int* at) { return *reinterpret_cast<const int4*>(at); }
  __device__ static void load(const std::int32_t* at, std::int32_t (&to)[1]) { to[0] = __ldg(at); }
  __device__ static void load(const std::int32_t* at, std::int32_t (&to)[4]) {
    const int4 four = __ldg(reinterpret_cast<const int4*>(at));
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
  }
  __device__ static void store(int* at, const unsigned (&from)[1]) {
    *at = static_cast<int>(from[0]);
  }
  __device__ static void store(int* at, const unsigned (&from)[4]) {
    *reinterpret_cast<uint4*>(at) = make_uint4(from[0], from[1], from[2], from[3]);
  }
  __device__ static int take_next(int* number) {
    int next = 0;
    if (lane() == 0) next = atomicAdd(number, 1);
    return broadcast(next, 0);
  }
  __device__ static void block_max(int* at, int value) { atomicMax(at, value); }
  __device__ static void block_min(int* at, int value) { atomicMin(at, value); }
  /// @return the number before
  __device__ static int block_add(int* at, int value) { return atomicAdd(at, value); }
  __device__ static int block_exchange(int* at, int value) { return atomicExch(at, value); }
};

/// A barrier of some of the block's threads.
__device__ void wait_for(int threads) { asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory"); }

/// Sums of experts and ranks.
template <class Phases>
__device__ void count(Phases& phases, int warp, int warps) {
  phases.clear();
  phases.sum_some_ranks();
  __syncthreads();
  phases.note_status();
  phases.sum_ranks(warp, warps);
  __syncthreads();
}

/// Some warps try limits from the mean on, while the others order ranks and seek the bound; where
/// it is above the mean, tries begin again. False: rows or present copies are wrong.
template <class Phases>
__device__ bool find_plan(Phases& phases, int pass_warps, int warp, int warps) {
  const int first = pass_warps * warp_lanes, threads = even_experts_threads - first;
#pragma unroll 1  // else the tries are twice in the code
  for (bool again = false;; again = true) {
    if (warp < pass_warps) {
      if (again || phases.note_sums()) phases.try_limits(warp);
    } else if (!again) {
      phases.order_ranks(warp - pass_warps, warps - pass_warps);
      wait_for(threads);
      if (phases.choose_sums()) {
        phases.sort_experts(static_cast<int>(threadIdx.x) - first, threads);
        wait_for(threads);
        phases.find_bound(warp - pass_warps, warps - pass_warps);
      }
    }
    __syncthreads();
    if (!phases.is_good()) return false;
    if (again || !phases.was_vain()) return true;
    phases.take_bound();
    __syncthreads();
  }
}

template <int Own, bool Nodes>
__global__ void __launch_bounds__(even_experts_threads, 1)
    even_experts_kernel(const __grid_constant__ EvenExpertsParams p) {
  extern __shared__ __align__(16) int words[];
  const EvenExpertsMemory m(words, p);
  const auto thread = static_cast<int>(threadIdx.x);
  const int warp =
      DeviceWarp::broadcast(thread / warp_lanes, 0);  // the same in all lanes: known so
  constexpr int warps = even_experts_threads / warp_lanes;
  EvenExpertsPhases<DeviceWarp, Own, Nodes> phases(p, m, thread, even_experts_threads);
  const auto begin = static_cast<unsigned>(clock());
  count(phases, warp, warps);
  const auto counted = static_cast<unsigned>(clock());
  if (!find_plan(phases, p.pass_warps, warp, warps)) return phases.write_failure();
  const auto tried = static_cast<unsigned>(clock());
  phases.fill_slots();
  phases.write_homes(warps - 1 - warp, warps);  // the first warps have copies
  __syncthreads();
  phases.write_copies(warp, warps);
  if (thread > 0) return;
  p.figures[figure_count_cycles] = static_cast<int>(counted - begin);
  p.figures[figure_try_cycles] = static_cast<int>(tried - counted);
  p.figures[figure_write_cycles] = static_cast<int>(static_cast<unsigned>(clock()) - tried);
}

using Kernel = void (*)(EvenExpertsParams);
// By whether there are nodes, then by ranks.
constexpr Kernel kernels[2][3] = {
    {even_experts_kernel<1, false>, even_experts_kernel<2, false>, even_experts_kernel<4, false>},
    {even_experts_kernel<1, true>, even_experts_kernel<2, true>, even_experts_kernel<4, true>}};

}  // namespace

cudaError_t prepare_even_experts(int shared_bytes) {
  for (const auto& by_ranks : kernels) {
    for (const Kernel kernel : by_ranks) {
      const cudaError_t status =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
      if (status != cudaSuccess) return status;
    }
  }
  return cudaSuccess;
}

cudaError_t launch_even_experts(const EvenExpertsParams& params, int shared_bytes,
                                cudaStream_t stream) {
  const auto bytes = static_cast<std::size_t>(shared_bytes);
  const int width = params.num_ranks <= warp_lanes ? 0 : params.num_ranks <= 2 * warp_lanes ? 1 : 2;
  const Kernel kernel = kernels[params.num_nodes > 1 ? 1 : 0][width];
  kernel<<<1, even_experts_threads, bytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace waybill::cuda
