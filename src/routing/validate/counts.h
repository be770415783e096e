#pragma once

#include "arrivals.h"
#include "send_table.h"

namespace waybill::validation {

/// What is wrong with a number of rows or tokens.
[[nodiscard]] inline FindingKind count_kind(std::int64_t got) {
  return got < 0 ? FindingKind::negative : FindingKind::count;
}

/// What ranks are told to expect agrees with the entries: rows by pair of ranks, and totals.
/// `received_rows` [W] is the sum of the lengths by destination. Where the arrivals are known they
/// make the check faster; otherwise null.
void check_counts(const SparseMetadata& metadata, const SendTable& table,
                  std::span<const std::int64_t> received_rows, const Arrivals* arrivals,
                  Findings& findings);

/// Which entries num_seqs counts.
enum class NumSeqs {
  with_rows,            ///< tables of Q: those with rows
  with_rows_or_copies,  ///< tables of KV and of copies count either those or all that are sent
};

/// The dense form, with num_seqs.
void check_counts(const Metadata& metadata, const SendTable& table,
                  std::span<const std::int64_t> received_rows, NumSeqs num_seqs,
                  Findings& findings);

/// Sum of the lengths by destination, where there are no arrivals to tell it. [W]
[[nodiscard]] std::vector<std::int64_t> received_rows(const SendTable& table);

/// seq_recv_mask and recv_seq_lens: in the reverse of a forward table with copies only, and there
/// they repeat which copies and lengths went out.
void check_masks(const Metadata& fwd, const Metadata& rev, const SendTable& forward,
                 const char* reverse_name, Findings& findings);

}  // namespace waybill::validation
