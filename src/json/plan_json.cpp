#include "waybill/json/plan_json.h"

#include <array>
#include <limits>
#include <tuple>
#include <utility>

#include "json/parts.h"
#include "waybill/core/error.h"
#include "waybill/core/topology.h"
#include "waybill/json/file.h"

namespace waybill {
namespace detail {

namespace {

KvLayout read_kv_layout(const JsonNode& node) {
  for (const KvLayout layout : {KvLayout::per_query, KvLayout::per_rank}) {
    if (node.string() == to_string(layout)) return layout;
  }
  node.fail("\"per_query\" or \"per_rank\"");
}

/// The member "mask" of the object that is open; nothing for a causal one, as before there was one.
void write_mask(JsonWriter& writer, MaskKind mask) {
  if (mask != MaskKind::causal) writer.key("mask").string(to_string(mask));
}

MaskKind read_mask(const JsonNode& parent) {
  const auto node = parent.find("mask");
  if (!node) return MaskKind::causal;
  for (const MaskKind mask : {MaskKind::causal, MaskKind::full}) {
    if (node->string() == to_string(mask)) return mask;
  }
  node->fail("\"causal\" or \"full\"");
}

}  // namespace

void write_plan_members(JsonWriter& writer, const QkvPlan& plan) {
  writer.key("world_size").integer(plan.world_size);
  writer.key("kv_layout").string(to_string(plan.kv_layout));
  writer.key("rank_shard_offsets").integers(plan.rank_shard_offsets);
  writer.key("shard_len").integers(plan.shard_len);
  writer.key("q_dst").integers(plan.q_dst);
  writer.key("doc_shard_offsets").integers(plan.doc_shard_offsets);
  writer.key("doc_shards").integers(plan.doc_shards);
  if (!plan.kv_begin.empty()) writer.key("kv_begin").integers(plan.kv_begin);
  write_mask(writer, plan.mask);
}

QkvPlan read_plan(const JsonNode& node, ReadCheck check) {
  node.check_keys({"format", "version", "world_size", "kv_layout", "rank_shard_offsets",
                   "shard_len", "q_dst", "doc_shard_offsets", "doc_shards", "kv_begin", "mask"});
  QkvPlan plan;
  const JsonNode world = node.at("world_size");
  plan.world_size = static_cast<std::int32_t>(
      check == ReadCheck::values ? world.integer(1, max_world_size)
                                 : world.integer(std::numeric_limits<std::int32_t>::min(),
                                                 std::numeric_limits<std::int32_t>::max()));
  plan.kv_layout = read_kv_layout(node.at("kv_layout"));
  plan.rank_shard_offsets = node.at("rank_shard_offsets").integers();
  plan.shard_len = node.at("shard_len").integers();
  plan.q_dst = node.at("q_dst").integers32();
  plan.doc_shard_offsets = node.at("doc_shard_offsets").integers();
  plan.doc_shards = node.at("doc_shards").integers32();
  if (const auto kv_begin = node.find("kv_begin")) plan.kv_begin = kv_begin->integers32();
  plan.mask = read_mask(node);
  if (check == ReadCheck::values) {
    check_at(node, [&] { plan.check("plan"); });
  }
  return plan;
}

namespace {

constexpr std::int64_t max_int32 = std::numeric_limits<std::int32_t>::max();

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
      static_cast<std::int32_t>(node.at("ranks_per_node").integer(1, max_int32));
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

// The columns of two tables. The first sets the number of rows.
constexpr std::tuple link_columns{std::pair{"nvlink_in", &LinkBytes::nvlink_in},
                                  std::pair{"nvlink_out", &LinkBytes::nvlink_out},
                                  std::pair{"network_in", &LinkBytes::network_in},
                                  std::pair{"network_out", &LinkBytes::network_out}};
constexpr std::tuple hop_columns{
    std::pair{"src_rank", &RelayHop::src_rank},   std::pair{"dst_rank", &RelayHop::dst_rank},
    std::pair{"shard", &RelayHop::shard},         std::pair{"stage", &RelayHop::stage},
    std::pair{"row_begin", &RelayHop::row_begin}, std::pair{"num_rows", &RelayHop::num_rows},
    std::pair{"after", &RelayHop::after}};

template <class Row, class... Columns>
void write_table(JsonWriter& writer, const char* name, const std::vector<Row>& rows,
                 const std::tuple<Columns...>& columns) {
  writer.key(name).open_object();
  const auto write = [&](const auto& column) {
    writer.key(column.first).open_list(true);
    for (const Row& row : rows) writer.integer(row.*column.second);
    writer.close();
  };
  std::apply([&](const auto&... column) { (write(column), ...); }, columns);
  writer.close();
}

template <class Row, class... Columns>
std::vector<Row> read_table(const JsonNode& table, const std::tuple<Columns...>& columns) {
  std::vector<Row> rows;
  bool first = true;
  std::apply(
      [&](const auto&... column) {
        table.check_keys({std::string_view(column.first)...});
        (read_column(table, rows, std::exchange(first, false), column.first, column.second), ...);
      },
      columns);
  return rows;
}

void write_relay(JsonWriter& writer, const RelaySchedule& relay) {
  writer.key("relay").open_object();
  writer.key("num_stages").integer(relay.num_stages);
  write_table(writer, "links", relay.links, link_columns);
  write_table(writer, "hops", relay.hops, hop_columns);
  writer.close();
}

RelaySchedule read_relay(const JsonNode& node) {
  node.check_keys({"num_stages", "links", "hops"});
  RelaySchedule relay;
  relay.num_stages = static_cast<std::int32_t>(node.at("num_stages").integer(0, max_int32));
  relay.links = read_table<LinkBytes>(node.at("links"), link_columns);
  relay.hops = read_table<RelayHop>(node.at("hops"), hop_columns);
  return relay;
}

void check_table(const JsonNode& node, std::size_t got, const AttentionPlan& plan) {
  if (got != static_cast<std::size_t>(plan.plan.world_size))
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
  plan.links = read_table<LinkBytes>(root.at("links"), link_columns);
  if (const auto relay = root.find("relay")) plan.relay = read_relay(*relay);
  plan.block_work = root.at("block_work").integer();
  plan.least_bytes_in = root.at("least_bytes_in").integer();
  if (check == ReadCheck::values) {
    if (plan.options.world_size != plan.plan.world_size)
      root.at("plan").fail_text(concat("world_size ", plan.plan.world_size, ", expected ",
                                       plan.options.world_size, " as in the options"));
    for (const auto& [name, table] : {std::pair{"work", &plan.work},
                                      {"home_tokens", &plan.home_tokens},
                                      {"attention_tokens", &plan.attention_tokens},
                                      {"kv_tokens", &plan.kv_tokens}})
      check_table(root.at(name), table->size(), plan);
    check_table(root.at("links"), plan.links.size(), plan);
    if (root.find("relay")) check_table(root.at("relay"), plan.relay.links.size(), plan);
  }
  return plan;
}

}  // namespace
}  // namespace detail

std::string to_json(const QkvPlan& plan, JsonStyle style) {
  return detail::write_document(style, "waybill.plan", [&](detail::JsonWriter& writer) {
    detail::write_plan_members(writer, plan);
  });
}

QkvPlan plan_from_json(std::string_view text, std::string_view origin, ReadCheck check) {
  return detail::read_document(text, origin, "waybill.plan", [&](const detail::JsonNode& root) {
    return detail::read_plan(root, check);
  });
}

QkvPlan read_plan(const std::filesystem::path& path, ReadCheck check) {
  return plan_from_json(read_file(path), path.string(), check);
}

void write_plan(const std::filesystem::path& path, const QkvPlan& plan, JsonStyle style) {
  write_file(path, to_json(plan, style));
}

std::string to_json(const AttentionPlan& plan, JsonStyle style) {
  return detail::write_document(style, "waybill.attention_plan", [&](detail::JsonWriter& writer) {
    detail::write_options(writer, plan.options);
    writer.key("plan").open_object();
    detail::write_plan_members(writer, plan.plan);
    writer.close();
    writer.key("work").integers(plan.work);
    writer.key("home_tokens").integers(plan.home_tokens);
    writer.key("attention_tokens").integers(plan.attention_tokens);
    writer.key("kv_tokens").integers(plan.kv_tokens);
    detail::write_table(writer, "links", plan.links, detail::link_columns);
    if (!plan.relay.empty()) detail::write_relay(writer, plan.relay);
    writer.key("block_work").integer(plan.block_work);
    writer.key("least_bytes_in").integer(plan.least_bytes_in);
  });
}

AttentionPlan attention_plan_from_json(std::string_view text, std::string_view origin,
                                       ReadCheck check) {
  return detail::read_document(
      text, origin, "waybill.attention_plan",
      [&](const detail::JsonNode& root) { return detail::read_attention_plan(root, check); });
}

AttentionPlan read_attention_plan(const std::filesystem::path& path, ReadCheck check) {
  return attention_plan_from_json(read_file(path), path.string(), check);
}

void write_attention_plan(const std::filesystem::path& path, const AttentionPlan& plan,
                          JsonStyle style) {
  write_file(path, to_json(plan, style));
}

}  // namespace waybill
