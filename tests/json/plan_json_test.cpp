#include "waybill/json/plan_json.h"

#include <gtest/gtest.h>

#include <limits>

#include "json/support.h"
#include "waybill/json/file.h"
#include "waybill/planner/planner.h"

namespace waybill::json_tests {
namespace {

constexpr const char* small_plan_text = R"({
  "format": "waybill.plan",
  "version": 1,
  "world_size": 3,
  "kv_layout": "per_rank",
  "rank_shard_offsets": [0, 2, 4, 5],
  "shard_len": [4, 6, 3, 5, 8],
  "q_dst": [0, 1, 2, 0, 1],
  "doc_shard_offsets": [0, 3, 5],
  "doc_shards": [0, 1, 2, 3, 4]
}
)";

std::string plan_error(std::string_view what, std::string_view with) {
  const std::string text = replaced(small_plan_text, what, with);
  return error_of([&] { return plan_from_json(text, "plan.json"); });
}

TEST(plan_json, has_a_field_a_line_and_an_array_on_one_line) {
  EXPECT_EQ(to_json(small_plan()), small_plan_text);
}

TEST(plan_json, compact_has_no_space) {
  const std::string text = to_json(small_plan(), JsonStyle::compact);
  EXPECT_EQ(text.find_first_of(" \n"), std::string::npos) << text;
  EXPECT_EQ(plan_from_json(text), small_plan());
}

TEST(plan_json, reads_back_equal) {
  QkvPlan plan = small_plan();
  EXPECT_EQ(plan_from_json(to_json(plan)), plan);
  plan.kv_begin = {0, 0, 1, 0, 0};
  plan.kv_layout = KvLayout::per_query;
  EXPECT_EQ(plan_from_json(to_json(plan)), plan);
  EXPECT_EQ(to_json(plan).find("mask"), std::string::npos);  // as before there was one
  plan.kv_begin.clear();
  plan.kv_end = {2, 2, 3, 1, 2};
  EXPECT_EQ(plan_from_json(to_json(plan)), plan);
  plan.need_whole_documents();
  EXPECT_EQ(plan_from_json(to_json(plan)), plan);
  EXPECT_EQ(to_json(plan).find("kv_end"), std::string::npos);  // the mask stands for it
  EXPECT_NE(error_of([&] {
              return plan_from_json(replaced(to_json(plan), "\"full\"", "\"fuller\""));
            }).find("/mask"),
            std::string::npos);
}

TEST(plan_json, a_world_without_shards_reads_back_equal) {
  QkvPlan plan;
  plan.world_size = 2;
  plan.rank_shard_offsets = {0, 0, 0};
  plan.doc_shard_offsets = {0};
  EXPECT_EQ(plan_from_json(to_json(plan)), plan);
}

TEST(plan_json, fields_may_come_in_any_order) {
  const std::string text = replaced(replaced(small_plan_text, "\"world_size\": 3,\n", ""),
                                    "[0, 1, 2, 3, 4]", "[0, 1, 2, 3, 4], \"world_size\": 3");
  EXPECT_EQ(plan_from_json(text), small_plan());
}

TEST(plan_json, a_wrong_type_names_path_got_and_expected) {
  EXPECT_EQ(plan_error("5, 8]", "\"abc\", 8]"),
            "plan.json: /shard_len/3 = \"abc\", expected an integer");
  EXPECT_EQ(plan_error("5, 8]", "5.0, 8]"), "plan.json: /shard_len/3 = 5.0, expected an integer");
  EXPECT_EQ(plan_error("5, 8]", "null, 8]"), "plan.json: /shard_len/3 = null, expected an integer");
  EXPECT_EQ(plan_error("5, 8]", "[5], 8]"),
            "plan.json: /shard_len/3 = a list of 1, expected an integer");
  EXPECT_EQ(plan_error("[4, 6, 3, 5, 8]", "7"), "plan.json: /shard_len = 7, expected a list");
  EXPECT_EQ(plan_error("[4, 6, 3, 5, 8]", "{}"),
            "plan.json: /shard_len = an object, expected a list");
  EXPECT_EQ(plan_error("\"world_size\": 3", "\"world_size\": true"),
            "plan.json: /world_size = true, expected an integer");
  EXPECT_EQ(plan_error("\"per_rank\"", "\"per_node\""),
            "plan.json: /kv_layout = \"per_node\", expected \"per_query\" or \"per_rank\"");
}

