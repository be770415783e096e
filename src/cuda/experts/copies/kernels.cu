// Weights of copies from home to the stores of other ranks, and their gradients home again. Blocks
// find the transfers in the plan's table, so the launch is the same whatever the plan.

#include "../../device/arrive_and_wait.cuh"
#include "../../device/number.cuh"
#include "../../device/word_copy.cuh"
#include "../kernels.h"
#include "copies.h"
#include "rule.h"

namespace waybill::cuda {
namespace {

constexpr int copy_threads = 512;
constexpr int words_together = 8;  ///< words of a thread that are on their way at once
constexpr int packs_together = 4;  ///< the same of a sum

/// The call as a block sees it, in shared memory.
struct CopyWork {
  std::uint64_t* keys;    ///< [copies]
  std::int32_t* experts;  ///< [copies]: CopyTable::experts
  std::int32_t* order;    ///< [count]: copies that this rank sends, or adds, in order
  CopyTable table;
  std::int32_t count;
};

__device__ CopyWork work_in(std::uint64_t* shared, const CopyParams& p) {
  const std::int32_t copies = p.arrive.world_size * p.spare;
  auto* const experts = reinterpret_cast<std::int32_t*>(shared + copies);
  const CopyTable table{experts, p.arrive.world_size, p.homes, p.spare, p.node_ranks};
  return {shared, experts, experts + copies, table, 0};
}

__device__ std::uint64_t* stamps_at(const CopyParams& p, std::uint64_t* arrivals,
                                    std::uint64_t epoch) {
  return arrivals + p.stamps_at + static_cast<std::int32_t>(epoch % 2) * p.arrive.world_size;
}

/// Tells all ranks that this one has come, with its stamp. One warp.
__device__ void announce(const CopyParams& p, std::uint64_t epoch, const CallWords& words) {
  for_node(p.arrive, [&](std::uint64_t* arrivals) {
    store_behind_fence(stamps_at(p, arrivals, epoch) + p.arrive.rank,
                       static_cast<std::uint64_t>(p.stamp));
  });
  signal_to_all(p.arrive, epoch, words);  // its fence is after the stamps
}

/// All blocks: enters the call. Afterwards all threads see what all ranks have written before.
__device__ std::uint64_t enter(const CopyParams& p) {
  const std::uint64_t epoch = p.arrive.state->epoch + 1;
  if (threadIdx.x < 32 && !p.over_network) {
    const CallWords words = load_call_words(p.arrive.fingerprint);
    __syncwarp();
    if (blockIdx.x == 0) announce(p, epoch, words);
    wait_all(p.arrive, epoch, words);
  }
  __syncthreads();
  end_if_reported(p.arrive.sink);
  return epoch;
}

__device__ std::int64_t held_expert(const CopyParams& p, std::int32_t expert) {
  return p.owner << 32 | expert;
}

/// The stamp of an expert's weights, which its home has sent.
__device__ std::int64_t stamp_of(const CopyParams& p, std::int32_t expert, std::uint64_t epoch) {
  const std::int32_t home = expert / p.homes;
  if (home == p.arrive.rank) return p.stamp;
  const volatile std::uint64_t* const stamps = stamps_at(p, p.arrive.own_arrivals, epoch);
  return static_cast<std::int64_t>(stamps[home]);
}

/// The expert whose copy a slot has in this plan; -1: none.
__device__ std::int32_t planned(const CopyParams& p, std::int32_t rank, std::int32_t s) {
  const std::int32_t slot = rank * p.slots_per_rank + p.homes + s;
  const bool has_rows = p.quotas == nullptr || __ldg(p.quotas + slot) > 0;
  return has_rows ? __ldg(p.slots + slot) : -1;
}

/// The expert whose copy is to come into a slot; -1: none, or it is there.
__device__ std::int32_t missing(const CopyParams& p, std::int32_t rank, std::int32_t s,
                                std::uint64_t epoch) {
  const std::int32_t expert = planned(p, rank, s);
  if (expert < 0 || p.fresh != 0) return expert;
  const HeldCopy held = p.held[rank * p.store_spare + s];
  const bool is_there =
      held.expert == held_expert(p, expert) && held.stamp == stamp_of(p, expert, epoch);
  return is_there ? -1 : expert;
}

/// Fills the table by `expert_of(rank, s)` and orders this rank's copies by `key`. All threads.
template <class ExpertOf, class Key>
__device__ void order_copies(const CopyParams& p, CopyWork& work, ExpertOf&& expert_of, Key&& key) {
  __shared__ std::int32_t count;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t copies = work.table.size();
  if (thread == 0) count = 0;
  for (std::int32_t i = thread; i < copies; i += copy_threads)
    work.experts[i] = expert_of(i / p.spare, i % p.spare);
  __syncthreads();
  for (std::int32_t i = thread; i < copies; i += copy_threads)
    work.keys[i] = key(work.table, i, p.arrive.rank);
  __syncthreads();
  for (std::int32_t i = thread; i < copies; i += copy_threads) {
    if (work.keys[i] == no_copy_key) continue;
    work.order[place_of(work.keys, copies, i)] = i;
    atomicAdd(&count, 1);
  }
  __syncthreads();
  work.count = count;
}

/// The end of the run of copies of one expert that begins at `first`.
__device__ std::int32_t end_of_expert(const CopyWork& work, std::int32_t first) {
  const std::int32_t expert = work.experts[work.order[first]];
  std::int32_t end = first + 1;
  while (end < work.count && work.experts[work.order[end]] == expert) ++end;
  return end;
}

/// A chunk of an expert's weights.
struct Chunk {
  std::int32_t part;
  std::int64_t begin;  ///< byte of the part
  std::int64_t bytes;
};

__device__ std::int64_t weight_bytes(const CopyPart& part) {
  const bool wide = part.dtype == DType::float32 || part.dtype == DType::float64;
  return part.elements * (!wide ? 2 : part.dtype == DType::float32 ? 4 : 8);
}

__device__ Chunk chunk_of(const CopyParams& p, std::int32_t number) {
  std::int32_t part = 0;
  while (part + 1 < p.num_parts && p.parts[part + 1].first_chunk <= number) ++part;
  const std::int64_t begin = std::int64_t{number - p.parts[part].first_chunk} * copy_chunk_bytes;
  const std::int64_t left = weight_bytes(p.parts[part]) - begin;
  return {part, begin, left < copy_chunk_bytes ? left : copy_chunk_bytes};
}

/// A chunk in spare slot s of a store.
__device__ std::byte* chunk_in(const CopyParams& p, std::byte* store, std::int32_t s,
                               const Chunk& chunk) {
  const CopyPart& part = p.parts[chunk.part];
  return store + part.copies_at + s * weight_bytes(part) + chunk.begin;
}

/// All threads of the block.
__device__ void copy_bytes(std::byte* to, const std::byte* from, std::int64_t bytes) {
  const auto bits = reinterpret_cast<std::uint64_t>(to) | reinterpret_cast<std::uint64_t>(from) |
                    static_cast<std::uint64_t>(bytes);
  for_word(common_word(bits), [&]<class Word>(Word /*is*/) {
    const auto total = static_cast<int>(bytes / std::int64_t{sizeof(Word)});
    for (int first = static_cast<int>(threadIdx.x); first < total;
         first += copy_threads * words_together) {
      Word words[words_together];
      load_batch<copy_threads>(words, reinterpret_cast<const Word*>(from), first, total);
      store_batch<copy_threads>(reinterpret_cast<Word*>(to), words, first, total);
    }
  });
}

/// Whether an expert has come to a copy over the network, before this kernel.
__device__ bool has_come(const CopyParams& p, const CopyTable& table, std::int32_t copy) {
  return p.over_network && table.experts[copy] >= 0 && first_of_node(table, copy) == copy;
}

/// Where the progress of a stripe of spare slot s is told.
__device__ std::uint64_t* progress_in(const CopyParams& p, std::uint64_t* arrivals, std::int32_t s,
                                      std::int32_t stripe) {
  return arrivals + p.progress_at + s * copy_stripes + stripe;
}

/// Waits until so many chunks of a stripe of this rank's copy have arrived. One thread.
__device__ void wait_chunks(const CopyParams& p, const CopyWork& work, std::int32_t copy,
                            std::int32_t stripe, std::uint64_t epoch, std::int64_t chunks) {
  const std::int32_t sender = sender_of(work.table, copy);
  const std::int32_t from = sender < 0 ? work.experts[copy] / p.homes : sender / p.spare;
  wait_until(progress_in(p, p.arrive.own_arrivals, copy % p.spare, stripe),
             progress_word(epoch, chunks), p.arrive.kind, p.arrive.rank, from, p.arrive.sink);
}

/// Sends a stripe of one expert to the copies order[first..end) of it. All threads.
__device__ void send_expert(const CopyParams& p, const CopyWork& work, std::int32_t first,
                            std::int32_t end, std::int32_t stripe, std::uint64_t epoch) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t expert = work.experts[work.order[first]];
  const std::int32_t sender = sender_of(work.table, work.order[first]);
  std::int64_t done = 0;
  for (std::int32_t number = stripe; number < p.num_chunks; number += copy_stripes) {
    ++done;
    const Chunk chunk = chunk_of(p, number);
    const std::byte* from;
    if (sender < 0) {
      from = p.home[expert % p.homes * p.num_parts + chunk.part] + chunk.begin;
    } else {
      if (thread == 0 && !has_come(p, work.table, sender))
        wait_chunks(p, work, sender, stripe, epoch, done);
      __syncthreads();
      end_if_reported(p.arrive.sink);
      from = chunk_in(p, p.own_store, sender % p.spare, chunk);
    }
    for (std::int32_t k = first; k < end; ++k) {
      const std::int32_t copy = work.order[k];
      std::byte* const store = peer_at(p.stores, copy / p.spare);
      copy_bytes(chunk_in(p, store, copy % p.spare, chunk), from, chunk.bytes);
    }
    __threadfence_system();
    __syncthreads();
    for (std::int32_t k = first + thread; k < end; k += copy_threads) {
      const std::int32_t copy = work.order[k];
      std::uint64_t* const arrivals = peer_at(p.arrive.arrivals, copy / p.spare);
      signal(progress_in(p, arrivals, copy % p.spare, stripe), progress_word(epoch, done));
    }
  }
}

/// Waits until this rank's copies are there, as far as a stripe goes. All threads.
__device__ void receive(const CopyParams& p, const CopyWork& work, std::int32_t stripe,
                        std::uint64_t epoch) {
  const std::int64_t chunks = chunks_of_stripe(p.num_chunks, stripe);
  if (chunks == 0) return;
  for (auto s = static_cast<std::int32_t>(threadIdx.x); s < p.spare; s += copy_threads) {
    const std::int32_t copy = p.arrive.rank * p.spare + s;
    if (work.experts[copy] < 0 || has_come(p, work.table, copy)) continue;
    wait_chunks(p, work, copy, stripe, epoch, chunks);
  }
}

/// Notes what lies in the store now. What others had there may be overwritten. The last block.
__device__ void note_held(const CopyParams& p, const CopyWork& work, std::uint64_t epoch) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  int comes = 0;
  for (std::int32_t i = thread; i < work.table.size(); i += copy_threads)
    comes |= work.experts[i] >= 0 ? 1 : 0;
  if (__syncthreads_or(comes) == 0) return;
  for (std::int32_t i = thread; i < p.arrive.world_size * p.store_spare; i += copy_threads) {
    if (p.held[i].expert >> 32 != p.owner) p.held[i].expert = -1;
  }
  __syncthreads();
  for (std::int32_t i = thread; i < work.table.size(); i += copy_threads) {
    const std::int32_t expert = work.experts[i];
    if (expert < 0) continue;
    p.held[i / p.spare * p.store_spare + i % p.spare] = {held_expert(p, expert),
                                                         stamp_of(p, expert, epoch)};
  }
}

