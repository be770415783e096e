#include "../device/bulk.cuh"
#include "../device/number.cuh"
#include "../device/peers.cuh"
#include "call.cuh"
#include "kernels.h"

namespace waybill::cuda {
namespace {

/// A warp that works on a piece mostly waits. Many warps with few rows each are therefore faster
/// than few warps with many rows.
constexpr int max_warps = 16;
/// If no block has more than one piece, all rows of it are loaded at once.
constexpr int single_piece_warps = 6;
constexpr int stages = 2;
constexpr int ring_rows = 96;  ///< rows that a block holds in the stages of all its warps
constexpr int piece_bytes = 2048;
constexpr int words_per_lane = piece_bytes / widest_word / 32;

/// Where the rows of one token lie. Each lane has one topk slot.
struct TokenRows {
  std::int64_t address;
  float weight;
};

/// Loads the addresses and weights of a token, without waiting for them. lanes_summed() later finds
/// rows that did not fit.
template <class Weight>
__device__ TokenRows read_token(const CombineParams& p, std::int32_t token) {
  TokenRows rows{-1, 0};
  if (lane_id() < p.shape.topk && token < p.shape.num_tokens) {
    const std::int64_t i = std::int64_t{token} * p.shape.topk + lane_id();
    rows.address = p.addresses[i];
    if (p.weights != nullptr) rows.weight = number_at<Weight>(p.weights, i);
  }
  return rows;
}

/// The lanes whose row is part of the sum. A row that did not fit was lost, and NaN stands for it.
__device__ unsigned lanes_summed(const CombineParams& p, TokenRows& rows) {
  if (rows.address >= 0 && (rows.address & 0xFFFFFFFF) >= p.shape.capacity_rows)
    rows.address = lost_address;
  const bool counts =
      rows.address >= 0 && (p.primary_only == 0 || (rows.address & primary_row_bit) != 0);
  return __ballot_sync(all_lanes, counts);
}

using Windows = WarpPeers<const std::byte>;

/// The address of each lane's own row. All lanes call it.
/// @param address as lanes_summed() leaves it; if it is negative, the result is not used
__device__ const std::byte* row_at(const CombineParams& p, const Windows& windows,
                                   std::int64_t address) {
  const bool is_there = address >= 0 && address != lost_address;
  const auto rank = static_cast<std::int32_t>(address >> address_dst_shift & 0xFFFF);
  const std::byte* const window = windows[is_there ? rank : 0];
  return (is_there ? window : p.lost_row) + (address & 0xFFFFFFFF) * p.row_bytes;
}

/// Adds a value to a sum. Each product and each sum is rounded.
template <class Number, bool Weighted>
__device__ float sum_with(float sum, typename Number::Stored value, float weight) {
  const float x = Number::load(value);
  return __fadd_rn(sum, Weighted ? __fmul_rn(weight, x) : x);
}

struct BulkMemory {
  alignas(128) std::byte ring[ring_rows][piece_bytes];
  std::uint64_t loaded[max_warps][stages];
};

/// A piece of the sum of a token.
struct Piece {
  std::int32_t token;
  std::int32_t piece;
};

/// Rows of a piece that fill one stage.
struct Batch {
  Piece at;
  const std::byte* row;  ///< each lane's row
  float weight;
  unsigned left;  ///< lanes of these rows and of those that are loaded later
  bool is_first;
};

/// Pulls the rows of tokens through shared memory, piece by piece. While it sums a piece, the rows
/// of the next piece and the addresses of the one after that are in flight.
template <class Number, class Weight>
class BulkSum {
 public:
  __device__ BulkSum(const CombineParams& p, const Windows& windows, BulkMemory& memory)
      : p_(p),
        windows_(windows),
        slots_(static_cast<int>(ring_rows / stages * 32 / blockDim.x)),
        ring_(memory.ring[threadIdx.x / 32 * slots_ * stages]),
        loaded_(memory.loaded[threadIdx.x / 32]),
        pieces_(static_cast<std::int32_t>((p.row_bytes + piece_bytes - 1) / piece_bytes)),
        last_bytes_(static_cast<int>(p.row_bytes - std::int64_t{pieces_ - 1} * piece_bytes)) {
    const auto step = static_cast<std::int32_t>(gridDim.x) * static_cast<int>(blockDim.x / 32);
    step_tokens_ = step / pieces_;
    step_pieces_ = step % pieces_;
    if (lane_id() == 0) {
      for (int s = 0; s < stages; ++s) barrier_init(&loaded_[s]);
      fence_barrier_init();
    }
    fence_async_global();  // orders what the ranks wrote before they came here
    __syncwarp();
  }

