#include <algorithm>

#include "../device/peers.cuh"
#include "early.h"
#include "expert_arrive.cuh"
#include "expert_launch.h"
#include "input_fault.cuh"
#include "push_walk.cuh"

namespace waybill::cuda {
namespace {

using ShortPieces = WalkShape<12, 8, 2048>;
using LongPieces = WalkShape<8, 6, 4096>;
using NoPieces = WalkShape<16, 1, 0>;

/// One weight as float32.
__device__ float weight_at(const std::byte* weights, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::bfloat16:
      return BFloat16::load(reinterpret_cast<const std::uint16_t*>(weights)[i]);
    case DType::float16:
      return Float16::load(reinterpret_cast<const std::uint16_t*>(weights)[i]);
    default:
      return reinterpret_cast<const float*>(weights)[i];
  }
}

/// What all warps of a call know of its units.
struct Units {
  PushUnits cut;
  std::int32_t groups;    ///< of the rank that has the most tokens
  std::int32_t together;  ///< tokens whose topk slots a warp has in its lanes
  std::int32_t mine;      ///< which of them a lane has
  std::int32_t k;         ///< and which topk slot
  std::int32_t tokens;    ///< of the rank of this lane's number

  /// All lanes, with the same rank.
  [[nodiscard]] __device__ std::int32_t tokens_of(const PushParams& p, std::int32_t rank) const {
    return rank < 32 ? __shfl_sync(all_lanes, tokens, rank) : p.num_input_tokens[rank];
  }
};

/// Asked for early. @return Units::tokens
__device__ std::int32_t tokens_of_lane(const PushParams& p) {
  return lane_id() < p.shape.world_size ? p.num_input_tokens[lane_id()] : 0;
}

__device__ Units units_of(const PushParams& p, std::int32_t tokens) {
  std::int32_t most = tokens;
  for (std::int32_t r = 32 + lane_id(); r < p.shape.world_size; r += 32)
    most = max(most, p.num_input_tokens[r]);
  most = __reduce_max_sync(all_lanes, most);
  Units u{push_units(most, p.shape.topk, p.row_bytes), 0, 32 / p.shape.topk, 0, 0, tokens};
  u.groups = (most + u.cut.group - 1) / u.cut.group;
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

/// Where a row of a token lies in a slab.
__device__ std::int64_t slab_offset(const PushParams& p, std::int32_t token, std::int32_t slot) {
  return (std::int64_t{token} * p.slots + slot) * p.row_bytes;
}

/// What a lane pushes of token t of rank `home`: the row of its topk slot, or of compact rows that
/// of the token. @return lanes with something
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
  const bool leads = row >= 0 && is_first(here & of_token);
  if (s.compact != 0) here = __ballot_sync(all_lanes, leads);
  if (row < 0) return here;
  rows.from = p.input + row * p.row_bytes;
  rows.mates = p.sums ? of_token : 1U << lane_id();
  if (p.sums && p.received_weights != nullptr)
    rows.weight = weight_at(p.received_weights, p.weight_dtype, row);
  if (!p.once || leads) {
    rows.to = peer_at(p.slabs, home) + slab_offset(p, t, p.by_rank ? s.rank : u.k);
  }
  return here;
}

/// Pushes what this rank has of a unit of a rank's tokens, and tells that rank.
template <class Walk>
__device__ void push_unit(const PushParams& p, Walk& walk, const Units& u, std::int32_t home,
                          Unit unit, std::int64_t end, std::uint64_t epoch) {
  const std::int32_t tokens = u.tokens_of(p, home);
  bool has_some = false;
  for (std::int32_t i = 0; i < u.cut.group; i += u.together) {
    const std::int32_t t = unit.group * u.cut.group + i + u.mine;
    const std::int32_t most = min(tokens, (unit.group + 1) * u.cut.group);
    WalkRows rows;
    const unsigned here = rows_to_push(p, u, home, t, most, end, rows);
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
  __syncwarp();  // all lanes' stores go out before the flag
  if (lane_id() == 0) signal(peer_at(p.flags, home) + unit.flag(p, u, p.shape.rank), epoch);
}

/// All units that this rank has something of, those of the first tokens of all ranks first.
template <class Walk>
__device__ void push(const PushParams& p, Walk& walk, const Units& u, std::uint64_t epoch) {
  const std::int32_t world = p.shape.world_size;
  const std::int64_t end = min(p.shape.capacity_rows, p.num_rows);
  const std::int32_t step = p.push_warps * static_cast<std::int32_t>(gridDim.x);
  const std::int32_t all = u.groups * world * u.cut.parts;
  for (auto i = static_cast<std::int32_t>(blockIdx.x + threadIdx.x / 32 * gridDim.x); i < all;
       i += step) {
    const std::int32_t of_group = i / u.cut.parts;
    const std::int32_t group = of_group / world;
    const std::int32_t k = of_group - group * world + 1;  // this rank's own tokens last
    const std::int32_t home = rank_behind(p.shape, k == world ? 0 : k);
    if (home == p.shape.rank && !p.sums) continue;  // it reads the rows themselves
    push_unit(p, walk, u, home, {group, i - of_group * u.cut.parts}, end, epoch);
  }
}

/// What a lane adds to the sum of token t of this rank, when it has come. @return lanes that add
__device__ unsigned rows_to_sum(const PushParams& p, const Units& u, Unit unit, std::int32_t t,
                                std::int32_t tokens, std::uint64_t epoch, WalkRows& rows) {
  const MoeShape& s = p.shape;
  const unsigned of_token = lanes_of_token(s.topk, u.k);
  rows = {nullptr, nullptr, 0, of_token};
  const bool active = u.mine < u.together && t < tokens;
  const std::int64_t i = std::int64_t{t} * s.topk + u.k;
  std::int64_t address = active ? p.addresses[i] : -1;
  const bool lost = address >= 0 && (address & 0xFFFFFFFF) >= s.capacity_rows;
  const bool counts = address >= 0 && (lost || !p.once || (address & primary_row_bit) != 0);
  const auto rank = static_cast<std::int32_t>(address >> address_dst_shift & 0xFFFF);
  if (active) rows.to = p.biases.output + t * p.row_bytes;
  if (counts) {
    const std::int64_t row = address & 0xFFFFFFFF;
    if (p.weights != nullptr) rows.weight = weight_at(p.weights, p.weight_dtype, i);
    if (lost || (rank == s.rank && !p.sums && row >= p.num_rows)) {
      rows.from = p.lost_row;
    } else if (rank == s.rank && !p.sums) {
      rows.from = p.input + row * p.row_bytes;
    } else {
      rows.from = p.own_slab + slab_offset(p, t, p.by_rank ? rank : u.k);
      wait_slot(p.m.arrive, p.own_flags + unit.flag(p, u, rank), epoch, rank);
    }
  }
  __syncwarp();  // what one lane was told of others read
  end_if_reported(p.m.arrive.sink);
  const unsigned here = __ballot_sync(all_lanes, counts);
  const bool has_none = active && u.k == 0 && (here & of_token) == 0;  // sums are zeros
  return here | __ballot_sync(all_lanes, has_none);
}

template <class Walk>
__device__ void sum_unit(const PushParams& p, Walk& walk, const Units& u, Unit unit,
                         std::uint64_t epoch) {
  for (std::int32_t i = 0; i < u.cut.group; i += u.together) {
    const std::int32_t t = unit.group * u.cut.group + i + u.mine;
    const std::int32_t most = min(p.shape.num_tokens, (unit.group + 1) * u.cut.group);
    WalkRows rows;
    const unsigned here = rows_to_sum(p, u, unit, t, most, epoch, rows);
    walk.expect_arrived();
    if (p.weights != nullptr) {
      walk.template sum<true, false>(rows, here, unit.begin(u), unit.end(p, u), &p.biases);
    } else {
      walk.template sum<false, false>(rows, here, unit.begin(u), unit.end(p, u), &p.biases);
    }
  }
}

/// Sums units in their order, whoever comes first: warps that push join when they are done.
template <class Walk>
__device__ void sum(const PushParams& p, Walk& walk, const Units& u, std::uint64_t epoch) {
  const auto claim = [&] {
    std::uint32_t unit = 0;
    if (lane_id() == 0) unit = atomicAdd(&p.m.state->next_sum, 1U);
    return unit;
  };
  const std::int32_t groups = (p.shape.num_tokens + u.cut.group - 1) / u.cut.group;
  const auto all = static_cast<std::uint32_t>(groups * u.cut.parts);
  std::uint32_t unit = __shfl_sync(all_lanes, claim(), 0);
  while (unit < all) {
    const std::uint32_t next = claim();
    const auto group = static_cast<std::int32_t>(unit) / u.cut.parts;
    const std::int32_t part = static_cast<std::int32_t>(unit) - group * u.cut.parts;
    sum_unit(p, walk, u, {group, part}, epoch);
    unit = __shfl_sync(all_lanes, next, 0);
  }
}

/// No rank waits for others before it pushes: slabs take turns, and who is in combine n has seen
/// all ranks come to the one before it, so that the slab of n - 2 has been read.
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
  const auto run = [&](auto&& walk) {
    if (warp < p.push_warps) push(p, walk, units, epoch);
    sum(p, walk, units, epoch);
  };
  if constexpr (Shape::bytes > 0) {
    run(BulkWalk<Number, Shape>(shared + warp * Shape::bytes, states[warp]));
  } else {
    run(VectorWalk<Number, Count>());
  }
  if (compares) {
    wait_arrivals(p.m.arrive, epoch);
    CallComparison(p.m.arrive, epoch, true).settle(p.m.arrive);
  }
  if (comes_last(p.m.state)) {
    p.m.state->next_sum = 0;
    end_moe_call(p.m, 1, epoch);
  }
}

using Kernel = void (*)(PushParams);

Kernel kernel_for(DType tokens, PushWay way) {
  return for_number(tokens, [&]<class Number>(Number) -> Kernel {
    constexpr int most = 16 / static_cast<int>(sizeof(typename Number::Stored));
    switch (way) {
      case PushWay::bulk:
        return push_combine_kernel<Number, most, ShortPieces>;
      case PushWay::long_bulk:
        return push_combine_kernel<Number, most, LongPieces>;
      case PushWay::words:
        return push_combine_kernel<Number, most, NoPieces>;
      default:
        return push_combine_kernel<Number, 1, NoPieces>;
    }
  });
}

struct BlockSize {
  int warps;
  int shared_bytes;
};
template <class Shape>
constexpr BlockSize block_of = {Shape::warps, Shape::warps* Shape::bytes};
BlockSize block_size(PushWay way) {
  if (way == PushWay::bulk) return block_of<ShortPieces>;
  return way == PushWay::long_bulk ? block_of<LongPieces> : block_of<NoPieces>;
}

}  // namespace

cudaError_t prepare_push_combine(DType tokens, PushWay way) {
  const Kernel kernel = kernel_for(tokens, way);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                              block_size(way).shared_bytes);
}

cudaError_t launch_push_combine(const PushParams& params, DType tokens, PushWay way, int blocks,
                                bool early, cudaStream_t stream) {
  const Kernel kernel = kernel_for(tokens, way);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  const BlockSize block = block_size(way);
  PushParams of_blocks = params;
  of_blocks.push_warps = std::clamp(params.push_warps * block.warps / 4, 1, block.warps);
  return launch_kernel(kernel, static_cast<unsigned>(blocks), block.warps * 32,
                       static_cast<std::size_t>(block.shared_bytes), early, stream, of_blocks);
}

}  // namespace waybill::cuda
