#include <limits>
#include <utility>

#include "core/to_size.h"
#include "parts.h"
#include "waybill/core/error.h"
#include "waybill/core/topology.h"
#include "waybill/json/file.h"
#include "waybill/json/plan_json.h"

namespace waybill {
namespace detail {
namespace {

constexpr std::int64_t most_int32 = std::numeric_limits<std::int32_t>::max();

void write_options(JsonWriter& writer, const PlannerOptions& options) {
  writer.key("options").open_object();
  writer.key("world_size").integer(options.world_size);
  writer.key("tokens_per_rank").integer(options.tokens_per_rank);
  writer.key("q_hidden").integer(options.model.q_hidden);
  writer.key("kv_hidden").integer(options.model.kv_hidden);
  writer.key("dtype").string(dtype_name(options.model.dtype));
  writer.key("window").integer(options.mask.window);
  write_mask(writer, options.mask.kind);
  writer.key("kv_layout").string(to_string(options.kv_layout));
  writer.key("imbalance_target").real(options.imbalance_target);
  writer.key("byte_weight").real(options.byte_weight);
  writer.key("max_tokens_per_rank").integer(options.max_tokens_per_rank);
  writer.key("block_tokens").integer(options.block_tokens);
  writer.key("relay").boolean(options.relay);
  if (options.tails) writer.key("tails").boolean(true);
  const HardwareFacts& hardware = options.hardware;
  writer.key("hardware").open_object();
  writer.key("nvlink_bytes_per_second").real(hardware.nvlink_bytes_per_second);
  writer.key("network_bytes_per_second").real(hardware.network_bytes_per_second);
  writer.key("ranks_per_node").integer(hardware.ranks_per_node);
  writer.key("message_seconds").real(hardware.message_seconds);
  writer.key("pairs_per_second").real(hardware.pairs_per_second);
  // Texts of plans that use none of these are as they were before there were any.
  if (hardware.row_pairs != 0) writer.key("row_pairs").integer(hardware.row_pairs);
  if (hardware.shard_pairs != 0) writer.key("shard_pairs").integer(hardware.shard_pairs);
  writer.close().close();
}

HardwareFacts read_hardware(const JsonNode& node) {
  node.check_keys({"nvlink_bytes_per_second", "network_bytes_per_second", "ranks_per_node",
                   "message_seconds", "pairs_per_second", "row_pairs", "shard_pairs"});
  HardwareFacts hardware;
  hardware.nvlink_bytes_per_second = node.at("nvlink_bytes_per_second").real();
  hardware.network_bytes_per_second = node.at("network_bytes_per_second").real();
  hardware.ranks_per_node =
      static_cast<std::int32_t>(node.at("ranks_per_node").integer(1, most_int32));
  hardware.message_seconds = node.at("message_seconds").real();
  hardware.pairs_per_second = node.at("pairs_per_second").real();
  if (const auto row = node.find("row_pairs")) hardware.row_pairs = row->integer();
  if (const auto shard = node.find("shard_pairs")) hardware.shard_pairs = shard->integer();
  return hardware;
}

PlannerOptions read_options(const JsonNode& node, ReadCheck check) {
  node.check_keys({"world_size", "tokens_per_rank", "q_hidden", "kv_hidden", "dtype", "window",
                   "mask", "kv_layout", "imbalance_target", "byte_weight", "max_tokens_per_rank",
                   "block_tokens", "relay", "tails", "hardware"});
  PlannerOptions options;
  options.world_size = static_cast<std::int32_t>(node.at("world_size").integer(1, max_world_size));
  options.tokens_per_rank = node.at("tokens_per_rank").integer();
  options.model.q_hidden = node.at("q_hidden").integer();
  options.model.kv_hidden = node.at("kv_hidden").integer();
  const JsonNode dtype = node.at("dtype");
  check_at(dtype, [&] { options.model.dtype = dtype_from_name(dtype.string()); });
  options.mask.window = node.at("window").integer();
  options.mask.kind = read_mask(node);
  options.kv_layout = read_kv_layout(node.at("kv_layout"));
  options.imbalance_target = node.at("imbalance_target").real();
  options.byte_weight = node.at("byte_weight").real();
  options.max_tokens_per_rank = node.at("max_tokens_per_rank").integer();
  options.block_tokens = node.at("block_tokens").integer();
  options.relay = node.at("relay").boolean();
  if (const auto tails = node.find("tails")) options.tails = tails->boolean();
  options.hardware = read_hardware(node.at("hardware"));
  if (check == ReadCheck::values) check_at(node, [&] { options.check("options"); });
  return options;
}

/// Writes one column of a table: `column(table, "name", &Row::field)`.
template <class Row, class Field>
void write_column(JsonWriter& writer, const std::vector<Row>& rows, const char* name,
                  Field Row::*field) {
  writer.key(name).open_list(true);
  for (const Row& row : rows) writer.integer(row.*field);
  writer.close();
}

/// Reads one column; the first sets the number of rows, the others must have as many.
template <class Row, class Field>
void read_column(const JsonNode& table, std::vector<Row>& rows, bool first, const char* name,
                 Field Row::*field) {
  const JsonNode node = table.at(name);
  const std::vector<std::int64_t>& numbers = node.integers();
  if (first) rows.resize(numbers.size());
  if (numbers.size() != rows.size())
    node.fail_text(concat(numbers.size(), " entries, expected ", rows.size(),
                          " as in the table's first column"));
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (numbers[i] < std::numeric_limits<Field>::min() ||
        numbers[i] > std::numeric_limits<Field>::max())
      node.fail_text(concat("entry ", i, " = ", numbers[i], ", expected a number of 32 bits"));
    rows[i].*field = static_cast<Field>(numbers[i]);
  }
}

void write_links(JsonWriter& writer, const std::vector<LinkBytes>& links) {
  writer.key("links").open_object();
  write_column(writer, links, "nvlink_in", &LinkBytes::nvlink_in);
  write_column(writer, links, "nvlink_out", &LinkBytes::nvlink_out);
  write_column(writer, links, "network_in", &LinkBytes::network_in);
  write_column(writer, links, "network_out", &LinkBytes::network_out);
  writer.close();
}

std::vector<LinkBytes> read_links(const JsonNode& node) {
  node.check_keys({"nvlink_in", "nvlink_out", "network_in", "network_out"});
  std::vector<LinkBytes> links;
  read_column(node, links, true, "nvlink_in", &LinkBytes::nvlink_in);
  read_column(node, links, false, "nvlink_out", &LinkBytes::nvlink_out);
  read_column(node, links, false, "network_in", &LinkBytes::network_in);
  read_column(node, links, false, "network_out", &LinkBytes::network_out);
  return links;
}

void write_relay(JsonWriter& writer, const RelaySchedule& relay) {
  writer.key("relay").open_object();
  writer.key("num_stages").integer(relay.num_stages);
  write_links(writer, relay.links);
  writer.key("hops").open_object();
  write_column(writer, relay.hops, "src_rank", &RelayHop::src_rank);
  write_column(writer, relay.hops, "dst_rank", &RelayHop::dst_rank);
  write_column(writer, relay.hops, "shard", &RelayHop::shard);
  write_column(writer, relay.hops, "stage", &RelayHop::stage);
  write_column(writer, relay.hops, "row_begin", &RelayHop::row_begin);
  write_column(writer, relay.hops, "num_rows", &RelayHop::num_rows);
  write_column(writer, relay.hops, "after", &RelayHop::after);
  writer.close().close();
}

RelaySchedule read_relay(const JsonNode& node) {
  node.check_keys({"num_stages", "links", "hops"});
  RelaySchedule relay;
  relay.num_stages = static_cast<std::int32_t>(node.at("num_stages").integer(0, most_int32));
  relay.links = read_links(node.at("links"));
  const JsonNode hops = node.at("hops");
  hops.check_keys({"src_rank", "dst_rank", "shard", "stage", "row_begin", "num_rows", "after"});
  read_column(hops, relay.hops, true, "src_rank", &RelayHop::src_rank);
  read_column(hops, relay.hops, false, "dst_rank", &RelayHop::dst_rank);
  read_column(hops, relay.hops, false, "shard", &RelayHop::shard);
  read_column(hops, relay.hops, false, "stage", &RelayHop::stage);
  read_column(hops, relay.hops, false, "row_begin", &RelayHop::row_begin);
  read_column(hops, relay.hops, false, "num_rows", &RelayHop::num_rows);
  read_column(hops, relay.hops, false, "after", &RelayHop::after);
  return relay;
}

void check_table(const JsonNode& node, std::size_t got, const AttentionPlan& plan) {
  if (got != to_size(plan.plan.world_size))
    node.fail_text(concat(got, " entries, expected ", plan.plan.world_size, ": one per rank"));
}

AttentionPlan read_attention_plan(const JsonNode& root, ReadCheck check) {
  root.check_keys({"format", "version", "options", "plan", "work", "home_tokens",
                   "attention_tokens", "kv_tokens", "links", "relay", "block_work",
                   "least_bytes_in"});
  AttentionPlan plan;
  plan.options = read_options(root.at("options"), check);
  plan.plan = read_plan(root.at("plan"), check);
  plan.work = root.at("work").integers();
  plan.home_tokens = root.at("home_tokens").integers();
  plan.attention_tokens = root.at("attention_tokens").integers();
  plan.kv_tokens = root.at("kv_tokens").integers();
  plan.links = read_links(root.at("links"));
  if (const auto relay = root.find("relay")) plan.relay = read_relay(*relay);
  plan.block_work = root.at("block_work").integer();
  plan.least_bytes_in = root.at("least_bytes_in").integer();
  if (check == ReadCheck::values) {
    if (plan.options.world_size != plan.plan.world_size)
      root.at("plan").fail_text(concat("world_size ", plan.plan.world_size, ", expected ",
                                       plan.options.world_size, " as in the options"));
    check_table(root.at("work"), plan.work.size(), plan);
    check_table(root.at("home_tokens"), plan.home_tokens.size(), plan);
    check_table(root.at("attention_tokens"), plan.attention_tokens.size(), plan);
    check_table(root.at("kv_tokens"), plan.kv_tokens.size(), plan);
    check_table(root.at("links"), plan.links.size(), plan);
    if (root.find("relay")) check_table(root.at("relay"), plan.relay.links.size(), plan);
  }
  return plan;
}

}  // namespace
}  // namespace detail

