#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "waybill/routing/qkv_plan.h"

namespace waybill {

/// Which keys of its document a query attends to, by name.
enum class MaskKind : std::uint8_t {
  causal,  ///< itself and those before it
  full,    ///< all of them (bidirectional)
  prefix,  ///< the first tokens all of each other; after them as causal
};

[[nodiscard]] std::string_view to_string(MaskKind mask);

/// The inverse. @throws InvalidArgument "who: mask = ..., expected ..."
[[nodiscard]] MaskKind mask_from_name(const char* who, std::string_view name);

/// Keys [begin, end), or queries, as positions in a document.
struct TokenRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  [[nodiscard]] std::int64_t rows() const { return end - begin; }

  friend bool operator==(const TokenRange&, const TokenRange&) = default;
};

/// Which keys of its document a query meets, and all that plans and predictions derive from that:
/// the keys of a range of queries, its work, and where work ends. Only here is a mask's kind looked
/// at. Positions are tokens from the beginning of the document; a document has `doc_len` tokens.
struct AttentionMask {
  std::int64_t window = 0;  ///< keys a query meets, itself included; 0: all that the kind allows
  MaskKind kind = MaskKind::causal;  ///< full, prefix: without a window
  /// Tokens after which attention begins anew, counted from the document's beginning: a query meets
  /// keys of its own chunk alone, as kind and window say; 0: never.
  std::int64_t chunk = 0;
  /// Tokens at the document's beginning that all meet each other, where the kind is prefix and
  /// there are no chunks. A document that has fewer is full. 0 and 1 are as causal.
  std::int64_t prefix = 0;

  /// The keys that the queries [begin, end) meet: from the first to the last.
  [[nodiscard]] TokenRange keys(std::int64_t begin, std::int64_t end, std::int64_t doc_len) const {
    if (chunk > 0) return keys_in_chunks(begin, end, doc_len);
    if (is_full()) return {0, doc_len};
    if (begin < prefix) return {0, std::max(end, std::min(prefix, doc_len))};
    return {window == 0 ? 0 : std::max<std::int64_t>(0, begin + 1 - window), end};
  }

  /// Exact number of (query, key) pairs of the queries [begin, end): the area of the mask. Fits for
  /// doc_len <= 2^31.
  [[nodiscard]] std::int64_t pairs(std::int64_t begin, std::int64_t end,
                                   std::int64_t doc_len) const {
    if (chunk > 0) return pairs_in_chunks(end, doc_len) - pairs_in_chunks(begin, doc_len);
    if (is_full()) return (end - begin) * doc_len;
    const std::int64_t ahead =
        prefix == 0 ? 0 : pairs_ahead(end, doc_len) - pairs_ahead(begin, doc_len);
    return pairs_before(end) - pairs_before(begin) + ahead;
  }

  /// The same with a prefix of so many tokens: documents have prefixes of their own.
  [[nodiscard]] AttentionMask with_prefix(std::int64_t tokens) const {
    AttentionMask its = *this;
    its.prefix = tokens;
    return its;
  }
  /// Whether queries may meet keys after themselves: plans then have a kv_end.
  [[nodiscard]] bool looks_ahead() const { return kind != MaskKind::causal; }
  /// Whether the query meets all keys of its shard's range, also those after itself.
  [[nodiscard]] bool looks_ahead_at(std::int64_t query) const {
    return is_full() || (prefix > 1 && query < prefix);
  }
  /// Whether later queries do not meet the first keys any more: plans then have a kv_begin.
  [[nodiscard]] bool moves_on() const { return window > 0 || chunk > 0; }
  /// The chunk of a query, outside which no key of its shard may lie; without chunks the document.
  [[nodiscard]] TokenRange chunk_of(std::int64_t query, std::int64_t doc_len) const {
    if (chunk == 0) return {0, doc_len};
    return {query / chunk * chunk, std::min(doc_len, (query / chunk + 1) * chunk)};
  }
  /// The mask inside a chunk, which is a document then. The functions below are of such masks.
  [[nodiscard]] AttentionMask in_chunk() const { return {.window = window, .kind = kind}; }
  /// Whether long ranges of queries have about as many keys per query wherever they begin.
  [[nodiscard]] bool is_even() const { return is_full() || window > 0; }

  /// About where queries that end at `end` begin if they have `work` pairs, each query `row` pairs
  /// besides its keys.
  [[nodiscard]] double begin_for(double end, double work, std::int64_t doc_len, double row) const;
  /// The end of the shortest range of queries from `begin` with about `work`, in the same way.
  [[nodiscard]] std::int64_t end_for(std::int64_t begin, double work, std::int64_t doc_len,
                                     double row) const;
  /// About the number of keys of `num_parts` parts of `queries` with equal work, added up.
  [[nodiscard]] double keys_of_parts(TokenRange queries, double num_parts,
                                     std::int64_t doc_len) const;
  /// The end of the queries whose ranges fit into `num_keys` keys when they begin at the document's
  /// first query; of a window, which ranges that begin later follow, that of the document.
  [[nodiscard]] std::int64_t end_within(std::int64_t num_keys, std::int64_t doc_len) const {
    if (std::min(is_full() ? doc_len : prefix, doc_len) > num_keys) return 0;
    if (is_full()) return doc_len;
    return window > 0 ? doc_len : std::min(doc_len, num_keys);
  }

  /// This mask, or where it says nothing else, full for a plan that needs whole documents, and
  /// prefix for one with prefixes: `prefix` is the longest then.
  /// @throws InvalidArgument "who: mask ..., expected ..." where the plan's ranges are not this
  ///   mask's
  [[nodiscard]] AttentionMask as_in(const QkvPlan& plan, const char* who) const;

  /// @throws InvalidArgument "who: mask.window = got, expected ..." of window, chunk and prefix
  void check(const char* who) const;

  friend bool operator==(const AttentionMask&, const AttentionMask&) = default;

 private:
  [[nodiscard]] bool is_full() const { return kind == MaskKind::full; }

  [[nodiscard]] TokenRange keys_in_chunks(std::int64_t begin, std::int64_t end,
                                          std::int64_t doc_len) const;
  [[nodiscard]] std::int64_t pairs_in_chunks(std::int64_t end, std::int64_t doc_len) const;

  // Queries [0, end): position p of the prefix also meets the keys after itself there.
  [[nodiscard]] std::int64_t pairs_ahead(std::int64_t end, std::int64_t doc_len) const {
    const std::int64_t length = std::min(prefix, doc_len);
    const std::int64_t queries = std::min(end, length);
    return queries * length - AttentionMask{}.pairs_before(queries);
  }

  // Queries [0, end): position p meets min(p + 1, window) keys.
  [[nodiscard]] std::int64_t pairs_before(std::int64_t end) const {
    const std::int64_t ramp = window == 0 ? end : std::min(end, window);
    return (ramp & 1) == 0 ? ramp / 2 * (ramp + 1) + (end - ramp) * window
                           : (ramp + 1) / 2 * ramp + (end - ramp) * window;
  }
};

/// "causal", "causal, window 4096", "full", "causal, chunks of 8192", "prefix of 100".
[[nodiscard]] std::string to_string(const AttentionMask& mask);

}  // namespace waybill
