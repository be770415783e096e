#include <concepts>
#include <string>
#include <utility>

#include "json/parts.h"
#include "waybill/core/error.h"
#include "waybill/json/file.h"
#include "waybill/json/plan_json.h"

namespace waybill {
namespace detail {
namespace {

void write_nested(JsonWriter& writer, const Shape& shape, const Int64View& values, std::size_t axis,
                  std::int64_t& next) {
  if (axis == shape.size()) {
    writer.integer(values[next++]);
    return;
  }
  writer.open_list(true);
  for (std::int64_t i = 0; i < shape[axis]; ++i) {
    write_nested(writer, shape, values, axis + 1, next);
  }
  writer.close();
}

/// Appends the elements below `value`. The lists must have the extents of the shape, which thereby
/// is checked before anything of its size is allocated.
class NestedReader {
 public:
  NestedReader(const JsonNode& data, const Shape& shape) : data_(&data), shape_(&shape) {}

  std::vector<std::int64_t> read() {
    add(data_->value(), 0);
    return std::move(elements_);
  }

 private:
  void add(const JsonValue& value, std::size_t axis) {
    if (axis == shape_->size()) {
      const auto* number = std::get_if<std::int64_t>(&value.value);
      if (number == nullptr) fail(value, "an integer");
      elements_.push_back(*number);
      return;
    }
    if (const auto* integers = std::get_if<JsonIntegers>(&value.value)) {
      check_extent(value, integers->size(), axis);
      if (axis + 1 < shape_->size() && !integers->empty()) {
        path_ += "/0";
        fail(JsonValue{integers->front()}, "a list, as the shape says");
      }
      elements_.insert(elements_.end(), integers->begin(), integers->end());
      return;
    }
    const auto* list = std::get_if<JsonList>(&value.value);
    if (list == nullptr) fail(value, "a list, as the shape says");
    check_extent(value, list->size(), axis);
    const std::size_t path_size = path_.size();
    for (std::size_t i = 0; i < list->size(); ++i) {
      path_ += concat('/', i);
      add((*list)[i], axis + 1);
      path_.resize(path_size);
    }
  }

  void check_extent(const JsonValue& value, std::size_t size, std::size_t axis) const {
    const std::int64_t extent = (*shape_)[axis];
    if (static_cast<std::int64_t>(size) == extent) return;
    fail(value,
         concat("a list of ", extent, ", extent ", axis, " of the shape ", to_string(*shape_)));
  }

  [[noreturn]] void fail(const JsonValue& value, std::string_view expected) const {
    data_->below(value, path_).fail(expected);
  }

