#include "receiver_pool.h"

#include <algorithm>
#include <bit>

#include "waybill/core/at.h"

namespace waybill::detail {

void ReceiverPool::reset(std::int32_t world_size, std::int64_t most_room) {
  used_.fill(0);
  bucket_.assign(at(world_size), -1);
  next_.resize(at(world_size));
  prev_.resize(at(world_size));
  scale_ = most_room > 0 ? (num_buckets - 1) / static_cast<double>(most_room) : 0;
}

std::int32_t ReceiverPool::bucket_of(std::int64_t room) const {
  return std::clamp(static_cast<std::int32_t>(static_cast<double>(room) * scale_), 0,
                    num_buckets - 1);
}

void ReceiverPool::put(std::int32_t rank, std::int64_t room) {
  remove(rank);
  const std::int32_t bucket = bucket_of(room);
  const bool first = (used_[at(bucket / 64)] >> (bucket % 64) & 1) == 0;
  bucket_[at(rank)] = bucket;
  next_[at(rank)] = -1;
  prev_[at(rank)] = first ? -1 : last_[at(bucket)];
  if (first) {
    first_[at(bucket)] = rank;
    used_[at(bucket / 64)] |= std::uint64_t{1} << (bucket % 64);
  } else {
    next_[at(last_[at(bucket)])] = rank;
  }
  last_[at(bucket)] = rank;
}

void ReceiverPool::remove(std::int32_t rank) {
  const std::int32_t bucket = bucket_[at(rank)];
  if (bucket < 0) return;
  const std::int32_t prev = prev_[at(rank)];
  const std::int32_t next = next_[at(rank)];
  (prev < 0 ? first_[at(bucket)] : next_[at(prev)]) = next;
  (next < 0 ? last_[at(bucket)] : prev_[at(next)]) = prev;
  if (prev < 0 && next < 0) used_[at(bucket / 64)] &= ~(std::uint64_t{1} << (bucket % 64));
  bucket_[at(rank)] = -1;
}

std::int32_t ReceiverPool::bucket_at_least(std::int32_t bucket) const {
  if (bucket >= num_buckets) return -1;
  std::uint64_t bits = used_[at(bucket / 64)] & (~std::uint64_t{0} << (bucket % 64));
  for (std::int32_t word = bucket / 64;; bits = used_[at(word)]) {
    if (bits != 0) return word * 64 + std::countr_zero(bits);
    if (++word == num_buckets / 64) return -1;
  }
}

std::int32_t ReceiverPool::bucket_at_most(std::int32_t bucket) const {
  if (bucket < 0) return -1;
  std::uint64_t bits = used_[at(bucket / 64)] & (~std::uint64_t{0} >> (63 - bucket % 64));
  for (std::int32_t word = bucket / 64;; bits = used_[at(word)]) {
    if (bits != 0) return word * 64 + 63 - std::countl_zero(bits);
    if (--word < 0) return -1;
  }
}

std::int32_t ReceiverPool::most_room() const {
  const std::int32_t bucket = bucket_at_most(num_buckets - 1);
  return bucket < 0 ? -1 : first_[at(bucket)];
}

std::int32_t ReceiverPool::least_room(std::int64_t room) const {
  const std::int32_t bucket = bucket_at_least(bucket_of(room) + 1);
  return bucket < 0 ? most_room() : first_[at(bucket)];
}

std::int32_t ReceiverPool::roomier(std::int32_t rank) const {
  if (next_[at(rank)] >= 0) return next_[at(rank)];
  const std::int32_t bucket = bucket_at_least(bucket_[at(rank)] + 1);
  return bucket < 0 ? -1 : first_[at(bucket)];
}

}  // namespace waybill::detail
