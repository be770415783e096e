#pragma once

#include <optional>
#include <string>

#include "waybill/core/index_array.h"
#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/metadata.h"

namespace waybill::test {

/// What differs, "" when nothing does: a failing property prints it.
inline std::string difference(const char* name, const IndexArray& got, const IndexArray& expected) {
  if (got == expected) return "";
  return concat(name, ": got ", to_string(got.shape()), " ", got.dtype(), " ", to_string(got),
                ", expected ", to_string(expected.shape()), " ", expected.dtype(), " ",
                to_string(expected), "\n");
}

inline std::string difference(const char* name, const std::optional<IndexArray>& got,
                              const std::optional<IndexArray>& expected) {
  if (got && expected) return difference(name, *got, *expected);
  if (!got && !expected) return "";
  return concat(name, got ? ": got an array, expected none\n" : ": got none, expected an array\n");
}

inline std::string difference(const Metadata& got, const Metadata& expected) {
  std::string text = difference("dst_rank", got.dst_rank, expected.dst_rank) +
                     difference("dst_offset", got.dst_offset, expected.dst_offset) +
                     difference("seq_len", got.seq_len, expected.seq_len) +
                     difference("num_recv_tokens", got.num_recv_tokens, expected.num_recv_tokens) +
                     difference("seq_recv_mask", got.seq_recv_mask, expected.seq_recv_mask) +
                     difference("recv_seq_lens", got.recv_seq_lens, expected.recv_seq_lens) +
                     difference("num_seqs", got.num_seqs, expected.num_seqs);
  if (text.empty() && got != expected) {
    text = "world_size, normalized or num_total_recv_tokens differ\n";
  }
  return text;
}

inline std::string difference(const char* name, const std::vector<IndexArray>& got,
                              const std::vector<IndexArray>& expected) {
  if (got.size() != expected.size()) {
    return concat(name, ": got ", got.size(), " arrays, expected ", expected.size(), "\n");
  }
  for (std::size_t r = 0; r < got.size(); ++r) {
    const std::string text = difference(name, got[r], expected[r]);
    if (!text.empty()) return concat("rank ", r, ": ", text);
  }
  return "";
}

inline std::string difference(const AttnLayout& got, const AttnLayout& expected) {
  return difference("cu_seqlens_q", got.cu_seqlens_q, expected.cu_seqlens_q) +
         difference("cu_seqlens_kv", got.cu_seqlens_kv, expected.cu_seqlens_kv) +
         difference("max_seqlen_q", got.max_seqlen_q, expected.max_seqlen_q) +
         difference("max_seqlen_kv", got.max_seqlen_kv, expected.max_seqlen_kv) +
         difference("num_local_seqs_recv", got.num_local_seqs_recv, expected.num_local_seqs_recv) +
         difference("kv_row", got.kv_row, expected.kv_row) +
         difference("kv_len", got.kv_len, expected.kv_len);
}

/// The four metadata and the attention layout; intermediates are not looked at.
inline std::string difference(const E2eMetadata& got, const E2eMetadata& expected) {
  const auto part = [](const char* name, const std::string& text) {
    return text.empty() ? text : concat(name, ": ", text);
  };
  return part("fwd_q", difference(got.fwd_q, expected.fwd_q)) +
         part("rev_q", difference(got.rev_q, expected.rev_q)) +
         part("fwd_kv", difference(got.fwd_kv, expected.fwd_kv)) +
         part("rev_kv", difference(got.rev_kv, expected.rev_kv)) +
         part("attention", difference(got.attention, expected.attention));
}

}  // namespace waybill::test