std::string to_json(const AttentionPlan& plan, JsonStyle style) {
  detail::JsonWriter writer(style);
  writer.open_object().header("waybill.attention_plan");
  detail::write_options(writer, plan.options);
  writer.key("plan").open_object();
  detail::write_plan_members(writer, plan.plan);
  writer.close();
  writer.key("work").integers(plan.work);
  writer.key("home_tokens").integers(plan.home_tokens);
  writer.key("attention_tokens").integers(plan.attention_tokens);
  writer.key("kv_tokens").integers(plan.kv_tokens);
  detail::write_links(writer, plan.links);
  if (!plan.relay.empty()) detail::write_relay(writer, plan.relay);
  writer.key("block_work").integer(plan.block_work);
  writer.key("least_bytes_in").integer(plan.least_bytes_in);
  writer.close();
  return std::move(writer).finish();
}

AttentionPlan attention_plan_from_json(std::string_view text, std::string_view origin,
                                       ReadCheck check) {
  const detail::JsonValue value = detail::parse_json(text, origin);
  const detail::JsonNode root(value, origin);
  root.check_format("waybill.attention_plan");
  return detail::read_attention_plan(root, check);
}

AttentionPlan read_attention_plan(const std::filesystem::path& path, ReadCheck check) {
  return attention_plan_from_json(read_file(path), path.string(), check);
}

void write_attention_plan(const std::filesystem::path& path, const AttentionPlan& plan,
                          JsonStyle style) {
  write_file(path, to_json(plan, style));
}

}  // namespace waybill
