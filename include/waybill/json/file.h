#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace waybill {

/// The whole file.
/// @throws IoError naming the file and the system's reason.
[[nodiscard]] std::string read_file(const std::filesystem::path& path);

/// Replaces the file by `text`, whole or not at all, also when the machine stops meanwhile: writes
/// a new file beside it and renames that when it is on the disk. A link is followed; something that
/// is no regular file (a device, a pipe) is written in place.
/// @throws IoError naming the file and the system's reason; what was there is then still there.
void write_file(const std::filesystem::path& path, std::string_view text);

}  // namespace waybill
