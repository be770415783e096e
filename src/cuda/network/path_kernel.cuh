#pragma once

#include "../device/call_words.cuh"
#include "path_params.h"

// The network path's kernel for wires that a device serves itself. A Backend has, for one block:
//   void put(const NetworkPut&)          begins or does a put; all threads
//   void settle()                        all puts of this block have arrived; all threads
//   void raise_slot(peer, slot, epoch)   one thread; after settle()
//   void send_call_words(peer, words, epoch)  one thread: into the peer's slot for this rank's
//   words,
//                                        which the own pad holds at the same place
//   void raise_arrival(peer, epoch)      one thread, behind a fence: slot `rank` of the peer's
//                                        arrivals
//   bool put_signal(const NetworkPut&, slot, epoch)   all threads: a put whose arrival raises a
//                                        slot of its peer; false where the backend cannot

namespace waybill::cuda {

inline constexpr int path_threads = 512;

/// A peer may be late by the deadline, and the rank's own rows then are as well: its kernel says
/// for whom it waits, not this one.
inline constexpr std::uint64_t own_rows_patience = 4;

/// A wait of a network path for another rank that comes to a bad end, as report_missed().
[[noreturn]] __device__ __noinline__ inline void report_path_timeout(const PathParams& p,
                                                                     std::uint64_t epoch,
                                                                     std::int32_t peer,
                                                                     std::uint64_t seen,
                                                                     std::uint64_t waited_ns) {
  if (p.arrivals != nullptr) report_disagreement(p, p.arrivals, epoch, peer, waited_ns);
  report_and_trap(p.sink, p.kind, p.rank, peer, epoch, seen, waited_ns);
}

__device__ inline void wait_rank(const PathParams& p, const std::uint64_t* flag,
                                 std::uint64_t epoch, std::int32_t peer) {
  std::uint64_t seen = 0;
  spin_until([&] { return (seen = load_acquire(flag)) >= epoch; },
             [&](std::uint64_t waited_ns) {
               if (is_over(p.sink, waited_ns)) report_path_timeout(p, epoch, peer, seen, waited_ns);
             });
}

template <class Backend>
class PathWork {
 public:
  __device__ PathWork(const PathParams& p, Backend& backend, std::uint64_t epoch)
      : p_(p), backend_(backend), epoch_(epoch) {}

  __device__ void run() {
    if (p_.arrival != PathArrival::none && blockIdx.x == 0) begin();
    const std::int32_t num_puts = *p_.tables.num_puts;
    std::int32_t number = -1;
    NetworkStep step{};
    for (auto i = static_cast<std::int32_t>(blockIdx.x); i < num_puts;
         i += static_cast<std::int32_t>(gridDim.x)) {
      // What a kernel writes into the tables is there when the waits of the step are over.
      const std::int32_t next = p_.tables.puts[i].step;
      if (next != number) {
        number = next;
        step = p_.tables.steps[number];
        wait_epoch(step);
      }
      if (p_.arrival == PathArrival::first) wait_peer(p_.tables.puts[i].peer);
      do_put(p_.tables.puts[i], step, number);
    }
    backend_.settle();
    end();
  }

 private:
  __device__ void wait_epoch(const NetworkStep& step) {
    for (int w = static_cast<int>(threadIdx.x); w < step.num_waits; w += path_threads) {
      const BatchSlot slot = p_.tables.waits[step.first_wait + w];
      if (slot.rank == p_.world_size) {
        FaultSink sink = p_.sink;
        sink.timeout_ns *= own_rows_patience;
        wait_until(p_.tables.ready + slot.slot, epoch_, p_.kind, p_.rank, p_.rank, sink);
      } else {
        wait_rank(p_, p_.slots + slot.slot, epoch_, slot.rank);
      }
    }
    __syncthreads();
  }

  /// Nothing is put into the window of a rank that has not come to this call.
  __device__ void wait_peer(std::int32_t peer) {
    if (peer == come_) return;
    come_ = peer;
    if (threadIdx.x == 0) wait_rank(p_, p_.arrivals + peer, epoch_, peer);
    __syncthreads();
  }

  __device__ void do_put(const NetworkPut& put, const NetworkStep& step, std::int32_t number) {
    if (step.num_puts == 1 && step.num_signals == 1) {
      const BatchSlot slot = p_.tables.signals[step.first_signal];
      if (slot.rank == put.peer && backend_.put_signal(put, slot.slot, epoch_)) return;
    }
    backend_.put(put);
    if (step.num_signals == 0) return;
    backend_.settle();
    if (threadIdx.x == 0) count(step, number);
  }

  /// A put of a step has arrived. The last one raises the signals.
  __device__ void count(const NetworkStep& step, std::int32_t number) {
    __threadfence_system();
    unsigned* const done = p_.tables.done + number;
    if (atomicAdd(done, 1U) + 1 != static_cast<unsigned>(step.num_puts)) return;
    __threadfence_system();
    *done = 0;  // for the next call
    for (int s = 0; s < step.num_signals; ++s) {
      const BatchSlot slot = p_.tables.signals[step.first_signal + s];
      backend_.raise_slot(slot.rank, slot.slot, epoch_);
    }
  }

  /// Calls for the ranks of other nodes, from the next one on, one thread a rank.
  template <class Visit>
  __device__ void for_other_nodes(Visit&& visit) {
    const std::int32_t others = p_.world_size - p_.ranks_per_node;
    const std::int32_t next_node = (p_.rank / p_.ranks_per_node + 1) * p_.ranks_per_node;
    for (auto k = static_cast<std::int32_t>(threadIdx.x); k < others; k += path_threads)
      visit((next_node + k) % p_.world_size);
  }

  /// Tells what this rank means by the call, and that it has come where that is to be said first.
  __device__ void begin() {
    const CallWords words = load_call_words(p_.fingerprint);
    if (threadIdx.x == 0)
      store_words(words_at(p_.arrivals, p_.fingerprint, p_.world_size, epoch_, p_.rank), words,
                  epoch_);
    __threadfence_system();
    __syncthreads();
    for_other_nodes([&](std::int32_t peer) {
      backend_.send_call_words(peer, words, epoch_);
      if (p_.arrival == PathArrival::first) backend_.raise_arrival(peer, epoch_);
    });
  }

  __device__ void arrive() {
    __threadfence_system();
    for_other_nodes([&](std::int32_t peer) { backend_.raise_arrival(peer, epoch_); });
  }

  /// The last block says that the rank has arrived, and ends the network path.
  __device__ void end() {
    __shared__ bool last;
    if (threadIdx.x == 0) {
      __threadfence_system();
      last = atomicAdd(&p_.state->blocks, 1ULL) == gridDim.x - 1;
      __threadfence_system();
    }
    __syncthreads();
    if (!last) return;
    if (p_.arrival == PathArrival::last) {
      arrive();
      backend_.settle();
    }
    if (threadIdx.x != 0) return;
    p_.state->blocks = 0;
    p_.state->epoch = epoch_;
  }

  const PathParams& p_;
  Backend& backend_;
  const std::uint64_t epoch_;
  std::int32_t come_ = -1;  ///< the last peer that was waited for
};

template <class Backend>
__device__ void run_path(const PathParams& p, Backend& backend) {
  const std::uint64_t epoch = p.state->epoch + 1;
  if (epoch % 2 != p.parity) report_parity(p.sink, p.kind, p.rank, p.parity, epoch);
  PathWork<Backend>(p, backend, epoch).run();
}

}  // namespace waybill::cuda
