#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "node.h"
#include "waybill/core/index_array.h"
#include "waybill/json/options.h"
#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/metadata.h"
#include "waybill/routing/qkv_plan.h"
#include "writer.h"

// The parts of which the formats consist; each writer with its reader.
namespace waybill::detail {

inline constexpr std::int64_t longest_document = std::int64_t{1} << 40;  ///< tokens

/// {"shape": [...], "dtype": "...", "data": nested lists, or a number for a scalar}
void write_array(JsonWriter& writer, const IndexArray& array);
void write_array(JsonWriter& writer, const std::optional<IndexArray>& array);  ///< or null
[[nodiscard]] IndexArray read_array(const JsonNode& node);
[[nodiscard]] std::optional<IndexArray> read_array(const std::optional<JsonNode>& node);

/// One array, or {"ragged": [array, ...]}
void write_arrays(JsonWriter& writer, const std::vector<IndexArray>& arrays);
[[nodiscard]] std::vector<IndexArray> read_arrays(const JsonNode& node);

/// The members of the object that is open, without "format" and "version".
void write_metadata_members(JsonWriter& writer, const Metadata& metadata);
[[nodiscard]] Metadata read_metadata(const JsonNode& node, ReadCheck check);

[[nodiscard]] KvLayout read_kv_layout(const JsonNode& node);
/// The member "mask" of the object that is open; nothing for a causal one, as before there was one.
void write_mask(JsonWriter& writer, MaskKind mask);
[[nodiscard]] MaskKind read_mask(const JsonNode& parent);
void write_plan_members(JsonWriter& writer, const QkvPlan& plan);
[[nodiscard]] QkvPlan read_plan(const JsonNode& node, ReadCheck check);

void write_attention(JsonWriter& writer, const AttnLayout& layout);
[[nodiscard]] AttnLayout read_attention(const JsonNode& node);

/// Calls `check`; what it finds wrong becomes an error of the text, at `node`.
template <class Check>
void check_at(const JsonNode& node, Check&& check) {
  try {
    check();
  } catch (const InvalidArgument& error) {
    node.fail_text(error.what());
  }
}

}  // namespace waybill::detail
