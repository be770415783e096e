#include "waybill/simulate/orchestrate.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>

#include "core/checks.h"
#include "core/copy_bytes.h"
#include "core/parallel_for.h"
#include "views.h"
#include "waybill/core/error.h"

namespace waybill {
namespace {

using detail::copy_bytes;
using detail::step_of;

/// One shard's rows on their way to one destination.
struct CopySegment {
  std::int32_t src_rank = 0;
  std::int32_t dst_rank = 0;
  std::int64_t shard = 0;  ///< index on its rank
  std::int64_t copy = 0;
  std::int64_t src_row = 0;  ///< also the rows consumed before
  std::int64_t dst_row = 0;
  std::int64_t rows = 0;
};

/// The two ends of a job, rank by rank.
struct CopyJob {
  const char* who = "";                  ///< begins every error text
  std::vector<ConstTensorView> sources;  ///< W x [n_w, H]
  std::vector<TensorView> outputs;       ///< W x [m_w, H]; data may be null until the copy
  Shape tensor_shape = {};               ///< as the caller knows it; empty: that of the rank's view
  Shape output_shape = {};

  [[nodiscard]] std::int64_t world_size() const { return std::ssize(sources); }
};

/// Splits [W, n, H] into its ranks.
template <class Byte>
std::vector<BasicTensorView<Byte>> views_of_ranks(const BasicTensorView<Byte>& all) {
  std::vector<BasicTensorView<Byte>> ranks;
  for (std::int64_t w = 0; w < all.shape[0]; ++w) {
    BasicTensorView<Byte> view;
    view.dtype = all.dtype;
    view.shape = {all.shape[1], all.shape[2]};
    view.strides = {all.strides[1], all.strides[2]};
    const bool empty = all.shape[1] == 0 || all.shape[2] == 0;
    if (!empty) view.data = all.data + w * step_of(all, 0) * dtype_bytes(all.dtype);
    ranks.push_back(std::move(view));
  }
  return ranks;
}

constexpr std::int64_t copy_item_bytes = std::int64_t{1} << 20;

template <std::size_t ElementBytes>
void copy_elements(std::byte* to, std::int64_t to_step, const std::byte* from,
                   std::int64_t from_step, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * to_step, from + i * from_step, ElementBytes);
  }
}

/// Rows first .. first + count of a segment.
void copy_rows(const CopyJob& job, const CopySegment& segment, std::int64_t first,
               std::int64_t count, bool streaming) {
  const ConstTensorView& source = job.sources[segment.src_rank];
  const TensorView& output = job.outputs[segment.dst_rank];
  const std::int64_t hidden = source.shape[1];
  const std::int64_t element_bytes = dtype_bytes(source.dtype);
  const std::int64_t row_bytes = hidden * element_bytes;
  const std::int64_t from_row = step_of(source, 0) * element_bytes;
  const std::int64_t to_row = step_of(output, 0) * element_bytes;
  const std::byte* from = source.data + (segment.src_row + first) * from_row;
  std::byte* to = output.data + (segment.dst_row + first) * to_row;

  const bool unit_steps = hidden == 1 || (source.strides[1] == 1 && output.strides[1] == 1);
  if (unit_steps && (count == 1 || (from_row == row_bytes && to_row == row_bytes))) {
    copy_bytes(to, from, count * row_bytes, streaming);
    return;
  }
  if (unit_steps) {
    for (std::int64_t i = 0; i < count; ++i) {
      copy_bytes(to + i * to_row, from + i * from_row, row_bytes, streaming);
    }
    return;
  }
  const auto copy_row = element_bytes == 1   ? copy_elements<1>
                        : element_bytes == 2 ? copy_elements<2>
                        : element_bytes == 4 ? copy_elements<4>
                                             : copy_elements<8>;
  for (std::int64_t i = 0; i < count; ++i) {
    copy_row(to + i * to_row, output.strides[1] * element_bytes, from + i * from_row,
             source.strides[1] * element_bytes, hidden);
  }
}

