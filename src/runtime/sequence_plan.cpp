#include "waybill/runtime/sequence_plan.h"

#include <algorithm>
#include <limits>

#include "chunk_writer.h"
#include "plan_checks.h"
#include "waybill/core/at.h"
#include "waybill/core/error.h"

namespace waybill {
namespace {

using detail::at;
using detail::ChunkWriter;
using detail::WindowMap;

/// Small, as an executor holds the addends of many chunks at once.
constexpr std::int64_t most_gradient_chunk_bytes = 2048;

void check_formats(const char* who, std::span<const SequencePart> parts, SequenceOperation op) {
  const TensorFormat* first = nullptr;
  for (const SequencePart& part : parts) {
    for (const TensorFormat& format : part.tensors) {
      require(0 <= format.hidden && format.hidden <= (std::int64_t{1} << 27), who,
              ": hidden = ", format.hidden, ", expected 0..2^27");
      const bool floating = format.dtype == DType::float16 || format.dtype == DType::bfloat16 ||
                            format.dtype == DType::float32 || format.dtype == DType::float64;
      require(op == SequenceOperation::dispatch || floating, who, ": dtype = ", format.dtype,
              ", expected float16, bfloat16, float32 or float64");
      if (first == nullptr) first = &format;
      require(op == SequenceOperation::dispatch || format.dtype == first->dtype, who,
              ": dtypes are ", first->dtype, " and ", format.dtype, ", expected one");
    }
  }
}

/// The copies of one line, to be written as chunks.
void write_line(ChunkWriter& writer, const SparseMetadata& metadata, std::int64_t line,
                std::int64_t first_row) {
  const std::int64_t begin = metadata.copy_begin(line);
  const auto count = at(metadata.copy_end(line) - begin);
  writer.add_line(first_row, metadata.seq_len[at(line)],
                  std::span(metadata.dst_rank.data() + begin, count),
                  std::span(metadata.dst_offset.data() + begin, count));
}

SequencePlan compile(const char* who, SequenceOperation operation,
                     std::span<const SequencePart> parts, Rank rank,
                     const SequencePlanOptions& options) {
  require(!parts.empty(), who, ": parts are empty");
  require(options.chunk_bytes >= 16 && options.chunk_bytes % 16 == 0 &&
              options.chunk_bytes <= std::numeric_limits<std::int32_t>::max() / 2,
          who, ": chunk_bytes = ", options.chunk_bytes, ", expected a multiple of 16, up to 2^30");
  detail::check_parts(who, parts, rank);
  check_formats(who, parts, operation);
  SequencePlan plan;
  plan.operation = operation;
  plan.rank = rank;
  plan.world_size = parts.front().metadata->world_size;
  const WindowMap windows(who, parts);
  const auto r = at(to_int(rank));
  plan.chunk_bytes = operation == SequenceOperation::dispatch
                         ? options.chunk_bytes
                         : std::min(options.chunk_bytes, most_gradient_chunk_bytes);
  ChunkWriter writer(plan, windows, plan.chunk_bytes);
  for (const auto pass : {ChunkWriter::Pass::count, ChunkWriter::Pass::write}) {
    writer.begin(pass);
    std::int32_t first_tensor = 0;
    for (const SequencePart& part : parts) {
      const SparseMetadata& metadata = *part.metadata;
      writer.begin_part(part, first_tensor);
      std::int64_t row = 0;
      for (std::int64_t j = metadata.rank_offsets[r]; j < metadata.rank_offsets[r + 1]; ++j) {
        write_line(writer, metadata, j, row);
        row += metadata.seq_len[at(j)];
      }
      if (pass == ChunkWriter::Pass::write) {
        plan.tensors.insert(plan.tensors.end(), part.tensors.begin(), part.tensors.end());
        plan.own_rows.insert(plan.own_rows.end(), part.tensors.size(), row);
      }
      first_tensor += static_cast<std::int32_t>(part.tensors.size());
    }
  }
  for (std::size_t t = 0; t < plan.tensors.size(); ++t) {
    plan.window_rows.push_back(windows.rows(t, to_int(rank)));
    plan.window_offsets.push_back(windows.offset(t, to_int(rank)));
  }
  plan.window_bytes = windows.largest();
  return plan;
}

}  // namespace

SequencePlan compile_dispatch(std::span<const SequencePart> parts, Rank rank,
                              const SequencePlanOptions& options) {
  return compile("compile_dispatch", SequenceOperation::dispatch, parts, rank, options);
}

SequencePlan compile_kv_gradient(std::span<const SequencePart> parts, Rank rank,
                                 const SequencePlanOptions& options) {
  return compile("compile_kv_gradient", SequenceOperation::kv_gradient, parts, rank, options);
}

}  // namespace waybill