TEST(plan_json, a_number_that_is_too_large_is_an_error) {
  expect_parts(plan_error("5, 8]", "9223372036854775808, 8]"),
               {"/shard_len/3", "9223372036854775808", "an integer"});
  expect_parts(plan_error("5, 8]", "123456789012345678901234567890, 8]"), {"/shard_len/3"});
  expect_parts(plan_error("5, 8]", "1e400, 8]"), {"plan.json: line 7, column ", "1e400"});
  expect_parts(plan_error("5, 8]", "1e3, 8]"), {"/shard_len/3 = 1e3"});
  expect_parts(plan_error("2, 0, 1]", "2, 4294967296, 1]"), {"/q_dst/3 = 4294967296", "32 bits"});
  expect_parts(plan_error("\"world_size\": 3", "\"world_size\": 2000000000"),
               {"/world_size = 2000000000", "1..1048576"});
}

TEST(plan_json, not_a_number_is_an_error_with_line_and_column) {
  expect_parts(plan_error("5, 8]", "NaN, 8]"), {"plan.json: line 7, column ", "invalid literal"});
  expect_parts(plan_error("5, 8]", "-Infinity, 8]"), {"plan.json: line 7, column "});
  expect_parts(plan_error("5, 8]", "0x10, 8]"), {"plan.json: line 7, column "});
}

TEST(plan_json, what_check_refuses_is_an_error_of_the_file) {
  expect_parts(plan_error("5, 8]", "-5, 8]"), {"plan.json: /: ", "shard_len", "shard 3: got -5"});
  expect_parts(plan_error("2, 0, 1]", "3, 0, 1]"), {"q_dst", "shard 2: got 3", "0..2"});
  expect_parts(plan_error("5, 8]", "9223372036854775807, 8]"), {"shard_len", "shard 3"});
  expect_parts(plan_error("[0, 1, 2, 3, 4]", "[0, 1, 2, 3, 3]"),
               {"doc_shards: shard 3", "again at 4"});
  expect_parts(plan_error("[4, 6, 3, 5, 8]", "[4, 6, 3, 5]"), {"plan."});
  expect_parts(plan_error("\"world_size\": 3", "\"world_size\": 0"), {"/world_size = 0"});
  expect_parts(plan_error("\"world_size\": 3", "\"world_size\": -3"), {"/world_size = -3"});
}

TEST(plan_json, form_only_leaves_values_to_the_caller) {
  const std::string text = replaced(small_plan_text, "2, 0, 1]", "-7, 0, 1]");
  EXPECT_THROW((void)plan_from_json(text), IoError);
  EXPECT_EQ(plan_from_json(text, "JSON", ReadCheck::form).q_dst.at(2), -7);
}

TEST(plan_json, keys_are_checked) {
  EXPECT_EQ(plan_error("  \"q_dst\": [0, 1, 2, 0, 1],\n", ""),
            "plan.json: /: the key \"q_dst\" is missing");
  expect_parts(plan_error("\"q_dst\"", "\"q_dest\""), {"unknown key \"q_dest\"", "q_dst"});
  expect_parts(plan_error("\"world_size\": 3", "\"world_size\": 3, \"world_size\": 3"),
               {"plan.json: /: the key \"world_size\" appears twice"});
}

