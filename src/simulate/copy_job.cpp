#include "copy_job.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "core/copy_bytes.h"
#include "core/parallel_for.h"
#include "waybill/core/error.h"
#include "waybill/core/index_array.h"

namespace waybill::detail {
namespace {

constexpr std::int64_t max_bytes = std::int64_t{1} << 62;

/// Step in bytes and extent. The step is > 0: the direction does not matter for what is covered.
using Axis = std::pair<std::int64_t, std::int64_t>;

/// The memory of a non-empty view: an unbroken block, repeated along the other axes.
struct Footprint {
  std::uintptr_t begin;  ///< lowest address
  std::uintptr_t end;    ///< past the highest
  std::int64_t block_bytes;
  std::int64_t step_gcd_bytes;  ///< the repeats' steps; 0 without any
};

bool is_empty(const ConstTensorView& view) {
  return std::ranges::any_of(view.shape, [](std::int64_t extent) { return extent == 0; });
}

/// Axes with more than one element, smallest step first.
std::vector<Axis> moving_axes(const ConstTensorView& view) {
  std::vector<Axis> axes;
  const std::int64_t element_bytes = dtype_bytes(view.dtype);
  for (std::size_t i = 0; i < view.shape.size(); ++i) {
    if (view.shape[i] > 1)
      axes.emplace_back(std::abs(view.strides[i]) * element_bytes, view.shape[i]);
  }
  std::ranges::stable_sort(axes, {}, &Axis::first);
  return axes;
}

Footprint footprint_of(const ConstTensorView& view) {
  const std::int64_t element_bytes = dtype_bytes(view.dtype);
  std::int64_t below = 0;
  std::int64_t above = element_bytes;
  for (std::size_t i = 0; i < view.shape.size(); ++i) {
    const std::int64_t reach = (view.shape[i] - 1) * view.strides[i] * element_bytes;
    (reach < 0 ? below : above) += reach;
  }
  Footprint result{};
  const auto first = reinterpret_cast<std::uintptr_t>(view.data);
  result.begin = first - static_cast<std::uintptr_t>(-below);
  result.end = first + static_cast<std::uintptr_t>(above);
  result.block_bytes = element_bytes;
  for (const auto& [step_bytes, extent] : moving_axes(view)) {
    if (step_bytes == 0) continue;
    if (step_bytes == result.block_bytes && result.step_gcd_bytes == 0) {
      result.block_bytes *= extent;
    } else {
      result.step_gcd_bytes = std::gcd(result.step_gcd_bytes, step_bytes);
    }
  }
  return result;
}

/// One end of a job on the sweep over addresses.
struct Piece {
  Footprint footprint;
  bool is_output;
  std::size_t idx;
};

void check_pair(const char* who, std::span<const ConstTensorView> sources,
                std::span<const TensorView> outputs, const Piece& a, const Piece& b) {
  const Piece& output = a.is_output ? a : b;
  const Piece& other = a.is_output ? b : a;
  const ConstTensorView output_view = outputs[output.idx];
  const ConstTensorView other_view = other.is_output ? outputs[other.idx] : sources[other.idx];
  require(!may_share_memory(output_view, other_view), who, ": output ", output.idx, " of shape ",
          to_string(output_view.shape), " shares memory with ",
          other.is_output ? "output " : "source ", other.idx, " of shape ",
          to_string(other_view.shape), ", expected memory of its own");
}

}  // namespace

void check_view(const char* who, const char* name, const ConstTensorView& view, std::int64_t ndim) {
  require(view.ndim() == ndim, who, ": ", name, " has shape ", to_string(view.shape), ", expected ",
          ndim, " dimensions");
  require(view.strides.size() == view.shape.size(), who, ": ", name, " has strides ",
          to_string(view.strides), ", expected ", ndim, " of them");
  (void)num_elements(view.shape, concat(who, ": ", name).c_str());
  if (is_empty(view)) return;
  require(view.data != nullptr, who, ": ", name, " of shape ", to_string(view.shape),
          " has no memory");
  std::int64_t reach_bytes = 0;
  for (std::size_t i = 0; i < view.shape.size(); ++i) {
    std::int64_t reach = 0;
    if (view.shape[i] == 1) continue;  // its stride is never used
    const bool fits = view.strides[i] != std::numeric_limits<std::int64_t>::min() &&
                      !__builtin_mul_overflow(view.shape[i], std::abs(view.strides[i]), &reach) &&
                      !__builtin_mul_overflow(reach, dtype_bytes(view.dtype), &reach) &&
                      !__builtin_add_overflow(reach_bytes, reach, &reach_bytes) &&
                      reach_bytes <= max_bytes;
    require(fits, who, ": ", name, " has shape ", to_string(view.shape), " and strides ",
            to_string(view.strides), ", expected at most 2^62 bytes from end to end");
  }
}

bool is_injective(const ConstTensorView& view) {
  if (is_empty(view)) return true;
  std::int64_t reach = 0;  // along all axes with smaller steps
  for (const auto& [step_bytes, extent] : moving_axes(view)) {
    if (step_bytes <= reach) return false;
    reach += (extent - 1) * step_bytes;
  }
  return true;
}

bool may_share_memory(const ConstTensorView& a, const ConstTensorView& b) {
  if (is_empty(a) || is_empty(b)) return false;
  const Footprint fa = footprint_of(a);
  const Footprint fb = footprint_of(b);
  if (fa.end <= fb.begin || fb.end <= fa.begin) return false;
  // Both repeat in steps of a common divisor: apart when they keep to different parts of it.
  const std::int64_t step = std::gcd(fa.step_gcd_bytes, fb.step_gcd_bytes);
  if (step == 0) return true;
  const auto unsigned_step = static_cast<std::uintptr_t>(step);
  const std::uintptr_t gap =
      fb.begin >= fa.begin
          ? (fb.begin - fa.begin) % unsigned_step
          : (unsigned_step - (fa.begin - fb.begin) % unsigned_step) % unsigned_step;
  const auto distance = static_cast<std::int64_t>(gap);
  return distance < fa.block_bytes || distance + fb.block_bytes > step;
}

void check_memory(const char* who, std::span<const ConstTensorView> sources,
                  std::span<const TensorView> outputs) {
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    if (!is_empty(sources[i])) pieces.push_back({footprint_of(sources[i]), false, i});
  }
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    require(is_injective(outputs[i]), who, ": output ", i, " has shape ",
            to_string(outputs[i].shape), " and strides ", to_string(outputs[i].strides),
            ", expected no two elements at one address");
    if (!is_empty(outputs[i])) pieces.push_back({footprint_of(outputs[i]), true, i});
  }
  std::ranges::sort(pieces, {}, [](const Piece& piece) { return piece.footprint.begin; });
  std::vector<const Piece*> open_sources;
  std::vector<const Piece*> open_outputs;
  for (const Piece& piece : pieces) {
    const auto is_over = [&](const Piece* open) {
      return open->footprint.end <= piece.footprint.begin;
    };
    std::erase_if(open_sources, is_over);
    std::erase_if(open_outputs, is_over);
    for (const Piece* open : open_outputs) check_pair(who, sources, outputs, piece, *open);
    if (piece.is_output) {
      for (const Piece* open : open_sources) check_pair(who, sources, outputs, piece, *open);
    }
    (piece.is_output ? open_outputs : open_sources).push_back(&piece);
  }
}

