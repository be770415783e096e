#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "waybill/routing/generators.h"
#include "waybill/routing/qkv_plan.h"
#include "waybill/routing/qkv_routing.h"
#include "waybill/routing/validate.h"

namespace waybill {

struct CheckOptions {
  std::int64_t q_row_bytes = 256;   ///< at least 8, so that a row can say which one it is
  std::int64_t kv_row_bytes = 128;  ///< K and V of a row together, at least 8
  int num_threads = 0;              ///< 0: all cores
  std::int64_t max_findings = 100;
  /// Called on the caller's thread before every phase: its name, how many are done, how many there
  /// are; and once at the end, with done = total.
  std::function<void(std::string_view phase, int done, int total)> progress = {};
};

/// Time and bytes of one phase of a check.
struct CheckPhase {
  std::string name;
  double seconds = 0;
  std::int64_t bytes = 0;  ///< written by a dispatch, or read by a comparison
};

/// Findings and figures of check_dispatch.
struct DispatchCheck {
  std::vector<Finding> findings;       ///< empty: every byte is where it belongs
  std::int64_t q_rows = 0;             ///< all ranks, in either layout
  std::int64_t kv_rows = 0;            ///< all ranks, in the MLP layout
  std::int64_t kv_rows_attention = 0;  ///< all ranks, after the forward dispatch
  std::int64_t rows_checked = 0;       ///< rows of which every byte was compared
  std::int64_t bytes_checked = 0;
  std::int64_t queries_checked = 0;       ///< query shards whose context was followed row by row
  std::int64_t context_rows_checked = 0;  ///< rows of these contexts
  std::int64_t bytes_moved = 0;           ///< by the four dispatches, local copies included
  std::int64_t wire_bytes = 0;            ///< the part of it that leaves its rank
  std::vector<CheckPhase> phases;

  [[nodiscard]] bool passed() const { return findings.empty(); }
};

/// Carries out forward and reverse dispatch of Q and KV in memory and compares every byte; what
/// rows cannot show, validate adds from the tables.
///
/// Each row carries a pattern that only it has. Checked against the plan: every query row at its
/// place in the attention layout; the KV context of every query, row by row, against the rows of
/// its document; no KV row that nobody asked for; Q back at home, bit for bit; each plane of the KV
/// gradient, row by row, from where that copy went, and nothing anywhere else. Places and contexts
/// are derived by other means than those of routing and validate.
///
/// Memory: both layouts of Q, or those of KV with the gradient planes, plus 8 bytes per row (of the
/// planes too). Rows of planes that no copy uses are never touched, which costs nothing on Linux.
///
/// @throws InvalidArgument when plan.check() does, and for options out of range; never for what it
///   finds in `routing`. A dispatch that simulate_dispatch refuses is a finding with its text.
[[nodiscard]] DispatchCheck check_dispatch(const QkvPlan& plan, const QkvRouting& routing,
                                           const CheckOptions& options = {});

/// A random plan and its payload.
struct QkvDispatchTestOptions {
  std::int64_t world_size = 4;
  std::int64_t total_seq_len = 1024;  ///< rows on every rank, a multiple of max_cp_degree
  std::int64_t num_seqs = 4;          ///< on every rank
  std::int64_t max_cp_degree = 4;     ///< at most world_size
  std::int64_t hidden_q = 16;         ///< float32 elements of a row
  std::int64_t hidden_k = 8;
  std::uint64_t seed = 0;
  int num_threads = 0;
  std::int64_t max_findings = 100;
};

/// Findings and figures of test_qkv_dispatch.
struct QkvDispatchTest {
  std::vector<Finding> findings;  ///< empty: passed
  std::int64_t elements_compared = 0;

  [[nodiscard]] bool passed() const { return findings.empty(); }
};

/// DistCA's check of a random plan (test_qkv_dispatch), on the dense form: validate finds what is
/// wrong with its tables; where nothing is, to_sparse and check_dispatch carry it out.
///
/// @throws InvalidArgument when create_qkv_dispatch does; never for what it finds.
[[nodiscard]] QkvDispatchTest test_qkv_dispatch(const QkvDispatchTestOptions& options);

/// The same for a dispatch that exists already, in either KV layout. world_size, total_seq_len,
/// num_seqs and max_cp_degree of `options` are not read; ranks may have different numbers of rows.
[[nodiscard]] QkvDispatchTest test_qkv_dispatch(const QkvDispatch& dispatch,
                                                const QkvDispatchTestOptions& options);

}  // namespace waybill
