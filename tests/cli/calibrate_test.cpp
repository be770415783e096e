#include "program_runner.h"
#include "waybill/json/plan_json.h"

namespace waybill::test {
namespace {

using CalibrateTest = ProgramTest;

TEST_F(CalibrateTest, LinksDecideThePrediction) {
  write("slow.json", to_json({.speeds = {.nvlink_bytes_per_second = 20e9,
                                         .network_bytes_per_second = 3e9,
                                         .block_bytes_per_second = 10e9}}));
  const std::string small = "explain --world-size 4 --tokens-per-rank 2048 ";
  EXPECT_TRUE(holds(run(small).out, {"345 GB/s NVLink", "50.0 GB/s network"}));
  EXPECT_TRUE(
      holds(run(small + "--links slow.json").out, {"20.0 GB/s NVLink", "3.00 GB/s network"}));
  EXPECT_TRUE(holds(run(small + "--links slow.json --nvlink 100GB/s").out,
                    {"100 GB/s NVLink", "3.00 GB/s network"}));
  EXPECT_TRUE(
      holds(run(small + "--links -", text_of(path("slow.json"))).out, {"20.0 GB/s NVLink"}));
  EXPECT_TRUE(fails(run(small + "--links -"), 1, {"standard input: line 1"}));
  EXPECT_TRUE(fails(run(small + "--links nowhere.json"), 1, {"nowhere.json"}));
  EXPECT_TRUE(holds(run("plan --full --world-size 4 --tokens-per-rank 2048 --links slow.json").out,
                    {"\"nvlink_bytes_per_second\": 2e+10", "\"network_bytes_per_second\": 3e+09"}));
  // What an unset variable of a script leaves is not "without".
  EXPECT_TRUE(fails(run(small + "--links ''"), 2, {"--links: got \"\", expected a file"}));
  EXPECT_TRUE(fails(run("experts --ids ''"), 2, {"--ids: got \"\", expected a file"}));
  EXPECT_TRUE(fails(run("calibrate -o ''"), 2, {"--output: got \"\", expected a file"}));
  write("fast.json", R"({"format": "waybill.links", "version": 1, "nvlink_bytes_per_second": 1e308,
      "network_bytes_per_second": 1, "block_bytes_per_second": 1})");
  EXPECT_TRUE(fails(run(small + "--links fast.json"), 1,
                    {"fast.json: /nvlink_bytes_per_second = 1e308, expected 1 to 1e+18"}));
}

TEST_F(CalibrateTest, NeedsGpus) {
  if (WAYBILL_TEST_CUDA) GTEST_SKIP() << "built with CUDA: measured where GPUs are";
  EXPECT_TRUE(fails(run("calibrate -o links.json"), 1, {"calibrate", "built without CUDA"}));
  EXPECT_FALSE(std::filesystem::exists(path("links.json")));
  EXPECT_TRUE(fails(run("calibrate --network fast"), 2, {"--network"}));
}

/// The device is there to write to, and full when the links have been measured.
TEST_F(CalibrateTest, KeepsWhatWasMeasured) {
  if (run("calibrate").exit_code != 0) GTEST_SKIP() << "needs GPUs, and a build for them";
  const ProgramResult result = run("calibrate -o /dev/full");
  EXPECT_TRUE(fails(result, 1, {"/dev/full: cannot write"}));
  EXPECT_TRUE(holds(result.out, {"\"format\": \"waybill.links\"", "nvlink_bytes_per_second"}));
}

}  // namespace
}  // namespace waybill::test