  const JsonNode* data_;
  const Shape* shape_;
  std::string path_;  // below "data"
  std::vector<std::int64_t> elements_;
};

Shape read_shape(const JsonNode& node) {
  const std::vector<std::int64_t>& shape = node.integers();
  if (shape.size() > Shape::max_axes) node.fail(concat("at most ", Shape::max_axes, " extents"));
  check_at(node, [&] { (void)num_elements(shape, "shape"); });
  return Shape(std::span(shape));
}

DType read_dtype(const JsonNode& node) {
  for (const DType dtype :
       {DType::boolean, DType::int32, DType::uint32, DType::int64, DType::uint64}) {
    if (node.string() == dtype_name(dtype)) return dtype;
  }
  node.fail("one of bool, int32, uint32, int64, uint64");
}

/// {"shape": [...], "dtype": "...", "data": nested lists, or a number for a scalar}
void write_array(JsonWriter& writer, const IndexArray& array) {
  writer.open_object(true);
  writer.key("shape").integers(array.shape());
  writer.key("dtype").string(dtype_name(array.dtype()));
  writer.key("data");
  const Int64View values(array);
  std::int64_t next = 0;
  write_nested(writer, array.shape(), values, 0, next);
  writer.close();
}

void write_array(JsonWriter& writer, const std::optional<IndexArray>& array) {
  if (array) {
    write_array(writer, *array);
  } else {
    writer.null();
  }
}

IndexArray read_array(const JsonNode& node) {
  node.check_keys({"shape", "dtype", "data"});
  Shape shape = read_shape(node.at("shape"));
  const DType dtype = read_dtype(node.at("dtype"));
  const JsonNode data = node.at("data");
  std::vector<std::int64_t> elements = NestedReader(data, shape).read();
  IndexArray array(shape, elements);
  if (dtype == DType::int64) return array;
  check_at(data, [&] { array = array.to(dtype, "data"); });
  return array;
}

/// One array, or {"ragged": [array, ...]}
void write_array(JsonWriter& writer, const std::vector<IndexArray>& arrays) {
  if (arrays.size() == 1 && arrays.front().ndim() != 1) {
    write_array(writer, arrays.front());
    return;
  }
  writer.open_object().key("ragged").open_list();
  for (const IndexArray& array : arrays) write_array(writer, array);
  writer.close().close();
}

std::vector<IndexArray> read_arrays(const JsonNode& node) {
  const std::optional<JsonNode> ragged = node.find("ragged");
  if (!ragged) return {read_array(node)};
  node.check_keys({"ragged"});
  std::vector<IndexArray> arrays;
  for (const JsonNode& item : ragged->items()) arrays.push_back(read_array(item));
  return arrays;
}

void read_member(const JsonNode& parent, const char* name, IndexArray& array) {
  array = read_array(parent.at(name));
}
void read_member(const JsonNode& parent, const char* name, std::optional<IndexArray>& array) {
  if (const auto node = parent.find(name)) array = read_array(*node);
}
void read_member(const JsonNode& parent, const char* name, std::vector<IndexArray>& arrays) {
  arrays = read_arrays(parent.at(name));
}

/// The arrays of what is written under their names, in this order.
template <class Visit>
void for_each_array(auto& metadata, Visit&& visit) {
  using Type = std::remove_cvref_t<decltype(metadata)>;
  if constexpr (std::same_as<Type, Metadata>) {
    visit("dst_rank", metadata.dst_rank);
    visit("dst_offset", metadata.dst_offset);
    visit("seq_len", metadata.seq_len);
    visit("num_recv_tokens", metadata.num_recv_tokens);
    visit("seq_recv_mask", metadata.seq_recv_mask);
    visit("recv_seq_lens", metadata.recv_seq_lens);
    visit("num_seqs", metadata.num_seqs);
  } else if constexpr (std::same_as<Type, AttnLayout>) {
    visit("cu_seqlens_q", metadata.cu_seqlens_q);
    visit("cu_seqlens_kv", metadata.cu_seqlens_kv);
    visit("max_seqlen_q", metadata.max_seqlen_q);
    visit("max_seqlen_kv", metadata.max_seqlen_kv);
    visit("num_local_seqs_recv", metadata.num_local_seqs_recv);
    visit("kv_begin", metadata.kv_begin);
    visit("kv_len", metadata.kv_len);
  } else {
    visit("tokens_to_dst_per_dispatch", metadata.tokens_to_dst_per_dispatch);
    visit("seq_to_dst", metadata.seq_to_dst);
    visit("num_received_seqs", metadata.num_received_seqs);
  }
}

void write_fields(JsonWriter& writer, const auto& metadata) {
  for_each_array(
      metadata, [&](const char* name, const auto& array) { write_array(writer.key(name), array); });
}

/// @param others keys that are no arrays
void read_fields(const JsonNode& node, auto& metadata,
                 std::initializer_list<std::string_view> others = {}) {
  std::vector<std::string_view> keys(others);
  for_each_array(metadata, [&](const char* name, const auto&) { keys.emplace_back(name); });
  node.check_keys(keys);
  for_each_array(metadata, [&](const char* name, auto& array) { read_member(node, name, array); });
}

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
  constexpr std::int64_t max = std::numeric_limits<std::int64_t>::max();
  check_range(node, "dst_rank", metadata.dst_rank, -1, max_world_size - 1);
  check_range(node, "dst_offset", metadata.dst_offset, 0, max);
  check_range(node, "seq_len", metadata.seq_len, 0, max);
  check_range(node, "num_recv_tokens", metadata.num_recv_tokens, 0, max);
  check_range(node, "seq_recv_mask", metadata.seq_recv_mask, 0, 1);
  check_range(node, "recv_seq_lens", metadata.recv_seq_lens, 0, max);
  check_range(node, "num_seqs", metadata.num_seqs, 0, max);
  for (const std::int64_t total : metadata.num_total_recv_tokens) {
    if (total < 0) {
      node.at("num_total_recv_tokens").fail_text(concat("total ", total, ", expected 0 or more"));
    }
  }
  if (metadata.is_slice() && metadata.num_total_recv_tokens.size() > 1) {
    node.at("num_total_recv_tokens").fail("one number, as in the slice of one rank");
  }
}

void write_metadata_members(JsonWriter& writer, const Metadata& metadata) {
  metadata.check_counts("to_json");
  writer.key("world_size");
  if (metadata.world_size) {
    writer.integer(*metadata.world_size);
  } else {
    writer.null();
  }
  writer.key("normalized").boolean(metadata.normalized);
  write_fields(writer, metadata);
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
  Metadata metadata;
  read_fields(node, metadata,
              {"format", "version", "world_size", "normalized", "num_total_recv_tokens"});
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

/// The four metadata under their names, in this order.
template <class Bundle, class Visit>
void for_each_metadata(Bundle& metadata, Visit&& visit) {
  visit("fwd_q", metadata.fwd_q);
  visit("rev_q", metadata.rev_q);
  visit("fwd_kv", metadata.fwd_kv);
  visit("rev_kv", metadata.rev_kv);
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
}  // namespace detail

std::string to_json(const Metadata& metadata, JsonStyle style) {
  return detail::write_document(style, "waybill.metadata", [&](detail::JsonWriter& writer) {
    detail::write_metadata_members(writer, metadata);
  });
}

Metadata metadata_from_json(std::string_view text, std::string_view origin, ReadCheck check) {
  return detail::read_document(text, origin, "", [&](const detail::JsonNode& root) {
    if (root.find("format") || root.find("version")) root.check_format("waybill.metadata");
    return detail::read_metadata(root, check);
  });
}

Metadata read_metadata(const std::filesystem::path& path, ReadCheck check) {
  return metadata_from_json(read_file(path), path.string(), check);
}

void write_metadata(const std::filesystem::path& path, const Metadata& metadata, JsonStyle style) {
  write_file(path, to_json(metadata, style));
}

std::string to_json(const DispatchBundle& bundle, JsonStyle style) {
  return detail::write_document(style, "waybill.dispatch", [&](detail::JsonWriter& writer) {
    writer.key("plan").open_object();
    detail::write_plan_members(writer, bundle.plan);
    writer.close();
    detail::for_each_metadata(bundle.metadata, [&](const char* name, const Metadata& metadata) {
      writer.key(name).open_object();
      detail::write_metadata_members(writer, metadata);
      writer.close();
    });
    writer.key("attention").open_object();
    detail::write_fields(writer, bundle.metadata.attention);
    writer.close();
    if (bundle.metadata.q_intermediates) {
      writer.key("q_intermediates").open_object();
      detail::write_fields(writer, *bundle.metadata.q_intermediates);
      writer.close();
    }
    if (bundle.metadata.kv_dst_global_seq_id) {
      detail::write_array(writer.key("kv_dst_global_seq_id"), bundle.metadata.kv_dst_global_seq_id);
    }
  });
}

DispatchBundle dispatch_from_json(std::string_view text, std::string_view origin, ReadCheck check) {
  return detail::read_document(text, origin, "waybill.dispatch", [&](const detail::JsonNode& root) {
    root.check_keys({"format", "version", "plan", "fwd_q", "rev_q", "fwd_kv", "rev_kv", "attention",
                     "q_intermediates", "kv_dst_global_seq_id"});
    DispatchBundle bundle;
    bundle.plan = detail::read_plan(root.at("plan"), check);
    detail::for_each_metadata(bundle.metadata, [&](const char* name, Metadata& metadata) {
      metadata = detail::read_metadata(root.at(name), check);
    });
    detail::read_fields(root.at("attention"), bundle.metadata.attention);
    if (const auto intermediates = root.find("q_intermediates"))
      detail::read_fields(*intermediates, bundle.metadata.q_intermediates.emplace());
    detail::read_member(root, "kv_dst_global_seq_id", bundle.metadata.kv_dst_global_seq_id);
    if (check == ReadCheck::values) detail::check_world(root, bundle);
    return bundle;
  });
}

DispatchBundle read_dispatch(const std::filesystem::path& path, ReadCheck check) {
  return dispatch_from_json(read_file(path), path.string(), check);
}

void write_dispatch(const std::filesystem::path& path, const DispatchBundle& bundle,
                    JsonStyle style) {
  write_file(path, to_json(bundle, style));
}

std::string json_format(std::string_view text, std::string_view origin) {
  return detail::read_document(text, origin, "", [](const detail::JsonNode& root) -> std::string {
    const auto format = root.find("format");
    return format ? format->string() : "";
  });
}

}  // namespace waybill