/// Segments that write different rows: any thread may take any rows of any segment.
void copy_any_order(const CopyJob& job, const std::vector<CopySegment>& segments,
                    std::int64_t row_bytes, int num_threads) {
  std::vector<std::int64_t> rows_before{0};  // [segments + 1]
  rows_before.reserve(segments.size() + 1);
  for (const CopySegment& segment : segments) {
    rows_before.push_back(rows_before.back() + segment.rows);
  }
  const std::int64_t num_rows = rows_before.back();
  const bool streaming = num_rows > detail::streaming_bytes / row_bytes;
  const std::int64_t grain = std::max<std::int64_t>(1, copy_item_bytes / row_bytes);
  parallel_for(num_rows, grain, num_threads, [&](std::int64_t begin, std::int64_t end) {
    const auto after = std::ranges::upper_bound(rows_before, begin);
    auto i = static_cast<std::size_t>(after - rows_before.begin()) - 1;
    for (std::int64_t row = begin; row < end; ++i) {
      const std::int64_t first = row - rows_before[i];
      const std::int64_t count = std::min(segments[i].rows - first, end - row);
      copy_rows(job, segments[i], first, count, streaming);
      row += count;
    }
    if (streaming) detail::finish_streaming();
  });
}

/// Segments that overlap, one after another on each destination: the last one stays.
void copy_in_order(const CopyJob& job, const std::vector<CopySegment>& segments, int num_threads) {
  parallel_for(job.world_size(), 1, num_threads, [&](std::int64_t begin, std::int64_t end) {
    for (const CopySegment& segment : segments) {
      if (begin <= segment.dst_rank && segment.dst_rank < end)
        copy_rows(job, segment, 0, segment.rows, false);
    }
  });
}

/// Does the job. Nothing can fail any more.
/// @param overlapping two segments write one row
void copy_segments(const CopyJob& job, const std::vector<CopySegment>& segments, bool overlapping,
                   int num_threads) {
  const std::int64_t row_bytes =
      job.sources.front().shape[1] * dtype_bytes(job.sources.front().dtype);
  if (segments.empty() || row_bytes == 0) return;
  if (overlapping) {
    copy_in_order(job, segments, num_threads);
  } else {
    copy_any_order(job, segments, row_bytes, num_threads);
  }
}

/// Throws with everything that is known about a segment, whose `dst_rank` may be no rank at all.
[[noreturn]] void fail_at(const CopyJob& job, const CopySegment& segment, std::int64_t dst_rank,
                          const std::string& what) {
  const auto rank_shape = [](const Shape& all, const auto& views, std::int64_t rank) {
    if (!all.empty()) return to_string(all);
    if (rank < 0 || rank >= std::ssize(views)) return std::string("unknown");
    return to_string(views[rank].shape);
  };
  throw_invalid(job.who, ": ", what, " (source rank ", segment.src_rank, ", destination rank ",
                dst_rank, ", shard ", segment.shard, ", copy ", segment.copy, ", offset ",
                segment.dst_row, ", length ", segment.rows, ", source shape ",
                rank_shape(job.tensor_shape, job.sources, segment.src_rank), ", output shape ",
                rank_shape(job.output_shape, job.outputs, dst_rank), ", rows consumed ",
                segment.src_row, ")");
}

/// All ends have one dtype and one H.
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

/// Checks segments as they come, in the global order, and keeps those with rows.
class SegmentList {
 public:
  SegmentList(const CopyJob& job, std::size_t expected) : job_(job) { segments_.reserve(expected); }

  void begin_rank(std::int64_t rank) {
    at_.src_rank = static_cast<std::int32_t>(rank);
    next_row_ = 0;
    source_rows_ = job_.sources[rank].shape[0];
  }

  /// A shard and its copies, of which the tables have the ranks and rows at [first, last).
  template <class Ranks, class Rows>
  void add_shard(std::int64_t shard, std::int64_t rows, const Ranks& dst_rank, const Rows& dst_row,
                 std::int64_t first, std::int64_t last) {
    const bool none = first == last;
    begin_shard(shard, rows, none ? -1 : dst_rank[first], none ? 0 : dst_row[first]);
    for (std::int64_t c = first; c < last; ++c) add_copy(c - first, dst_rank[c], dst_row[c]);
  }

