#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "waybill/core/index_array.h"
#include "waybill/routing/metadata.h"

namespace waybill::test {

/// One copy of one shard on its way: what a metadata table says, as a plain record.
struct Sent {
  std::int64_t src = 0;    ///< home rank
  std::int64_t shard = 0;  ///< index on the home rank
  std::int64_t copy = 0;
  std::int64_t dst = 0;
  std::int64_t dst_offset = 0;
  std::int64_t len = 0;
};

/// One element of an int64 array, to write.
inline std::int64_t& element(IndexArray& array, std::vector<std::int64_t> place) {
  std::int64_t flat = 0;
  for (std::size_t i = 0; i < place.size(); ++i) {
    flat = flat * array.shape()[i] + place[i];
  }
  return array.i64()[static_cast<std::size_t>(flat)];
}

/// First row of shard s on rank w, from [W, S] lengths.
inline std::int64_t begin_of(const IndexArray& seq_len, std::int64_t w, std::int64_t s) {
  std::int64_t rows = 0;
  for (std::int64_t i = 0; i < s; ++i) rows += seq_len.at({w, i});
  return rows;
}

inline std::int64_t rows_of(const IndexArray& seq_len, std::int64_t w) {
  return begin_of(seq_len, w, seq_len.dim(1));
}

/// Where compute_metadata puts every shard (copy), in the order in which it is placed.
inline std::vector<Sent> model_q_sends(const IndexArray& seq_len, const IndexArray& dispatch) {
  const std::int64_t copies = dispatch.ndim() == 3 ? dispatch.dim(2) : 1;
  std::vector<std::int64_t> rows(static_cast<std::size_t>(seq_len.dim(0)));
  std::vector<Sent> sends;
  for (std::int64_t w = 0; w < seq_len.dim(0); ++w) {
    for (std::int64_t s = 0; s < seq_len.dim(1); ++s) {
      for (std::int64_t c = 0; c < copies; ++c) {
        const std::int64_t dst =
            dispatch.ndim() == 3 ? dispatch.at({w, s, c}) : dispatch.at({w, s});
        if (dst < 0) continue;
        std::int64_t& filled = rows[static_cast<std::size_t>(dst)];
        sends.push_back({w, s, c, dst, filled, seq_len.at({w, s})});
        filled += seq_len.at({w, s});
      }
    }
  }
  return sends;
}

/// [W, W + 1] counts and their totals, from (receiver, sender, rows).
inline void model_counts(Metadata& metadata, std::int64_t world_size,
                         const std::vector<Sent>& sends, bool reverse) {
  metadata.world_size = world_size;
  metadata.num_recv_tokens = IndexArray(Shape{world_size, world_size + 1});
  for (const Sent& sent : sends) {
    const std::int64_t receiver = reverse ? sent.src : sent.dst;
    const std::int64_t sender = reverse ? sent.dst : sent.src;
    element(metadata.num_recv_tokens, {receiver, sender}) += sent.len;
    element(metadata.num_recv_tokens, {receiver, world_size}) += sent.len;
  }
  for (std::int64_t r = 0; r < world_size; ++r) {
    metadata.num_total_recv_tokens.push_back(metadata.num_recv_tokens.at({r, world_size}));
  }
}

/// The forward table of these sends. copies = 0: 2-D.
inline Metadata model_forward(const IndexArray& seq_len, std::int64_t copies,
                              const std::vector<Sent>& sends, const IndexArray& num_seqs) {
  Shape entries = seq_len.shape();
  if (copies > 0) entries.push_back(copies);
  Metadata metadata;
  metadata.dst_rank = IndexArray::full(entries, -1);
  metadata.dst_offset = IndexArray(entries);
  metadata.seq_len = seq_len;
  metadata.num_seqs = num_seqs;
  for (const Sent& sent : sends) {
    std::vector<std::int64_t> place{sent.src, sent.shard};
    if (copies > 0) place.push_back(sent.copy);
    element(metadata.dst_rank, place) = sent.dst;
    element(metadata.dst_offset, place) = sent.dst_offset;
  }
  model_counts(metadata, seq_len.dim(0), sends, false);
  return metadata;
}

/// What a reverse table counts in num_seqs: Q counts entries with rows, KV all entries.
enum class Counted { with_rows, all };

/// The reverse table: `sends` of one destination stand in the order of its buffer.
inline Metadata model_reverse(const IndexArray& seq_len, std::int64_t copies,
                              const std::vector<Sent>& sends, Counted counted) {
  const std::int64_t world = seq_len.dim(0);
  std::vector<std::vector<Sent>> arrived(static_cast<std::size_t>(world));
  for (const Sent& sent : sends) arrived[static_cast<std::size_t>(sent.dst)].push_back(sent);
  std::size_t most = 0;
  for (const auto& list : arrived) most = std::max(most, list.size());
  const Shape shape{world, static_cast<std::int64_t>(most)};
  Metadata metadata;
  metadata.dst_rank = IndexArray::full(shape, -1);
  metadata.dst_offset = IndexArray(shape);
  metadata.seq_len = IndexArray(shape);
  IndexArray num_seqs(Shape{world});
  for (std::int64_t r = 0; r < world; ++r) {
    std::int64_t t = 0;
    for (const Sent& sent : arrived[static_cast<std::size_t>(r)]) {
      element(metadata.dst_rank, {r, t}) = sent.src;
      element(metadata.dst_offset, {r, t}) =
          sent.copy * rows_of(seq_len, sent.src) + begin_of(seq_len, sent.src, sent.shard);
      element(metadata.seq_len, {r, t}) = sent.len;
      if (sent.len > 0 || counted == Counted::all) element(num_seqs, {r}) += 1;
      ++t;
    }
  }
  metadata.num_seqs = num_seqs;
  model_counts(metadata, world, sends, true);
  if (copies > 0) {
    IndexArray mask(Shape{world, seq_len.dim(1), copies});
    for (const Sent& sent : sends) element(mask, {sent.src, sent.shard, sent.copy}) = 1;
    metadata.seq_recv_mask = mask.to(DType::boolean);
    metadata.recv_seq_lens = seq_len;
  }
  return metadata;
}

/// [W]: entries of each row of [W, S] that are over 0.
inline IndexArray count_with_rows(const IndexArray& seq_len) {
  IndexArray counts(Shape{seq_len.dim(0)});
  for (std::int64_t w = 0; w < seq_len.dim(0); ++w) {
    for (std::int64_t s = 0; s < seq_len.dim(1); ++s) {
      if (seq_len.at({w, s}) > 0) element(counts, {w}) += 1;
    }
  }
  return counts;
}

}  // namespace waybill::test
