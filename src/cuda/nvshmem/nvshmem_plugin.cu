// The only file that includes NVSHMEM: the shared library waybill_nvshmem.

#include <nvshmem.h>
#include <nvshmemx.h>

#include "../device/signal.cuh"
#include "../network/path_kernel.cuh"
#include "nvshmem_api.h"

namespace waybill::cuda {
namespace {

constexpr std::size_t alignment_bytes = 256;

#define WAYBILL_TEXT_OF(x) #x
#define WAYBILL_TEXT(x) WAYBILL_TEXT_OF(x)
constexpr const char* version_text = WAYBILL_TEXT(NVSHMEM_VENDOR_MAJOR_VERSION) "." WAYBILL_TEXT(
    NVSHMEM_VENDOR_MINOR_VERSION) "." WAYBILL_TEXT(NVSHMEM_VENDOR_PATCH_VERSION);

/// Waits for a slot, with the deadline of `sink`. NVSHMEM's own test also makes the writes of a
/// network card before the signal visible.
__global__ void wait_kernel(FlagWait wait, FaultSink sink) {
  spin_until(
      [&] {
        return nvshmem_uint64_test(const_cast<std::uint64_t*>(wait.flag), NVSHMEM_CMP_GE,
                                   wait.wanted) != 0;
      },
      [&](std::uint64_t waited_ns) {
        if (is_over(sink, waited_ns)) {
          report_and_trap(sink, FaultKind::wait, wait.rank, wait.peer, wait.wanted,
                          load_acquire(wait.flag), waited_ns);
        }
      });
  *wait.seen = load_acquire(wait.flag);
}

/// Asks as NVSHMEM's own waits do before they let the rows be read. No public call tells it
/// (docs/decisions/worlds.md).
__global__ void connectivity_kernel(int* enforces) {
  *enforces = nvshmemi_device_state_d.job_connectivity > NVSHMEMI_JOB_GPU_PROXY ? 1 : 0;
}

/// A network path's backend. Rows have the same offset in the symmetric heap of every rank.
class NvshmemBackend : public WholeBlock {
 public:
  __device__ explicit NvshmemBackend(const PathParams& p) : p_(p) {}

  __device__ void put(const NetworkPut& put) {
    nvshmemx_putmem_nbi_block(p_.window + put.to_bytes, p_.window + put.from_bytes,
                              static_cast<std::size_t>(put.size_bytes), put.peer);
  }
  __device__ void put_alone(const NetworkPut& all) { put(all); }
  __device__ void settle() {
    __threadfence_system();  // some puts are stores
    __syncthreads();
    if (threadIdx.x == 0) nvshmem_quiet();
    __syncthreads();
  }
  __device__ void raise_slot(std::int32_t peer, std::int32_t slot, std::uint64_t epoch) {
    nvshmemx_signal_op(p_.slots + slot, epoch, NVSHMEM_SIGNAL_SET, peer);
  }
  __device__ void send_call_words(std::int32_t peer, const CallWords& /*words*/,
                                  std::uint64_t epoch) {
    std::uint64_t* const at = words_at(p_.arrivals, p_.fingerprint, p_.world_size, epoch, p_.rank);
    nvshmem_uint64_put_nbi(at, at, fault_words, peer);
  }
  __device__ void raise_arrival(std::int32_t peer, std::uint64_t epoch) {
    nvshmemx_signal_op(p_.arrivals + p_.rank, epoch, NVSHMEM_SIGNAL_SET, peer);
  }
  /// The last put carries the signal, and the fence keeps it after the others: nothing waits.
  __device__ bool put_step(const NetworkPut* puts, std::int32_t count, std::int32_t slot,
                           std::uint64_t epoch) {
    const NetworkPut& last = puts[count - 1];
    if (last.size_bytes == 0) return false;
    for (std::int32_t i = 0; i + 1 < count; ++i) put(puts[i]);
    if (count > 1) {
      __threadfence_system();  // some puts are stores
      __syncthreads();
      if (threadIdx.x == 0) nvshmem_fence();
      __syncthreads();
    }
    nvshmemx_putmem_signal_nbi_block(p_.window + last.to_bytes, p_.window + last.from_bytes,
                                     static_cast<std::size_t>(last.size_bytes), p_.slots + slot,
                                     epoch, NVSHMEM_SIGNAL_SET, last.peer);
    return true;
  }

