#include "waybill/json/plan_json.h"

#include <concepts>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

#include "json/text.h"
#include "waybill/core/error.h"
#include "waybill/core/index_array.h"
#include "waybill/core/topology.h"
#include "waybill/json/file.h"

// Texts of plans, metadata, and speeds of links. Each type has one list of its fields, which the
// writer and the reader visit.
namespace waybill::detail {
namespace {

/// How a field stands in the text.
enum class Presence : std::uint8_t {
  required,       ///< null stands for an optional that is empty; a reader takes its absence as well
  may_be_absent,  ///< always written; a reader goes without
  left_out,  ///< written only where it has not the default, as texts before it had no such field
};

template <class T, class Type>
concept Is = std::same_as<std::remove_const_t<T>, Type>;

template <class Visit>
void for_each_field(Is<QkvPlan> auto& plan, Visit&& visit) {
  visit("world_size", plan.world_size);
  visit("kv_layout", plan.kv_layout);
  visit("rank_shard_offsets", plan.rank_shard_offsets);
  visit("shard_len", plan.shard_len);
  visit("q_dst", plan.q_dst);
  visit("doc_shard_offsets", plan.doc_shard_offsets);
  visit("doc_shards", plan.doc_shards);
  visit("kv_begin", plan.kv_begin, Presence::left_out);
  visit("kv_end", plan.kv_end, Presence::left_out);
}

template <class Visit>
void for_each_field(Is<HardwareFacts> auto& hardware, Visit&& visit) {
  visit("nvlink_bytes_per_second", hardware.nvlink_bytes_per_second);
  visit("network_bytes_per_second", hardware.network_bytes_per_second);
  visit("ranks_per_node", hardware.ranks_per_node);
  visit("message_seconds", hardware.message_seconds);
  visit("pairs_per_second", hardware.pairs_per_second);
  visit("row_pairs", hardware.row_pairs, Presence::left_out);
  visit("shard_pairs", hardware.shard_pairs, Presence::left_out);
}

template <class Visit>
void for_each_field(Is<PlannerOptions> auto& options, Visit&& visit) {
  visit("world_size", options.world_size);
  visit("tokens_per_rank", options.tokens_per_rank);
  visit("q_hidden", options.model.q_hidden);
  visit("kv_hidden", options.model.kv_hidden);
  visit("dtype", options.model.dtype);
  visit("window", options.mask.window);
  visit("mask", options.mask.kind, Presence::left_out);
  visit("chunk", options.mask.chunk, Presence::left_out);
  visit("prefix", options.mask.prefix, Presence::left_out);
  visit("prefixes", options.prefixes, Presence::left_out);
  visit("kv_layout", options.kv_layout);
  visit("imbalance_target", options.imbalance_target);
  visit("byte_weight", options.byte_weight);
  visit("max_tokens_per_rank", options.max_tokens_per_rank);
  visit("block_tokens", options.block_tokens);
  visit("relay", options.relay);
  visit("tails", options.tails, Presence::left_out);
  visit("hardware", options.hardware);
}

template <class Visit>
void for_each_field(Is<RelaySchedule> auto& relay, Visit&& visit) {
  visit("num_stages", relay.num_stages);
  visit("links", relay.links);
  visit("hops", relay.hops);
}

template <class Visit>
void for_each_field(Is<AttentionPlan> auto& plan, Visit&& visit) {
  visit("options", plan.options);
  visit("plan", plan.plan);
  visit("work", plan.work);
  visit("home_tokens", plan.home_tokens);
  visit("attention_tokens", plan.attention_tokens);
  visit("kv_tokens", plan.kv_tokens);
  visit("links", plan.links);
  visit("relay", plan.relay, Presence::left_out);
  visit("block_work", plan.block_work);
  visit("least_bytes_in", plan.least_bytes_in);
}

/// All but num_total_recv_tokens, a number in a slice and else a list.
template <class Visit>
void for_each_field(Is<Metadata> auto& metadata, Visit&& visit) {
  visit("world_size", metadata.world_size);
  visit("normalized", metadata.normalized, Presence::may_be_absent);
  visit("dst_rank", metadata.dst_rank);
  visit("dst_offset", metadata.dst_offset);
  visit("seq_len", metadata.seq_len);
  visit("num_recv_tokens", metadata.num_recv_tokens);
  visit("seq_recv_mask", metadata.seq_recv_mask);
  visit("recv_seq_lens", metadata.recv_seq_lens);
  visit("num_seqs", metadata.num_seqs);
}

template <class Visit>
void for_each_field(Is<AttnLayout> auto& layout, Visit&& visit) {
  visit("cu_seqlens_q", layout.cu_seqlens_q);
  visit("cu_seqlens_kv", layout.cu_seqlens_kv);
  visit("max_seqlen_q", layout.max_seqlen_q);
  visit("max_seqlen_kv", layout.max_seqlen_kv);
  visit("num_local_seqs_recv", layout.num_local_seqs_recv);
  visit("kv_begin", layout.kv_row);
  visit("kv_len", layout.kv_len);
}

template <class Visit>
void for_each_field(Is<DispatchIntermediates> auto& intermediates, Visit&& visit) {
  visit("tokens_to_dst_per_dispatch", intermediates.tokens_to_dst_per_dispatch);
  visit("seq_to_dst", intermediates.seq_to_dst);
  visit("num_received_seqs", intermediates.num_received_seqs);
}

template <class Visit>
void for_each_field(Is<DispatchBundle> auto& bundle, Visit&& visit) {
  visit("plan", bundle.plan);
  visit("fwd_q", bundle.metadata.fwd_q);
  visit("rev_q", bundle.metadata.rev_q);
  visit("fwd_kv", bundle.metadata.fwd_kv);
  visit("rev_kv", bundle.metadata.rev_kv);
  visit("attention", bundle.metadata.attention);
  visit("q_intermediates", bundle.metadata.q_intermediates, Presence::left_out);
  visit("kv_dst_global_seq_id", bundle.metadata.kv_dst_global_seq_id, Presence::left_out);
}

template <class Visit>
void for_each_field(Is<LinkMeasurement> auto& links, Visit&& visit) {
  visit("device", links.device, Presence::may_be_absent);
  visit("num_gpus", links.num_gpus, Presence::may_be_absent);
  visit("nvlink_bytes_per_second", links.speeds.nvlink_bytes_per_second);
  visit("network_bytes_per_second", links.speeds.network_bytes_per_second);
  visit("block_bytes_per_second", links.speeds.block_bytes_per_second);
}

// Tables stand column by column. The first sets the number of rows.
constexpr std::tuple link_columns{std::pair{"nvlink_in", &LinkBytes::nvlink_in},
                                  std::pair{"nvlink_out", &LinkBytes::nvlink_out},
                                  std::pair{"network_in", &LinkBytes::network_in},
                                  std::pair{"network_out", &LinkBytes::network_out}};
constexpr std::tuple hop_columns{
    std::pair{"src_rank", &RelayHop::src_rank},   std::pair{"dst_rank", &RelayHop::dst_rank},
    std::pair{"shard", &RelayHop::shard},         std::pair{"stage", &RelayHop::stage},
    std::pair{"row_begin", &RelayHop::row_begin}, std::pair{"num_rows", &RelayHop::num_rows},
    std::pair{"after", &RelayHop::after}};

template <class Row>
constexpr const auto& columns_of() {
  if constexpr (std::same_as<Row, LinkBytes>) {
    return link_columns;
  } else {
    return hop_columns;
  }
}

std::string_view name_of(DType dtype) { return dtype_name(dtype); }
std::string_view name_of(KvLayout layout) { return to_string(layout); }
std::string_view name_of(MaskKind mask) { return to_string(mask); }

/// The value whose name the node gives. @throws IoError that tells what is expected
template <class Name>
Name read_name(const JsonNode& node, std::initializer_list<Name> names, std::string_view expected) {
  for (const Name name : names) {
    if (node.string() == name_of(name)) return name;
  }
  node.fail(expected);
}

template <class Row>
void write_table(JsonWriter& writer, const std::vector<Row>& rows) {
  writer.open_object();
  const auto write = [&](const auto& column) {
    writer.key(column.first).open_list(true);
    for (const Row& row : rows) writer.integer(row.*column.second);
    writer.close();
  };
  std::apply([&](const auto&... column) { (write(column), ...); }, columns_of<Row>());
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
    if (!std::in_range<Field>(numbers[i]))
      node.fail_text(concat("entry ", i, " = ", numbers[i], ", expected a number of 32 bits"));
    rows[i].*field = static_cast<Field>(numbers[i]);
  }
}

template <class Row>
void read_table(const JsonNode& table, std::vector<Row>& rows) {
  bool first = true;
  std::apply(
      [&](const auto&... column) {
        table.check_keys({std::string_view(column.first)...});
        (read_column(table, rows, std::exchange(first, false), column.first, column.second), ...);
      },
      columns_of<Row>());
}

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

/// Appends the elements below a node. The lists must have the extents of the shape, which thereby
/// is checked before anything of its size is allocated.
void read_nested(const JsonNode& node, const Shape& shape, std::size_t axis,
                 std::vector<std::int64_t>& elements) {
  if (axis == shape.size()) {
    elements.push_back(node.integer());
    return;
  }
  if (!node.is_list()) node.fail("a list, as the shape says");
  const auto check_extent = [&](std::size_t size) {
    if (static_cast<std::int64_t>(size) == shape[axis]) return;
    node.fail(
        concat("a list of ", shape[axis], ", extent ", axis, " of the shape ", to_string(shape)));
  };
  if (const auto* const integers = std::get_if<JsonIntegers>(&node.value().value)) {
    check_extent(integers->size());
    if (axis + 1 < shape.size() && !integers->empty()) {
      node.below(JsonValue{integers->front()}, "/0").fail("a list, as the shape says");
    }
    elements.insert(elements.end(), integers->begin(), integers->end());
    return;
  }
  const std::vector<JsonNode> items = node.items();
  check_extent(items.size());
  for (const JsonNode& item : items) read_nested(item, shape, axis + 1, elements);
}

IndexArray read_array(const JsonNode& node) {
  node.check_keys({"shape", "dtype", "data"});
  const JsonNode shape_node = node.at("shape");
  const std::vector<std::int64_t>& extents = shape_node.integers();
  if (extents.size() > Shape::max_axes) {
    shape_node.fail(concat("at most ", Shape::max_axes, " extents"));
  }
  check_at(shape_node, [&] { (void)num_elements(extents, "shape"); });
  const Shape shape{std::span(extents)};
  const DType dtype = read_name(
      node.at("dtype"), {DType::boolean, DType::int32, DType::uint32, DType::int64, DType::uint64},
      "one of bool, int32, uint32, int64, uint64");
  const JsonNode data = node.at("data");
  std::vector<std::int64_t> elements;
  read_nested(data, shape, 0, elements);
  IndexArray array(shape, elements);
  if (dtype == DType::int64) return array;
  check_at(data, [&] { array = array.to(dtype, "data"); });
  return array;
}

/// One array, or {"ragged": [array, ...]}
void write_arrays(JsonWriter& writer, const std::vector<IndexArray>& arrays) {
  if (arrays.size() == 1 && arrays.front().ndim() != 1) {
    return write_array(writer, arrays.front());
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

// Checks of what has been read. Some hold whatever the caller validates itself.

/// Texts say "mask": "full" in place of a kv_end for whole documents: shorter, and as before there
/// was one.
void read_mask(const JsonNode& node, QkvPlan& plan) {
  const std::optional<JsonNode> mask = node.find("mask");
  if (!mask) return;
  const bool full = read_name(*mask, {MaskKind::causal, MaskKind::full},
                              "\"causal\" or \"full\"") == MaskKind::full;
  if (!full) return;
  for (const char* const range : {"kv_begin", "kv_end"}) {
    if (const auto given = node.find(range)) given->fail("none: the mask is full");
  }
  plan.need_whole_documents();
}

void check_values(const JsonNode& /*node*/, const auto& /*value*/, ReadCheck /*check*/) {}

void check_values(const JsonNode& node, const QkvPlan& plan, ReadCheck check) {
  if (check == ReadCheck::form) return;
  (void)node.at("world_size").integer(1, max_world_size);
  check_at(node, [&] { plan.check("plan"); });
}

void check_values(const JsonNode& node, const HardwareFacts& /*hardware*/, ReadCheck /*check*/) {
  (void)node.at("ranks_per_node").integer(1, std::numeric_limits<std::int32_t>::max());
}

void check_values(const JsonNode& node, const PlannerOptions& options, ReadCheck check) {
  (void)node.at("world_size").integer(1, max_world_size);
  if (check == ReadCheck::values) check_at(node, [&] { options.check("options"); });
}

void check_values(const JsonNode& node, const RelaySchedule& /*relay*/, ReadCheck /*check*/) {
  (void)node.at("num_stages").integer(0, std::numeric_limits<std::int32_t>::max());
}

void check_values(const JsonNode& root, const AttentionPlan& plan, ReadCheck check) {
  if (check == ReadCheck::form) return;
  const std::int32_t world = plan.plan.world_size;
  if (plan.options.world_size != world)
    root.at("plan").fail_text(
        concat("world_size ", world, ", expected ", plan.options.world_size, " as in the options"));
  const auto check_table = [&](const char* name, std::size_t got) {
    if (got == static_cast<std::size_t>(world)) return;
    root.at(name).fail_text(concat(got, " entries, expected ", world, ": one per rank"));
  };
  check_table("work", plan.work.size());
  check_table("home_tokens", plan.home_tokens.size());
  check_table("attention_tokens", plan.attention_tokens.size());
  check_table("kv_tokens", plan.kv_tokens.size());
  check_table("links", plan.links.size());
  if (root.find("relay")) check_table("relay", plan.relay.links.size());
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

void check_values(const JsonNode& node, const Metadata& metadata, ReadCheck check) {
  if (metadata.world_size) (void)node.at("world_size").integer(1, max_world_size);
  if (check == ReadCheck::form) return;
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

void check_values(const JsonNode& root, const DispatchBundle& bundle, ReadCheck check) {
  if (check == ReadCheck::form) return;
  const auto check_world = [&]<class Field>(const char* name, const Field& metadata,
                                            Presence = {}) {
    if constexpr (std::same_as<Field, Metadata>) {
      if (!metadata.is_slice() && metadata.seq_len.dim(0) == bundle.plan.world_size) return;
      root.at(name).fail_text(concat("seq_len has shape ", to_string(metadata.seq_len.shape()),
                                     ", expected [", bundle.plan.world_size,
                                     ", S], as the plan's world_size"));
    }
  };
  for_each_field(bundle, check_world);
}

void check_values(const JsonNode& root, const LinkMeasurement& links, ReadCheck /*check*/) {
  constexpr std::int64_t max_gpus = 1 << 20;
  const auto check_speed = [&]<class Field>(const char* name, const Field& field, Presence = {}) {
    if constexpr (std::same_as<Field, double>) {
      if (LinkSpeeds::makes_sense(field)) return;
      root.at(name).fail(concat(LinkSpeeds::least, " to ", LinkSpeeds::most, " bytes per second"));
    }
  };
  for_each_field(links, check_speed);
  if (const auto gpus = root.find("num_gpus")) (void)gpus->integer(0, max_gpus);
}

/// The member "num_total_recv_tokens" of the object that is open.
void write_totals(JsonWriter& writer, const Metadata& metadata) {
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

void read_totals(const JsonNode& parent, Metadata& metadata) {
  const auto node = parent.find("num_total_recv_tokens");
  if (!node) return;  // unknown
  metadata.num_total_recv_tokens =
      node->is_list() ? node->integers() : std::vector<std::int64_t>{node->integer()};
}

template <class T>
inline constexpr bool is_optional = false;
template <class T>
inline constexpr bool is_optional<std::optional<T>> = true;

template <class T>
void write_value(JsonWriter& writer, const T& value);

/// The members of the object that is open.
template <class T>
void write_fields(JsonWriter& writer, const T& value) {
  if constexpr (std::same_as<T, Metadata>) value.check_counts("to_json");
  if constexpr (std::same_as<T, QkvPlan>) {
    if (value.needs_whole_documents()) {  // read_mask
      QkvPlan rest = value;
      rest.kv_end.clear();
      write_fields(writer, rest);
      return void(writer.key("mask").string(to_string(MaskKind::full)));
    }
  }
  const auto write = [&]<class Field>(const char* name, const Field& field,
                                      Presence presence = Presence::required) {
    if (presence == Presence::left_out && field == Field{}) return;
    writer.key(name);
    write_value(writer, field);
  };
  for_each_field(value, write);
  if constexpr (std::same_as<T, Metadata>) write_totals(writer, value);
}

template <class T>
void write_value(JsonWriter& writer, const T& value) {
  if constexpr (std::same_as<T, bool>) {
    writer.boolean(value);
  } else if constexpr (std::integral<T>) {
    writer.integer(value);
  } else if constexpr (std::same_as<T, double>) {
    writer.real(value);
  } else if constexpr (std::same_as<T, std::string>) {
    writer.string(value);
  } else if constexpr (std::is_enum_v<T>) {
    writer.string(name_of(value));
  } else if constexpr (is_optional<T>) {
    if (!value) return void(writer.null());
    write_value(writer, *value);
  } else if constexpr (std::same_as<T, IndexArray>) {
    write_array(writer, value);
  } else if constexpr (std::same_as<T, std::vector<IndexArray>>) {
    write_arrays(writer, value);
  } else if constexpr (requires { requires std::integral<typename T::value_type>; }) {
    writer.integers(value);
  } else if constexpr (requires { write_table(writer, value); }) {
    write_table(writer, value);
  } else {
    writer.open_object();
    write_fields(writer, value);
    writer.close();
  }
}

template <class T>
void read_value(const JsonNode& node, T& value, ReadCheck check);

template <class T>
void read_fields(const JsonNode& node, T& value, ReadCheck check) {
  std::vector<std::string_view> keys{"format", "version"};
  for_each_field(value,
                 [&](const char* name, const auto&, Presence = {}) { keys.emplace_back(name); });
  if constexpr (std::same_as<T, Metadata>) keys.emplace_back("num_total_recv_tokens");
  if constexpr (std::same_as<T, QkvPlan>) keys.emplace_back("mask");
  node.check_keys(keys);
  const auto read = [&]<class Field>(const char* name, Field& field,
                                     Presence presence = Presence::required) {
    if (presence == Presence::required && !is_optional<Field>) {
      return read_value(node.at(name), field, check);
    }
    if (const auto given = node.find(name)) read_value(*given, field, check);
  };
  for_each_field(value, read);
  if constexpr (std::same_as<T, Metadata>) read_totals(node, value);
  if constexpr (std::same_as<T, QkvPlan>) read_mask(node, value);
  check_values(node, value, check);
}

template <class T>
void read_value(const JsonNode& node, T& value, ReadCheck check) {
  using Limits = std::numeric_limits<T>;
  if constexpr (std::same_as<T, bool>) {
    value = node.boolean();
  } else if constexpr (std::integral<T>) {
    value = static_cast<T>(node.integer(Limits::min(), Limits::max()));
  } else if constexpr (std::same_as<T, double>) {
    value = node.real();
  } else if constexpr (std::same_as<T, std::string>) {
    value = node.string();
  } else if constexpr (std::same_as<T, DType>) {
    check_at(node, [&] { value = dtype_from_name(node.string()); });
  } else if constexpr (std::same_as<T, KvLayout>) {
    value =
        read_name(node, {KvLayout::per_query, KvLayout::per_rank}, "\"per_query\" or \"per_rank\"");
  } else if constexpr (std::same_as<T, MaskKind>) {
    value = read_name(node, {MaskKind::causal, MaskKind::full, MaskKind::prefix},
                      "\"causal\", \"full\" or \"prefix\"");
  } else if constexpr (is_optional<T>) {
    read_value(node, value.emplace(), check);
  } else if constexpr (std::same_as<T, IndexArray>) {
    value = read_array(node);
  } else if constexpr (std::same_as<T, std::vector<IndexArray>>) {
    value = read_arrays(node);
  } else if constexpr (std::same_as<T, std::vector<std::int64_t>>) {
    value = node.integers();
  } else if constexpr (std::same_as<T, std::vector<std::int32_t>>) {
    value = node.integers32();
  } else if constexpr (requires { read_table(node, value); }) {
    read_table(node, value);
  } else {
    read_fields(node, value, check);
  }
}

template <class T>
std::string text_of(const T& value, std::string_view format, JsonStyle style) {
  return write_document(style, format, [&](JsonWriter& writer) { write_fields(writer, value); });
}

template <class T>
T value_in(std::string_view text, std::string_view origin, std::string_view format,
           ReadCheck check) {
  return read_document(text, origin, format, [&](const JsonNode& root) {
    T value;
    if constexpr (std::same_as<T, Metadata>) {
      if (root.find("format") || root.find("version")) root.check_format("waybill.metadata");
    }
    read_fields(root, value, check);
    return value;
  });
}

}  // namespace
}  // namespace waybill::detail

namespace waybill {

std::string to_json(const QkvPlan& plan, JsonStyle style) {
  return detail::text_of(plan, "waybill.plan", style);
}

QkvPlan plan_from_json(std::string_view text, std::string_view origin, ReadCheck check) {
  return detail::value_in<QkvPlan>(text, origin, "waybill.plan", check);
}

QkvPlan read_plan(const std::filesystem::path& path, ReadCheck check) {
  return plan_from_json(read_file(path), path.string(), check);
}

void write_plan(const std::filesystem::path& path, const QkvPlan& plan, JsonStyle style) {
  write_file(path, to_json(plan, style));
}

std::string to_json(const AttentionPlan& plan, JsonStyle style) {
  return detail::text_of(plan, "waybill.attention_plan", style);
}

AttentionPlan attention_plan_from_json(std::string_view text, std::string_view origin,
                                       ReadCheck check) {
  return detail::value_in<AttentionPlan>(text, origin, "waybill.attention_plan", check);
}

AttentionPlan read_attention_plan(const std::filesystem::path& path, ReadCheck check) {
  return attention_plan_from_json(read_file(path), path.string(), check);
}

void write_attention_plan(const std::filesystem::path& path, const AttentionPlan& plan,
                          JsonStyle style) {
  write_file(path, to_json(plan, style));
}

std::string to_json(const Metadata& metadata, JsonStyle style) {
  return detail::text_of(metadata, "waybill.metadata", style);
}

Metadata metadata_from_json(std::string_view text, std::string_view origin, ReadCheck check) {
  return detail::value_in<Metadata>(text, origin, "", check);
}

Metadata read_metadata(const std::filesystem::path& path, ReadCheck check) {
  return metadata_from_json(read_file(path), path.string(), check);
}

void write_metadata(const std::filesystem::path& path, const Metadata& metadata, JsonStyle style) {
  write_file(path, to_json(metadata, style));
}

std::string to_json(const DispatchBundle& bundle, JsonStyle style) {
  return detail::text_of(bundle, "waybill.dispatch", style);
}

DispatchBundle dispatch_from_json(std::string_view text, std::string_view origin, ReadCheck check) {
  return detail::value_in<DispatchBundle>(text, origin, "waybill.dispatch", check);
}

DispatchBundle read_dispatch(const std::filesystem::path& path, ReadCheck check) {
  return dispatch_from_json(read_file(path), path.string(), check);
}

void write_dispatch(const std::filesystem::path& path, const DispatchBundle& bundle,
                    JsonStyle style) {
  write_file(path, to_json(bundle, style));
}

std::string to_json(const LinkMeasurement& links, JsonStyle style) {
  links.speeds.check("to_json");
  return detail::text_of(links, "waybill.links", style);
}

LinkMeasurement links_from_json(std::string_view text, std::string_view origin) {
  return detail::value_in<LinkMeasurement>(text, origin, "waybill.links", ReadCheck::values);
}

LinkMeasurement read_links(const std::filesystem::path& path) {
  return links_from_json(read_file(path), path.string());
}

std::string json_format(std::string_view text, std::string_view origin) {
  return detail::read_document(text, origin, "", [](const detail::JsonNode& root) -> std::string {
    const auto format = root.find("format");
    return format ? format->string() : "";
  });
}

}  // namespace waybill
