#pragma once

#include "../device/signal.cuh"
#include "path_params.h"

// The network path's kernel for network backends that a device serves itself. The threads of a
// block take puts in groups, which go through them alike, each with its share: the whole block is
// one, or each warp. A Backend has, for one thread of a group:
//   static constexpr int groups               of a block
//   static constexpr int group_threads        of a group
//   int group(), int thread()                 which group, and which thread of it
//   void sync()                               of the group
//   bool all(bool)                            whether it is so in the whole group
//   void expect_arrived()                     what was waited for is read next
//   void put(const NetworkPut&)               begins or does the group's share of a put
//   void put_alone(const NetworkPut&)         the same of a put that no other group has a share of
//   std::uint32_t begun()                     pieces of puts that the group has begun so far
//   static constexpr std::uint32_t few        see wait_but_few(); 0: it has none
//   static constexpr std::int64_t few_bytes   of as many pieces; where it has some
//   void wait_but_few()                       where it has: all but the last `few` have arrived
//   void settle()                             all puts of this group have arrived
//   bool put_step(puts, count, slot, epoch)   a whole step of one peer, whose arrival raises a slot
//                                             there; false where the backend cannot
// and for one thread of the block
//   void raise_slot(peer, slot, epoch)        after the puts that have arrived
//   void send_call_words(peer, words, epoch)  into the peer's slot for this rank's words, which the
//                                             own pad holds at the same place
//   void raise_arrival(peer, epoch)           after a fence: slot `rank` of the peer's arrivals

namespace waybill::cuda {

inline constexpr int path_threads = 512;  ///< threads of a block that is one group

/// Puts of one step that are on their way.
struct PathCount {
  std::int32_t step;
  unsigned puts;        ///< or PathCounts::is_whole_step
  std::uint32_t begun;  ///< pieces that the group had begun after them
};

/// Puts of a group of threads that are not yet counted, in order, so that the next puts begin
/// before the last ones have arrived. All threads of the group make the same calls; they
/// synchronize between note() and take().
class PathCounts {
 public:
  static constexpr unsigned most = 16;
  static constexpr unsigned is_whole_step = 0;  ///< no other group has put any of it

  /// @param memory shared, of the group: [most]
  __device__ explicit PathCounts(PathCount* memory) : memory_(memory) {}

  [[nodiscard]] __device__ bool is_empty() const { return first_ == behind_; }

  /// More puts of a step. @return false: there is no room
  __device__ bool note(std::int32_t step, unsigned puts, std::uint32_t begun) {
    if (is_empty() || step != step_) {
      if (behind_ - first_ == most) return false;
      step_ = step;
      puts_ = 0;
      ++behind_;
    }
    puts_ += puts;
    memory_[(behind_ - 1) % most] = {step, puts_, begun};  // all threads write the same
    return true;
  }

  /// Whether the first have arrived when all pieces but the last `few` have.
  [[nodiscard]] __device__ bool is_due(std::uint32_t begun, std::uint32_t few) const {
    return !is_empty() && begun - memory_[first_ % most].begun >= few;
  }

  /// @pre not empty
  __device__ PathCount take() { return memory_[first_++ % most]; }

 private:
  PathCount* const memory_;
  unsigned first_ = 0;
  unsigned behind_ = 0;
  std::int32_t step_ = -1;  ///< the last one's
  unsigned puts_ = 0;       ///< the last one's
};

/// Part of a backend: the whole block is one group, which knows of its puts only when it settles.
struct WholeBlock {
  static constexpr int groups = 1;
  static constexpr int group_threads = path_threads;
  static constexpr std::uint32_t few = 0;

  [[nodiscard]] __device__ int group() const { return 0; }
  [[nodiscard]] __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ void sync() const { __syncthreads(); }
  [[nodiscard]] __device__ bool all(bool mine) const {
    return __syncthreads_and(mine ? 1 : 0) != 0;
  }
  __device__ void expect_arrived() const {}
  [[nodiscard]] __device__ std::uint32_t begun() const { return 0; }
};

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

/// Waits for a counter of the rank's own, which its kernels raise.
__device__ inline void wait_own(const PathParams& p, const std::uint64_t* flag,
                                std::uint64_t epoch) {
  std::uint64_t seen = 0;
  spin_until([&] { return (seen = load_acquire(flag)) >= epoch; },
             [&](std::uint64_t waited_ns) {
               if (is_over(p.sink, waited_ns, own_rows_patience)) {
                 report_and_trap(p.sink, p.kind, p.rank, p.rank, epoch, seen, waited_ns);
               }
               end_if_reported(p.sink);
             });
}

template <class Backend>
class PathWork {
 public:
  __device__ PathWork(const PathParams& p, Backend& backend, PathCount* memory, std::uint64_t epoch)
      : p_(p), backend_(backend), counts_(memory), epoch_(epoch) {}

