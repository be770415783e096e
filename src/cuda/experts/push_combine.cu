#include <algorithm>

#include "../device/peers.cuh"
#include "call.cuh"
#include "kernels.h"
#include "push_combine.cuh"

namespace waybill::cuda {
namespace {

using Pieces = WalkShape<16, 6, 2048>;
using NoPieces = WalkShape<16, 1, 0>;

/// Reads one weight of any dtype. The kernels are not compiled for each dtype of weights.
__device__ float weight_at(const std::byte* weights, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::bfloat16:
      return number_at<BFloat16>(weights, i);
    case DType::float16:
      return number_at<Float16>(weights, i);
    default:
      return number_at<Float32>(weights, i);
  }
}

/// How a call is cut into units, as each lane sees it.
struct Units {
  PushUnits cut;
  std::int32_t groups;    ///< groups of the rank that has most tokens
  std::int32_t together;  ///< tokens that a warp handles at once, with one lane per topk slot
  std::int32_t mine;      ///< index of this lane's token among them
  std::int32_t k;         ///< this lane's topk slot of the token
  std::int32_t tokens;    ///< tokens of the rank whose number is the lane's

  /// Tokens of a rank. All lanes ask for the same rank.
  [[nodiscard]] __device__ std::int32_t tokens_of(const PushParams& p, std::int32_t rank) const {
    return rank < 32 ? __shfl_sync(all_lanes, tokens, rank) : p.num_input_tokens[rank];
  }
};

/// Loads Units::tokens early.
__device__ std::int32_t tokens_of_lane(const PushParams& p) {
  return lane_id() < p.shape.world_size ? p.num_input_tokens[lane_id()] : 0;
}

__device__ Units units_of(const PushParams& p, std::int32_t tokens) {
  std::int32_t busiest_tokens = tokens;
  for (std::int32_t r = 32 + lane_id(); r < p.shape.world_size; r += 32)
    busiest_tokens = max(busiest_tokens, p.num_input_tokens[r]);
  busiest_tokens = __reduce_max_sync(all_lanes, busiest_tokens);
  Units u{
      push_units(busiest_tokens, p.shape.topk, p.row_bytes), 0, 32 / p.shape.topk, 0, 0, tokens};
  u.groups = (busiest_tokens + u.cut.group - 1) / u.cut.group;
  u.mine = lane_id() / p.shape.topk;
  u.k = lane_id() - u.mine * p.shape.topk;
  return u;
}

/// A unit of a rank's tokens.
struct Unit {
  std::int32_t group;
  std::int32_t part;