  template <bool Weighted>
  __device__ void run() {
    const auto first = static_cast<std::int32_t>(blockIdx.x + threadIdx.x / 32 * gridDim.x);
    coming_ = {first / pieces_, first % pieces_};
    coming_rows_ = read_token<Weight>(p_, coming_.token);
    Batch next = begin_piece();
    if (next.at.token < p_.shape.num_tokens) ask(next, 0);
    for (unsigned number = 0; next.at.token < p_.shape.num_tokens; ++number) {
      const Batch here = next;
      const bool is_last = __popc(here.left) <= slots_;
      if (is_last) {
        next = begin_piece();
      } else {
        for (int i = 0; i < slots_; ++i) next.left &= next.left - 1;
        next.is_first = false;
      }
      if (next.at.token < p_.shape.num_tokens) ask(next, (number + 1) % stages);
      add<Weighted>(here, number, is_last);
      release_stage();
    }
  }

 private:
  [[nodiscard]] __device__ std::byte* place(unsigned stage, int slot) const {
    return ring_ + (static_cast<int>(stage) * slots_ + slot) * piece_bytes;
  }

  [[nodiscard]] __device__ int bytes_of(const Piece& at) const {
    return at.piece + 1 < pieces_ ? piece_bytes : last_bytes_;
  }

  /// The warp's next piece, found without divisions.
  __device__ void advance(Piece& at) const {
    at.token += step_tokens_;
    at.piece += step_pieces_;
    if (at.piece < pieces_) return;
    at.piece -= pieces_;
    ++at.token;
  }

  /// Begins the piece whose addresses have arrived, and loads the addresses of the next one.
  __device__ Batch begin_piece() {
    const unsigned summed = lanes_summed(p_, coming_rows_);
    const std::byte* const row = row_at(p_, windows_, coming_rows_.address);
    const Batch batch{coming_, row, coming_rows_.weight, summed, true};
    advance(coming_);
    coming_rows_ = read_token<Weight>(p_, coming_.token);
    return batch;
  }

  __device__ void ask(const Batch& batch, unsigned stage) {
    const auto bytes = static_cast<std::uint32_t>(bytes_of(batch.at));
    const auto count = static_cast<std::uint32_t>(__popc(batch.left));
    if (lane_id() == 0) {
      barrier_expect(&loaded_[stage], bytes * min(count, static_cast<unsigned>(slots_)));
    }
    __syncwarp();
    const int slot = __popc(batch.left & ((1U << lane_id()) - 1));
    if ((batch.left >> lane_id() & 1U) != 0 && slot < slots_) {
      bulk_load_to_read(place(stage, slot), batch.row + batch.at.piece * piece_bytes, bytes,
                        &loaded_[stage]);
    }
  }

  template <bool Weighted>
  __device__ void add(const Batch& batch, unsigned number, bool is_last) {
    const int bytes = bytes_of(batch.at);
    const std::int64_t offset = batch.at.token * p_.row_bytes + batch.at.piece * piece_bytes;
    if (batch.is_first) {
      clear_sums();
      for (const std::byte* bias : p_.biases) {
        if (bias != nullptr) add_row<false, false>(bias + offset, bytes, 0);
      }
    }
    const unsigned stage = number % stages;
    barrier_wait(&loaded_[stage], number / stages % 2);
    if (bytes == piece_bytes) {
      add_rows<Weighted, true>(batch, stage, bytes);
    } else {
      add_rows<Weighted, false>(batch, stage, bytes);
    }
    if (is_last) write_sums(p_.output + offset, bytes);
  }