  __device__ void run() {
    if (p_.arrival != PathArrival::none && blockIdx.x == 0) begin();
    if (p_.tables.num_puts == nullptr) {
      take_steps();
    } else {
      take_puts();
    }
    settle();
    end();
  }

 private:
  /// Puts one after another, whatever their step.
  __device__ void take_puts() {
    const std::int32_t num_puts = *p_.tables.num_puts;
    std::int32_t number = -1;
    NetworkStep step{};
    for (auto i = static_cast<std::int32_t>(blockIdx.x); i < num_puts;
         i += static_cast<std::int32_t>(gridDim.x)) {
      // A kernel has written the tables when the waits of the step are over.
      const std::int32_t next = p_.tables.puts[i].step;
      if (next != number) {
        number = next;
        step = p_.tables.steps[number];
        wait_step(step);
      }
      if (p_.arrival == PathArrival::first) wait_peer(p_.tables.puts[i].peer);
      if (step.num_puts == 1 && put_step(step)) continue;
      do_put(p_.tables.puts[i], step, number);
    }
  }

  /// Whole steps: the first ones are shared by the groups of a block, the others have one group
  /// each; or a block all of a peer.
  __device__ void take_steps() {
    const PathTables& t = p_.tables;
    const auto block = static_cast<std::int32_t>(blockIdx.x);
    const auto blocks = static_cast<std::int32_t>(gridDim.x);
    for (std::int32_t i = block; i < t.first_steps; i += blocks) take_step(i);
    const std::int32_t stretch = t.one_block_of_peer ? t.steps_of_peer : 1;
    const std::int32_t worker = backend_.group() * blocks + block;
    const std::int32_t workers = Backend::groups * blocks;
    for (std::int32_t first = t.first_steps + worker * stretch; first < t.num_steps;
         first += workers * stretch) {
      for (std::int32_t i = first; i < first + stretch; ++i) take_alone(i);
    }
  }

  /// All groups of a block share the step's puts.
  __device__ void take_step(std::int32_t number) {
    NetworkStep step;
    if (is_done(number, step)) return;
    for (std::int32_t i = 0; i < step.num_puts; ++i)
      do_put(p_.tables.puts[step.first_put + i], step, number);
  }

  __device__ void take_alone(std::int32_t number) {
    NetworkStep step;
    if (is_done(number, step)) return;
    for (std::int32_t i = 0; i < step.num_puts; ++i) put_alone(p_.tables.puts[step.first_put + i]);
    note(number, PathCounts::is_whole_step);
  }

  /// Reads a step and waits until it may begin.
  /// @return whether it has no puts, or the backend has taken it whole
  [[nodiscard]] __device__ bool is_done(std::int32_t number, NetworkStep& step) {
    step = p_.tables.steps[number];
    if (step.num_puts == 0) return true;
    wait_step(step);
    if (p_.arrival == PathArrival::first) wait_peer(p_.tables.puts[step.first_put].peer);
    return put_step(step);
  }

  /// It counts earlier puts meanwhile.
  __device__ void put_alone(const NetworkPut& put) {
    if constexpr (Backend::few == 0) {
      backend_.put_alone(put);
    } else {
      NetworkPut part = put;
      for (std::int64_t left = put.size_bytes; left > 0; left -= Backend::few_bytes) {
        part.size_bytes = left < Backend::few_bytes ? left : Backend::few_bytes;
        backend_.put_alone(part);
        count_arrived();
        part.from_bytes += part.size_bytes;
        part.to_bytes += part.size_bytes;
      }
    }
  }

  /// @return whether it is done, and signalled
  __device__ bool put_step(const NetworkStep& step) {
    if (step.num_signals != 1) return false;
    const BatchSlot slot = p_.tables.signals[step.first_signal];
    const NetworkPut* const puts = p_.tables.puts + step.first_put;
    return slot.rank == puts->peer && backend_.put_step(puts, step.num_puts, slot.slot, epoch_);
  }

  [[nodiscard]] __device__ const std::uint64_t* flag_of(const BatchSlot& slot) const {
    return slot.rank == p_.world_size ? p_.tables.ready + slot.slot : p_.slots + slot.slot;
  }

