#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace waybill {

/// How rows of K and V reach the ranks that need them. Rows of Q, and what belongs to them
/// backward, always go straight.
enum class TransferMode : std::uint8_t {
  direct,         ///< from home to each rank
  once_per_node,  ///< over the network once to each other node, there to the rank with the home's
                  ///< local index where several ranks need them; it forwards over NVLink
  relay,          ///< by the planner's relay schedule; once per node over the network
};

/// "direct", "once_per_node", "relay".
[[nodiscard]] std::string_view to_string(TransferMode transfer);

/// The inverse; nothing for another name.
[[nodiscard]] std::optional<TransferMode> transfer_from_name(std::string_view name);

/// Bytes of one rank by kind of link; rows that stay on a rank do not count. [of one rank]
struct LinkBytes {
  std::int64_t nvlink_in = 0;  ///< from ranks of its node
  std::int64_t nvlink_out = 0;
  std::int64_t network_in = 0;  ///< from other nodes
  std::int64_t network_out = 0;

  [[nodiscard]] std::int64_t in() const { return nvlink_in + network_in; }
  [[nodiscard]] std::int64_t out() const { return nvlink_out + network_out; }

  friend bool operator==(const LinkBytes&, const LinkBytes&) = default;
};

/// Rows [row_begin, row_begin + num_rows) of a KV shard go from one rank to another. A hop whose
/// `after` is not -1 forwards what hop `after`, an earlier one, has brought to src_rank.
struct RelayHop {
  std::int32_t src_rank = 0;
  std::int32_t dst_rank = 0;
  std::int32_t shard = 0;      ///< shard of the plan
  std::int32_t stage = 0;      ///< hops before it on the way from home: 0 from home itself
  std::int64_t row_begin = 0;  ///< rows of the shard
  std::int64_t num_rows = 0;
  std::int32_t after = -1;  ///< hop

  friend bool operator==(const RelayHop&, const RelayHop&) = default;
};

/// How KV rows reach all ranks that need them when receivers forward. Every rank still receives
/// every row that it needs once, so bytes in stay; bytes out spread. Rows of Q go straight from
/// home. A row enters each of several nodes once, and spreads inside it over NVLink. A rank
/// sends in the order of its hops. What arrives, the limits of a plan and the size of its windows
/// are the same in every order in which hops stand after those that feed them.
struct RelaySchedule {
  std::vector<RelayHop> hops;    ///< ordered: a hop comes after the one that feeds it
  std::vector<LinkBytes> links;  ///< [W] Q and KV; empty: no relay was asked for
  std::int32_t num_stages = 0;

  [[nodiscard]] bool empty() const { return links.empty(); }

  friend bool operator==(const RelaySchedule&, const RelaySchedule&) = default;
};

}  // namespace waybill
