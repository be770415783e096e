#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "waybill/json/options.h"
#include "waybill/routing/qkv_plan.h"

namespace waybill {

/// "waybill.plan", version 1: the fields of QkvPlan under their names. Read back it compares equal.
[[nodiscard]] std::string to_json(const QkvPlan& plan, JsonStyle style = JsonStyle::readable);

/// The inverse. "kv_begin" may be absent: all 0; "mask" too: causal.
/// @param origin what errors call the text, usually the file
/// @throws IoError `ORIGIN: /shard_len/3 = "abc", expected an integer`, or with line and column for
///   text that is not JSON. With ReadCheck::values also for what plan.check() refuses.
[[nodiscard]] QkvPlan plan_from_json(std::string_view text, std::string_view origin = "JSON",
                                     ReadCheck check = ReadCheck::values);

/// The same from a file, and into one (see write_file).
[[nodiscard]] QkvPlan read_plan(const std::filesystem::path& path,
                                ReadCheck check = ReadCheck::values);
void write_plan(const std::filesystem::path& path, const QkvPlan& plan,
                JsonStyle style = JsonStyle::readable);

}  // namespace waybill
