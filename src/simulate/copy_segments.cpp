#include <string>

#include "copy_job.h"
#include "waybill/core/error.h"
#include "waybill/core/index_array.h"

namespace waybill::detail {
namespace {

/// Checks segments as they come, in the global order, and keeps those with rows.
class SegmentList {
 public:
  SegmentList(const CopyJob& job, std::size_t expected) : job_(job) { segments_.reserve(expected); }

  /// The next shard of `at_.src_rank`, before its copies. `dst_rank` and `dst_row` of its first
  /// copy only make the text complete.
  void begin_shard(std::int64_t shard, std::int64_t rows, std::int64_t dst_rank,
                   std::int64_t dst_row) {
    at_.src_row = next_row_;
    at_.shard = shard;
    at_.rows = rows;
    const std::int64_t num_rows = source_rows_;
    if (rows >= 0 && rows <= num_rows - next_row_) {
      next_row_ += rows;
      return;
    }
    at_.copy = 0;
    at_.dst_row = dst_row;
    if (rows < 0) fail_at(job_, at_, dst_rank, concat("length = ", rows, ", expected >= 0"));
    fail_at(
        job_, at_, dst_rank,
        concat("the source has ", num_rows - next_row_, " rows left, expected at least ", rows));
  }

  /// A copy of the shard begun last. Rank -1: there is none.
  void add_copy(std::int64_t copy, std::int64_t dst_rank, std::int64_t dst_row) {
    if (dst_rank == -1) return;
    at_.copy = copy;
    at_.dst_row = dst_row;
    const std::int64_t world = job_.world_size();
    if (dst_rank < 0 || dst_rank >= world) {
      fail_at(job_, at_, dst_rank,
              concat("destination rank = ", dst_rank, ", expected -1 (none) or 0..", world - 1));
    }
    at_.dst_rank = static_cast<std::int32_t>(dst_rank);
    const std::int64_t num_rows = job_.outputs[static_cast<std::size_t>(dst_rank)].shape[0];
    if (dst_row < 0) fail_at(job_, at_, dst_rank, concat("offset = ", dst_row, ", expected >= 0"));
    if (at_.rows > num_rows || dst_row > num_rows - at_.rows) {
      fail_at(job_, at_, dst_rank,
              concat("offset + length exceeds the ", num_rows, " rows of the destination"));
    }
    if (at_.rows > 0) segments_.push_back(at_);
  }

  void begin_rank(std::int64_t rank) {
    at_.src_rank = static_cast<std::int32_t>(rank);
    next_row_ = 0;
    source_rows_ = job_.sources[static_cast<std::size_t>(rank)].shape[0];
  }

  [[nodiscard]] std::vector<CopySegment> take() { return std::move(segments_); }

