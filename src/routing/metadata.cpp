#include "waybill/routing/metadata.h"

#include <algorithm>
#include <limits>
#include <ostream>

#include "waybill/core/error.h"

namespace waybill {
namespace {

/// The entries of one rank that move something, as positions 0..S-1.
std::vector<std::int64_t> live_entries(const IndexArray& dst_rank, const IndexArray& seq_len) {
  const Int64View dst(dst_rank);
  const Int64View len(seq_len);
  const std::int64_t copies = dst_rank.ndim() == 2 ? dst_rank.dim(1) : 1;
  std::vector<std::int64_t> live;
  for (std::int64_t j = 0; j < seq_len.size(); ++j) {
    bool moves = len[j] > 0;
    for (std::int64_t c = 0; c < copies && !moves; ++c) moves = dst[j * copies + c] >= 0;
    if (moves) live.push_back(j);
  }
  return live;
}

/// Rows `keep` of an array, as a new array with the same dtype.
IndexArray take_rows(const IndexArray& array, const std::vector<std::int64_t>& keep) {
  const Int64View source(array);
  Shape shape = array.shape();
  const std::int64_t row_size = shape[0] == 0 ? 0 : array.size() / shape[0];
  shape[0] = static_cast<std::int64_t>(keep.size());
  std::vector<std::int64_t> values;
  values.reserve(keep.size() * static_cast<std::size_t>(row_size));
  for (const std::int64_t j : keep) {
    const auto first = source.span().begin() + j * row_size;
    values.insert(values.end(), first, first + row_size);
  }
  IndexArray result(shape, values);
  return array.dtype() == DType::int64 ? result : result.to(array.dtype());
}

std::optional<IndexArray> row_of(const std::optional<IndexArray>& array, std::int64_t rank) {
  return array ? std::optional(array->row(rank)) : std::nullopt;
}

std::optional<IndexArray> converted(const std::optional<IndexArray>& array, DType dtype,
                                    const char* name) {
  return array ? std::optional(array->to(dtype, name)) : std::nullopt;
}

/// The fields that do not fit, each as a text that names it, its shape and the expected one.
std::vector<std::string> odd_shapes(const Metadata& m) {
  std::vector<std::string> odd;
  const auto add = [&](const char* field, const Shape& shape, const std::string& expected) {
    odd.push_back(concat(field, " has shape ", to_string(shape), ", expected ", expected));
  };
  const auto expect = [&](const char* field, const IndexArray& array, const Shape& expected) {
    if (array.shape() != expected) add(field, array.shape(), to_string(expected));
  };
  if (m.seq_len.ndim() != 1 && m.seq_len.ndim() != 2) {
    add("seq_len", m.seq_len.shape(), "[W, S], or [n] in a slice");
    return odd;
  }
  Shape entries = m.seq_len.shape();
  if (m.has_copies()) entries.push_back(m.dst_rank.shape().back());
  expect("dst_rank", m.dst_rank, entries);
  expect("dst_offset", m.dst_offset, m.dst_rank.shape());
  if (m.is_slice()) {
    if (m.num_recv_tokens.ndim() != 1) add("num_recv_tokens", m.num_recv_tokens.shape(), "[W + 1]");
    return odd;
  }
  const std::int64_t world = m.seq_len.dim(0);
  if (m.has_counts() && m.num_recv_tokens.shape() != Shape{world, 1})
    expect("num_recv_tokens", m.num_recv_tokens, {world, world + 1});
  if (m.num_seqs && m.num_seqs->shape() != Shape{world, 1})
    expect("num_seqs", *m.num_seqs, {world});
  if (m.world_size && *m.world_size != world) {
    odd.push_back(concat("world_size = ", *m.world_size, ", expected ", world,
                         ", the first extent of seq_len"));
  }
  const std::vector<std::int64_t>& totals = m.num_total_recv_tokens;
  if (!totals.empty() && std::ssize(totals) != world) {
    odd.push_back(concat("num_total_recv_tokens has ", totals.size(), " values, expected ", world));
  }
  const std::optional<IndexArray>& mask = m.seq_recv_mask;
  const std::optional<IndexArray>& lens = m.recv_seq_lens;
  const bool mask_fits = mask && mask->ndim() == 3 && mask->dim(0) == world;
  const bool lens_fit = lens && lens->ndim() == 2 && lens->dim(0) == world;
  if (mask && !mask_fits) add("seq_recv_mask", mask->shape(), concat("[", world, ", S, C]"));
  if (lens && !lens_fit) add("recv_seq_lens", lens->shape(), concat("[", world, ", S]"));
  if (mask_fits && lens_fit) expect("recv_seq_lens", *lens, {world, mask->dim(1)});
  return odd;
}

/// An element of a flat array as int64; the largest number where the value is larger.
std::int64_t number_at(const IndexArray& flat, std::int64_t idx) {
  constexpr std::int64_t largest = std::numeric_limits<std::int64_t>::max();
  if (flat.dtype() != DType::uint64) return flat.flat_at(idx);
  const std::uint64_t value = static_cast<const std::uint64_t*>(flat.data())[idx];
  return value > static_cast<std::uint64_t>(largest) ? largest : static_cast<std::int64_t>(value);
}

/// Where the copies of an entry go; "-" where they go nowhere.
std::string entry_text(const IndexArray& dst_rank, const IndexArray& dst_offset,
                       std::int64_t first_copy, std::int64_t num_copies) {
  std::string text;
  for (std::int64_t c = first_copy; c < first_copy + num_copies; ++c) {
    if (number_at(dst_rank, c) == -1) continue;
    text += concat(text.empty() ? "" : ", ", "rank ", to_string(dst_rank.row(c)), " at ",
                   to_string(dst_offset.row(c)));
  }
  return text.empty() ? "-" : text;
}

/// "receives 3, 4, 7 rows" of one rank; nothing where the counts are missing or do not fit.
std::string counts_text(const Metadata& metadata, std::int64_t rank) {
  const IndexArray& counts = metadata.num_recv_tokens;
  const bool slice = metadata.is_slice();
  if (!metadata.has_counts() || counts.ndim() != (slice ? 1 : 2)) return {};
  if (!slice && rank >= counts.dim(0)) return {};
  const bool has_sum = slice ? counts.size() > 1 : counts.dim(1) == metadata.seq_len.dim(0) + 1;
  return concat("  receives ", to_string(slice ? counts : counts.row(rank)), " rows",
                has_sum ? " (the last is the sum)\n" : "\n");
}

/// A line per shard, when dst_rank, dst_offset and seq_len fit each other.
std::string entries_text(const Metadata& metadata) {
  const bool slice = metadata.is_slice();
  const std::int64_t world = slice ? 1 : metadata.seq_len.dim(0);
  const std::int64_t per_rank = metadata.seq_len.shape().back();
  std::string text = slice ? concat("Metadata of one rank, ", per_rank, " entries")
                           : concat("Metadata of ", world, " ranks, up to ", per_rank, " entries");
  if (metadata.has_copies()) {
    text += concat(", up to ", metadata.dst_rank.shape().back(), " copies");
  }
  text += metadata.normalized ? ", normalized\n" : "\n";
  const IndexArray dst_rank = metadata.dst_rank.reshaped({metadata.dst_rank.size()});
  const IndexArray dst_offset = metadata.dst_offset.reshaped({metadata.dst_offset.size()});
  const IndexArray seq_len = metadata.seq_len.reshaped({metadata.seq_len.size()});
  const std::int64_t copies = metadata.has_copies() ? metadata.dst_rank.shape().back() : 1;
  for (std::int64_t r = 0; r < world; ++r) {
    if (!slice) text += concat("rank ", r, "\n");
    std::int64_t row = 0;
    for (std::int64_t j = r * per_rank; j < (r + 1) * per_rank; ++j) {
      const std::int64_t rows = number_at(seq_len, j);
      const std::string where = entry_text(dst_rank, dst_offset, j * copies, copies);
      if (rows == 0 && where == "-") continue;
      const std::int64_t begin = row;
      if (__builtin_add_overflow(row, rows, &row)) {
        row = rows < 0 ? std::numeric_limits<std::int64_t>::min()
                       : std::numeric_limits<std::int64_t>::max();
      }
      text +=
          concat("  shard ", j - r * per_rank, ": rows ", begin, "..", row, " -> ", where, "\n");
    }
    text += counts_text(metadata, r);
  }
  return text;
}

/// The arrays as they are, when no line per shard can be made of them.
std::string arrays_text(const Metadata& metadata) {
  std::string text = "Metadata of arrays that do not fit each other\n";
  const auto add = [&](const char* field, const IndexArray& array) {
    text += concat("  ", field, ": ", to_string(array), "\n");
  };
  add("dst_rank", metadata.dst_rank);
  add("dst_offset", metadata.dst_offset);
  add("seq_len", metadata.seq_len);
  if (metadata.has_counts()) add("num_recv_tokens", metadata.num_recv_tokens);
  return text;
}

}  // namespace

void Metadata::check_shapes(const char* who) const {
  const std::vector<std::string> odd = odd_shapes(*this);
  if (!odd.empty()) throw_invalid(who, ": ", odd.front());
}

void Metadata::check_counts(const char* who) const {
  const std::int64_t world = is_slice() || seq_len.ndim() == 0 ? 0 : seq_len.dim(0);
  const std::string expected = is_slice() ? "[W + 1]" : to_string(Shape{world, world + 1});
  require(has_counts(), who, ": num_recv_tokens is missing, expected counts of shape ", expected);
  require(is_slice() || num_recv_tokens.shape() == Shape{world, world + 1}, who,
          ": num_recv_tokens has shape ", to_string(num_recv_tokens.shape()), ", expected ",
          expected);
}

Metadata Metadata::get_slice(Rank rank) const {
  require(!is_slice(), "get_slice: this is the slice of one rank already");
  check_shapes("get_slice");
  const std::int64_t world = seq_len.dim(0);
  const std::int64_t r = to_int(rank);
  require(0 <= r && r < world, "get_slice: rank = ", r, ", expected 0..", world - 1);
  const IndexArray rank_dst = dst_rank.row(r);
  const IndexArray rank_len = seq_len.row(r);
  const std::vector<std::int64_t> keep = live_entries(rank_dst, rank_len);
  Metadata slice;
  slice.dst_rank = take_rows(rank_dst, keep);
  slice.dst_offset = take_rows(dst_offset.row(r), keep);
  slice.seq_len = take_rows(rank_len, keep);
  if (has_counts()) slice.num_recv_tokens = num_recv_tokens.row(r);
  slice.seq_recv_mask = row_of(seq_recv_mask, r);
  slice.recv_seq_lens = row_of(recv_seq_lens, r);
  slice.normalized = normalized;
  if (!num_total_recv_tokens.empty()) {
    slice.num_total_recv_tokens = {num_total_recv_tokens[r]};
  }
  return slice;
}

Metadata Metadata::normalize_dtype() const {
  Metadata result;
  result.dst_rank = dst_rank.to(DType::int32, "normalize_dtype: dst_rank");
  result.dst_offset = dst_offset.to(DType::uint32, "normalize_dtype: dst_offset");
  result.seq_len = seq_len.to(DType::uint32, "normalize_dtype: seq_len");
  result.num_recv_tokens = num_recv_tokens.to(DType::uint64, "normalize_dtype: num_recv_tokens");
  result.seq_recv_mask = converted(seq_recv_mask, DType::uint32, "normalize_dtype: seq_recv_mask");
  result.recv_seq_lens = converted(recv_seq_lens, DType::uint32, "normalize_dtype: recv_seq_lens");
  result.num_seqs = converted(num_seqs, DType::int32, "normalize_dtype: num_seqs");
  result.world_size = world_size;
  result.normalized = true;
  result.num_total_recv_tokens = num_total_recv_tokens;
  return result;
}

std::string to_string(const Metadata& metadata) {
  const std::int64_t axes = metadata.seq_len.ndim();
  Shape entries = metadata.seq_len.shape();
  if (metadata.has_copies()) entries.push_back(metadata.dst_rank.shape().back());
  const bool fit = (axes == 1 || axes == 2) && metadata.dst_rank.shape() == entries &&
                   metadata.dst_offset.shape() == entries;
  std::string text = fit ? entries_text(metadata) : arrays_text(metadata);
  for (const std::string& odd : odd_shapes(metadata)) text += concat("odd: ", odd, "\n");
  return text;
}

std::ostream& operator<<(std::ostream& out, const Metadata& metadata) {
  return out << to_string(metadata);
}

}  // namespace waybill
