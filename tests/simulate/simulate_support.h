#pragma once

#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "waybill/core/host_tensor.h"
#include "waybill/core/random.h"
#include "waybill/routing/metadata.h"
#include "waybill/routing/validate.h"

namespace waybill::test {

/// A line for each.
inline std::string text_of(const std::vector<Finding>& findings) {
  std::string text;
  for (const Finding& finding : findings) text += to_string(finding) + "\n";
  return text;
}

/// Different bytes everywhere.
inline HostTensor random_tensor(DType dtype, Shape shape, std::uint64_t seed) {
  HostTensor tensor(dtype, shape);
  Random random(seed);
  for (auto left = tensor.bytes(); !left.empty();) {
    const std::uint64_t bits = random.bits();
    const std::size_t count = std::min(left.size(), sizeof(bits));
    std::memcpy(left.data(), &bits, count);
    left = left.subspan(count);
  }
  return tensor;
}

/// For tensors of many MiB, where a loop that is not optimized takes seconds.
inline bool same_bytes(std::span<const std::byte> one, std::span<const std::byte> other) {
  return one.size() == other.size() && std::memcmp(one.data(), other.data(), one.size()) == 0;
}

inline HostTensor filled_tensor(DType dtype, Shape shape, unsigned char value) {
  HostTensor tensor(dtype, shape);
  std::ranges::fill(tensor.bytes(), std::byte{value});
  return tensor;
}

inline std::vector<std::byte> bytes_of(const HostTensor& tensor) {
  return {tensor.bytes().begin(), tensor.bytes().end()};
}

/// An ordinary tensor with the elements of any view.
inline HostTensor dense_copy(const ConstTensorView& view) {
  HostTensor result(view.dtype, view.shape);
  const auto element = static_cast<std::size_t>(dtype_bytes(view.dtype));
  std::vector<std::int64_t> idx(view.shape.size());
  for (std::size_t i = 0; i < result.bytes().size() / element; ++i) {
    std::int64_t rest = static_cast<std::int64_t>(i);
    std::int64_t at = 0;
    for (std::size_t axis = view.shape.size(); axis-- > 0;) {
      at += rest % view.shape[axis] * view.strides[axis];
      rest /= view.shape[axis];
    }
    std::memcpy(result.bytes().data() + i * element,
                view.data + at * static_cast<std::int64_t>(element), element);
  }
  return result;
}

/// The simplest thing that can be right: the loops of DistCA, on contiguous [W, n, H].
inline void simulate_plainly(const HostTensor& source, HostTensor& output,
                             const Metadata& metadata) {
  const std::int64_t row_bytes = source.shape()[2] * dtype_bytes(source.dtype());
  const std::int64_t shards = metadata.seq_len.dim(1);
  const std::int64_t copies = metadata.has_copies() ? metadata.dst_rank.dim(2) : 1;
  for (std::int64_t w = 0; w < metadata.seq_len.dim(0); ++w) {
    std::int64_t row = 0;
    for (std::int64_t j = 0; j < shards; ++j) {
      const std::int64_t rows = metadata.seq_len.at({w, j});
      for (std::int64_t c = 0; c < copies; ++c) {
        const std::int64_t cell = (w * shards + j) * copies + c;
        const std::int64_t r = metadata.dst_rank.flat_at(cell);
        if (r < 0) continue;
        const std::int64_t to = r * output.shape()[1] + metadata.dst_offset.flat_at(cell);
        std::copy_n(source.bytes().begin() + (w * source.shape()[1] + row) * row_bytes,
                    rows * row_bytes, output.bytes().begin() + to * row_bytes);
      }
      row += rows;
    }
  }
}

struct RandomJobOptions {
  std::int64_t world_size = 3;
  std::int64_t shards = 5;
  std::int64_t copies = 0;  ///< 0: dst_rank without the axis of copies
  std::int64_t max_rows = 6;
  bool overlapping = false;
};

/// Random shards, some without rows or destination, at random places that overlap only on request.
struct RandomJob {
  Metadata metadata;
  std::int64_t source_rows = 0;  ///< of a rank: enough for all
  std::int64_t output_rows = 0;
};

inline RandomJob random_job(std::uint64_t seed, const RandomJobOptions& options = {}) {
  Random random(seed);
  const std::int64_t world = options.world_size;
  const std::int64_t copies = std::max<std::int64_t>(1, options.copies);
  RandomJob job;
  Shape cells{world, options.shards};
  job.metadata.seq_len = IndexArray(cells);
  if (options.copies > 0) cells.push_back(options.copies);
  job.metadata.dst_rank = IndexArray::full(cells, -1);
  job.metadata.dst_offset = IndexArray(cells);
  std::vector<std::vector<std::size_t>> received(static_cast<std::size_t>(world));
  for (std::int64_t w = 0; w < world; ++w) {
    std::int64_t rows = 0;
    for (std::int64_t j = 0; j < options.shards; ++j) {
      const std::int64_t entry = w * options.shards + j;
      const std::int64_t len = random.below(options.max_rows + 1);
      job.metadata.seq_len.i64()[static_cast<std::size_t>(entry)] = len;
      rows += len;
      for (std::int64_t c = 0; c < copies; ++c) {
        const std::int64_t r = random.below(world + 1) - 1;
        const auto cell = static_cast<std::size_t>(entry * copies + c);
        job.metadata.dst_rank.i64()[cell] = r;
        if (r >= 0) received[static_cast<std::size_t>(r)].push_back(cell);
      }
    }
    job.source_rows = std::max(job.source_rows, rows);
  }
  for (const auto& list : received) {  // in a random order, with random gaps
    const auto n = static_cast<std::int32_t>(list.size());
    std::int64_t row = 0;
    for (const std::int32_t i : random.permutation(n, n)) {
      const std::size_t cell = list[static_cast<std::size_t>(i)];
      row += random.below(3);
      job.metadata.dst_offset.i64()[cell] = options.overlapping ? random.below(row + 1) : row;
      row += job.metadata.seq_len.flat_at(static_cast<std::int64_t>(cell) / copies);
    }
    job.output_rows = std::max(job.output_rows, row + random.below(3));
  }
  return job;
}

}  // namespace waybill::test