  [[nodiscard]] std::vector<CopySegment> take() { return std::move(segments_); }

 private:
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
    const std::int64_t num_rows = job_.outputs[dst_rank].shape[0];
    if (dst_row < 0) fail_at(job_, at_, dst_rank, concat("offset = ", dst_row, ", expected >= 0"));
    if (at_.rows > num_rows || dst_row > num_rows - at_.rows) {
      fail_at(job_, at_, dst_rank,
              concat("offset + length exceeds the ", num_rows, " rows of the destination"));
    }
    if (at_.rows > 0) segments_.push_back(at_);
  }

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

/// The segments of a job in the global order (source rank, shard, copy), every one checked against
/// both ends; those without rows are checked, then left out. @throws InvalidArgument
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
      list.add_shard(j, seq_len[entry], dst_rank, dst_offset, entry * copies, (entry + 1) * copies);
    }
  }
  return list.take();
}

std::vector<CopySegment> checked_segments(const CopyJob& job, const SparseMetadata& metadata) {
  check_tables(job, metadata);
  SegmentList list(job, metadata.dst_rank.size());
  for (std::int64_t w = 0; w < job.world_size(); ++w) {
    list.begin_rank(w);
    const std::int64_t begin = metadata.rank_offsets[w];
    for (std::int64_t entry = begin; entry < metadata.rank_offsets[w + 1]; ++entry) {
      list.add_shard(entry - begin, metadata.seq_len[entry], metadata.dst_rank, metadata.dst_offset,
                     metadata.destination_begin(entry), metadata.destination_end(entry));
    }
  }
  return list.take();
}

[[noreturn]] void fail_overlap(const CopyJob& job, const CopySegment& earlier,
                               const CopySegment& later) {
  fail_at(job, later, later.dst_rank,
          concat("rows ", std::max(earlier.dst_row, later.dst_row), "..",
                 std::min(earlier.dst_row + earlier.rows, later.dst_row + later.rows) - 1,
                 " of the destination are also written by source rank ", earlier.src_rank,
                 ", shard ", earlier.shard, ", copy ", earlier.copy, " at offset ", earlier.dst_row,
                 ", length ", earlier.rows));
}

/// Every destination is filled upwards: nothing overlaps, and nothing is left to look at.
bool come_in_order(const CopyJob& job, const std::vector<CopySegment>& segments) {
  std::vector<std::int64_t> filled(job.outputs.size());
  return std::ranges::all_of(segments, [&](const CopySegment& segment) {
    std::int64_t& end = filled[segment.dst_rank];
    const bool above = segment.dst_row >= end;
    end = segment.dst_row + segment.rows;
    return above;
  });
}

/// True: no row is taken twice. False: perhaps; sorting will tell. Linear in the segments and the
/// rows that they write, of which it reads 64 at a time.
bool surely_disjoint(const CopyJob& job, const std::vector<CopySegment>& segments) {
  if (come_in_order(job, segments)) return true;
  constexpr std::int64_t max_words_per_segment = 64;
  std::vector<std::int64_t> first_word{0};  // [W + 1] bits of rows, set when a segment takes them
  for (const TensorView& output : job.outputs) {
    first_word.push_back(first_word.back() + output.shape[0] / 64 + 1);
    if (first_word.back() / max_words_per_segment > std::ssize(segments)) return false;
  }
  std::vector<std::uint64_t> taken(static_cast<std::size_t>(first_word.back()));
  return std::ranges::all_of(segments, [&](const CopySegment& segment) {
    std::uint64_t* const words = taken.data() + first_word[segment.dst_rank];
    bool free = true;
    for (std::int64_t row = segment.dst_row, end = row + segment.rows; row < end;) {
      const std::int64_t count = std::min(end - row, 64 - row % 64);
      const std::uint64_t mask = (~std::uint64_t{0} >> (64 - count)) << (row % 64);
      free = free && (words[row / 64] & mask) == 0;
      words[row / 64] |= mask;
      row += count;
    }
    return free;
  });
}

