#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "waybill/core/link_speeds.h"
#include "waybill/json/file.h"
#include "waybill/planner/planner.h"
#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/metadata.h"
#include "waybill/routing/qkv_plan.h"

namespace waybill {

/// "waybill.plan", version 1: the fields of QkvPlan under their names. Read back it compares equal.
[[nodiscard]] std::string to_json(const QkvPlan& plan, JsonStyle style = JsonStyle::readable);

/// The inverse. "kv_begin" may be absent: all 0; "kv_end" too: empty, or as "mask" says.
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

/// "waybill.metadata", version 1: every field under its name; an array as
/// `{"shape": [2, 3], "dtype": "int64", "data": [[...], [...]]}`, null for what is absent. In a
/// slice num_total_recv_tokens is one number. Read back it compares equal.
/// @throws InvalidArgument for a uint64 value over 2^63 - 1.
[[nodiscard]] std::string to_json(const Metadata& metadata, JsonStyle style = JsonStyle::readable);

/// The inverse. "format" and "version" may be absent, as may be what can be null.
/// @param origin what errors call the text, usually the file
/// @throws IoError `ORIGIN: /dst_rank/data/0/2 = "a", expected an integer`, or with line and column
///   for text that is not JSON. With ReadCheck::values also for shapes that disagree, a dst_rank
///   outside -1..2^20 - 1, and negative lengths, offsets and counts.
[[nodiscard]] Metadata metadata_from_json(std::string_view text, std::string_view origin = "JSON",
                                          ReadCheck check = ReadCheck::values);

/// The same from a file, and into one (see write_file).
[[nodiscard]] Metadata read_metadata(const std::filesystem::path& path,
                                     ReadCheck check = ReadCheck::values);
void write_metadata(const std::filesystem::path& path, const Metadata& metadata,
                    JsonStyle style = JsonStyle::readable);

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

/// Speeds of a machine's links, and where they come from.
struct LinkMeasurement {
  LinkSpeeds speeds = {};
  std::string device = {};  ///< name of its GPUs; empty: not measured on GPUs
  int num_gpus = 0;

  friend bool operator==(const LinkMeasurement&, const LinkMeasurement&) = default;
};

/// "waybill.links", version 1, as `waybill calibrate` writes it.
/// @throws InvalidArgument as LinkSpeeds::check
[[nodiscard]] std::string to_json(const LinkMeasurement& links,
                                  JsonStyle style = JsonStyle::readable);

/// The inverse. @throws IoError `ORIGIN: /nvlink_bytes_per_second = -1, expected ...`
[[nodiscard]] LinkMeasurement links_from_json(std::string_view text,
                                              std::string_view origin = "JSON");

/// The same from a file.
[[nodiscard]] LinkMeasurement read_links(const std::filesystem::path& path);

/// The text's "format": "waybill.plan", "waybill.dispatch", "waybill.metadata", ...; "" when the
/// top is an object without one.
/// @throws IoError for text that is not JSON or not an object, or a format that is not a string.
[[nodiscard]] std::string json_format(std::string_view text, std::string_view origin = "JSON");

}  // namespace waybill
