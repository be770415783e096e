#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "waybill/json/options.h"
#include "waybill/planner/attention_plan.h"

namespace waybill {

/// "waybill.attention_plan", version 1: the fields of AttentionPlan under their names, tables
/// column by column. Read back it compares equal.
[[nodiscard]] std::string to_json(const AttentionPlan& plan, JsonStyle style = JsonStyle::readable);

/// The inverse.
/// @param origin what errors call the text, usually the file
/// @throws IoError as plan_from_json. With ReadCheck::values also for what the QkvPlan or the
///   options refuse and for tables whose lengths disagree; figures are validate's to check.
[[nodiscard]] AttentionPlan attention_plan_from_json(std::string_view text,
                                                     std::string_view origin = "JSON",
                                                     ReadCheck check = ReadCheck::values);

/// The same from a file, and into one (see write_file).
[[nodiscard]] AttentionPlan read_attention_plan(const std::filesystem::path& path,
                                                ReadCheck check = ReadCheck::values);
void write_attention_plan(const std::filesystem::path& path, const AttentionPlan& plan,
                          JsonStyle style = JsonStyle::readable);

}  // namespace waybill
