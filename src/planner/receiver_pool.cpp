#include "receiver_pool.h"

#include <algorithm>
#include <bit>

#include "core/to_size.h"

namespace waybill::detail {

void ReceiverPool::reset(std::int32_t world_size, std::int64_t most_room) {
  used_.fill(0);
  bucket_.assign(to_size(world_size), -1);
  next_.resize(to_size(world_size));
  prev_.resize(to_size(world_size));
  scale_ = most_room > 0 ? (num_buckets - 1) / static_cast<double>(most_room) : 0;
}

std::int32_t ReceiverPool::bucket_of(std::int64_t room) const {
  return std::clamp(static_cast<std::int32_t>(static_cast<double>(room) * scale_), 0,
                    num_buckets - 1);
}

void ReceiverPool::put(std::int32_t rank, std::int64_t room) {
  remove(rank);
  const std::int32_t bucket = bucket_of(room);
  const bool first = (used_[to_size(bucket / 64)] >> (bucket % 64) & 1) == 0;
  bucket_[to_size(rank)] = bucket;
  next_[to_size(rank)] = -1;
  prev_[to_size(rank)] = first ? -1 : last_[to_size(bucket)];
  if (first) {
    first_[to_size(bucket)] = rank;
    used_[to_size(bucket / 64)] |= std::uint64_t{1} << (bucket % 64);
  } else {
    next_[to_size(last_[to_size(bucket)])] = rank;
  }
  last_[to_size(bucket)] = rank;
}

void ReceiverPool::remove(std::int32_t rank) {
  const std::int32_t bucket = bucket_[to_size(rank)];
  if (bucket < 0) return;
  const std::int32_t prev = prev_[to_size(rank)];
  const std::int32_t next = next_[to_size(rank)];
  (prev < 0 ? first_[to_size(bucket)] : next_[to_size(prev)]) = next;
  (next < 0 ? last_[to_size(bucket)] : prev_[to_size(next)]) = prev;
  if (prev < 0 && next < 0) used_[to_size(bucket / 64)] &= ~(std::uint64_t{1} << (bucket % 64));
  bucket_[to_size(rank)] = -1;
}

std::int32_t ReceiverPool::bucket_at_least(std::int32_t bucket) const {
  if (bucket >= num_buckets) return -1;
  std::uint64_t bits = used_[to_size(bucket / 64)] & (~std::uint64_t{0} << (bucket % 64));
  for (std::int32_t word = bucket / 64;; bits = used_[to_size(word)]) {
    if (bits != 0) return word * 64 + std::countr_zero(bits);
    if (++word == num_buckets / 64) return -1;
  }
}

std::int32_t ReceiverPool::bucket_at_most(std::int32_t bucket) const {
  if (bucket < 0) return -1;
  std::uint64_t bits = used_[to_size(bucket / 64)] & (~std::uint64_t{0} >> (63 - bucket % 64));
  for (std::int32_t word = bucket / 64;; bits = used_[to_size(word)]) {
    if (bits != 0) return word * 64 + 63 - std::countl_zero(bits);
    if (--word < 0) return -1;
  }
}

std::int32_t ReceiverPool::most_room() const {
  const std::int32_t bucket = bucket_at_most(num_buckets - 1);
  return bucket < 0 ? -1 : first_[to_size(bucket)];
}

std::int32_t ReceiverPool::least_room(std::int64_t room) const {
  const std::int32_t bucket = bucket_at_least(bucket_of(room) + 1);
  return bucket < 0 ? most_room() : first_[to_size(bucket)];
}

std::int32_t ReceiverPool::roomier(std::int32_t rank) const {
  if (next_[to_size(rank)] >= 0) return next_[to_size(rank)];
  const std::int32_t bucket = bucket_at_least(bucket_[to_size(rank)] + 1);
  return bucket < 0 ? -1 : first_[to_size(bucket)];
}

}  // namespace waybill::detail
