#include "waybill/json/link_speeds_json.h"

#include <string_view>
#include <utility>

#include "json/text.h"
#include "waybill/json/file.h"

namespace waybill {
namespace {

constexpr std::string_view links_format = "waybill.links";
constexpr std::int64_t max_gpus = 1 << 20;

double speed_at(const detail::JsonNode& root, std::string_view key) {
  const detail::JsonNode node = root.at(key);
  const double speed = node.real();
  if (!LinkSpeeds::makes_sense(speed))
    node.fail(concat(LinkSpeeds::least, " to ", LinkSpeeds::most, " bytes per second"));
  return speed;
}

}  // namespace

std::string to_json(const LinkMeasurement& links, JsonStyle style) {
  links.speeds.check("to_json");
  return detail::write_document(style, links_format, [&](detail::JsonWriter& writer) {
    writer.key("device").string(links.device).key("num_gpus").integer(links.num_gpus);
    writer.key("nvlink_bytes_per_second").real(links.speeds.nvlink_bytes_per_second);
    writer.key("network_bytes_per_second").real(links.speeds.network_bytes_per_second);
    writer.key("block_bytes_per_second").real(links.speeds.block_bytes_per_second);
  });
}

LinkMeasurement links_from_json(std::string_view text, std::string_view origin) {
  const detail::JsonValue value = detail::parse_json(text, origin);
  const detail::JsonNode root(value, origin);
  root.check_format(links_format);
  root.check_keys({"format", "version", "device", "num_gpus", "nvlink_bytes_per_second",
                   "network_bytes_per_second", "block_bytes_per_second"});
  LinkMeasurement links;
  links.speeds = {.nvlink_bytes_per_second = speed_at(root, "nvlink_bytes_per_second"),
                  .network_bytes_per_second = speed_at(root, "network_bytes_per_second"),
                  .block_bytes_per_second = speed_at(root, "block_bytes_per_second")};
  if (const auto device = root.find("device")) links.device = device->string();
  if (const auto gpus = root.find("num_gpus")) {
    links.num_gpus = static_cast<int>(gpus->integer(0, max_gpus));
  }
  return links;
}

LinkMeasurement read_links(const std::filesystem::path& path) {
  return links_from_json(read_file(path), path.string());
}

}  // namespace waybill