 private:
  const CopyJob& job_;
  std::vector<CopySegment> segments_;
  CopySegment at_;
  std::int64_t next_row_ = 0;
  std::int64_t source_rows_ = 0;
};

template <class Value>
void check_offsets(const char* who, const char* name, const Value& offsets, std::int64_t num_parts,
                   std::int64_t last) {
  require(std::ssize(offsets) == num_parts + 1, who, ": ", name, " has ", offsets.size(),
          " values, expected ", num_parts + 1);
  require(offsets.front() == 0, who, ": ", name, "[0] = ", offsets.front(), ", expected 0");
  for (std::size_t i = 1; i < offsets.size(); ++i) {
    require(offsets[i - 1] <= offsets[i], who, ": ", name, "[", i, "] = ", offsets[i],
            ", expected at least ", offsets[i - 1], ", the value before");
  }
  require(offsets.back() == last, who, ": ", name, " ends with ", offsets.back(), ", expected ",
          last);
}

void check_tables(const CopyJob& job, const Metadata& metadata) {
  const IndexArray& len = metadata.seq_len;
  require(len.ndim() == 2, job.who, ": seq_len has shape ", to_string(len.shape()),
          ", expected [W, S] (not the slice of one rank)");
  require(len.dim(0) == job.world_size(), job.who, ": seq_len has shape ", to_string(len.shape()),
          ", expected ", job.world_size(), " ranks, as many as the tensors");
  Shape cells = len.shape();
  if (metadata.dst_rank.ndim() == 3) cells.push_back(metadata.dst_rank.dim(2));
  require(metadata.dst_rank.shape() == cells, job.who, ": dst_rank has shape ",
          to_string(metadata.dst_rank.shape()),
          ", expected [W, S] or [W, S, C] with [W, S] = ", to_string(len.shape()));
  require(metadata.dst_offset.shape() == cells, job.who, ": dst_offset has shape ",
          to_string(metadata.dst_offset.shape()), ", expected ", to_string(cells),
          ", that of dst_rank");
}

void check_tables(const CopyJob& job, const SparseMetadata& metadata) {
  const std::int64_t world = job.world_size();
  require(metadata.world_size == world, job.who, ": world_size = ", metadata.world_size,
          ", expected ", world, ", as many ranks as tensors");
  check_offsets(job.who, "rank_offsets", metadata.rank_offsets, world, metadata.num_entries());
  const std::int64_t copies = metadata.num_destinations();
  if (metadata.copy_offsets.empty()) {
    require(copies == metadata.num_entries(), job.who, ": dst_rank has ", copies,
            " values, expected ", metadata.num_entries(), ", one per entry");
  } else {
    check_offsets(job.who, "copy_offsets", metadata.copy_offsets, metadata.num_entries(), copies);
  }
  require(std::ssize(metadata.dst_offset) == copies, job.who, ": dst_offset has ",
          metadata.dst_offset.size(), " values, expected ", copies, ", as many as dst_rank");
}

}  // namespace

void fail_at(const CopyJob& job, const CopySegment& segment, std::int64_t dst_rank,
             const std::string& what) {
  const auto rank_shape = [](const Shape& all, const auto& views, std::int64_t rank) {
    if (!all.empty()) return to_string(all);
    if (rank < 0 || rank >= std::ssize(views)) return std::string("unknown");
    return to_string(views[static_cast<std::size_t>(rank)].shape);
  };
  throw_invalid(job.who, ": ", what, " (source rank ", segment.src_rank, ", destination rank ",
                dst_rank, ", shard ", segment.shard, ", copy ", segment.copy, ", offset ",
                segment.dst_row, ", length ", segment.rows, ", source shape ",
                rank_shape(job.tensor_shape, job.sources, segment.src_rank), ", output shape ",
                rank_shape(job.output_shape, job.outputs, dst_rank), ", rows consumed ",
                segment.src_row, ")");
}

void check_ends(const CopyJob& job) {
  const ConstTensorView& first = job.sources.front();
  const auto check = [&](const char* name, std::size_t rank, const ConstTensorView& view) {
    require(view.dtype == first.dtype, job.who, ": ", name, " of rank ", rank, " has dtype ",
            view.dtype, ", expected ", first.dtype, ", that of the source of rank 0");
    require(view.shape[1] == first.shape[1], job.who, ": ", name, " of rank ", rank, " has shape ",
            to_string(view.shape), ", expected hidden = ", first.shape[1],
            ", that of the source of rank 0");
  };
  for (std::size_t w = 0; w < job.sources.size(); ++w) check("source", w, job.sources[w]);
  for (std::size_t w = 0; w < job.outputs.size(); ++w) check("output", w, job.outputs[w]);
}

std::vector<CopySegment> checked_segments(const CopyJob& job, const Metadata& metadata) {
  check_tables(job, metadata);
  const Int64View dst_rank(metadata.dst_rank);
  const Int64View dst_offset(metadata.dst_offset);
  const Int64View seq_len(metadata.seq_len);
  const std::int64_t num_shards = metadata.seq_len.dim(1);
  const std::int64_t copies = metadata.dst_rank.ndim() == 3 ? metadata.dst_rank.dim(2) : 1;
  SegmentList list(job, dst_rank.span().size());
  for (std::int64_t w = 0; w < job.world_size(); ++w) {
    list.begin_rank(w);
    for (std::int64_t j = 0; j < num_shards; ++j) {
      const std::int64_t entry = w * num_shards + j;
      const std::int64_t cell = entry * copies;
      list.begin_shard(j, seq_len[entry], copies == 0 ? -1 : dst_rank[cell],
                       copies == 0 ? 0 : dst_offset[cell]);
      for (std::int64_t c = 0; c < copies; ++c) {
        list.add_copy(c, dst_rank[cell + c], dst_offset[cell + c]);
      }
    }
  }
  return list.take();
}

std::vector<CopySegment> checked_segments(const CopyJob& job, const SparseMetadata& metadata) {
  check_tables(job, metadata);
  SegmentList list(job, metadata.dst_rank.size());
  for (std::int64_t w = 0; w < job.world_size(); ++w) {
    list.begin_rank(w);
    const std::int64_t begin = metadata.rank_offsets[static_cast<std::size_t>(w)];
    const std::int64_t end = metadata.rank_offsets[static_cast<std::size_t>(w) + 1];
    for (std::int64_t entry = begin; entry < end; ++entry) {
      const std::int64_t first = metadata.destination_begin(entry);
      const std::int64_t last = metadata.destination_end(entry);
      const auto at = static_cast<std::size_t>(first);
      list.begin_shard(entry - begin, metadata.seq_len[static_cast<std::size_t>(entry)],
                       first == last ? -1 : metadata.dst_rank[at],
                       first == last ? 0 : metadata.dst_offset[at]);
      for (std::int64_t c = first; c < last; ++c) {
        const auto i = static_cast<std::size_t>(c);
        list.add_copy(c - first, metadata.dst_rank[i], metadata.dst_offset[i]);
      }
    }
  }
  return list.take();
}

}  // namespace waybill::detail
