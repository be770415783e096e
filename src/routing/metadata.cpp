#include "waybill/routing/metadata.h"

#include <algorithm>
#include <limits>
#include <ostream>
#include <utility>

#include "waybill/core/error.h"

namespace waybill {
namespace {

void check_shape(const char* who, const char* field, const IndexArray& array,
                 const Shape& expected) {
  require(array.shape() == expected, who, ": ", field, " has shape ", to_string(array.shape()),
          ", expected ", to_string(expected));
}

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

std::string entry_text(const Metadata& metadata, const Int64View& dst, const Int64View& offset,
                       std::int64_t entry) {
  if (!metadata.has_copies()) {
    return dst[entry] < 0 ? "-" : concat("rank ", dst[entry], " at ", offset[entry]);
  }
  const std::int64_t copies = metadata.dst_rank.shape().back();
  std::string text;
  for (std::int64_t c = entry * copies; c < (entry + 1) * copies; ++c) {
    if (dst[c] < 0) continue;
    text += concat(text.empty() ? "" : ", ", "rank ", dst[c], " at ", offset[c]);
  }
  return text.empty() ? "-" : text;
}

}  // namespace

void Metadata::check_shapes(const char* who) const {
  require(seq_len.ndim() == 1 || seq_len.ndim() == 2, who, ": seq_len has shape ",
          to_string(seq_len.shape()), ", expected [W, S], or [n] in a slice");
  Shape entries = seq_len.shape();
  if (has_copies()) entries.push_back(dst_rank.shape().back());
  check_shape(who, "dst_rank", dst_rank, entries);
  check_shape(who, "dst_offset", dst_offset, dst_rank.shape());
  if (is_slice()) {
    require(num_recv_tokens.ndim() == 1 && num_recv_tokens.size() >= 1, who,
            ": num_recv_tokens has shape ", to_string(num_recv_tokens.shape()),
            ", expected [W + 1]");
    return;
  }
  const std::int64_t world = seq_len.dim(0);
  check_shape(who, "num_recv_tokens", num_recv_tokens, {world, world + 1});
  if (num_seqs) check_shape(who, "num_seqs", *num_seqs, {world});
  require(!world_size || *world_size == world, who, ": world_size = ", world_size.value_or(0),
          ", expected ", world, ", the first extent of seq_len");
  require(num_total_recv_tokens.empty() || std::ssize(num_total_recv_tokens) == world, who,
          ": num_total_recv_tokens has ", num_total_recv_tokens.size(), " values, expected ",
          world);
  require(!seq_recv_mask || (seq_recv_mask->ndim() == 3 && seq_recv_mask->dim(0) == world), who,
          ": seq_recv_mask has shape ", to_string(seq_recv_mask ? seq_recv_mask->shape() : Shape{}),
          ", expected [", world, ", S, C]");
  require(!recv_seq_lens || (recv_seq_lens->ndim() == 2 && recv_seq_lens->dim(0) == world), who,
          ": recv_seq_lens has shape ", to_string(recv_seq_lens ? recv_seq_lens->shape() : Shape{}),
          ", expected [", world, ", S]");
  if (seq_recv_mask && recv_seq_lens) {
    check_shape(who, "recv_seq_lens", *recv_seq_lens, {world, seq_recv_mask->dim(1)});
  }
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
  slice.num_recv_tokens = num_recv_tokens.row(r);
  slice.seq_recv_mask = row_of(seq_recv_mask, r);
  slice.recv_seq_lens = row_of(recv_seq_lens, r);
  slice.normalized = normalized;
  if (!num_total_recv_tokens.empty()) {
    slice.num_total_recv_tokens = {num_total_recv_tokens[static_cast<std::size_t>(r)]};
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
  metadata.check_shapes("to_string(Metadata)");
  const Int64View dst(metadata.dst_rank);
  const Int64View offset(metadata.dst_offset);
  const Int64View len(metadata.seq_len);
  const bool slice = metadata.is_slice();
  const std::int64_t world = slice ? 1 : metadata.seq_len.dim(0);
  const std::int64_t per_rank = metadata.seq_len.shape().back();
  std::string text = slice ? concat("Metadata of one rank, ", per_rank, " entries")
                           : concat("Metadata of ", world, " ranks, up to ", per_rank, " entries");
  if (metadata.has_copies()) {
    text += concat(", up to ", metadata.dst_rank.shape().back(), " copies");
  }
  text += metadata.normalized ? ", normalized\n" : "\n";
  for (std::int64_t r = 0; r < world; ++r) {
    if (!slice) text += concat("rank ", r, "\n");
    std::int64_t row = 0;
    for (std::int64_t j = r * per_rank; j < (r + 1) * per_rank; ++j) {
      const std::string where = entry_text(metadata, dst, offset, j);
      if (len[j] == 0 && where == "-") continue;
      const std::int64_t begin = row;
      if (__builtin_add_overflow(row, len[j], &row)) row = std::numeric_limits<std::int64_t>::max();
      text +=
          concat("  shard ", j - r * per_rank, ": rows ", begin, "..", row, " -> ", where, "\n");
    }
    const IndexArray recv = slice ? metadata.num_recv_tokens : metadata.num_recv_tokens.row(r);
    text += concat("  receives ", to_string(recv), " rows (the last is the sum)\n");
  }
  return text;
}

std::ostream& operator<<(std::ostream& out, const Metadata& metadata) {
  return out << to_string(metadata);
}

}  // namespace waybill