  template <bool Weighted, bool Full>
  __device__ void add_rows(const Batch& batch, unsigned stage, int bytes) {
    unsigned left = batch.left;
    for (int slot = 0; slot < slots_ && left != 0; ++slot, left &= left - 1) {
      float weight = 0;
      if (Weighted) {
        weight = __shfl_sync(all_lanes, batch.weight, __ffs(static_cast<int>(left)) - 1);
      }
      add_row<Weighted, Full>(place(stage, slot), bytes, weight);
    }
  }

  __device__ void clear_sums() {
#pragma unroll
    for (int w = 0; w < words_per_lane; ++w) {
#pragma unroll
      for (int e = 0; e < WidePack<Number>::count; ++e) sums_[w][e] = 0;
    }
  }

  /// Adds a row.
  /// @tparam Full the piece is a whole one, not the last of a row
  template <bool Weighted, bool Full>
  __device__ void add_row(const std::byte* from, int bytes, float weight) {
#pragma unroll
    for (int w = 0; w < words_per_lane; ++w) {
      const int offset = (w * 32 + lane_id()) * widest_word;
      if (!Full && offset >= bytes) continue;
      const auto in = *reinterpret_cast<const WidePack<Number>*>(from + offset);
#pragma unroll
      for (int e = 0; e < WidePack<Number>::count; ++e) {
        sums_[w][e] = sum_with<Number, Weighted>(sums_[w][e], in.values[e], weight);
      }
    }
  }

  __device__ void write_sums(std::byte* to, int bytes) const {
#pragma unroll
    for (int w = 0; w < words_per_lane; ++w) {
      const int offset = (w * 32 + lane_id()) * widest_word;
      if (offset >= bytes) continue;
      WidePack<Number> out;
#pragma unroll
      for (int e = 0; e < WidePack<Number>::count; ++e) out.values[e] = Number::round(sums_[w][e]);
      *reinterpret_cast<WidePack<Number>*>(to + offset) = out;
    }
  }

