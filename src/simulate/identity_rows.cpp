#include "identity_rows.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/parallel_for.h"

namespace waybill::detail {
namespace {

constexpr std::int64_t word_bytes = 8;
constexpr std::int64_t write_item_bytes = std::int64_t{1} << 20;
constexpr std::uint64_t word_step = 0x9E3779B97F4A7C15U;  // odd: all words of a row differ

// The finalizer of MurmurHash3 (Appleby, public domain): a bijection that maps 0 to 0.
constexpr std::uint64_t factor_1 = 0xFF51AFD7ED558CCDU;
constexpr std::uint64_t factor_2 = 0xC4CEB9FE1A85EC53U;

constexpr std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 33)) * factor_1;
  x = (x ^ (x >> 33)) * factor_2;
  return x ^ (x >> 33);
}

/// The inverse of an odd number modulo 2^64, by Newton's iteration.
constexpr std::uint64_t inverse(std::uint64_t odd) {
  std::uint64_t x = odd;
  for (int i = 0; i < 6; ++i) x *= 2 - odd * x;
  return x;
}

constexpr std::uint64_t unmix(std::uint64_t x) {
  x = (x ^ (x >> 33)) * inverse(factor_2);
  x = (x ^ (x >> 33)) * inverse(factor_1);
  return x ^ (x >> 33);
}
static_assert(mix(0) == 0 && unmix(mix(0x0123456789ABCDEFU)) == 0x0123456789ABCDEFU);

/// First word of row `id`; never 0.
std::uint64_t key_of(std::int64_t id) { return mix(static_cast<std::uint64_t>(id) + 1); }

void write_row(std::byte* row, std::int64_t row_bytes, std::int64_t id) {
  std::uint64_t word = key_of(id);
  std::int64_t at = 0;
  for (; at + word_bytes <= row_bytes; at += word_bytes, word += word_step) {
    std::memcpy(row + at, &word, sizeof(word));
  }
  std::memcpy(row + at, &word, static_cast<std::size_t>(row_bytes - at));
}

bool holds_pattern(const std::byte* row, std::int64_t row_bytes, std::uint64_t key) {
  std::uint64_t word = key;
  std::uint64_t differing = 0;
  std::int64_t at = 0;
  for (; at + word_bytes <= row_bytes; at += word_bytes, word += word_step) {
    std::uint64_t got = 0;
    std::memcpy(&got, row + at, sizeof(got));
    differing |= got ^ word;
  }
  return differing == 0 &&
         std::memcmp(row + at, &word, static_cast<std::size_t>(row_bytes - at)) == 0;
}

bool all_zero(const std::byte* row, std::int64_t row_bytes) {
  return row[0] == std::byte{0} &&
         std::memcmp(row, row + 1, static_cast<std::size_t>(row_bytes - 1)) == 0;
}

std::int64_t identify_row(const std::byte* row, std::int64_t row_bytes, std::int64_t num_ids) {
  std::uint64_t key = 0;
  std::memcpy(&key, row, sizeof(key));
  if (key == 0) return all_zero(row, row_bytes) ? untouched_row : damaged_row;
  const std::uint64_t id = unmix(key) - 1;
  if (id >= static_cast<std::uint64_t>(num_ids)) return damaged_row;
  return holds_pattern(row, row_bytes, key) ? static_cast<std::int64_t>(id) : damaged_row;
}

/// Calls body(rank, row in the rank, number of the row) for every row.
template <class Body>
void for_each_row(const RankBuffers& buffers, int num_threads, const Body& body) {
  const std::vector<std::int64_t>& first = buffers.first_row();
  const std::int64_t grain = std::max<std::int64_t>(1, write_item_bytes / buffers.row_bytes());
  parallel_for(buffers.num_rows(), grain, num_threads, [&](std::int64_t begin, std::int64_t end) {
    auto rank = std::ranges::upper_bound(first, begin) - first.begin() - 1;
    for (std::int64_t i = begin; i < end; ++i) {
      while (i >= first[static_cast<std::size_t>(rank) + 1]) ++rank;
      body(rank, i - first[static_cast<std::size_t>(rank)], i);
    }
  });
}

}  // namespace

RankBuffers::RankBuffers(const std::vector<std::int64_t>& rows, std::int64_t row_bytes)
    : row_bytes_(row_bytes), first_row_{0} {
  for (const std::int64_t num_rows : rows) {
    first_row_.push_back(first_row_.back() + num_rows);
    tensors_.emplace_back(DType::uint8, Shape{num_rows, row_bytes});
  }
}

std::vector<ConstTensorView> RankBuffers::sources() const {
  std::vector<ConstTensorView> views;
  for (const HostTensor& tensor : tensors_) views.push_back(tensor.view());
  return views;
}

std::vector<TensorView> RankBuffers::outputs() {
  std::vector<TensorView> views;
  for (HostTensor& tensor : tensors_) views.push_back(tensor.view());
  return views;
}

std::byte* RankBuffers::row(std::int64_t rank, std::int64_t row) {
  return tensors_[static_cast<std::size_t>(rank)].bytes().data() + row * row_bytes_;
}

const std::byte* RankBuffers::row(std::int64_t rank, std::int64_t row) const {
  return tensors_[static_cast<std::size_t>(rank)].bytes().data() + row * row_bytes_;
}

void write_identities(RankBuffers& buffers, int num_threads) {
  for_each_row(buffers, num_threads, [&](std::int64_t rank, std::int64_t row, std::int64_t id) {
    write_row(buffers.row(rank, row), buffers.row_bytes(), id);
  });
}

std::vector<std::int64_t> identify_rows(const RankBuffers& buffers, std::int64_t num_ids,
                                        int num_threads) {
  std::vector<std::int64_t> ids(static_cast<std::size_t>(buffers.num_rows()));
  for_each_row(buffers, num_threads, [&](std::int64_t rank, std::int64_t row, std::int64_t i) {
    ids[static_cast<std::size_t>(i)] =
        identify_row(buffers.row(rank, row), buffers.row_bytes(), num_ids);
  });
  return ids;
}

}  // namespace waybill::detail