 private:
  const PathParams& p_;
};

__global__ void __launch_bounds__(path_threads) path_kernel(const __grid_constant__ PathParams p) {
  NvshmemBackend backend(p);
  run_path(p, backend);
}

int make_unique_id(void* id) {
  auto* const made = static_cast<nvshmemx_uniqueid_t*>(id);
  *made = NVSHMEMX_UNIQUEID_INITIALIZER;
  return nvshmemx_get_uniqueid(made);
}

/// Asks once, as it waits for the device. Below 0: it failed.
int ask_consistency() {
  int answer = -1;
  int* on_device = nullptr;
  if (cudaMalloc(&on_device, sizeof(int)) != cudaSuccess) return -1;
  connectivity_kernel<<<1, 1>>>(on_device);
  const cudaError_t status =
      cudaMemcpy(&answer, on_device, sizeof(int), cudaMemcpyDeviceToHost);  // after the kernel
  (void)cudaFree(on_device);
  return status == cudaSuccess ? answer : -1;
}

int consistency = -1;

int enforces_consistency() { return consistency; }

int initialize(int rank, int world_size, const void* id) {
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  const int status = nvshmemx_set_attr_uniqueid_args(
      rank, world_size, static_cast<const nvshmemx_uniqueid_t*>(id), &attributes);
  if (status != 0) return status;
  // The public nvshmemx_init_attr is an inline function that makes this call and ends the process
  // if it fails (docs/decisions/worlds.md).
  const nvshmemi_version_t version = {NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION,
                                      NVSHMEM_VENDOR_PATCH_VERSION};
  nvshmemx_init_init_attr_ver_only(attributes);
  int provided = 0;
  const int failed = nvshmemi_init_thread(NVSHMEM_THREAD_SERIALIZED, &provided,
                                          NVSHMEMX_INIT_WITH_UNIQUEID, &attributes, version);
  if (failed != 0) return failed;
  consistency = ask_consistency();
  cudaFuncAttributes unused{};  // loads the kernels while no other one can be waiting
  const cudaError_t loaded =
      cudaFuncGetAttributes(&unused, reinterpret_cast<const void*>(wait_kernel));
  if (loaded != cudaSuccess) return static_cast<int>(loaded);
  return static_cast<int>(
      cudaFuncGetAttributes(&unused, reinterpret_cast<const void*>(path_kernel)));
}

void* allocate(std::size_t size_bytes) { return nvshmem_align(alignment_bytes, size_bytes); }

void free_memory(void* memory) { nvshmem_free(memory); }

void* peer(const void* mine, int rank) { return nvshmem_ptr(mine, rank); }

void put(void* to, const void* from, std::size_t size_bytes, int rank, cudaStream_t stream) {
  nvshmemx_putmem_on_stream(to, from, size_bytes, rank, stream);
}

void signal(std::uint64_t* slot, std::uint64_t epoch, int rank, cudaStream_t stream) {
  nvshmemx_signal_op_on_stream(slot, epoch, NVSHMEM_SIGNAL_SET, rank, stream);
}

void quiet(cudaStream_t stream) { nvshmemx_quiet_on_stream(stream); }

cudaError_t wait(const FlagWait* wait, const FaultSink* sink, cudaStream_t stream) {
  wait_kernel<<<1, 1, 0, stream>>>(*wait, *sink);
  return cudaGetLastError();
}

cudaError_t path(const PathParams* params, int num_sms, cudaStream_t stream) {
  path_kernel<<<static_cast<unsigned>(num_sms), path_threads, 0, stream>>>(*params);
  return cudaGetLastError();
}

constexpr NvshmemApi api{.version = nvshmem_api_version,
                         .nvshmem_version = version_text,
                         .unique_id_bytes = sizeof(nvshmemx_uniqueid_t),
                         .make_unique_id = make_unique_id,
                         .initialize = initialize,
                         .enforces_consistency = enforces_consistency,
                         .allocate = allocate,
                         .free = free_memory,
                         .peer = peer,
                         .put = put,
                         .signal = signal,
                         .quiet = quiet,
                         .wait = wait,
                         .path = path};

}  // namespace
}  // namespace waybill::cuda

extern "C" __attribute__((visibility("default"))) const waybill::cuda::NvshmemApi*
waybill_nvshmem_api() {
  return &waybill::cuda::api;
}
