#include "schedule/sequence_plan.h"

#include <algorithm>
#include <limits>

#include "batched_plans.h"
#include "core/number.h"
#include "core/parallel_for.h"
#include "local_runs.h"
#include "network_phases.h"
#include "plan_checks.h"
#include "plan_fingerprint.h"
#include "segments.h"
#include "waybill/core/error.h"

namespace waybill {
namespace {

using detail::ChosenWay;
using detail::LocalRun;
using detail::SegmentWriter;
using detail::WindowMap;
using detail::WindowRows;

/// Small, as an executor holds the addends of many chunks at once.
constexpr std::int64_t most_gradient_chunk_bytes = 2048;

void check_formats(const char* who, std::span<const SequencePart> parts, SequenceOperation op) {
  const TensorFormat* first = nullptr;
  for (const SequencePart& part : parts) {
    for (const TensorFormat& format : part.tensors) {
      require(0 <= format.hidden && format.hidden <= (std::int64_t{1} << 27), who,
              ": hidden = ", format.hidden, ", expected 0..2^27");
      require(op == SequenceOperation::dispatch || detail::is_summed(format.dtype), who,
              ": dtype = ", format.dtype, ", expected float16, bfloat16, float32 or float64");
      if (first == nullptr) first = &format;
      require(op == SequenceOperation::dispatch || format.dtype == first->dtype, who,
              ": dtypes are ", first->dtype, " and ", format.dtype, ", expected one");
    }
  }
}

/// Whether rows that stay on the rank are worth a call to the copy engine of their own: each piece
/// costs it a microsecond or two, in which it copies a megabyte, and `num_sms` multiprocessors that
/// have time beside the links do it themselves.
bool local_rows_go_apart(std::span<const SequencePart> parts, Rank rank, std::int32_t num_sms) {
  constexpr std::int64_t least_bytes = std::int64_t{4} << 20;
  constexpr std::int64_t least_piece_bytes = std::int64_t{1} << 19;
  constexpr std::int64_t sms_of_links = 8;  // docs/performance/gpu_sequences.md
  std::int64_t bytes = 0;
  std::int64_t sent_bytes = 0;
  std::int64_t pieces = 0;
  const std::size_t r = to_int(rank);
  for (const SequencePart& part : parts) {
    const SparseMetadata& metadata = *part.metadata;
    std::int64_t rows = 0;
    std::int64_t sent = 0;
    std::int64_t runs = 0;
    std::int64_t next = -1;
    std::int64_t row = 0;
    std::int64_t next_row = -1;
    for (auto j = metadata.rank_offsets[r]; j < metadata.rank_offsets[r + 1]; ++j) {
      const std::int64_t len = metadata.seq_len[j];
      for (auto c = metadata.destination_begin(j); c < metadata.destination_end(j); ++c) {
        if (metadata.dst_rank[c] != to_int(rank)) {
          sent += len;
          continue;
        }
        rows += len;
        if (metadata.dst_offset[c] != next || row != next_row) ++runs;
        next = metadata.dst_offset[c] + len;
        next_row = row + len;
      }
      row += len;
    }
    for (const TensorFormat& format : part.tensors) {
      bytes += rows * format.row_bytes();
      sent_bytes += sent * format.row_bytes();
      pieces += runs;
    }
  }
  return bytes >= least_bytes && bytes >= pieces * least_piece_bytes &&
         static_cast<double>(num_sms) * static_cast<double>(sent_bytes) <
             static_cast<double>(sms_of_links) * static_cast<double>(sent_bytes + bytes);
}

/// All entries of the plan's rank. @param local [parts] runs that stand apart
void write_entries(SegmentWriter& writer, std::span<const SequencePart> parts,
                   std::span<const std::vector<LocalRun>> local, SequencePlan& plan) {
  const std::size_t r = to_int(plan.rank);
  std::int32_t first_tensor = 0;
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const SequencePart& part = parts[p];
    const SparseMetadata& metadata = *part.metadata;
    writer.begin_part(part, first_tensor);
    std::int64_t row = 0;
    auto run = local[p].begin();
    for (std::int64_t j = metadata.rank_offsets[r]; j < metadata.rank_offsets[r + 1]; ++j) {
      if (run != local[p].end() && j == run->first_entry) {
        writer.add_local(row, run->rows, run->window_row);
        row += run->rows;
        j = run++->end_entry - 1;
        continue;
      }
      const std::int64_t begin = metadata.destination_begin(j);
      const std::size_t count = metadata.destination_end(j) - begin;
      writer.add_entry(row, metadata.seq_len[j], std::span(metadata.dst_rank.data() + begin, count),
                       std::span(metadata.dst_offset.data() + begin, count));
      row += metadata.seq_len[j];
    }
    plan.own_rows.insert(plan.own_rows.end(), part.tensors.size(), row);
    first_tensor += static_cast<std::int32_t>(part.tensors.size());
  }
  writer.finish();
}

void compile_direct(const char* who, std::span<const SequencePart> parts,
                    const CompileOptions& options, SequencePlan& plan) {
  std::vector<WindowRows> rows;
  for (const SequencePart& part : parts) rows.push_back({detail::rows_needed(part), {}});
  const WindowMap windows(who, parts, rows);
  const bool sends = plan.operation == SequenceOperation::dispatch;
  const bool apart = sends && options.separate_local_copies &&
                     local_rows_go_apart(parts, plan.rank, options.num_sms);
  SegmentWriter writer(plan, windows, apart);
  const auto local = !sends && options.separate_local_copies
                         ? detail::long_local_runs(parts, plan.rank)
                         : std::vector<std::vector<LocalRun>>(parts.size());
  write_entries(writer, parts, local, plan);
  for (std::size_t t = 0; t < plan.tensors.size(); ++t)
    plan.window_offsets.push_back(windows.offset(t, to_int(plan.rank)));
  plan.window_bytes = windows.largest();
}

void compile_batched(const char* who, std::span<const SequencePart> parts, const ChosenWay& way,
                     CompileOptions options, SequencePlan& plan) {
  for (const SequencePart& part : parts) {
    std::int64_t rows = 0;
    const std::size_t r = to_int(plan.rank);
    for (auto j = part.metadata->rank_offsets[r]; j < part.metadata->rank_offsets[r + 1]; ++j)
      rows += part.metadata->seq_len[j];
    plan.own_rows.insert(plan.own_rows.end(), part.tensors.size(), rows);
  }
  if (plan.operation == SequenceOperation::dispatch) {
    options.separate_local_copies =
        options.separate_local_copies && local_rows_go_apart(parts, plan.rank, options.num_sms);
    detail::compile_batched_dispatch(who, parts, way, options, plan);
    return;
  }
  for (const SequencePart& part : parts) {
    for (const TensorFormat& format : part.tensors)
      plan.cuts.push_back(
          detail::cut_rows(detail::sum_format(format).row_bytes(), plan.chunk_bytes));
  }
  detail::compile_batched_gradient(who, parts, way, options, plan);
}

/// Whether ranks compare the plan: it then has its hashes.
enum class Compares : std::uint8_t { no, yes };

SequencePlan compile(const char* who, SequenceOperation operation,
                     std::span<const SequencePart> parts, Rank rank, const CompileOptions& options,
                     Compares compares);

/// What a rank receives stands in the plans of those that send it.
std::vector<NetworkPhase> compile_phases(const char* who, std::span<const SequencePart> parts,
                                         const SequencePlan& plan, CompileOptions options) {
  const Topology topology = detail::topology_of(plan, options);
  if (topology.num_nodes() == 1) return {};
  options.two_sided_network = false;
  options.chunks = false;
  std::vector<SequencePlan> others(plan.world_size);
  parallel_for(plan.world_size, 1, 0, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      if (r == to_int(plan.rank)) continue;
      others[r] = compile(who, plan.operation, parts, Rank{static_cast<std::int32_t>(r)}, options,
                          Compares::no);
    }
  });
  std::vector<const SequencePlan*> plans;
  for (const SequencePlan& other : others) plans.push_back(&other);
  plans[to_int(plan.rank)] = &plan;
  return detail::network_phases(plans, topology, plan.rank, options.phase_bytes);
}