__global__ void __launch_bounds__(copy_threads, 1)
    fetch_weights_kernel(const __grid_constant__ CopyParams p) {
  extern __shared__ __align__(16) std::uint64_t shared[];
  CopyWork work = work_in(shared, p);
  const std::uint64_t epoch = enter(p);
  order_copies(
      p, work, [&](std::int32_t rank, std::int32_t s) { return missing(p, rank, s, epoch); },
      [&](const CopyTable& table, std::int32_t i, std::int32_t rank) {
        return has_come(p, table, i) ? no_copy_key : weight_key(table, i, rank);
      });
  for (auto stripe = static_cast<std::int32_t>(blockIdx.x); stripe < copy_stripes;
       stripe += static_cast<std::int32_t>(gridDim.x)) {
    for (std::int32_t first = 0; first < work.count;) {
      const std::int32_t end = end_of_expert(work, first);
      send_expert(p, work, first, end, stripe, epoch);
      first = end;
    }
  }
  for (auto stripe = static_cast<std::int32_t>(blockIdx.x); stripe < copy_stripes;
       stripe += static_cast<std::int32_t>(gridDim.x)) {
    receive(p, work, stripe, epoch);
  }
  if (!is_last_block(p.arrive)) return;
  end_if_reported(p.arrive.sink);
  note_held(p, work, epoch);
  __syncthreads();
  if (threadIdx.x == 0) end_call(p.arrive, epoch);
}

