#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace waybill::detail {

/// Ranks by how much work they can still take, in buckets: all operations take constant time, and
/// what they return depends only on the order of the calls.
class ReceiverPool {
 public:
  /// Empties the pool; room is at most `most_room`.
  void reset(std::int32_t world_size, std::int64_t most_room);

  /// Adds a rank that is not in it, or changes its room.
  void put(std::int32_t rank, std::int64_t room);
  void remove(std::int32_t rank);
  [[nodiscard]] bool contains(std::int32_t rank) const {
    return bucket_[static_cast<std::size_t>(rank)] >= 0;
  }

  /// The rank with the most room, or -1.
  [[nodiscard]] std::int32_t most_room() const;
  /// The rank with the least room of at least `room`, else the one with the most, or -1.
  [[nodiscard]] std::int32_t least_room(std::int64_t room) const;
  /// The next rank in the pool with about as much room or more; -1: none.
  [[nodiscard]] std::int32_t roomier(std::int32_t rank) const;

 private:
  static constexpr std::int32_t num_buckets = 1024;

  [[nodiscard]] std::int32_t bucket_of(std::int64_t room) const;
  [[nodiscard]] std::int32_t bucket_at_least(std::int32_t bucket) const;  // or -1
  [[nodiscard]] std::int32_t bucket_at_most(std::int32_t bucket) const;   // or -1

  std::array<std::uint64_t, num_buckets / 64> used_{};
  std::array<std::int32_t, num_buckets> first_{};
  std::array<std::int32_t, num_buckets> last_{};
  std::vector<std::int32_t> bucket_;  // [W] or -1
  std::vector<std::int32_t> next_;    // [W]
  std::vector<std::int32_t> prev_;    // [W]
  double scale_ = 0;
};

}  // namespace waybill::detail