namespace {

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
    copy_bytes(to, from, static_cast<std::size_t>(count * row_bytes), streaming);
    return;
  }
  if (unit_steps) {
    for (std::int64_t i = 0; i < count; ++i) {
      copy_bytes(to + i * to_row, from + i * from_row, static_cast<std::size_t>(row_bytes),
                 streaming);
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
  const bool streaming = num_rows > streaming_bytes / row_bytes;
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
    if (streaming) finish_streaming();
  });
}

/// Segments of one destination one after another: the last one stays.
void copy_in_order(const CopyJob& job, const std::vector<CopySegment>& segments,
                   const Destinations& destinations, int num_threads) {
  parallel_for(job.world_size(), 1, num_threads, [&](std::int64_t begin, std::int64_t end) {
    const auto first = destinations.offsets[begin];
    const auto last = destinations.offsets[end];
    for (std::int64_t k = first; k < last; ++k) {
      const auto i = static_cast<std::size_t>(destinations.segments[k]);
      copy_rows(job, segments[i], 0, segments[i].rows, false);
    }
  });
}

}  // namespace

void copy_segments(const CopyJob& job, const std::vector<CopySegment>& segments,
                   const Destinations& destinations, int num_threads) {
  const std::int64_t row_bytes =
      job.sources.front().shape[1] * dtype_bytes(job.sources.front().dtype);
  if (segments.empty() || row_bytes == 0) return;
  if (destinations.overlapping) {
    copy_in_order(job, segments, destinations, num_threads);
  } else {
    copy_any_order(job, segments, row_bytes, num_threads);
  }
}

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
    const std::int64_t num_rows = job_.outputs[dst_rank].shape[0];
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
    source_rows_ = job_.sources[rank].shape[0];
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
    return to_string(views[rank].shape);
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
    const std::int64_t begin = metadata.rank_offsets[w];
    const std::int64_t end = metadata.rank_offsets[w + 1];
    for (std::int64_t entry = begin; entry < end; ++entry) {
      const std::int64_t first = metadata.destination_begin(entry);
      const std::int64_t last = metadata.destination_end(entry);
      const auto at = static_cast<std::size_t>(first);
      list.begin_shard(entry - begin, metadata.seq_len[entry],
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

namespace {

Destinations group_by_destination(const std::vector<CopySegment>& segments, std::size_t world) {
  Destinations groups;
  groups.offsets.assign(world + 1, 0);
  for (const CopySegment& segment : segments) {
    ++groups.offsets[segment.dst_rank + 1];
  }
  for (std::size_t r = 0; r < world; ++r) groups.offsets[r + 1] += groups.offsets[r];
  groups.segments.resize(segments.size());
  std::vector<std::int64_t> next(groups.offsets.begin(), groups.offsets.end() - 1);
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const auto r = static_cast<std::size_t>(segments[i].dst_rank);
    groups.segments[next[r]++] = static_cast<std::int64_t>(i);
  }
  return groups;
}

/// A segment after its first row at the destination; ties in the global order.
using Placed = std::pair<std::int64_t, std::size_t>;

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

/// A bit a row of every output, set when a segment takes it.
class TakenRows {
 public:
  explicit TakenRows(const CopyJob& job) {
    for (const TensorView& output : job.outputs) {
      first_word_.push_back(num_words_);
      num_words_ = std::min(num_words_ + output.shape[0] / 64 + 1, max_words);
    }
  }

  /// Up to max_words.
  [[nodiscard]] std::int64_t num_words() const { return num_words_; }
  void clear() { words_.assign(static_cast<std::size_t>(num_words_), 0); }

  /// False: one of the rows was taken before.
  [[nodiscard]] bool take(const CopySegment& segment) {
    std::uint64_t* words = words_.data() + first_word_[segment.dst_rank];
    bool free = true;
    for (std::int64_t row = segment.dst_row, end = row + segment.rows; row < end;) {
      const std::int64_t count = std::min(end - row, 64 - row % 64);
      const std::uint64_t mask = (~std::uint64_t{0} >> (64 - count)) << (row % 64);
      free = free && (words[row / 64] & mask) == 0;
      words[row / 64] |= mask;
      row += count;
    }
    return free;
  }

 private:
  static constexpr std::int64_t max_words = std::int64_t{1} << 60;  // more is never cleared

  std::vector<std::int64_t> first_word_;
  std::int64_t num_words_ = 0;
  std::vector<std::uint64_t> words_;
};

/// True: no row is taken twice. False: perhaps; sorting will tell. Linear in the segments and the
/// rows that they write, of which it reads 64 at a time.
bool surely_disjoint(const CopyJob& job, const std::vector<CopySegment>& segments) {
  if (come_in_order(job, segments)) return true;
  TakenRows taken(job);
  constexpr std::int64_t words_per_segment = 64;
  if (taken.num_words() / words_per_segment > std::ssize(segments)) return false;
  taken.clear();
  return std::ranges::all_of(segments,
                             [&](const CopySegment& segment) { return taken.take(segment); });
}

}  // namespace

Destinations find_destinations(const CopyJob& job, const std::vector<CopySegment>& segments,
                               Overlap overlap) {
  if (surely_disjoint(job, segments)) return {};
  Destinations groups = group_by_destination(segments, job.sources.size());
  std::vector<Placed> placed;
  for (std::size_t r = 0; r < job.sources.size(); ++r) {
    placed.clear();
    for (std::int64_t k = groups.offsets[r]; k < groups.offsets[r + 1]; ++k) {
      const auto segment = static_cast<std::size_t>(groups.segments[k]);
      placed.emplace_back(segments[segment].dst_row, segment);
    }
    if (!std::ranges::is_sorted(placed)) std::ranges::sort(placed);
    // In the order of their first rows, it is enough to look at neighbours.
    for (std::size_t k = 1; k < placed.size(); ++k) {
      const auto [earlier, later] = std::minmax(placed[k - 1].second, placed[k].second);
      if (placed[k].first >= placed[k - 1].first + segments[placed[k - 1].second].rows) continue;
      if (overlap == Overlap::reject) fail_overlap(job, segments[earlier], segments[later]);
      groups.overlapping = true;
    }
  }
  return groups;
}

}  // namespace waybill::detail
