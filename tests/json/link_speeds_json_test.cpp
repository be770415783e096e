#include <gtest/gtest.h>

#include <string>

#include "waybill/core/error.h"
#include "waybill/json/plan_json.h"

namespace waybill {
namespace {

const LinkMeasurement measured{.speeds = {.nvlink_bytes_per_second = 700.5e9,
                                          .network_bytes_per_second = 100e9,
                                          .block_bytes_per_second = 61e9},
                               .device = "NVIDIA B200",
                               .num_gpus = 8};

std::string error_of(const std::string& text) {
  try {
    (void)links_from_json(text, "links.json");
  } catch (const IoError& error) {
    return error.what();
  }
  return "no error";
}

std::string with(std::string text, const std::string& from, const std::string& to) {
  return text.replace(text.find(from), from.size(), to);
}

TEST(LinksJson, ComesBack) {
  for (const JsonStyle style : {JsonStyle::readable, JsonStyle::compact}) {
    EXPECT_EQ(links_from_json(to_json(measured, style)), measured);
  }
}

TEST(LinksJson, DeviceMayBeMissing) {
  const LinkMeasurement links = links_from_json(
      R"({"format": "waybill.links", "version": 1, "nvlink_bytes_per_second": 1e11,
          "network_bytes_per_second": 5e10, "block_bytes_per_second": 2e10})");
  EXPECT_EQ(links.speeds.nvlink_bytes_per_second, 1e11);
  EXPECT_EQ(links.num_gpus, 0);
}

TEST(LinksJson, SaysWhatIsWrong) {
  const std::string good =
      R"({"format": "waybill.links", "version": 1, "nvlink_bytes_per_second": 1e11,
          "network_bytes_per_second": 5e10, "block_bytes_per_second": 61})";
  EXPECT_EQ(error_of(with(good, "61", "0")),
            "links.json: /block_bytes_per_second = 0, expected 1 to 1e+18 bytes per second");
  for (const char* const odd : {"1e-300", "5e-324", "1e19", "1e308", "-61"})
    EXPECT_NE(error_of(with(good, "61", odd)).find("expected 1 to 1e+18"), std::string::npos);
  EXPECT_NE(error_of(with(good, "block_bytes", "black_bytes")).find("black_bytes_per_second"),
            std::string::npos);
  EXPECT_NE(error_of(with(good, "waybill.links", "waybill.plan")).find("waybill.links"),
            std::string::npos);
  EXPECT_NE(error_of(with(good, "5e10", "\"fast\"")).find("network_bytes_per_second"),
            std::string::npos);
  EXPECT_THROW((void)to_json(LinkMeasurement{.speeds = {.block_bytes_per_second = -1}}),
               InvalidArgument);
}

}  // namespace
}  // namespace waybill