  [[nodiscard]] __device__ std::int64_t flag(const PushParams& p, const Units& u,
                                             std::int32_t source) const {
    return (std::int64_t{group} * u.cut.parts + part) * p.shape.world_size + source;
  }
  [[nodiscard]] __device__ int begin(const Units& u) const { return part * u.cut.part_bytes; }
  [[nodiscard]] __device__ int end(const PushParams& p, const Units& u) const {
    return min((part + 1) * u.cut.part_bytes, static_cast<int>(p.row_bytes));
  }
};

/// Byte offset of a token's row in a slab.
__device__ std::int64_t slab_offset(const PushParams& p, std::int32_t token, std::int32_t slot) {
  return (std::int64_t{token} * p.slots + slot) * p.row_bytes;
}

/// Finds what each lane pushes of token t of rank `home`: the row of its topk slot or, with compact
/// rows, the token's row.
/// @return lanes that have a row
__device__ unsigned rows_to_push(const PushParams& p, const Units& u, std::int32_t home,
                                 std::int32_t t, std::int32_t tokens, std::int64_t end,
                                 WalkRows& rows) {
  const MoeShape& s = p.shape;
  rows = {nullptr, nullptr, 0, 0};
  std::int64_t row = -1;
  if (u.mine < u.together && t < tokens) {
    const std::int64_t at = (std::int64_t{home} * s.max_tokens + t) * record_stride(s);
    row = p.records[at + u.k];
    if (s.compact != 0 && row >= 0) row = p.records[at + s.topk];
  }
  if (row >= end) row = -1;
  const unsigned of_token = lanes_of_token(s.topk, u.k);
  unsigned here = __ballot_sync(all_lanes, row >= 0);
  const bool is_primary = row >= 0 && is_first(here & of_token);
  if (s.compact != 0) here = __ballot_sync(all_lanes, is_primary);
  if (row < 0) return here;
  rows.from = p.input + row * p.row_bytes;
  rows.token_lanes = p.sums ? of_token : 1U << lane_id();
  if (p.sums && p.received_weights != nullptr)
    rows.weight = weight_at(p.received_weights, p.weight_dtype, row);
  if (!p.once || is_primary) {
    rows.to = peer_at(p.slabs, home) + slab_offset(p, t, p.by_rank ? s.rank : u.k);
  }
  return here;
}

/// Pushes this rank's rows of one unit of rank `home`, and signals that rank.
template <class Walk>
__device__ void push_unit(const PushParams& p, Walk& walk, const Units& u, std::int32_t home,
                          Unit unit, std::int64_t end, std::uint64_t epoch) {
  const std::int32_t tokens = u.tokens_of(p, home);
  bool has_some = false;
  for (std::int32_t i = 0; i < u.cut.group; i += u.together) {
    const std::int32_t t = unit.group * u.cut.group + i + u.mine;
    const std::int32_t unit_end = min(tokens, (unit.group + 1) * u.cut.group);
    WalkRows rows;
    const unsigned here = rows_to_push(p, u, home, t, unit_end, end, rows);
    if (here == 0) continue;
    has_some = true;
    if (p.sums && p.received_weights != nullptr) {
      walk.template sum<true, false>(rows, here, unit.begin(u), unit.end(p, u), nullptr);
    } else {
      walk.template sum<false, true>(rows, here, unit.begin(u), unit.end(p, u), nullptr);
    }
  }
  if (!has_some) return;
  walk.wait_stores();
  __syncwarp();  // all lanes' stores precede the flag
  if (lane_id() == 0) signal(peer_at(p.flags, home) + unit.flag(p, u, p.shape.rank), epoch);
}

/// The units that a warp pushes. They begin with the first tokens of all ranks.
class UnitsToPush {
 public:
  __device__ UnitsToPush(const PushParams& p, const Units& u)
      : all_(u.groups * p.shape.world_size * u.cut.parts),
        step_(static_cast<std::int32_t>(blockDim.x / 32 * gridDim.x)),
        next_(static_cast<std::int32_t>(blockIdx.x + threadIdx.x / 32 * gridDim.x)) {}

  [[nodiscard]] __device__ bool is_over() const { return next_ >= all_; }

  /// Pushes the next unit. All lanes.
  template <class Walk>
  __device__ void push_next(const PushParams& p, Walk& walk, const Units& u, std::uint64_t epoch) {
    const std::int32_t world = p.shape.world_size;
    const std::int32_t of_group = next_ / u.cut.parts;
    const std::int32_t part = next_ - of_group * u.cut.parts;
    const std::int32_t group = of_group / world;
    const std::int32_t k = of_group - group * world + 1;  // this rank's own tokens come last
    next_ += step_;
    const std::int32_t home = rank_after(p.shape, k == world ? 0 : k);
    if (home == p.shape.rank && !p.sums) return;  // its sums read these rows where they are
    push_unit(p, walk, u, home, {group, part}, min(p.shape.capacity_rows, p.num_rows), epoch);
  }

