#pragma once

#include <cstdint>

// Bulk copies between global and shared memory by the copy engine of a multiprocessor (sm_90 and
// later). Addresses and sizes are multiples of 16 bytes.

namespace waybill::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define WAYBILL_HAS_BULK 1
#endif

__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// A barrier that counts the bytes of loads; one thread arrives at it.
__device__ inline void barrier_init(std::uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)));
}

/// Makes barriers that this thread has initialized known to the copy engine. The threads that use
/// them synchronize afterwards.
__device__ inline void fence_barrier_init() {
#ifdef WAYBILL_HAS_BULK
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

/// Orders global memory: stores of this thread, and stores of others that it has acquired, come
/// before the next accesses of the copy engine. It does not order shared memory: a fence of both
/// also waits for the thread's stores to arrive on the device.
__device__ inline void fence_async_global() {
#ifdef WAYBILL_HAS_BULK
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

__device__ inline void barrier_expect(std::uint64_t* barrier, std::uint32_t bytes) {
#ifdef WAYBILL_HAS_BULK
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
#endif
}

__device__ inline void barrier_wait(std::uint64_t* barrier, std::uint32_t phase) {
#ifdef WAYBILL_HAS_BULK
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(phase)
      : "memory");
#endif
}

/// Loads what only the copy engine reads again: bulk_store() takes it from there.
__device__ inline void bulk_load_to_copy(void* shared, const void* global, std::uint32_t bytes,
                                         std::uint64_t* barrier) {
#ifdef WAYBILL_HAS_BULK
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
#endif
}

/// Loads what lanes read. Before shared memory that they have read is filled again they call
/// release_stage(); scripts/check_bulk_fences.py looks for it.
__device__ inline void bulk_load_to_read(void* shared, const void* global, std::uint32_t bytes,
                                         std::uint64_t* barrier) {
  bulk_load_to_copy(shared, global, bytes, barrier);
}

/// A warp has read shared memory that a bulk copy fills next. The reads of lanes and the writes of
/// the copy engine have no order without the fence, which each lane needs for its own reads: a
/// fence of the lane that issues the copy, after the lanes have synchronized, is too late.
__device__ inline void release_stage() {
#ifdef WAYBILL_HAS_BULK
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  __syncwarp();
}

__device__ inline void bulk_store(void* global, const void* shared, std::uint32_t bytes) {
#ifdef WAYBILL_HAS_BULK
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
#endif
}

__device__ inline void bulk_commit() {
#ifdef WAYBILL_HAS_BULK
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

/// Waits until all groups of this thread but the last `Groups` have left shared memory.
template <int Groups>
__device__ inline void bulk_wait_read_but() {
#ifdef WAYBILL_HAS_BULK
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Groups) : "memory");
#endif
}
__device__ inline void bulk_wait_read_but_one() { bulk_wait_read_but<1>(); }

/// Waits until the stores of all groups of this thread but the last `Groups` have arrived.
template <int Groups>
__device__ inline void bulk_wait_but() {
#ifdef WAYBILL_HAS_BULK
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Groups) : "memory");
#endif
}

/// Waits until all stores of this thread have arrived.
__device__ inline void bulk_wait_all() { bulk_wait_but<0>(); }

}  // namespace waybill::cuda
