#include <algorithm>

#include "golden/record.h"
#include "waybill/simulate/orchestrate.h"

namespace waybill::golden {
namespace {

std::vector<float> elements(const HostTensor& tensor) {
  const auto values = tensor.as<float>();
  return {values.begin(), values.end()};
}

constexpr const char* overlapping = "ok_overlap_last_writer_wins";

WAYBILL_GOLDEN(orchestrate_simulate, "orchestrate_simulate") {
  const HostTensor source = tensor(in("tensor"));
  const HostTensor before = tensor(in("output_tensor"));
  const Metadata table = metadata(in("metadata"));
  const bool fails = outputs().contains("error") && !out("error").is_null();
  ASSERT_EQ(fails, out("output_tensor").is_null());

  HostTensor output = before;
  SimulateOptions options;
  if (fails || GetParam().name == overlapping) {
    EXPECT_THROW(waybill::orchestrate_simulate(source.view(), output.view(), table, options),
                 InvalidArgument);
    EXPECT_EQ(elements(output), elements(before)) << "something was written";
  }
  if (fails) return;
  if (GetParam().name == overlapping) options.overlap = Overlap::last_wins;
  waybill::orchestrate_simulate(source.view(), output.view(), table, options);
  const HostTensor expected = tensor(out("output_tensor"));
  EXPECT_EQ(output.shape(), expected.shape());
  EXPECT_EQ(elements(output), elements(expected));
}

TEST(orchestrate_simulate_records, have_the_case_of_overlapping_writers) {
  const auto all = cases("orchestrate_simulate");
  EXPECT_TRUE(
      std::any_of(all.begin(), all.end(), [](const Case& one) { return one.name == overlapping; }));
}

WAYBILL_GOLDEN(simulate_communication, "simulate_communication") {
  std::vector<HostTensor> sources;
  for (const Json& item : in("tensors").at("ragged")) sources.push_back(tensor(item));
  std::vector<ConstTensorView> views;
  for (const HostTensor& source : sources) views.push_back(source.view());
  const std::vector<HostTensor> got =
      waybill::simulate_communication(views, metadata(in("metadata")));
  const Json& expected = out("tensors").at("ragged");
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t r = 0; r < got.size(); ++r) {
    const HostTensor want = tensor(expected[r]);
    EXPECT_EQ(got[r].shape(), want.shape()) << "rank " << r;
    EXPECT_EQ(elements(got[r]), elements(want)) << "rank " << r;
  }
}

}  // namespace
}  // namespace waybill::golden