 private:
  std::int32_t all_;
  std::int32_t step_;
  std::int32_t next_;
};

/// One topk slot of this rank's tokens: which row the sum takes, and when it may.
struct SumSlot {
  const std::byte* from;      ///< null: no row
  const std::uint64_t* flag;  ///< null: the row needs no wait
  std::int32_t rank;
  float weight;
  bool active;  ///< the token exists
};

/// Reads this lane's topk slot of the unit's tokens from `first` on.
__device__ SumSlot read_slot(const PushParams& p, const Units& u, Unit unit, std::int32_t first) {
  const MoeShape& s = p.shape;
  const std::int32_t t = unit.group * u.cut.group + first + u.mine;
  const std::int32_t tokens = min(s.num_tokens, (unit.group + 1) * u.cut.group);
  SumSlot slot{nullptr, nullptr, 0, 0, u.mine < u.together && t < tokens};
  const std::int64_t i = std::int64_t{t} * s.topk + u.k;
  const std::int64_t address = slot.active ? p.addresses[i] : -1;
  const std::int64_t row = address & 0xFFFFFFFF;
  const bool lost = address >= 0 && row >= s.capacity_rows;
  if (address < 0 || !(lost || !p.once || (address & primary_row_bit) != 0)) return slot;
  slot.rank = static_cast<std::int32_t>(address >> address_dst_shift & 0xFFFF);
  if (p.weights != nullptr) slot.weight = weight_at(p.weights, p.weight_dtype, i);
  const bool is_own = slot.rank == s.rank && !p.sums;
  if (lost || (is_own && row >= p.num_rows)) {
    slot.from = p.lost_row;
  } else if (is_own) {
    slot.from = p.input + row * p.row_bytes;
  } else {
    slot.from = p.own_slab + slab_offset(p, t, p.by_rank ? slot.rank : u.k);
    slot.flag = p.own_flags + unit.flag(p, u, slot.rank);
  }
  return slot;
}

/// Waits for the rows that the lanes add to the sums of their tokens.
/// @return lanes that add a row
__device__ unsigned rows_to_sum(const PushParams& p, const Units& u, Unit unit, std::int32_t first,
                                std::uint64_t epoch, WalkRows& rows) {
  const SumSlot slot = read_slot(p, u, unit, first);
  const unsigned of_token = lanes_of_token(p.shape.topk, u.k);
  rows = {slot.from, nullptr, slot.weight, of_token};
  const std::int32_t t = unit.group * u.cut.group + first + u.mine;
  if (slot.active) rows.to = p.output + t * p.row_bytes;
  if (slot.flag != nullptr) wait_slot(p.m.arrive, slot.flag, epoch, slot.rank);
  __syncwarp();  // after it all lanes may read what one lane has waited for
  end_if_reported(p.m.arrive.sink);
  const unsigned here = __ballot_sync(all_lanes, slot.from != nullptr);
  // the sum of such a token is zeros
  const bool has_none = slot.active && u.k == 0 && (here & of_token) == 0;
  return here | __ballot_sync(all_lanes, has_none);
}

/// Sums units as they arrive: first one that is the warp's, then the next one that no warp has
/// taken.
template <class Walk>
__device__ void sum_units(const PushParams& p, Walk& walk, const Units& u, std::uint64_t epoch) {
  const auto all = static_cast<std::uint32_t>((p.shape.num_tokens + u.cut.group - 1) / u.cut.group *
                                              u.cut.parts);
  const auto claim = [&]() -> std::uint32_t {
    const unsigned warps = blockDim.x / 32 * gridDim.x;
    return lane_id() == 0 ? warps + atomicAdd(&p.m.state->next_sum, 1U) : 0;
  };
  std::uint32_t idx = blockIdx.x + threadIdx.x / 32 * gridDim.x;
  std::uint32_t next = idx >= all ? 0 : claim();  // valid in lane 0
  while (idx < all) {
    const auto group = static_cast<std::int32_t>(idx) / u.cut.parts;
    const Unit unit{group, static_cast<std::int32_t>(idx) - group * u.cut.parts};
    for (std::int32_t i = 0; i < u.cut.group; i += u.together) {
      WalkRows rows;
      const unsigned here = rows_to_sum(p, u, unit, i, epoch, rows);
      walk.expect_arrived();
      if (p.weights != nullptr) {
        walk.template sum<true, false>(rows, here, unit.begin(u), unit.end(p, u), &p);
      } else {
        walk.template sum<false, false>(rows, here, unit.begin(u), unit.end(p, u), &p);
      }
    }
    idx = __shfl_sync(all_lanes, next, 0);
    if (idx < all) next = claim();
  }
}

/// Does a warp's part of a call: first all pushes, then sums. Looking for arrived units between
/// pushes costs more time than it saves (docs/performance/gpu_moe.md).
template <class Walk>
__device__ void push_and_sum(const PushParams& p, Walk&& walk, const Units& u,
                             std::uint64_t epoch) {
  for (UnitsToPush pushed(p, u); !pushed.is_over();) pushed.push_next(p, walk, u, epoch);
  sum_units(p, walk, u, epoch);
}

/// Pushes and sums. No rank waits before it pushes, because two slabs alternate: a rank in combine
/// n has seen all ranks come to combine n - 1, so they have read the slab of combine n - 2.
template <class Number, int Count, class Shape>
__global__ void __launch_bounds__(Shape::warps * 32, 1)
    push_combine_kernel(const __grid_constant__ PushParams p) {
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ WalkState<Shape> states[Shape::bytes > 0 ? Shape::warps : 1];
  const auto warp = static_cast<int>(threadIdx.x / 32);
  wait_earlier_kernel();
  const std::int32_t tokens = tokens_of_lane(p);
  const std::uint64_t epoch = begin_moe_call(p.m, 1);
  const bool compares = compares_calls();
  if (compares) {
    signal_arrival(p.m.arrive, epoch);
    send_call_words(p.m.arrive, epoch, load_call_words(p.m.arrive.fingerprint));
  }
  const Units units = units_of(p, tokens);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    const std::int64_t rows = min(std::int64_t{*p.num_recv_rows}, p.shape.capacity_rows);
    if (p.num_rows < rows) {
      report_few_rows(p.m.arrive.sink, p.m.state, p.shape.rank, p.num_rows, rows);
    }
  }
  __syncwarp();
  end_if_reported(p.m.arrive.sink);
  linger_block(p.m);
  if constexpr (Shape::bytes > 0) {
    push_and_sum(p, BulkWalk<Number, Shape>(shared + warp * Shape::bytes, states[warp]), units,
                 epoch);
  } else {
    push_and_sum(p, VectorWalk<Number, Count>(), units, epoch);
  }
  if (compares) {
    wait_arrivals(p.m.arrive, epoch);
    CallComparison(p.m.arrive, epoch, true).settle(p.m.arrive);
  }
  if (is_last_block(p.m.state)) {
    p.m.state->next_sum = 0;
    end_moe_call(p.m, 1, epoch);
  }
}