  const CombineParams& p_;
  const Windows& windows_;
  const int slots_;  ///< rows per stage
  std::byte* const ring_;
  std::uint64_t* const loaded_;
  const std::int32_t pieces_;  ///< pieces per row
  const int last_bytes_;
  std::int32_t step_tokens_;  ///< tokens per step of a warp, and pieces in addition
  std::int32_t step_pieces_;
  Piece coming_;
  TokenRows coming_rows_;
  float sums_[words_per_lane][WidePack<Number>::count];  ///< words lane, lane + 32, ...
};

/// Sums with loads of the lanes: for devices without bulk copies, and for addresses and sizes that
/// bulk copies cannot take.
template <class Number, class Weight>
__device__ void sum_elements(const CombineParams& p, const Windows& windows) {
  using Stored = typename Number::Stored;
  constexpr auto size = static_cast<int>(sizeof(Stored));
  constexpr int unroll = 4;
  const std::int64_t elements = p.row_bytes / size;
  const std::int64_t pieces = (elements + 32 * unroll - 1) / (32 * unroll);
  const std::int64_t step = std::int64_t{gridDim.x} * max_warps;
  const bool weighted = p.weights != nullptr;
  for (std::int64_t item = blockIdx.x + std::int64_t{threadIdx.x / 32} * gridDim.x;
       item < p.shape.num_tokens * pieces; item += step) {
    TokenRows rows = read_token<Weight>(p, static_cast<std::int32_t>(item / pieces));
    const std::int64_t first = item % pieces * 32 * unroll + lane_id();
    const std::int64_t offset = item / pieces * elements;
    float sums[unroll] = {};
    const auto add = [&](const Stored* from, float weight, bool with_weight) {
#pragma unroll
      for (int u = 0; u < unroll; ++u) {
        if (first + u * 32 >= elements) continue;
        const Stored value = from[first + u * 32];
        sums[u] = with_weight ? sum_with<Number, true>(sums[u], value, weight)
                              : sum_with<Number, false>(sums[u], value, weight);
      }
    };
    for (const std::byte* bias : p.biases) {
      if (bias != nullptr) add(reinterpret_cast<const Stored*>(bias) + offset, 0, false);
    }
    unsigned left = lanes_summed(p, rows);
    const auto row = reinterpret_cast<std::uint64_t>(row_at(p, windows, rows.address));
    for (; left != 0; left &= left - 1) {
      const int k = __ffs(static_cast<int>(left)) - 1;
      const std::uint64_t from = __shfl_sync(all_lanes, row, k);
      const float weight = __shfl_sync(all_lanes, rows.weight, k);
      add(reinterpret_cast<const Stored*>(from), weight, weighted);
    }
    auto* const to = reinterpret_cast<Stored*>(p.output) + offset;
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      if (first + u * 32 < elements) to[first + u * 32] = Number::round(sums[u]);
    }
  }
}

template <class Number, class Weight, bool Bulk>
__global__ void __launch_bounds__(max_warps * 32, 1)
    combine_kernel(const __grid_constant__ CombineParams p) {
  extern __shared__ __align__(128) std::byte shared[];
  std::uint64_t epoch = 0;
  const Windows windows(p.windows, p.shape.node_ranks);
  wait_earlier_kernel();
  if (!p.in_call) {
    epoch = begin_moe_call(p.m, 1);
    arrive_and_wait(p.m.arrive, epoch);
  }
  const bool compares = !p.in_call && compares_calls();
  CallComparison comparison(p.m.arrive, epoch, compares);  // checked after the sums
  linger_block(p.m);
  if constexpr (Bulk) {
    BulkSum<Number, Weight> sum(p, windows, *reinterpret_cast<BulkMemory*>(shared));
    if (p.weights != nullptr) {
      sum.template run<true>();
    } else {
      sum.template run<false>();
    }
  } else {
    sum_elements<Number, Weight>(p, windows);
  }
  if (compares) comparison.settle(p.m.arrive);
  if (!p.in_call && is_last_block(p.m.state)) end_moe_call(p.m, 1, epoch);
}

using Kernel = void (*)(CombineParams);

Kernel kernel_for(DType tokens, DType weights, bool bulk) {
  return for_number(tokens, [&]<class Number>(Number) -> Kernel {
    return for_number(weights, [&]<class Weight>(Weight) -> Kernel {
      return bulk ? combine_kernel<Number, Weight, true> : combine_kernel<Number, Weight, false>;
    });
  });
}

}  // namespace

cudaError_t prepare_combine(DType tokens, DType weights, bool bulk) {
  const Kernel kernel = kernel_for(tokens, weights, bulk);
  const cudaError_t status = load_kernels(kernel);
  if (status != cudaSuccess || !bulk) return status;
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                              cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(BulkMemory));
}

cudaError_t launch_combine(const CombineParams& params, DType tokens, DType weights, bool bulk,
                           int blocks, bool early, cudaStream_t stream) {
  const Kernel kernel = kernel_for(tokens, weights, bulk);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  const std::int64_t pieces =
      params.shape.num_tokens * ((params.row_bytes + piece_bytes - 1) / piece_bytes);
  const int warps = bulk && pieces <= blocks ? single_piece_warps : max_warps;
  return launch_kernel(kernel, static_cast<unsigned>(blocks), warps * 32,
                       bulk ? sizeof(BulkMemory) : 0, early, stream, params);
}

}  // namespace waybill::cuda
