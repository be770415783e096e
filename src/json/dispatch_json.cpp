#include <array>
#include <utility>

#include "parts.h"
#include "waybill/core/error.h"
#include "waybill/json/file.h"
#include "waybill/json/plan_json.h"

namespace waybill {
namespace detail {
namespace {

/// The four metadata under their names, in this order.
template <class Bundle, class Visit>
void for_each_metadata(Bundle& metadata, Visit&& visit) {
  visit("fwd_q", metadata.fwd_q);
  visit("rev_q", metadata.rev_q);
  visit("fwd_kv", metadata.fwd_kv);
  visit("rev_kv", metadata.rev_kv);
}

void write_intermediates(JsonWriter& writer,
                         const std::optional<DispatchIntermediates>& intermediates) {
  if (!intermediates) return;
  writer.key("q_intermediates").open_object();
  write_array(writer.key("tokens_to_dst_per_dispatch"), intermediates->tokens_to_dst_per_dispatch);
  write_array(writer.key("seq_to_dst"), intermediates->seq_to_dst);
  write_array(writer.key("num_received_seqs"), intermediates->num_received_seqs);
  writer.close();
}

std::optional<DispatchIntermediates> read_intermediates(const std::optional<JsonNode>& node) {
  if (!node) return std::nullopt;
  node->check_keys({"tokens_to_dst_per_dispatch", "seq_to_dst", "num_received_seqs"});
  return DispatchIntermediates{read_array(node->at("tokens_to_dst_per_dispatch")),
                               read_array(node->at("seq_to_dst")),
                               read_array(node->at("num_received_seqs"))};
}

void check_world(const JsonNode& root, const DispatchBundle& bundle) {
  for_each_metadata(bundle.metadata, [&](const char* name, const Metadata& metadata) {
    if (!metadata.is_slice() && metadata.seq_len.dim(0) == bundle.plan.world_size) return;
    root.at(name).fail_text(concat("seq_len has shape ", to_string(metadata.seq_len.shape()),
                                   ", expected [", bundle.plan.world_size,
                                   ", S], as the plan's world_size"));
  });
}

}  // namespace

void write_attention(JsonWriter& writer, const AttnLayout& layout) {
  writer.open_object();
  write_arrays(writer.key("cu_seqlens_q"), layout.cu_seqlens_q);
  write_arrays(writer.key("cu_seqlens_kv"), layout.cu_seqlens_kv);
  write_array(writer.key("max_seqlen_q"), layout.max_seqlen_q);
  write_array(writer.key("max_seqlen_kv"), layout.max_seqlen_kv);
  write_array(writer.key("num_local_seqs_recv"), layout.num_local_seqs_recv);
  write_arrays(writer.key("kv_begin"), layout.kv_begin);
  write_arrays(writer.key("kv_len"), layout.kv_len);
  writer.close();
}

AttnLayout read_attention(const JsonNode& node) {
  node.check_keys({"cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv",
                   "num_local_seqs_recv", "kv_begin", "kv_len"});
  AttnLayout layout;
  layout.cu_seqlens_q = read_arrays(node.at("cu_seqlens_q"));
  layout.cu_seqlens_kv = read_arrays(node.at("cu_seqlens_kv"));
  layout.max_seqlen_q = read_array(node.at("max_seqlen_q"));
  layout.max_seqlen_kv = read_array(node.at("max_seqlen_kv"));
  layout.num_local_seqs_recv = read_array(node.at("num_local_seqs_recv"));
  layout.kv_begin = read_arrays(node.at("kv_begin"));
  layout.kv_len = read_arrays(node.at("kv_len"));
  return layout;
}

}  // namespace detail

std::string to_json(const DispatchBundle& bundle, JsonStyle style) {
  detail::JsonWriter writer(style);
  writer.open_object().header("waybill.dispatch");
  writer.key("plan").open_object();
  detail::write_plan_members(writer, bundle.plan);
  writer.close();
  detail::for_each_metadata(bundle.metadata, [&](const char* name, const Metadata& metadata) {
    writer.key(name).open_object();
    detail::write_metadata_members(writer, metadata);
    writer.close();
  });
  detail::write_attention(writer.key("attention"), bundle.metadata.attention);
  detail::write_intermediates(writer, bundle.metadata.q_intermediates);
  if (bundle.metadata.kv_dst_global_seq_id) {
    detail::write_array(writer.key("kv_dst_global_seq_id"), bundle.metadata.kv_dst_global_seq_id);
  }
  writer.close();
  return std::move(writer).finish();
}

DispatchBundle dispatch_from_json(std::string_view text, std::string_view origin, ReadCheck check) {
  const detail::JsonValue value = detail::parse_json(text, origin);
  const detail::JsonNode root(value, origin);
  root.check_format("waybill.dispatch");
  root.check_keys({"format", "version", "plan", "fwd_q", "rev_q", "fwd_kv", "rev_kv", "attention",
                   "q_intermediates", "kv_dst_global_seq_id"});
  DispatchBundle bundle;
  bundle.plan = detail::read_plan(root.at("plan"), check);
  detail::for_each_metadata(bundle.metadata, [&](const char* name, Metadata& metadata) {
    metadata = detail::read_metadata(root.at(name), check);
  });
  bundle.metadata.attention = detail::read_attention(root.at("attention"));
  bundle.metadata.q_intermediates = detail::read_intermediates(root.find("q_intermediates"));
  bundle.metadata.kv_dst_global_seq_id = detail::read_array(root.find("kv_dst_global_seq_id"));
  if (check == ReadCheck::values) detail::check_world(root, bundle);
  return bundle;
}

DispatchBundle read_dispatch(const std::filesystem::path& path, ReadCheck check) {
  return dispatch_from_json(read_file(path), path.string(), check);
}

void write_dispatch(const std::filesystem::path& path, const DispatchBundle& bundle,
                    JsonStyle style) {
  write_file(path, to_json(bundle, style));
}

std::string json_format(std::string_view text, std::string_view origin) {
  const detail::JsonValue value = detail::parse_json(text, origin);
  const detail::JsonNode root(value, origin);
  const auto format = root.find("format");
  return format ? format->string() : "";
}

}  // namespace waybill
