#include "waybill/json/plan_json.h"

#include <utility>

#include "parts.h"
#include "waybill/core/error.h"
#include "waybill/json/file.h"

namespace waybill {
namespace detail {

KvLayout read_kv_layout(const JsonNode& node) {
  for (const KvLayout layout : {KvLayout::per_query, KvLayout::per_rank}) {
    if (node.string() == to_string(layout)) return layout;
  }
  node.fail("\"per_query\" or \"per_rank\"");
}

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

}  // namespace detail

std::string to_json(const QkvPlan& plan, JsonStyle style) {
  detail::JsonWriter writer(style);
  writer.open_object().header("waybill.plan");
  detail::write_plan_members(writer, plan);
  writer.close();
  return std::move(writer).finish();
}

QkvPlan plan_from_json(std::string_view text, std::string_view origin, ReadCheck check) {
  const detail::JsonValue value = detail::parse_json(text, origin);
  const detail::JsonNode root(value, origin);
  root.check_format("waybill.plan");
  return detail::read_plan(root, check);
}

QkvPlan read_plan(const std::filesystem::path& path, ReadCheck check) {
  return plan_from_json(read_file(path), path.string(), check);
}

void write_plan(const std::filesystem::path& path, const QkvPlan& plan, JsonStyle style) {
  write_file(path, to_json(plan, style));
}

}  // namespace waybill
