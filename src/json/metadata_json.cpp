#include <utility>

#include "parts.h"
#include "waybill/core/error.h"
#include "waybill/json/file.h"
#include "waybill/json/plan_json.h"

namespace waybill {
namespace detail {
namespace {

/// A scalar in a slice, a list else. Absent: unknown.
std::vector<std::int64_t> read_totals(const std::optional<JsonNode>& node) {
  if (!node) return {};
  return node->is_list() ? node->integers() : std::vector<std::int64_t>{node->integer()};
}

void check_range(const JsonNode& node, const char* name, const std::optional<IndexArray>& array,
                 std::int64_t low, std::int64_t high) {
  if (!array) return;
  const Int64View values(*array);
  for (std::size_t i = 0; i < values.span().size(); ++i) {
    const std::int64_t value = values.span()[i];
    if (low <= value && value <= high) continue;
    node.at(name).fail_text(concat("element ", i, " = ", value, ", expected ", low, "..", high));
  }
}

void check_values(const JsonNode& node, const Metadata& metadata) {
  check_at(node, [&] {
    metadata.check_shapes("metadata");
    metadata.check_counts("metadata");
  });
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
  check_range(node, "dst_rank", metadata.dst_rank, -1, max_world_size - 1);
  check_range(node, "dst_offset", metadata.dst_offset, 0, most);
  check_range(node, "seq_len", metadata.seq_len, 0, most);
  check_range(node, "num_recv_tokens", metadata.num_recv_tokens, 0, most);
  check_range(node, "seq_recv_mask", metadata.seq_recv_mask, 0, 1);
  check_range(node, "recv_seq_lens", metadata.recv_seq_lens, 0, most);
  check_range(node, "num_seqs", metadata.num_seqs, 0, most);
  for (const std::int64_t total : metadata.num_total_recv_tokens) {
    if (total < 0) {
      node.at("num_total_recv_tokens").fail_text(concat("total ", total, ", expected 0 or more"));
    }
  }
  if (metadata.is_slice() && metadata.num_total_recv_tokens.size() > 1) {
    node.at("num_total_recv_tokens").fail("one number, as in the slice of one rank");
  }
}

}  // namespace

void write_metadata_members(JsonWriter& writer, const Metadata& metadata) {
  metadata.check_counts("to_json");
  writer.key("world_size");
  if (metadata.world_size) {
    writer.integer(*metadata.world_size);
  } else {
    writer.null();
  }
  writer.key("normalized").boolean(metadata.normalized);
  write_array(writer.key("dst_rank"), metadata.dst_rank);
  write_array(writer.key("dst_offset"), metadata.dst_offset);
  write_array(writer.key("seq_len"), metadata.seq_len);
  write_array(writer.key("num_recv_tokens"), metadata.num_recv_tokens);
  write_array(writer.key("seq_recv_mask"), metadata.seq_recv_mask);
  write_array(writer.key("recv_seq_lens"), metadata.recv_seq_lens);
  write_array(writer.key("num_seqs"), metadata.num_seqs);
  writer.key("num_total_recv_tokens");
  const std::vector<std::int64_t>& totals = metadata.num_total_recv_tokens;
  if (totals.empty()) {
    writer.null();
  } else if (metadata.is_slice() && totals.size() == 1) {
    writer.integer(totals.front());
  } else {
    writer.integers(totals);
  }
}

Metadata read_metadata(const JsonNode& node, ReadCheck check) {
  node.check_keys({"format", "version", "world_size", "normalized", "dst_rank", "dst_offset",
                   "seq_len", "num_recv_tokens", "seq_recv_mask", "recv_seq_lens", "num_seqs",
                   "num_total_recv_tokens"});
  Metadata metadata;
  metadata.dst_rank = read_array(node.at("dst_rank"));
  metadata.dst_offset = read_array(node.at("dst_offset"));
  metadata.seq_len = read_array(node.at("seq_len"));
  metadata.num_recv_tokens = read_array(node.at("num_recv_tokens"));
  metadata.seq_recv_mask = read_array(node.find("seq_recv_mask"));
  metadata.recv_seq_lens = read_array(node.find("recv_seq_lens"));
  metadata.num_seqs = read_array(node.find("num_seqs"));
  if (const auto world = node.find("world_size")) {
    metadata.world_size = world->integer(1, max_world_size);
  }
  if (const auto normalized = node.find("normalized")) {
    metadata.normalized = normalized->boolean();
  }
  metadata.num_total_recv_tokens = read_totals(node.find("num_total_recv_tokens"));
  if (check == ReadCheck::values) check_values(node, metadata);
  return metadata;
}

}  // namespace detail

std::string to_json(const Metadata& metadata, JsonStyle style) {
  detail::JsonWriter writer(style);
  writer.open_object().header("waybill.metadata");
  detail::write_metadata_members(writer, metadata);
  writer.close();
  return std::move(writer).finish();
}

Metadata metadata_from_json(std::string_view text, std::string_view origin, ReadCheck check) {
  const detail::JsonValue value = detail::parse_json(text, origin);
  const detail::JsonNode root(value, origin);
  if (root.find("format") || root.find("version")) root.check_format("waybill.metadata");
  return detail::read_metadata(root, check);
}

Metadata read_metadata(const std::filesystem::path& path, ReadCheck check) {
  return metadata_from_json(read_file(path), path.string(), check);
}

void write_metadata(const std::filesystem::path& path, const Metadata& metadata, JsonStyle style) {
  write_file(path, to_json(metadata, style));
}

}  // namespace waybill