SequencePlan compile(const char* who, SequenceOperation operation,
                     std::span<const SequencePart> parts, Rank rank, const CompileOptions& options,
                     Compares compares) {
  require(!parts.empty(), who, ": parts are empty");
  require(options.chunk_bytes >= 16 && options.chunk_bytes % 16 == 0 &&
              options.chunk_bytes <= std::numeric_limits<std::int32_t>::max() / 2,
          who, ": chunk_bytes = ", options.chunk_bytes, ", expected a multiple of 16, up to 2^30");
  require(options.phase_bytes > 0, who, ": phase_bytes = ", options.phase_bytes, ", expected > 0");
  detail::check_parts(who, parts, rank);
  check_formats(who, parts, operation);
  detail::check_traffic(who, parts);
  SequencePlan plan;
  plan.operation = operation;
  plan.rank = rank;
  plan.world_size = parts.front().metadata->world_size;
  const bool sends = operation == SequenceOperation::dispatch;
  plan.chunk_bytes =
      sends ? options.chunk_bytes : std::min(options.chunk_bytes, most_gradient_chunk_bytes);
  for (const SequencePart& part : parts) {
    for (const TensorFormat& format : part.tensors) {
      plan.tensors.push_back(format);
      plan.cuts.push_back(detail::cut_rows(format.row_bytes(), plan.chunk_bytes));
    }
  }
  const ChosenWay way = detail::choose_way(who, operation, parts, options);
  plan.limits = way.limits;
  if (compares == Compares::yes) {
    plan.fingerprint = detail::hash_plan(operation, parts, way, options);
    plan.formats = detail::hash_formats(parts);
  }
  for (const SequencePart& part : parts) {
    const std::int64_t rows = detail::rows_needed(part)[to_int(rank)];
    plan.window_rows.insert(plan.window_rows.end(), part.tensors.size(), rows);
  }
  if (!way.batched) {
    compile_direct(who, parts, options, plan);
  } else {
    compile_batched(who, parts, way, options, plan);
  }
  if (!sends) plan.staged = detail::rows_to_stage(plan);
  if (options.split_network && options.two_sided_network)
    plan.phases = compile_phases(who, parts, plan, options);
  if (options.chunks) expand_chunks(plan);
  return plan;
}

}  // namespace

CompileOptions compile_options(const SequencePlanOptions& options) {
  return {.chunk_bytes = options.chunk_bytes,
          .relay = options.relay,
          .nvlink_bytes_per_second = options.nvlink_bytes_per_second,
          .network_bytes_per_second = options.network_bytes_per_second,
          .batch_bytes = options.batch_bytes,
          .phase_bytes = options.phase_bytes};
}

SequencePlan compile_dispatch(std::span<const SequencePart> parts, Rank rank,
                              const CompileOptions& options) {
  return compile("compile_dispatch", SequenceOperation::dispatch, parts, rank, options,
                 Compares::yes);
}

SequencePlan compile_kv_gradient(std::span<const SequencePart> parts, Rank rank,
                                 const CompileOptions& options) {
  return compile("compile_kv_gradient", SequenceOperation::kv_gradient, parts, rank, options,
                 Compares::yes);
}

}  // namespace waybill