/// The number in which gradients of copies lie.
template <class Number>
using WideOf = std::conditional_t<std::is_same_v<Number, Float64>, Float64, Float32>;

/// A part of the gradients of an expert as they are added.
struct AddedPart {
  const CopyPart& part;
  std::byte* home;
  std::int64_t begin;  ///< first byte in the stream
};

/// The first element of a copy's part: in its rank's store, or as if all of it had landed here.
__device__ const std::byte* added_from(const CopyParams& p, const CopyWork& work,
                                       const AddedPart& one, std::int32_t copy,
                                       std::int64_t row_bytes) {
  if (p.over_network && crosses_nodes(work.table, copy)) {
    const auto place = static_cast<std::int64_t>(work.keys[copy]);
    return p.landed + place * p.range_bytes + one.begin - p.range_begin;
  }
  return peer_at(p.stores, copy / p.spare) + one.part.copies_at + copy % p.spare * row_bytes;
}

/// Adds a part of the copies order[first..end) of an expert to home's, as far as the range of the
/// stream goes. The blocks share the work.
template <class Number, int Count>
__device__ void add_part(const CopyParams& p, const CopyWork& work, std::int32_t first,
                         std::int32_t end, const AddedPart& one) {
  using Sum = typename Number::Sum;
  using Own = Pack<Number, Count>;
  using Added = Pack<WideOf<Number>, Count>;
  auto* const own = reinterpret_cast<Own*>(one.home);
  constexpr auto pack_bytes = static_cast<std::int64_t>(sizeof(Added));
  const std::int64_t row_bytes = one.part.elements * std::int64_t{sizeof(Sum)};
  const std::int64_t from_byte = max(p.range_begin - one.begin, std::int64_t{0});
  const std::int64_t packs = min(p.range_begin + p.range_bytes - one.begin, row_bytes) / pack_bytes;
  const std::int64_t step = std::int64_t{gridDim.x} * copy_threads;
  for (std::int64_t at =
           from_byte / pack_bytes + std::int64_t{blockIdx.x} * copy_threads + threadIdx.x;
       at < packs; at += step * packs_together) {
    Own rows[packs_together];
    Sum sums[packs_together][Count];
#pragma unroll
    for (int u = 0; u < packs_together; ++u) {
      if (at + u * step < packs) rows[u] = own[at + u * step];
    }
#pragma unroll
    for (int u = 0; u < packs_together; ++u) {
#pragma unroll
      for (int e = 0; e < Count; ++e) sums[u][e] = Number::load(rows[u].values[e]);
    }
    for (std::int32_t k = first; k < end; ++k) {
      const std::int32_t copy = work.order[k];
      const auto* const from =
          reinterpret_cast<const Added*>(added_from(p, work, one, copy, row_bytes));
      Added added[packs_together];
#pragma unroll
      for (int u = 0; u < packs_together; ++u) {
        if (at + u * step < packs) added[u] = from[at + u * step];
      }
#pragma unroll
      for (int u = 0; u < packs_together; ++u) {
#pragma unroll
        for (int e = 0; e < Count; ++e) sums[u][e] += added[u].values[e];
      }
    }
#pragma unroll
    for (int u = 0; u < packs_together; ++u) {
      if (at + u * step >= packs) continue;
#pragma unroll
      for (int e = 0; e < Count; ++e) rows[u].values[e] = Number::round(sums[u][e]);
      own[at + u * step] = rows[u];
    }
  }
}

