#include "receiver_pool.h"

#include <algorithm>
#include <bit>

namespace waybill::detail {

void ReceiverPool::reset(std::int32_t world_size, std::int64_t most_room) {
  used_.fill(0);
  bucket_.assign(world_size, -1);
  next_.resize(world_size);
  prev_.resize(world_size);
  scale_ = most_room > 0 ? (num_buckets - 1) / static_cast<double>(most_room) : 0;
}

std::int32_t ReceiverPool::bucket_of(std::int64_t room) const {
  return std::clamp(static_cast<std::int32_t>(static_cast<double>(room) * scale_), 0,
                    num_buckets - 1);
}

void ReceiverPool::put(std::int32_t rank, std::int64_t room) {
  remove(rank);
  const std::int32_t bucket = bucket_of(room);
  const bool first = (used_[bucket / 64] >> (bucket % 64) & 1) == 0;
  bucket_[rank] = bucket;
  next_[rank] = -1;
  prev_[rank] = first ? -1 : last_[bucket];
  if (first) {
    first_[bucket] = rank;
    used_[bucket / 64] |= std::uint64_t{1} << (bucket % 64);
  } else {
    next_[last_[bucket]] = rank;
  }
  last_[bucket] = rank;
}

void ReceiverPool::remove(std::int32_t rank) {
  const std::int32_t bucket = bucket_[rank];
  if (bucket < 0) return;
  const std::int32_t prev = prev_[rank];
  const std::int32_t next = next_[rank];
  (prev < 0 ? first_[bucket] : next_[prev]) = next;
  (next < 0 ? last_[bucket] : prev_[next]) = prev;
  if (prev < 0 && next < 0) used_[bucket / 64] &= ~(std::uint64_t{1} << (bucket % 64));
  bucket_[rank] = -1;
}

std::int32_t ReceiverPool::bucket_at_least(std::int32_t bucket) const {
  if (bucket >= num_buckets) return -1;
  std::uint64_t bits = used_[bucket / 64] & (~std::uint64_t{0} << (bucket % 64));
  for (std::int32_t word = bucket / 64;; bits = used_[word]) {
    if (bits != 0) return word * 64 + std::countr_zero(bits);
    if (++word == num_buckets / 64) return -1;
  }
}

std::int32_t ReceiverPool::bucket_at_most(std::int32_t bucket) const {
  if (bucket < 0) return -1;
  std::uint64_t bits = used_[bucket / 64] & (~std::uint64_t{0} >> (63 - bucket % 64));
  for (std::int32_t word = bucket / 64;; bits = used_[word]) {
    if (bits != 0) return word * 64 + 63 - std::countl_zero(bits);
    if (--word < 0) return -1;
  }
}

std::int32_t ReceiverPool::most_room() const {
  const std::int32_t bucket = bucket_at_most(num_buckets - 1);
  return bucket < 0 ? -1 : first_[bucket];
}

std::int32_t ReceiverPool::least_room(std::int64_t room) const {
  const std::int32_t bucket = bucket_at_least(bucket_of(room) + 1);
  return bucket < 0 ? most_room() : first_[bucket];
}

std::int32_t ReceiverPool::roomier(std::int32_t rank) const {
  if (next_[rank] >= 0) return next_[rank];
  const std::int32_t bucket = bucket_at_least(bucket_[rank] + 1);
  return bucket < 0 ? -1 : first_[bucket];
}

}  // namespace waybill::detail
