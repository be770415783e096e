#include "plan_fingerprint.h"

#include <array>

#include "core/hash.h"

namespace waybill::detail {
namespace {

constexpr std::uint64_t odd_factor = 0x9E37'79B9'7F4A'7C15;
constexpr int high_bits = 44;  // above rows and offsets, see check_parts

/// A step of one lane; a change of one word always changes the lane.
std::uint64_t mix(std::uint64_t lane, std::uint64_t word) {
  lane = (lane ^ word) * odd_factor;
  return lane ^ (lane >> 32);
}

/// Hashes words 0..count-1 in lanes, as a table is long and a step waits for the one before.
template <class WordAt>
std::uint64_t hash_words(std::int64_t count, WordAt&& word_at) {
  constexpr std::int64_t num_lanes = 4;
  std::array<std::uint64_t, num_lanes> lanes = {1, 2, 3, 4};
  std::int64_t i = 0;
  for (; i + num_lanes <= count; i += num_lanes) {
    for (std::int64_t k = 0; k < num_lanes; ++k) lanes[k] = mix(lanes[k], word_at(i + k));
  }
  for (; i < count; ++i) lanes[0] = mix(lanes[0], word_at(i));
  Hash hash;
  hash.add(count);
  for (const std::uint64_t lane : lanes) hash.add(lane);
  return hash.value();
}

std::uint64_t hash_entries(const SparseMetadata& metadata) {
  if (metadata.copy_offsets.empty()) {
    return hash_words(metadata.num_entries(), [&](std::int64_t j) {
      return static_cast<std::uint64_t>(metadata.seq_len[j]) ^
             static_cast<std::uint64_t>(j + 1) * odd_factor;
    });
  }
  return hash_words(metadata.num_entries(), [&](std::int64_t j) {
    return static_cast<std::uint64_t>(metadata.seq_len[j]) ^
           static_cast<std::uint64_t>(metadata.copy_offsets[j + 1]) * odd_factor;
  });
}

std::uint64_t hash_copies(const SparseMetadata& metadata) {
  return hash_words(metadata.num_destinations(), [&](std::int64_t c) {
    return static_cast<std::uint64_t>(metadata.dst_offset[c]) |
           static_cast<std::uint64_t>(metadata.dst_rank[c]) << high_bits;
  });
}

/// Stages only say what `after` says.
std::uint64_t hash_hops(std::span<const RelayHop> hops) {
  constexpr std::int64_t words = 4;
  const auto pair = [](std::int32_t high, std::int32_t low) {
    return static_cast<std::uint64_t>(static_cast<std::uint32_t>(high)) << 32 |
           static_cast<std::uint32_t>(low);
  };
  return hash_words(std::ssize(hops) * words, [&](std::int64_t i) {
    const RelayHop& hop = hops[i / words];
    switch (i % words) {
      case 0:
        return pair(hop.src_rank, hop.dst_rank);
      case 1:
        return pair(hop.shard, hop.after);
      case 2:
        return static_cast<std::uint64_t>(hop.row_begin);
      default:
        return static_cast<std::uint64_t>(hop.num_rows);
    }
  });
}

}  // namespace

std::uint64_t hash_plan(SequenceOperation operation, std::span<const SequencePart> parts,
                        const ChosenWay& way, const CompileOptions& options) {
  Hash hash;
  hash.add(static_cast<std::int32_t>(operation)).add(std::ssize(parts));
  for (const SequencePart& part : parts) {
    const SparseMetadata& metadata = *part.metadata;
    hash.add(metadata.world_size).add(std::span<const std::int64_t>(metadata.rank_offsets));
    hash.add(hash_entries(metadata)).add(hash_copies(metadata)).add(part.min_window_rows);
  }
  hash.add(static_cast<std::int32_t>(way.limits.way)).add(way.batched);
  if (!way.batched) return hash.value();
  for (const auto& hops : way.hops) hash.add(hash_hops(hops));
  hash.add(options.ranks_per_node).add(options.batch_bytes);
  hash.add(options.nvlink_bytes_per_second).add(options.network_bytes_per_second);
  if (options.split_network && options.two_sided_network) hash.add(options.phase_bytes);
  return hash.value();
}

std::uint64_t hash_formats(std::span<const SequencePart> parts) {
  Hash hash;
  for (const SequencePart& part : parts) {
    hash.add(std::ssize(part.tensors));
    for (const TensorFormat& format : part.tensors)
      hash.add(static_cast<std::int32_t>(format.dtype)).add(format.hidden);
  }
  return hash.value();
}

}  // namespace waybill::detail
