#include "self_test_job.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include "core/number.h"
#include "routing/for_each_entry.h"

namespace waybill::cuda {
namespace {

constexpr std::int64_t largest_number = 256;  // whole numbers up to it are exact in bfloat16
constexpr std::uint32_t most_numbers = 4;

std::int64_t place_of(std::int32_t rank, std::int64_t row) {
  return (std::int64_t{rank} << self_test_rank_shift) | row;
}

std::vector<std::vector<std::int64_t>> places_of(const SparseMetadata& metadata) {
  std::vector<std::vector<std::int64_t>> addresses(metadata.world_size);
  waybill::detail::for_each_entry(metadata,
                                  [&](std::int32_t from, std::int64_t first, std::int64_t entry) {
                                    const std::int64_t len = metadata.seq_len[entry];
                                    for (auto c = metadata.destination_begin(entry);
                                         c < metadata.destination_end(entry) && len > 0; ++c) {
                                      auto& rows = addresses[metadata.dst_rank[c]];
                                      const std::int64_t begin = metadata.dst_offset[c];
                                      if (std::ssize(rows) < begin + len)
                                        rows.resize(begin + len, -1);
                                      for (std::int64_t k = 0; k < len; ++k)
                                        rows[begin + k] = place_of(from, first + k);
                                    }
                                  });
  return addresses;
}

std::vector<std::vector<std::int32_t>> copies_of(const SparseMetadata& metadata) {
  std::vector<std::vector<std::int32_t>> copies(metadata.world_size);
  waybill::detail::for_each_entry(
      metadata, [&](std::int32_t from, std::int64_t /*first*/, std::int64_t entry) {
        const auto count = metadata.destination_end(entry) - metadata.destination_begin(entry);
        copies[from].insert(copies[from].end(), metadata.seq_len[entry],
                            static_cast<std::int32_t>(count));
      });
  return copies;
}

bool encode(DType dtype, float value, std::uint64_t& code) {
  switch (dtype) {
    case DType::bfloat16:
      code = float_to_bfloat16(value);
      return true;
    case DType::float16:
      code = float_to_float16(value);
      return true;
    case DType::float32:
      code = std::bit_cast<std::uint32_t>(value);
      return true;
    case DType::float64:
      code = std::bit_cast<std::uint64_t>(static_cast<double>(value));
      return true;
    default:
      return false;
  }
}

/// The most bytes that one GPU sends to, or gets from, the others; and that stay on one.
void count_bytes(GpuSelfTestStep& step, const std::vector<SequencePart>& parts, std::int32_t world,
                 int gpus) {
  std::vector<std::int64_t> out(gpus);
  std::vector<std::int64_t> in(gpus);
  std::vector<std::int64_t> local(gpus);
  for (std::int32_t w = 0; w < world; ++w) {
    const SequencePlan plan = compile_dispatch(parts, Rank{w}, {.chunks = false});
    for (std::int32_t r = 0; r < world; ++r) {
      const std::int64_t bytes = plan.wire_bytes[r];
      if (w % gpus == r % gpus) {
        local[w % gpus] += bytes;
      } else {
        out[w % gpus] += bytes;
        in[r % gpus] += bytes;
      }
    }
  }
  step.local_bytes = *std::ranges::max_element(local);
  step.link_bytes = std::max(*std::ranges::max_element(out), *std::ranges::max_element(in));
}

}  // namespace

TrialJob::TrialJob(const QkvRouting& the_routing, const TensorFormat& the_q,
                   const TensorFormat& the_kv, const GpuSelfTestOptions& the_options)
    : routing(the_routing),
      q(the_q),
      kv(the_kv),
      options(the_options),
      q_places(places_of(routing.fwd_q)),
      kv_places(places_of(routing.fwd_kv)),
      copies(copies_of(routing.fwd_kv)),
      byte_codes(256),
      codes(largest_number + 1) {
  std::iota(byte_codes.begin(), byte_codes.end(), std::uint64_t{0});
  bool encoded = true;
  for (std::size_t i = 0; i < codes.size(); ++i) {
    encoded = encode(kv.dtype, static_cast<float>(i), codes[i]) && encoded;
  }
  std::int64_t most_copies = 1;
  for (const auto& of_rank : copies) {
    for (const std::int32_t count : of_rank) {
      most_copies = std::max<std::int64_t>(most_copies, count);
    }
  }
  if (!encoded || most_copies > largest_number) return;
  number_span = std::min(most_numbers, static_cast<std::uint32_t>(largest_number / most_copies));
}

std::vector<GpuSelfTestStep> TrialJob::steps(int gpus) const {
  std::vector<GpuSelfTestStep> all;
  const auto add = [&](const char* name, const std::vector<SequencePart>& parts) {
    all.push_back({.name = name});
    count_bytes(all.back(), parts, routing.fwd_q.world_size, gpus);
  };
  add("Q, K and V", forward());
  add("Q back", back());
  if (has_gradient()) add("dK and dV", gradient());
  return all;
}

std::vector<std::int64_t> TrialJob::home_places(std::int32_t rank, std::int64_t rows) {
  std::vector<std::int64_t> addresses(rows);
  std::iota(addresses.begin(), addresses.end(), place_of(rank, 0));
  return addresses;
}

}  // namespace waybill::cuda