template <class Number>
__device__ void add_numbers(const CopyParams& p, const CopyWork& work, std::int32_t first,
                            std::int32_t end, const AddedPart& one) {
  using Wide = Pack<Number, 4>;
  const bool wide = one.part.elements % 4 == 0 && one.part.copies_at % 32 == 0 &&
                    reinterpret_cast<std::uint64_t>(one.home) % alignof(Wide) == 0;
  if (wide) {
    add_part<Number, 4>(p, work, first, end, one);
  } else {
    add_part<Number, 1>(p, work, first, end, one);
  }
}

/// Adds the gradients of one expert, all parts.
__device__ void add_expert(const CopyParams& p, const CopyWork& work, std::int32_t first,
                           std::int32_t end) {
  const std::int32_t home = work.experts[work.order[first]] % p.homes;
  std::int64_t begin = 0;
  for (std::int32_t i = 0; i < p.num_parts; ++i) {
    const AddedPart one{p.parts[i], p.home[home * p.num_parts + i], begin};
    switch (one.part.dtype) {
      case DType::float32:
        add_numbers<Float32>(p, work, first, end, one);
        break;
      case DType::bfloat16:
        add_numbers<BFloat16>(p, work, first, end, one);
        break;
      case DType::float16:
        add_numbers<Float16>(p, work, first, end, one);
        break;
      default:
        add_numbers<Float64>(p, work, first, end, one);
    }
    const std::int64_t wide = one.part.dtype == DType::float64 ? 8 : 4;
    begin = next_in_stream(begin, one.part.elements * wide);
  }
}