/// Whether two segments write one row. Linear, but for outputs that are nearly empty and filled out
/// of order: these cost a sort. @throws InvalidArgument unless allowed
bool find_overlaps(const CopyJob& job, const std::vector<CopySegment>& segments, Overlap overlap) {
  if (surely_disjoint(job, segments)) return false;
  std::vector<std::size_t> by_place(segments.size());
  std::iota(by_place.begin(), by_place.end(), 0);
  std::ranges::sort(by_place, {}, [&](std::size_t i) {
    return std::tuple(segments[i].dst_rank, segments[i].dst_row, i);
  });
  bool found = false;
  // In the order of their first rows, it is enough to look at neighbours.
  for (std::size_t k = 1; k < by_place.size(); ++k) {
    const CopySegment& below = segments[by_place[k - 1]];
    const CopySegment& above = segments[by_place[k]];
    if (above.dst_rank != below.dst_rank || above.dst_row >= below.dst_row + below.rows) continue;
    const auto [earlier, later] = std::minmax(by_place[k - 1], by_place[k]);
    if (overlap == Overlap::reject) fail_overlap(job, segments[earlier], segments[later]);
    found = true;
  }
  return found;
}

/// Checks a job whose ends have their memory, then does it.
template <class AnyMetadata>
void run_job(const CopyJob& job, const AnyMetadata& metadata, const SimulateOptions& options) {
  const std::vector<CopySegment> segments = checked_segments(job, metadata);
  const bool overlapping = find_overlaps(job, segments, options.overlap);
  copy_segments(job, segments, overlapping, options.num_threads);
}

void check_world(const char* who, std::int64_t num_ranks) {
  detail::check_range(who, "world_size", num_ranks, 1, max_world_size);
}

void check_shapes(const char* who, const Shape& tensor, const Shape& output) {
  require(tensor[0] == output[0] && tensor[2] == output[2], who, ": output has shape ",
          to_string(output), ", expected [", tensor[0], ", rows, ", tensor[2],
          "] for tensor of shape ", to_string(tensor));
  check_world(who, tensor[0]);
}

/// R_w of simulate_communication.
std::vector<std::int64_t> recv_rows(const char* who, const IndexArray& counts, std::int64_t world) {
  require(counts.shape() != Shape{0}, who, ": num_recv_tokens is missing, expected [", world, ", ",
          world + 1, "] counts, or [", world, ", 1]");
  require(counts.ndim() == 2 && counts.dim(0) == world && counts.dim(1) >= 1, who,
          ": num_recv_tokens has shape ", to_string(counts.shape()), ", expected [", world, ", ",
          world + 1, "]");
  const Int64View values(counts);
  const std::int64_t columns = counts.dim(1);
  std::vector<std::int64_t> rows;
  for (std::int64_t w = 0; w < world; ++w) {
    const auto row = values.span().subspan(w * columns, columns);
    const auto [low, high] = std::ranges::minmax(row);
    require(low >= 0, who, ": num_recv_tokens of rank ", w, " holds ", low, ", expected >= 0");
    rows.push_back(high);
  }
  return rows;
}

}  // namespace

void orchestrate_simulate(const ConstTensorView& tensor, const TensorView& output,
                          const Metadata& metadata, const SimulateOptions& options) {
  const char* who = "orchestrate_simulate";
  detail::check_at_least(who, "num_threads", options.num_threads, 0);
  detail::check_view(who, "tensor", tensor, 3);
  detail::check_view(who, "output", output, 3);
  require(tensor.dtype == output.dtype, who, ": output has dtype ", output.dtype, ", expected ",
          tensor.dtype, ", that of tensor");
  check_shapes(who, tensor.shape, output.shape);
  detail::check_memory(who, {&tensor, 1}, {&output, 1});
  CopyJob job{who, views_of_ranks(tensor), views_of_ranks(output), tensor.shape, output.shape};
  run_job(job, metadata, options);
}

