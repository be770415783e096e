#include "schedule/sequence_plan.h"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>

#include "compile.h"
#include "core/hash.h"
#include "core/number.h"
#include "core/parallel_for.h"
#include "waybill/core/error.h"

namespace waybill {
namespace detail {
namespace {

/// Small, as an executor holds the addends of many chunks at once.
constexpr std::int64_t max_gradient_chunk_bytes = 2048;

constexpr std::int64_t max_rows = std::int64_t{1} << 44;
constexpr std::int32_t max_batches = 1 << 20;

void check_offsets(const char* who, const char* name, std::span<const std::int64_t> offsets,
                   std::int64_t num_parts, std::int64_t last) {
  require(std::ssize(offsets) == num_parts + 1, who, ": ", name, " has ", offsets.size(),
          " values, expected ", num_parts + 1);
  require(offsets.front() == 0 && offsets.back() == last, who, ": ", name, " goes from ",
          offsets.front(), " to ", offsets.back(), ", expected 0 to ", last);
  require(std::ranges::is_sorted(offsets), who, ": ", name, " is not ascending");
}

/// Whether all values are in 0..end - 1, a power of two; without branches, as tables are long.
bool all_below_power(std::span<const std::int64_t> values, std::int64_t end) {
  std::uint64_t bits = 0;
  for (const std::int64_t value : values) bits |= static_cast<std::uint64_t>(value);
  return bits < static_cast<std::uint64_t>(end);
}

bool all_below(std::span<const std::int32_t> values, std::int32_t end) {
  std::int32_t max = 0;
  std::int32_t min = 0;
  for (const std::int32_t value : values) {
    max = value > max ? value : max;
    min = value < min ? value : min;
  }
  return min >= 0 && max < end;
}

/// Names the value that is not as it should be.
void check_values(const char* who, const SparseMetadata& metadata) {
  for (std::int64_t j = 0; j < metadata.num_entries(); ++j) {
    const std::int64_t rows = metadata.seq_len[j];
    require(0 <= rows && rows < max_rows, who, ": seq_len[", j, "] = ", rows,
            ", expected 0..2^44 - 1");
  }
  for (std::int64_t c = 0; c < metadata.num_destinations(); ++c) {
    const std::int32_t r = metadata.dst_rank[c];
    const std::int64_t row = metadata.dst_offset[c];
    require(0 <= r && r < metadata.world_size, who, ": dst_rank[", c, "] = ", r, ", expected 0..",
            metadata.world_size - 1);
    require(0 <= row && row < max_rows, who, ": dst_offset[", c, "] = ", row,
            ", expected 0..2^44 - 1");
  }
}

void check_metadata(const char* who, const SparseMetadata& metadata) {
  const std::int64_t entries = metadata.num_entries();
  const std::int64_t copies = metadata.num_destinations();
  require(1 <= metadata.world_size && metadata.world_size <= max_world_size, who,
          ": world_size = ", metadata.world_size, ", expected 1..", max_world_size);
  check_offsets(who, "rank_offsets", metadata.rank_offsets, metadata.world_size, entries);
  if (metadata.copy_offsets.empty()) {
    require(copies == entries, who, ": dst_rank has ", copies, " values, expected ", entries,
            ", one per entry");
  } else {
    check_offsets(who, "copy_offsets", metadata.copy_offsets, entries, copies);
  }
  require(std::ssize(metadata.dst_offset) == copies, who, ": dst_offset has ",
          metadata.dst_offset.size(), " values, expected ", copies, ", as many as dst_rank");
  if (all_below_power(metadata.seq_len, max_rows) &&
      all_below_power(metadata.dst_offset, max_rows) &&
      all_below(metadata.dst_rank, metadata.world_size)) {
    return;
  }
  check_values(who, metadata);
}

/// Tables that fit each other, ranks and offsets in range, one world. Whether two entries write the
/// same rows is left to validate().
void check_parts(const char* who, std::span<const SequencePart> parts, Rank rank) {
  require(!parts.empty(), who, ": parts are empty");
  for (const SequencePart& part : parts) {
    require(part.metadata != nullptr, who, ": a part has no metadata");
    check_metadata(who, *part.metadata);
    require(0 <= part.min_window_rows && part.min_window_rows < max_rows, who,
            ": min_window_rows = ", part.min_window_rows, ", expected 0..2^44 - 1");
    require(0 <= part.min_batches && part.min_batches <= max_batches, who,
            ": min_batches = ", part.min_batches, ", expected 0..2^20");
    require(part.metadata->world_size == parts.front().metadata->world_size, who,
            ": parts have world_size ", parts.front().metadata->world_size, " and ",
            part.metadata->world_size, ", expected one world");
  }
  const std::int32_t world = parts.front().metadata->world_size;
  require(0 <= to_int(rank) && to_int(rank) < world, who, ": rank = ", rank, ", expected 0..",
          world - 1);
}

/// Bytes of all copies of all ranks are in bounds, so that no sum of some of them overflows.
void check_traffic(const char* who, std::span<const SequencePart> parts) {
  double bytes = 0;
  for (const SequencePart& part : parts) {
    const SparseMetadata& metadata = *part.metadata;
    double rows = 0;
    for (std::int64_t j = 0; j < metadata.num_entries(); ++j) {
      const std::int64_t copies = metadata.destination_end(j) - metadata.destination_begin(j);
      rows += static_cast<double>(metadata.seq_len[j]) * static_cast<double>(1 + copies);
    }
    bytes += rows * (1 + static_cast<double>(row_bytes_of(part)));
  }
  require(bytes < max_call_bytes, who, ": the copies of all rows have ", bytes,
          " bytes, expected below 2^60");
}

void check_formats(const char* who, std::span<const SequencePart> parts, SequenceOperation op) {
  const TensorFormat* first = nullptr;
  for (const SequencePart& part : parts) {
    for (const TensorFormat& format : part.tensors) {
      require(0 <= format.hidden && format.hidden <= (std::int64_t{1} << 27), who,
              ": hidden = ", format.hidden, ", expected 0..2^27");
      require(op == SequenceOperation::dispatch || is_summed(format.dtype), who,
              ": dtype = ", format.dtype, ", expected float16, bfloat16, float32 or float64");
      if (first == nullptr) first = &format;
      require(op == SequenceOperation::dispatch || format.dtype == first->dtype, who,
              ": dtypes are ", first->dtype, " and ", format.dtype, ", expected one");
    }
  }
}

void check_options(const char* who, const SequencePlanOptions& options) {
  require(options.chunk_bytes >= 16 && options.chunk_bytes % 16 == 0 &&
              options.chunk_bytes <= std::numeric_limits<std::int32_t>::max() / 2,
          who, ": chunk_bytes = ", options.chunk_bytes, ", expected a multiple of 16, up to 2^30");
  require(options.phase_bytes > 0, who, ": phase_bytes = ", options.phase_bytes, ", expected > 0");
}

/// Rows that each rank's window has of the part's tensors: every copy has room. [W]
std::vector<std::int64_t> rows_needed(const SequencePart& part) {
  const SparseMetadata& metadata = *part.metadata;
  std::vector<std::int64_t> rows(metadata.world_size, part.min_window_rows);
  for (std::int64_t j = 0; j < metadata.num_entries(); ++j) {
    const std::int64_t len = metadata.seq_len[j];
    if (len == 0) continue;
    for (std::int64_t c = metadata.destination_begin(j); c < metadata.destination_end(j); ++c) {
      std::int64_t& end = rows[metadata.dst_rank[c]];
      end = std::max(end, metadata.dst_offset[c] + len);
    }
  }
  return rows;
}

std::int64_t rows_of(const SparseMetadata& metadata, Rank rank) {
  const auto first = metadata.seq_len.begin();
  const std::size_t r = to_int(rank);
  return std::accumulate(first + metadata.rank_offsets[r], first + metadata.rank_offsets[r + 1],
                         std::int64_t{0});
}

constexpr std::uint64_t odd_factor = 0x9E37'79B9'7F4A'7C15;
constexpr int high_bits = 44;  // above rows and offsets

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
  return hash_words(metadata.num_entries(), [&](std::int64_t j) {
    return static_cast<std::uint64_t>(metadata.seq_len[j]) ^
           static_cast<std::uint64_t>(metadata.destination_end(j)) * odd_factor;
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

/// Hash of the entries and copies of all ranks, of the hops on their way and of all else that cuts
/// it into pieces for which ranks wait. The same whether copy_offsets are given or not.
std::uint64_t hash_plan(SequenceOperation operation, std::span<const SequencePart> parts,
                        const ChosenWay& way, const CompileOptions& options) {
  Hash hash;
  hash.add(static_cast<std::int32_t>(operation)).add(std::ssize(parts));
  for (const SequencePart& part : parts) {
    const SparseMetadata& metadata = *part.metadata;
    hash.add(metadata.world_size).add(std::span<const std::int64_t>(metadata.rank_offsets));
    hash.add(hash_entries(metadata)).add(hash_copies(metadata));
    hash.add(part.min_window_rows).add(part.min_batches);
  }
  hash.add(static_cast<std::int32_t>(way.limits.way)).add(way.batched);
  if (!way.batched) return hash.value();
  for (const auto& hops : way.hops) hash.add(hash_hops(hops));
  hash.add(options.ranks_per_node);
  for_common_options(options.plan, [&](const char*, auto value) { hash.add(value); });
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

/// The tables of one rank; without hashes, phases and chunks. All arguments have been checked.
SequencePlan write_tables(const char* who, SequenceOperation operation,
                          std::span<const SequencePart> parts, const PartRows& needed, Rank rank,
                          const ChosenWay& way, const CompileOptions& options) {
  SequencePlan plan;
  plan.operation = operation;
  plan.rank = rank;
  plan.world_size = parts.front().metadata->world_size;
  const bool sends = operation == SequenceOperation::dispatch;
  plan.chunk_bytes = sends ? options.plan.chunk_bytes
                           : std::min(options.plan.chunk_bytes, max_gradient_chunk_bytes);
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const std::size_t count = parts[p].tensors.size();
    for (const TensorFormat& format : parts[p].tensors) {
      plan.tensors.push_back(format);
      plan.cuts.push_back(cut_rows(format.row_bytes(), plan.chunk_bytes));
    }
    plan.own_rows.insert(plan.own_rows.end(), count, rows_of(*parts[p].metadata, rank));
    plan.window_rows.insert(plan.window_rows.end(), count, needed[p][to_int(rank)]);
  }
  for (const SequencePart& part : parts)
    plan.min_batches = std::max(plan.min_batches, part.min_batches);
  plan.limits = way.limits;
  plan.wire_bytes.assign(plan.world_size, 0);
  if (!way.batched) {
    compile_direct(who, parts, needed, options, plan);
  } else if (sends) {
    compile_batched_dispatch(who, parts, needed, way, options, plan);
  } else {
    for (std::size_t t = 0; t < plan.tensors.size(); ++t)
      plan.cuts.push_back(cut_rows(sum_format(plan.tensors[t]).row_bytes(), plan.chunk_bytes));
    compile_batched_gradient(who, parts, needed, way, options, plan);
  }
  plan.num_slots = std::max(plan.num_slots, plan.min_batches);
  if (!sends) plan.staged = rows_to_stage(plan);
  return plan;
}

/// The pieces that a rank receives stand in the plans of those that send them.
std::vector<NetworkPhase> compile_phases(const char* who, std::span<const SequencePart> parts,
                                         const PartRows& needed, const ChosenWay& way,
                                         const SequencePlan& plan, const CompileOptions& options) {
  const Topology topology = options.topology(plan.world_size);
  if (topology.num_nodes() == 1) return {};
  std::vector<SequencePlan> others(plan.world_size);
  parallel_for(plan.world_size, 1, 0, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      if (r == to_int(plan.rank)) continue;
      const Rank rank{static_cast<std::int32_t>(r)};
      others[r] = write_tables(who, plan.operation, parts, needed, rank, way, options);
    }
  });
  std::vector<const SequencePlan*> plans;
  for (const SequencePlan& other : others) plans.push_back(&other);
  plans[to_int(plan.rank)] = &plan;
  return network_phases(plans, topology, plan.rank, options.plan.phase_bytes);
}

SequencePlan compile(const char* who, SequenceOperation operation,
                     std::span<const SequencePart> parts, Rank rank,
                     const CompileOptions& options) {
  check_options(who, options.plan);
  check_parts(who, parts, rank);
  check_formats(who, parts, operation);
  check_traffic(who, parts);
  const ChosenWay way = choose_way(who, operation, parts, options);
  PartRows needed;
  for (const SequencePart& part : parts) needed.push_back(rows_needed(part));
  SequencePlan plan = write_tables(who, operation, parts, needed, rank, way, options);
  plan.fingerprint = hash_plan(operation, parts, way, options);
  plan.formats = hash_formats(parts);
  if (options.split_network && options.two_sided_network)
    plan.phases = compile_phases(who, parts, needed, way, plan, options);
  if (options.chunks) expand_chunks(plan);
  return plan;
}

}  // namespace
}  // namespace detail

SequencePlan compile_dispatch(std::span<const SequencePart> parts, Rank rank,
                              const CompileOptions& options) {
  return detail::compile("compile_dispatch", SequenceOperation::dispatch, parts, rank, options);
}

SequencePlan compile_kv_gradient(std::span<const SequencePart> parts, Rank rank,
                                 const CompileOptions& options) {
  return detail::compile("compile_kv_gradient", SequenceOperation::kv_gradient, parts, rank,
                         options);
}

}  // namespace waybill
