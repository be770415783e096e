#pragma once

#include "../device/bulk.cuh"
#include "../device/peers.cuh"
#include "../device/word_copy.cuh"
#include "call.cuh"

namespace waybill::cuda {

inline constexpr int max_ring_stages = 6;

/// A piece of a row in flight. The row itself follows in memory.
struct RingStage {
  std::int64_t addresses[32];  ///< each lane's destination; negative: none
};

/// Where a row is read.
struct RingSource {
  const std::byte* row;     ///< the whole row
  const std::byte* scales;  ///< null without scales
};

/// A ring of bulk copies: pieces of rows pass through shared memory to up to 32 destinations each.
/// One warp; each lane stores to its own destination and waits for its own stores.
class TmaRing {
 public:
  static constexpr bool copies = true;

  /// If senders load early, the first store waits for the begin of the call.
  /// @param memory shared memory of this warp: stages of cuts.stage_bytes each
  /// @param barriers shared memory of this warp: [stages]
  template <class Rows>
  __device__ TmaRing(const Rows& p, CallBegin& begin, std::byte* memory, std::uint64_t* barriers)
      : p_(p),
        begin_(begin),
        memory_(memory),
        barriers_(barriers),
        lane_(static_cast<int>(threadIdx.x % 32)),
        holds_(Rows::loads),
        to_slots_(Rows::to_slots) {
    if (lane_ == 0) {
      for (int s = 0; s < p.cuts.stages; ++s) barrier_init(&barriers_[s]);
      fence_barrier_init();
    }
    fence_async_global();
    __syncwarp();
  }

  /// Must be called between a wait for rows and the push that reads them.
  __device__ void expect_arrived() const { fence_async_global(); }

  /// Later pushes go to windows. @pre all earlier pushes have arrived
  __device__ void leave_receive_slots() { to_slots_ = false; }

  __device__ void push(const RingSource& from, std::int32_t piece, std::int64_t address) {
    const RowCuts& c = p_.cuts;
    if (in_flight_ == c.stages - 1) finish_oldest();
    bulk_wait_read_but_one();  // the next stage to fill has been read
    __syncwarp();
    std::byte* const stage = memory_ + newest_ * c.stage_bytes;
    reinterpret_cast<RingStage*>(stage)->addresses[lane_] =
        address < 0 ? -1 : address | std::int64_t{piece} << 49;
    if (lane_ == 0) {
      const std::uint32_t bytes = bytes_of(piece);
      const bool scales = from.scales != nullptr && piece == 0;
      const auto scale_bytes = static_cast<std::uint32_t>(scales ? c.scale_bytes : 0);
      barrier_expect(&barriers_[newest_], bytes + scale_bytes);
      bulk_load_to_copy(stage + sizeof(RingStage), from.row + std::int64_t{piece} * c.piece_bytes,
                        bytes, &barriers_[newest_]);
      if (scales) {
        bulk_load_to_copy(stage + sizeof(RingStage) + c.piece_bytes, from.scales, scale_bytes,
                          &barriers_[newest_]);
      }
    }
    newest_ = newest_ + 1 == c.stages ? 0 : newest_ + 1;
    ++in_flight_;
  }

  /// Waits for older pushes: all but the last stages + 2 pushes have arrived. @pre there were more
  /// pushes than that
  __device__ void wait_earlier() const {
    bulk_wait_but<3>();
    fence_async_global();
    __syncwarp();
  }

  /// Waits until all pieces have arrived.
  __device__ void wait_all() {
    while (in_flight_ > 0) finish_oldest();
    bulk_wait_all();
    fence_async_global();
    __syncwarp();
  }

 private:
  [[nodiscard]] __device__ std::uint32_t bytes_of(std::int32_t piece) const {
    const std::int64_t left = p_.cuts.row_bytes - std::int64_t{piece} * p_.cuts.piece_bytes;
    return static_cast<std::uint32_t>(left < p_.cuts.piece_bytes ? left : p_.cuts.piece_bytes);
  }

