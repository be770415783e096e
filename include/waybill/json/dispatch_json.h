#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "waybill/json/options.h"
#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/qkv_plan.h"

namespace waybill {

/// A plan and everything that was computed from it, in the dense form.
struct DispatchBundle {
  QkvPlan plan;
  E2eMetadata metadata;
};

/// "waybill.dispatch", version 1: the plan, the four metadata, the attention layout and, where
/// present, the intermediates. Read back every field compares equal. Size grows with
/// world_size^2 and with world_size x shards x copies, as the dense form does.
[[nodiscard]] std::string to_json(const DispatchBundle& bundle,
                                  JsonStyle style = JsonStyle::readable);

/// The inverse. Errors as in plan_from_json and metadata_from_json; with ReadCheck::values also
/// for a world_size on which the parts disagree.
[[nodiscard]] DispatchBundle dispatch_from_json(std::string_view text,
                                                std::string_view origin = "JSON",
                                                ReadCheck check = ReadCheck::values);

/// The same from a file, and into one (see write_file).
[[nodiscard]] DispatchBundle read_dispatch(const std::filesystem::path& path,
                                           ReadCheck check = ReadCheck::values);
void write_dispatch(const std::filesystem::path& path, const DispatchBundle& bundle,
                    JsonStyle style = JsonStyle::readable);

/// The text's "format": "waybill.plan", "waybill.dispatch", "waybill.metadata", ...; "" when the
/// top is an object without one.
/// @throws IoError for text that is not JSON or not an object, or a format that is not a string.
[[nodiscard]] std::string json_format(std::string_view text, std::string_view origin = "JSON");

}  // namespace waybill