using Kernel = void (*)(PushParams);

Kernel kernel_for(DType tokens, PushWay way) {
  return for_number(tokens, [&]<class Number>(Number) -> Kernel {
    constexpr int wide_count = 16 / static_cast<int>(sizeof(typename Number::Stored));
    switch (way) {
      case PushWay::bulk:
        return push_combine_kernel<Number, wide_count, Pieces>;
      case PushWay::words:
        return push_combine_kernel<Number, wide_count, NoPieces>;
      default:
        return push_combine_kernel<Number, 1, NoPieces>;
    }
  });
}

int shared_bytes_of(PushWay way) {
  return way == PushWay::bulk ? Pieces::warps * Pieces::bytes : 0;
}

}  // namespace

cudaError_t prepare_push_combine(DType tokens, PushWay way) {
  const Kernel kernel = kernel_for(tokens, way);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                              cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes_of(way));
}

cudaError_t launch_push_combine(const PushParams& params, DType tokens, PushWay way, int blocks,
                                bool early, cudaStream_t stream) {
  const Kernel kernel = kernel_for(tokens, way);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  static_assert(Pieces::warps == NoPieces::warps);
  return launch_kernel(kernel, static_cast<unsigned>(blocks), Pieces::warps * 32,
                       static_cast<std::size_t>(shared_bytes_of(way)), early, stream, params);
}

}  // namespace waybill::cuda
