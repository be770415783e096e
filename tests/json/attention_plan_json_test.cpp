#include <gtest/gtest.h>

#include "json/support.h"
#include "waybill/json/plan_json.h"
#include "waybill/planner/planner.h"

namespace waybill::json_tests {
namespace {

AttentionPlan some_plan(bool relay = true) {
  PlannerOptions options{.world_size = 3, .tokens_per_rank = 500};
  options.mask.window = 200;
  options.kv_layout = KvLayout::per_query;
  options.model.dtype = DType::float16;
  options.max_tokens_per_rank = 4000;
  options.hardware.pairs_per_second = 1.5e12;
  options.hardware.ranks_per_node = 2;
  options.relay = relay;
  return plan_attention(std::vector<std::int64_t>{1100, 7, 130}, options);
}

std::string attention_plan_error(std::string_view what, std::string_view with) {
  const std::string text = replaced(to_json(some_plan()), what, with);
  return error_of([&] { return attention_plan_from_json(text, "a.json"); });
}

TEST(attention_plan_json, reads_back_equal) {
  for (const bool relay : {true, false}) {
    const AttentionPlan plan = some_plan(relay);
    EXPECT_EQ(attention_plan_from_json(to_json(plan)), plan);
    EXPECT_EQ(attention_plan_from_json(to_json(plan, JsonStyle::compact)), plan);
  }
  AttentionPlan full = plan_attention(std::vector<std::int64_t>{300, 7},
                                      {.world_size = 2, .mask = {.kind = MaskKind::full}});
  EXPECT_EQ(attention_plan_from_json(to_json(full)), full);
  const AttentionPlan nothing = plan_attention(std::vector<std::int64_t>{}, {.world_size = 2});
  EXPECT_EQ(attention_plan_from_json(to_json(nothing)), nothing);
}

TEST(attention_plan_json, errors_say_where) {
  const auto names = [](const std::string& error, std::initializer_list<const char*> parts) {
    for (const char* part : parts) {
      if (error.find(part) == std::string::npos)
        return ::testing::AssertionFailure() << error << "\nlacks " << part;
    }
    return ::testing::AssertionSuccess();
  };
  EXPECT_TRUE(names(attention_plan_error("\"waybill.attention_plan\"", "\"waybill.plan\""),
                    {"a.json", "/format", "waybill.attention_plan"}));
  EXPECT_TRUE(
      names(attention_plan_error("\"float16\"", "\"float31\""), {"/options/dtype", "float31"}));
  EXPECT_TRUE(names(attention_plan_error("\"relay\": true", "\"relay\": 1"), {"/options/relay"}));
  EXPECT_TRUE(names(attention_plan_error("\"block_tokens\": 128", "\"block_tokens\": 0"),
                    {"/options", "block_tokens = 0"}));
  EXPECT_TRUE(names(attention_plan_error("\"imbalance_target\": 1.01", "\"imbalance_target\": 1"),
                    {"/options", "imbalance_target"}));
  EXPECT_TRUE(
      names(attention_plan_error("\"work\": [", "\"work\": [5, "), {"/work", "4 entries", "3"}));
  EXPECT_TRUE(names(attention_plan_error("\"nvlink_in\": [", "\"nvlink_in\": [5, "),
                    {"/links", "entries"}));
  EXPECT_TRUE(
      names(attention_plan_error("\"after\": [", "\"after\": [5, "), {"/relay/hops/after"}));
  EXPECT_TRUE(names(attention_plan_error("\"after\": [", "\"after\": [9999999999, "),
                    {"/relay/hops/after"}));
  EXPECT_TRUE(names(attention_plan_error("\"block_work\"", "\"blok_work\""), {"blok_work"}));
}

TEST(attention_plan_json, form_alone_leaves_values_to_the_validator) {
  AttentionPlan plan = some_plan();
  plan.work.pop_back();
  plan.options.block_tokens = 0;
  EXPECT_NE(error_of([&] { return attention_plan_from_json(to_json(plan)); }), "");
  const AttentionPlan read = attention_plan_from_json(to_json(plan), "JSON", ReadCheck::form);
  EXPECT_EQ(read, plan);
  EXPECT_FALSE(validate(read).empty());
}

}  // namespace
}  // namespace waybill::json_tests
