#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "waybill/core/dtype.h"
#include "waybill/core/link_speeds.h"
#include "waybill/routing/qkv_plan.h"

namespace waybill {

/// Which keys a query of its document meets: those before it and itself, or only the latest
/// `window` of these, or all. Positions are tokens from the beginning of the document.
struct AttentionMask {
  std::int64_t window = 0;  ///< keys a query meets, itself included; 0: all that the kind allows
  MaskKind kind = MaskKind::causal;  ///< full: without a window

  [[nodiscard]] bool has_window() const { return window > 0; }
  [[nodiscard]] bool is_full() const { return kind == MaskKind::full; }

  /// The first key that the query at `position` meets.
  [[nodiscard]] std::int64_t first_key(std::int64_t position) const {
    return window == 0 ? 0 : std::max<std::int64_t>(0, position + 1 - window);
  }

  /// Exact number of (query, key) pairs of the queries [begin, end) of a document of `doc_len`
  /// tokens: the area of the mask. Fits for doc_len <= 2^31.
  [[nodiscard]] std::int64_t pairs(std::int64_t begin, std::int64_t end,
                                   std::int64_t doc_len) const {
    return is_full() ? (end - begin) * doc_len : pairs_before(end) - pairs_before(begin);
  }

  friend bool operator==(const AttentionMask&, const AttentionMask&) = default;

 private:
  // Queries [0, end): position p meets min(p + 1, window) keys.
  [[nodiscard]] std::int64_t pairs_before(std::int64_t end) const {
    const std::int64_t ramp = window == 0 ? end : std::min(end, window);
    return (ramp & 1) == 0 ? ramp / 2 * (ramp + 1) + (end - ramp) * window
                           : (ramp + 1) / 2 * ramp + (end - ramp) * window;
  }
};

/// "causal", "causal, window 4096", "full".
[[nodiscard]] std::string to_string(const AttentionMask& mask);

/// The size of a row (token) of the model. Elements of the whole model or of one tensor-parallel
/// slice, as the ranks are.
struct ModelShape {
  std::int64_t q_hidden = 4096;   ///< elements of a row of Q: query heads * head size
  std::int64_t kv_hidden = 1024;  ///< elements of a row of K, and of V: KV heads * head size
  DType dtype = DType::bfloat16;

  [[nodiscard]] static ModelShape of_heads(std::int64_t q_heads, std::int64_t kv_heads,
                                           std::int64_t head_size, DType dtype = DType::bfloat16) {
    return {.q_hidden = q_heads * head_size, .kv_hidden = kv_heads * head_size, .dtype = dtype};
  }

  [[nodiscard]] std::int64_t q_row_bytes() const { return q_hidden * dtype_bytes(dtype); }
  /// K and V together: a row of each crosses.
  [[nodiscard]] std::int64_t kv_row_bytes() const { return 2 * kv_hidden * dtype_bytes(dtype); }

  friend bool operator==(const ModelShape&, const ModelShape&) = default;
};

/// Speeds, one direction, of one rank. Bytes per second are what the wire really gives. Defaults:
/// "measured" is a host with 8 x H200 (NVLink 4 through an NVSwitch, multicast off), 2026-11-20;
/// "nominal" comes from data sheets and was not measured.
struct HardwareFacts {
  double nvlink_bytes_per_second = LinkSpeeds{}.nvlink_bytes_per_second;    ///< measured
  double network_bytes_per_second = LinkSpeeds{}.network_bytes_per_second;  ///< nominal
  std::int32_t ranks_per_node = 8;  ///< consecutive ranks; the last node may have fewer
  /// Time that each peer costs besides the bytes: signals to all are under way together. Fits calls
  /// of few bytes, 4 x H200 (docs/performance/prediction.md).
  double message_seconds = 0.4e-6;
  /// (query, key) pairs a rank attends to, forward. 0: not known.
  double pairs_per_second = 0;
  /// Cost of a row of queries, and of a shard of any length, for the kernel besides their pairs, in
  /// pairs: blocks are computed whole, short shards fill none. 0: nothing, work is pairs alone.
  std::int64_t row_pairs = 0;
  std::int64_t shard_pairs = 0;

  friend bool operator==(const HardwareFacts&, const HardwareFacts&) = default;
};

/// The work of the queries [begin, end) of a document as the kernel takes it, in pairs.
[[nodiscard]] inline std::int64_t kernel_work(const AttentionMask& mask, const HardwareFacts& facts,
                                              std::int64_t begin, std::int64_t end,
                                              std::int64_t doc_len) {
  return mask.pairs(begin, end, doc_len) + facts.row_pairs * (end - begin) +
         (end > begin ? facts.shard_pairs : 0);
}

/// The options of plan_attention.
struct PlannerOptions {
  std::int32_t world_size = 8;
  /// Rows of a rank in the MLP layout. Flat documents are packed by it; lists a rank must keep it.
  /// 0: flat documents fill all ranks evenly (rounded up); lists may have any length.
  std::int64_t tokens_per_rank = 65536;
  ModelShape model = {};
  AttentionMask mask = {};
  KvLayout kv_layout = KvLayout::per_rank;

  /// The largest work of a rank over the mean that is aimed at, > 1. Tighter costs bytes.
  double imbalance_target = 1.01;
  /// 0: the target holds whatever bytes it costs. Above: of the targets imbalance_target and looser
  /// ones, the plan with the least `largest work / pairs_per_second + byte_weight * limit_seconds`
  /// is taken; needs hardware.pairs_per_second.
  double byte_weight = 0;
  /// Rows of Q, and rows of KV, that the buffers of a rank hold in the attention layout: neither
  /// exceeds it. 0: no limit.
  std::int64_t max_tokens_per_rank = 0;
  /// Documents are cut at multiples of it, from their beginning, where ranks allow; at finer powers
  /// of two where one block of queries weighs more than a quarter of the balance that is aimed at.
  std::int64_t block_tokens = 128;

  /// A piece gives away its end, never its middle: its home keeps one shard of it. Takes more bytes
  /// where documents are long.
  bool tails = false;

  bool relay = true;  ///< let receivers forward KV to each other
  HardwareFacts hardware = {};

  /// @throws InvalidArgument "who: field = got, expected ..."
  void check(const char* who) const;

  friend bool operator==(const PlannerOptions&, const PlannerOptions&) = default;
};

}  // namespace waybill