  /// This group signals its puts before it waits for others, which may wait for these.
  __device__ void wait_step(const NetworkStep& step) {
    if (step.num_waits == 0) return;
    bool is_ready = true;
    for_waits(step, [&](const BatchSlot& slot) {
      is_ready = is_ready && load_acquire(flag_of(slot)) >= epoch_;
    });
    if (!backend_.all(is_ready)) {
      settle();
      for_waits(step, [&](const BatchSlot& slot) {
        if (slot.rank == p_.world_size) {
          wait_own(p_, flag_of(slot), epoch_);
        } else {
          wait_rank(p_, flag_of(slot), epoch_, slot.rank);
        }
      });
      backend_.sync();
    }
    backend_.expect_arrived();
  }

  template <class Visit>
  __device__ void for_waits(const NetworkStep& step, Visit&& visit) const {
    for (int w = backend_.thread(); w < step.num_waits; w += Backend::group_threads)
      visit(p_.tables.waits[step.first_wait + w]);
  }

  /// Nothing is put into the window of a rank that has not come to this call.
  __device__ void wait_peer(std::int32_t peer) {
    if (peer == come_) return;
    come_ = peer;
    const std::uint64_t* const flag = p_.arrivals + peer;
    if (backend_.all(backend_.thread() != 0 || load_acquire(flag) >= epoch_)) return;
    settle();
    if (backend_.thread() == 0) wait_rank(p_, flag, epoch_, peer);
    backend_.sync();
  }

  __device__ void do_put(const NetworkPut& put, const NetworkStep& step, std::int32_t number) {
    backend_.put(put);
    if (step.num_signals > 0) note(number, 1);
  }

  __device__ void note(std::int32_t number, unsigned puts) {
    if (!counts_.note(number, puts, backend_.begun())) {
      settle();
      (void)counts_.note(number, puts, backend_.begun());
    }
    if constexpr (Backend::few > 0) count_arrived();
  }

  /// Counts what must have arrived by now.
  __device__ void count_arrived() {
    backend_.sync();  // after the note
    bool is_due = counts_.is_due(backend_.begun(), Backend::few);
    if (is_due) backend_.wait_but_few();
    while (is_due) {
      count(counts_.take());
      is_due = counts_.is_due(backend_.begun(), Backend::few);
    }
    backend_.sync();  // before the next one
  }

  /// All that this group has put has arrived, and is counted.
  __device__ void settle() {
    backend_.settle();
    while (!counts_.is_empty()) count(counts_.take());
    backend_.sync();  // before the next note
  }

  /// So many puts of a step have arrived, as far as they are this group's. The last one raises the
  /// signals.
  __device__ void count(const PathCount& arrived) {
    if (backend_.thread() != 0) return;
    const NetworkStep step = p_.tables.steps[arrived.step];
    __threadfence_system();
    if (arrived.puts != PathCounts::is_whole_step) {
      unsigned* const done = p_.tables.done + arrived.step;
      const auto all = static_cast<unsigned>(step.num_puts * Backend::groups);
      if (atomicAdd(done, arrived.puts) + arrived.puts != all) return;
      __threadfence_system();
      *done = 0;  // for the next call
    }
    for (int s = 0; s < step.num_signals; ++s) {
      const BatchSlot slot = p_.tables.signals[step.first_signal + s];
      backend_.raise_slot(slot.rank, slot.slot, epoch_);
    }
  }

  /// Calls for the ranks of other nodes, from the next one on, a thread for each.
  template <class Visit>
  __device__ void for_other_nodes(Visit&& visit) {
    const std::int32_t others = p_.world_size - p_.ranks_per_node;
    const std::int32_t next_node = (p_.rank / p_.ranks_per_node + 1) * p_.ranks_per_node;
    for (auto k = static_cast<std::int32_t>(threadIdx.x); k < others;
         k += static_cast<std::int32_t>(blockDim.x))
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
    __syncthreads();  // all groups have settled
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
  PathCounts counts_;
  const std::uint64_t epoch_;
  std::int32_t come_ = -1;  ///< the last peer that was waited for
};

template <class Backend>
__device__ void run_path(const PathParams& p, Backend& backend) {
  __shared__ PathCount counts[Backend::groups][PathCounts::most];
  end_if_reported(p.sink);
  const std::uint64_t epoch = p.state->epoch + 1;
  if (epoch % 2 != p.parity) report_parity(p.sink, p.kind, p.rank, p.parity, epoch);
  PathWork<Backend>(p, backend, counts[backend.group()], epoch).run();
}

}  // namespace waybill::cuda
