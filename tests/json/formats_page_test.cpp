#include <gtest/gtest.h>

#include <map>

#include "json/support.h"
#include "support/test_data.h"
#include "waybill/json/file.h"
#include "waybill/json/length_distribution_json.h"
#include "waybill/json/plan_json.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill::json_tests {
namespace {

/// The JSON blocks of docs/formats.md, and of the page of its longest examples, by their format.
std::map<std::string, std::string> examples() {
  const std::string page = read_file(test::project_file("docs/formats.md")) +
                           read_file(test::project_file("tests/docs/examples/formats.md"));
  const std::string fence = "```json\n";
  std::map<std::string, std::string> found;
  for (std::size_t at = page.find(fence); at != std::string::npos; at = page.find(fence, at)) {
    at += fence.size();
    const std::string text = page.substr(at, page.find("```", at) - at);
    found[json_format(text, "docs/formats.md")] = text;
  }
  return found;
}

TEST(formats_page, has_an_example_of_every_format) {
  std::string formats;
  for (const auto& [format, text] : examples()) formats += format + ' ';
  EXPECT_EQ(formats,
            "waybill.attention_costs waybill.attention_plan waybill.dispatch "
            "waybill.length_distributions waybill.links waybill.metadata waybill.plan ");
}

TEST(formats_page, examples_are_what_the_library_writes) {
  const auto page = examples();
  const std::string plan = page.at("waybill.plan");
  EXPECT_EQ(to_json(plan_from_json(plan)), plan);
  const std::string attention = page.at("waybill.attention_plan");
  EXPECT_EQ(to_json(attention_plan_from_json(attention)), attention);
  EXPECT_TRUE(validate(attention_plan_from_json(attention)).empty());
  const std::string metadata = page.at("waybill.metadata");
  EXPECT_EQ(to_json(metadata_from_json(metadata)), metadata);
  const DispatchBundle bundle = dispatch_from_json(page.at("waybill.dispatch"));
  EXPECT_EQ(to_json(bundle), page.at("waybill.dispatch"));
  EXPECT_EQ(to_json(DispatchBundle{bundle.plan, to_dense(compute_qkv_routing(bundle.plan))}),
            page.at("waybill.dispatch"));
  EXPECT_EQ(length_distributions_from_json(page.at("waybill.length_distributions")).size(), 1U);
}

}  // namespace
}  // namespace waybill::json_tests
