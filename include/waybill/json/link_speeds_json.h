#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "waybill/core/link_speeds.h"
#include "waybill/json/file.h"

namespace waybill {

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

}  // namespace waybill