/// Puts the places of copies that have landed where their keys were. All threads.
__device__ void find_landed(const CopyParams& p, CopyWork& work) {
  const std::int32_t copies = work.table.size();
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < copies; i += copy_threads) {
    const bool lands = work.keys[i] != no_copy_key && crosses_nodes(work.table, i);
    work.keys[i] = lands ? static_cast<std::uint64_t>(landing_of(work.table, i)) : 0;
  }
  __syncthreads();
}

__global__ void __launch_bounds__(copy_threads, 1)
    add_gradients_kernel(const __grid_constant__ CopyParams p) {
  extern __shared__ __align__(16) std::uint64_t shared[];
  CopyWork work = work_in(shared, p);
  const std::uint64_t epoch = enter(p);
  order_copies(
      p, work, [&](std::int32_t rank, std::int32_t s) { return planned(p, rank, s); },
      [](const CopyTable& table, std::int32_t i, std::int32_t rank) {
        return gradient_key(table, i, rank);
      });
  if (p.over_network) find_landed(p, work);
  for (std::int32_t first = 0; first < work.count;) {
    const std::int32_t end = end_of_expert(work, first);
    add_expert(p, work, first, end);
    first = end;
  }
  if (p.over_network) return;  // the host lets ranks meet before and after
  if (!is_last_block(p.arrive) || threadIdx.x >= 32) return;
  // Nobody writes into a store that others still read.
  const CallWords words = load_call_words(p.arrive.fingerprint);
  arrive_and_wait_at_end(p.arrive, epoch + 1, words, false);
}

std::size_t shared_bytes_of(const CopyParams& params) {
  const auto copies = static_cast<std::size_t>(params.arrive.world_size * params.spare);
  return copies * (sizeof(std::uint64_t) + 2 * sizeof(std::int32_t));
}
static_assert(max_copies * 16 <= 48 << 10);

}  // namespace

cudaError_t prepare_copies() { return load_kernels(fetch_weights_kernel, add_gradients_kernel); }

cudaError_t launch_fetch_weights(const CopyParams& params, int blocks, cudaStream_t stream) {
  fetch_weights_kernel<<<static_cast<unsigned>(blocks), copy_threads, shared_bytes_of(params),
                         stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_add_gradients(const CopyParams& params, int blocks, cudaStream_t stream) {
  add_gradients_kernel<<<static_cast<unsigned>(blocks), copy_threads, shared_bytes_of(params),
                         stream>>>(params);
  return cudaGetLastError();
}

}  // namespace waybill::cuda