IndexArray source_rows(const Shape& tensor_shape, const Shape& output_shape,
                       const Metadata& metadata, const SimulateOptions& options) {
  const char* who = "orchestrate_simulate";
  detail::check_at_least(who, "num_threads", options.num_threads, 0);
  for (const Shape* shape : {&tensor_shape, &output_shape}) {
    require(shape->size() == 3, who, ": ", shape == &tensor_shape ? "tensor" : "output",
            " has shape ", to_string(*shape), ", expected 3 axes");
    std::ignore = num_elements(*shape, who);
  }
  check_shapes(who, tensor_shape, output_shape);
  const std::int64_t world = tensor_shape[0];
  const std::int64_t num_rows = tensor_shape[1];
  IndexArray numbers({world, num_rows});
  std::iota(numbers.i64().begin(), numbers.i64().end(), std::int64_t{0});
  IndexArray rows = IndexArray::full({world, output_shape[1]}, -1);
  const ConstTensorView from(numbers.data(), DType::int64, {world, num_rows, 1});
  const TensorView to(rows.data(), DType::int64, {world, output_shape[1], 1});
  CopyJob job{who, views_of_ranks(from), views_of_ranks(to), tensor_shape, output_shape};
  run_job(job, metadata, options);
  return rows;
}

std::vector<HostTensor> simulate_communication(std::span<const ConstTensorView> tensors,
                                               const Metadata& metadata,
                                               const SimulateOptions& options) {
  const char* who = "simulate_communication";
  detail::check_at_least(who, "num_threads", options.num_threads, 0);
  check_world(who, std::ssize(tensors));
  for (const ConstTensorView& tensor : tensors) detail::check_view(who, "tensor", tensor, 2);
  const auto world = static_cast<std::int64_t>(tensors.size());
  const std::vector<std::int64_t> rows = recv_rows(who, metadata.num_recv_tokens, world);
  CopyJob job{who, {tensors.begin(), tensors.end()}, {}};
  for (const std::int64_t num_rows : rows) {  // without memory until all is checked
    job.outputs.emplace_back(nullptr, tensors[0].dtype, Shape{num_rows, tensors[0].shape[1]});
  }
  check_ends(job);
  const std::vector<CopySegment> segments = checked_segments(job, metadata);
  const bool overlapping = find_overlaps(job, segments, options.overlap);
  std::vector<std::int64_t> sent(tensors.size());
  for (const CopySegment& segment : segments) {
    std::int64_t& to_rank = sent[segment.dst_rank];
    require(!__builtin_add_overflow(to_rank, segment.rows, &to_rank), who,
            ": the entries send 2^63 rows or more to rank ", segment.dst_rank);
  }
  std::vector<HostTensor> result;
  for (std::size_t w = 0; w < tensors.size(); ++w) {
    require(sent[w] == rows[w], who, ": num_recv_tokens of rank ", w, " gives ", rows[w],
            " rows, expected ", sent[w], ", the rows that the entries send to it");
  }
  for (const TensorView& output : job.outputs) result.emplace_back(output.dtype, output.shape);
  for (std::size_t w = 0; w < result.size(); ++w) job.outputs[w] = result[w].view();
  copy_segments(job, segments, overlapping, options.num_threads);
  return result;
}

void simulate_dispatch(std::span<const ConstTensorView> sources,
                       std::span<const TensorView> outputs, const SparseMetadata& metadata,
                       const SimulateOptions& options) {
  const char* who = "simulate_dispatch";
  detail::check_at_least(who, "num_threads", options.num_threads, 0);
  check_world(who, std::ssize(sources));
  require(sources.size() == outputs.size(), who, ": got ", outputs.size(), " outputs, expected ",
          sources.size(), ", as many as sources");
  for (const ConstTensorView& source : sources) detail::check_view(who, "source", source, 2);
  for (const TensorView& output : outputs) detail::check_view(who, "output", output, 2);
  CopyJob job{who, {sources.begin(), sources.end()}, {outputs.begin(), outputs.end()}};
  check_ends(job);
  detail::check_memory(who, sources, outputs);
  run_job(job, metadata, options);
}

}  // namespace waybill