TEST(plan_json, format_and_version_are_checked) {
  EXPECT_EQ(plan_error("waybill.plan", "waybill.plans"),
            "plan.json: /format = \"waybill.plans\", expected \"waybill.plan\"");
  EXPECT_EQ(plan_error("\"version\": 1", "\"version\": 2"),
            "plan.json: /version = 2, expected version 1");
  expect_parts(plan_error("\"version\": 1", "\"version\": \"1\""), {"/version = \"1\""});
  expect_parts(plan_error("  \"format\": \"waybill.plan\",\n", ""), {"\"format\" is missing"});
  expect_parts(error_of([] { return plan_from_json("[1, 2]", "plan.json"); }),
               {"plan.json: / = a list of 2, expected an object"});
}

TEST(plan_json, every_truncation_is_an_error) {
  const std::string_view text = small_plan_text;
  for (std::size_t size = 0; size + 2 < text.size(); ++size) {
    const std::string error =
        error_of([&] { return plan_from_json(text.substr(0, size), "plan.json"); });
    expect_parts(error, {"plan.json: line "});
  }
}

TEST(plan_json, trailing_text_is_an_error) {
  expect_parts(error_of([] { return plan_from_json(std::string(small_plan_text) + "x", "f"); }),
               {"f: line 12, column 1: "});
  expect_parts(error_of([] { return plan_from_json(std::string(small_plan_text) + "{}", "f"); }),
               {"f: line 12, column 1: "});
}

TEST(plan_json, deep_nesting_is_an_error) {
  for (const std::size_t depth : {std::size_t{25}, std::size_t{1000000}}) {
    expect_parts(error_of([&] { return plan_from_json(std::string(depth, '['), "f"); }),
                 {"nested deeper than 24 levels"});
  }
  std::string objects;
  for (int i = 0; i < 100000; ++i) objects += "{\"a\":";
  expect_parts(error_of([&] { return plan_from_json(objects, "f"); }),
               {"f: /a/a/a", "nested deeper than 24 levels"});
}

TEST(plan_json, an_error_stays_short) {
  const std::string long_text(1000000, 'x');
  const std::string wrong_type = plan_error("\"per_rank\"", concat('"', long_text, '"'));
  EXPECT_LT(wrong_type.size(), 200U);
  const std::string no_json = plan_error("\"per_rank\"", long_text);
  EXPECT_LT(no_json.size(), 400U);
  const std::string unknown_key = plan_error("\"q_dst\"", concat('"', long_text, '"'));
  EXPECT_LT(unknown_key.size(), 400U);
}

TEST(plan_json, bytes_that_are_no_text_are_an_error) {
  expect_parts(plan_error("\"per_rank\"", "\"\xff\xfe\""), {"line 5"});
  expect_parts(error_of([] { return plan_from_json(std::string_view("\0\0", 2), "f"); }),
               {"f: line 1, column 1"});
}

TEST(plan_json, files_read_back_equal_and_errors_name_them) {
  const TemporaryFolder folder;
  write_plan(folder / "plan.json", small_plan());
  EXPECT_EQ(read_plan(folder / "plan.json"), small_plan());
  write_file(folder / "bad.json", "{\"format\": \"waybill.plan\",\n \"version\": }");
  const std::string error = error_of([&] { return read_plan(folder / "bad.json"); });
  expect_parts(error, {(folder / "bad.json").string(), "line 2, column 13"});
  expect_parts(error_of([&] { return read_plan(folder / "none.json"); }),
               {(folder / "none.json").string(), "No such file"});
}

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
  const AttentionPlan chunks = plan_attention(
      std::vector<std::int64_t>{300, 7},
      {.world_size = 2, .tokens_per_rank = 0, .mask = {.kind = MaskKind::full, .chunk = 64}});
  EXPECT_EQ(attention_plan_from_json(to_json(chunks)), chunks);
  const AttentionPlan prefixes =
      plan_attention(std::vector<std::int64_t>{300, 7}, {.world_size = 2,
                                                         .tokens_per_rank = 0,
                                                         .mask = {.kind = MaskKind::prefix},
                                                         .prefixes = {120, 0}});
  EXPECT_EQ(prefixes.plan.kv_end.back(), 0);
  EXPECT_EQ(attention_plan_from_json(to_json(prefixes)), prefixes);
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
