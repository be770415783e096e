#include "rows.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>

#include "core/number.h"
#include "core/to_size.h"
#include "routing/homes.h"
#include "waybill/core/error.h"

namespace waybill::bench {
namespace {

using detail::to_size;

constexpr std::int64_t word_bytes = 8;
constexpr std::int64_t block_words = std::int64_t{1} << 20;

void copy(void* to, const void* from, std::int64_t bytes) {
  const cudaError_t status = cudaMemcpy(to, from, to_size(bytes), cudaMemcpyDefault);
  if (status != cudaSuccess) {
    throw InternalError(concat("rows: cudaMemcpy: ", cudaGetErrorString(status)));
  }
}

std::int64_t words_of(const TensorView& view) {
  return view.shape[1] * dtype_bytes(view.dtype) / word_bytes;
}

std::vector<std::uint64_t> read_row(const TensorView& view, std::int64_t row) {
  std::vector<std::uint64_t> words(words_of(view));
  const auto bytes = std::ssize(words) * word_bytes;
  copy(words.data(), view.data + row * bytes, bytes);
  return words;
}

std::vector<std::uint64_t> row_of(std::int32_t rank, std::size_t tensor, std::int64_t row,
                                  std::int64_t words) {
  std::vector<std::uint64_t> result(words);
  for (std::size_t i = 0; i < result.size(); ++i) {
    result[i] = word_of(rank, tensor, static_cast<std::uint64_t>(row * words) + i);
  }
  return result;
}

void expect(bool same, const char* what, std::int32_t rank, std::int64_t row) {
  if (!same) throw InternalError(concat("rows: ", what, " ", row, " of rank ", rank, " is wrong"));
}

}  // namespace

void fill_rows(const TensorView& view, std::int32_t rank, std::size_t tensor) {
  const std::int64_t total = view.shape[0] * words_of(view);
  std::vector<std::uint64_t> block(std::min(total, block_words));
  for (std::int64_t first = 0; first < total; first += block_words) {
    const std::int64_t count = std::min(block_words, total - first);
    for (std::int64_t i = 0; i < count; ++i) {
      block[i] = word_of(rank, tensor, static_cast<std::uint64_t>(first + i));
    }
    copy(view.data + first * word_bytes, block.data(), count * word_bytes);
  }
}

void check_rows(const TensorView& output, const SparseMetadata& metadata, std::int32_t rank,
                std::size_t tensor) {
  detail::for_each_entry(metadata, [&](std::int32_t from, std::int64_t row, std::int64_t entry) {
    const std::int64_t len = metadata.seq_len[entry];
    if (len == 0) return;
    for (auto c = metadata.destination_begin(entry); c < metadata.destination_end(entry); ++c) {
      if (metadata.dst_rank[c] != rank) continue;
      for (const std::int64_t k : {std::int64_t{0}, len / 2, len - 1}) {
        const std::int64_t to = metadata.dst_offset[c] + k;
        expect(read_row(output, to) == row_of(from, tensor, row + k, words_of(output)), "row", rank,
               to);
      }
    }
  });
}

void check_sums(const TensorView& output, const SparseMetadata& metadata, std::int32_t rank,
                std::size_t tensor) {
  detail::for_each_entry(metadata, [&](std::int32_t home, std::int64_t row, std::int64_t entry) {
    const std::int64_t len = metadata.seq_len[entry];
    if (home != rank || len == 0) return;
    const std::int64_t words = words_of(output);
    for (const std::int64_t k : {std::int64_t{0}, len - 1}) {
      std::vector<float> sums(words * 4);
      for (auto c = metadata.destination_begin(entry); c < metadata.destination_end(entry); ++c) {
        const auto addends =
            row_of(metadata.dst_rank[c], tensor, metadata.dst_offset[c] + k, words);
        for (std::size_t e = 0; e < sums.size(); ++e) {
          const auto bits = static_cast<std::uint16_t>(addends[e / 4] >> (e % 4 * 16));
          sums[e] = c == metadata.destination_begin(entry) ? bfloat16_to_float(bits)
                                                           : sums[e] + bfloat16_to_float(bits);
        }
      }
      const auto got = read_row(output, row + k);
      for (std::size_t e = 0; e < sums.size(); ++e) {
        const auto bits = static_cast<std::uint16_t>(got[e / 4] >> (e % 4 * 16));
        expect(bits == float_to_bfloat16(sums[e]), "sum", rank, row + k);
      }
    }
  });
}

}  // namespace waybill::bench