  /// Stores the oldest piece in flight.
  __device__ void finish_oldest() {
    if (holds_) {
      (void)begin_.wait_ended();
      holds_ = false;
    }
    const RowCuts& c = p_.cuts;
    const std::byte* const stage = memory_ + oldest_ * c.stage_bytes;
    const std::int64_t address = reinterpret_cast<const RingStage*>(stage)->addresses[lane_];
    barrier_wait(&barriers_[oldest_], phases_ >> oldest_ & 1U);
    phases_ ^= 1U << oldest_;
    if (address >= 0) {
      const auto piece = static_cast<std::int32_t>(address >> 49);
      const std::int64_t row = address & 0xFFFFFFFF;
      const auto dst = static_cast<std::int32_t>(address >> address_dst_shift & 0xFFFF);
      std::byte* const window = peer_at(to_slots_ ? p_.receive_slots.rows : p_.windows, dst);
      bulk_store(window + row * c.row_bytes + std::int64_t{piece} * c.piece_bytes,
                 stage + sizeof(RingStage), bytes_of(piece));
      if (c.scale_bytes != 0 && piece == 0) {
        bulk_store(window + (to_slots_ ? p_.receive_slots.scales_offset : p_.scales_offset) +
                       row * c.scale_bytes,
                   stage + sizeof(RingStage) + c.piece_bytes,
                   static_cast<std::uint32_t>(c.scale_bytes));
      }
    }
    bulk_commit();
    __syncwarp();
    oldest_ = oldest_ + 1 == c.stages ? 0 : oldest_ + 1;
    --in_flight_;
  }

  const RowsParams& p_;
  CallBegin& begin_;
  std::byte* const memory_;
  std::uint64_t* const barriers_;
  const int lane_;
  bool holds_;
  bool to_slots_;
  int in_flight_ = 0;
  int oldest_ = 0;
  int newest_ = 0;
  unsigned phases_ = 0;
};

/// Does the same with loads and stores of the lanes, for any address and size.
class VectorRing {
 public:
  static constexpr bool copies = true;

  __device__ VectorRing(const RowsParams& p, CallBegin& /*begin*/, std::byte* /*memory*/,
                        std::uint64_t* /*barriers*/)
      : p_(p) {}

  __device__ void expect_arrived() const {}
  __device__ void leave_receive_slots() const {}  // it never sends to them

  __device__ void push(const RingSource& from, std::int32_t piece, std::int64_t address) {
    if (piece != 0) return;  // a push of piece 0 copies the whole row
    const RowCuts& c = p_.cuts;
    copy_row(from.row, c.row_bytes, 0, address);
    if (from.scales != nullptr) copy_row(from.scales, c.scale_bytes, p_.scales_offset, address);
  }

  __device__ void wait_earlier() const { wait_all(); }

  __device__ void wait_all() const {
    __threadfence_system();
    __syncwarp();
  }

 private:
  __device__ void copy_row(const std::byte* from, std::int64_t bytes, std::int64_t offset,
                           std::int64_t address) const {
    for_word(p_.cuts.word_bytes,
             [&]<class Word>(Word) { copy_words<Word>(from, bytes, offset, address); });
  }

  template <class Word>
  __device__ void copy_words(const std::byte* from, std::int64_t bytes, std::int64_t offset,
                             std::int64_t address) const {
    constexpr int unroll = 4;
    const auto lane = static_cast<int>(threadIdx.x % 32);
    const auto count = static_cast<int>(bytes / static_cast<int>(sizeof(Word)));
    const unsigned stores = __ballot_sync(0xFFFFFFFFU, address >= 0);
    for (int first = lane; first - lane < count; first += 32 * unroll) {
      Word words[unroll];
      load_batch<32>(words, reinterpret_cast<const Word*>(from), first, count);
      for (unsigned left = stores; left != 0; left &= left - 1) {
        const std::int64_t to =
            __shfl_sync(0xFFFFFFFFU, address, __ffs(static_cast<int>(left)) - 1);
        const auto dst = static_cast<std::int32_t>(to >> address_dst_shift & 0xFFFF);
        auto* const at =
            reinterpret_cast<Word*>(peer_at(p_.windows, dst) + offset + (to & 0xFFFFFFFF) * bytes);
        store_batch<32>(at, words, first, count);
      }
    }
  }

  const RowsParams& p_;
};

}  // namespace waybill::cuda
