#include "waybill/report/html_report.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/printable.h"
#include "report/format.h"
#include "support/expect_error.h"
#include "support/packed_plan.h"
#include "waybill/core/random.h"
#include "waybill/report/expert_copies.h"

namespace waybill::test {
namespace {

std::string page_of(std::int32_t world_size, const std::vector<std::int64_t>& lengths,
                    std::int64_t shard_tokens, const ReportContext& context = {}) {
  std::int64_t total = 0;
  for (const std::int64_t length : lengths) total += length;
  const QkvPlan plan = test::packed_plan(lengths, {.world_size = world_size,
                                                   .tokens_per_rank = total / world_size + 1,
                                                   .shard_tokens = shard_tokens});
  const QkvRouting routing = compute_qkv_routing(plan);
  return html_report(plan, routing, summarize(plan, routing, {.q = 8192, .kv = 4096}), context);
}

// Empty when every tag is closed in order and every attribute is quoted; else what is wrong.
std::string tag_trouble(const std::string& page) {
  std::vector<std::string> open;
  for (std::size_t at = page.find('<'); at != std::string::npos; at = page.find('<', at + 1)) {
    const std::size_t end = page.find('>', at);
    if (end == std::string::npos) return "no > after " + page.substr(at, 30);
    const std::string tag = page.substr(at + 1, end - at - 1);
    if (tag.find('<') != std::string::npos) return "< inside " + tag;
    if (tag[0] == '!' || tag.back() == '/') continue;
    const std::string name = tag.substr(tag[0] == '/' ? 1 : 0, tag.find(' '));
    if (tag[0] != '/') {
      open.push_back(name);
      if (name == "style") at = page.find("</style>", at) - 1;
      continue;
    }
    if (open.empty() || open.back() != name)
      return "</" + name + "> closes <" + (open.empty() ? "" : open.back()) + ">";
    open.pop_back();
  }
  return open.empty() ? "" : "<" + open.back() + "> stays open";
}

std::vector<std::int64_t> mixed_lengths(std::int64_t count, std::int64_t longest) {
  Random random(7);
  std::vector<std::int64_t> lengths;
  for (std::int64_t i = 0; i < count; ++i)
    lengths.push_back(1 + random.below(i % 20 == 0 ? longest : 4000));
  return lengths;
}

TEST(HtmlReport, IsWellFormedAtManySizes) {
  for (const std::int32_t world_size : {1, 2, 8, 33, 64, 65, 129, 300}) {
    const std::string page = page_of(world_size, mixed_lengths(120, 60000), 2048);
    EXPECT_EQ(tag_trouble(page), "") << world_size;
    EXPECT_EQ(page.find("\"nan"), page.npos) << world_size;
    EXPECT_EQ(page.find("inf\""), page.npos) << world_size;
  }
  EXPECT_EQ(tag_trouble(page_of(4, {}, 16)), "");
}

TEST(HtmlReport, NeedsNothingFromOutside) {
  const std::string page = page_of(8, mixed_lengths(50, 30000), 1024);
  for (const std::string word : {"http:", "https:", "src=", "href=", "<script", "<link", "@import",
                                 "url(", "<iframe", "onload"})
    EXPECT_EQ(page.find(word), page.npos) << word;
}

TEST(HtmlReport, StaysSmallInALargeWorld) {
  const std::string page = page_of(512, mixed_lengths(6000, 120000), 1024);
  EXPECT_LT(page.size(), std::size_t{2} << 20);
  EXPECT_NE(page.find("A cell is a block of 4 by 4 ranks"), page.npos);
  EXPECT_NE(page.find("shorter documents are not shown"), page.npos);
}

TEST(HtmlReport, EscapesEveryText) {
  ReportContext context;
  context.title = "<b>title</b>";
  context.command = "waybill --lengths 'a&b'";
  context.inputs = {{"<i>", "\"quoted\" \xFF \x01"}};
  context.checks = {{"<u>check", CheckState::failed, "</section>"}};
  const std::string page = page_of(2, {100, 50}, 16, context);
  EXPECT_EQ(tag_trouble(page), "");
  for (const std::string raw : {"<b>title", "a&b", "<u>", "\xFF", "\x01"})
    EXPECT_EQ(page.find(raw), page.npos) << raw;
  EXPECT_NE(page.find("&lt;b&gt;title&lt;/b&gt;"), page.npos);
  EXPECT_NE(page.find("&#39;a&amp;b&#39;"), page.npos);
}

/// Not only C0: a title must not turn the page's direction either.
TEST(HtmlReport, HasNoControlCharacters) {
  const std::string evil =
      "\x1b[31m\x7f\r\xC2\x9B"
      "31m\u202Egpj\u2066\u200F\u2028";
  ReportContext context;
  context.title = context.command = evil;
  context.inputs = {{evil, evil}};
  context.checks = {{evil, CheckState::failed, evil}};
  std::string page = page_of(2, {100, 50}, 16, context);
  EXPECT_EQ(page, printable(page));
  EXPECT_NE(page.find("\uFFFD[31m"), page.npos);
  for (const double speed : {-1.0, std::nan(""), HUGE_VAL}) {
    context.gb_per_s = speed;
    EXPECT_TRUE(test::rejects([&] { (void)page_of(2, {100}, 16, context); }, {"gb_per_s"}));
  }
}

TEST(HtmlReport, TellsPassedFailedAndNotRunApart) {
  ReportContext context;
  context.checks = {{"one", CheckState::passed, ""}, {"two", CheckState::passed, ""}};
  EXPECT_NE(page_of(2, {100}, 16, context).find("all 2 checks passed"), std::string::npos);
  context.checks[1].state = CheckState::not_run;
  EXPECT_NE(page_of(2, {100}, 16, context).find("1 of 2 checks passed"), std::string::npos);
  context.checks[0].state = CheckState::failed;
  EXPECT_NE(page_of(2, {100}, 16, context).find("1 check failed"), std::string::npos);
  EXPECT_NE(page_of(2, {100}, 16).find("not checked"), std::string::npos);
}

TEST(Format, Numbers) {
  EXPECT_EQ(format_count(0), "0");
  EXPECT_EQ(format_count(999), "999");
  EXPECT_EQ(format_count(-1234567), "-1,234,567");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1536), "1.50 KiB");
  EXPECT_EQ(format_bytes(std::int64_t{1} << 30), "1.00 GiB");
  EXPECT_EQ(format_si(950), "950");
  EXPECT_EQ(format_si(1234567), "1.23 M");
  EXPECT_EQ(format_seconds(0.00123), "1.23 ms");
  EXPECT_EQ(format_plural(1, "rank"), "1 rank");
  EXPECT_EQ(format_plural(2, "rank"), "2 ranks");
}

TEST(HtmlReport, ThePageOfCopiesStandsAlone) {
  EPConfig config;
  config.max_tokens = 100;
  config.hidden = 128;
  config.topk = 1;
  for (const std::int32_t num_ranks : {1, 4, 300}) {
    config.world_size = config.local_world_size = num_ranks;
    config.num_experts = 2 * num_ranks;
    std::vector<std::int32_t> ids(40, 0);
    for (std::int32_t e = 1; e < config.num_experts; ++e) ids.insert(ids.end(), 4, e);
    config.max_tokens = std::ssize(ids);
    const std::vector<std::vector<std::int32_t>> all(num_ranks, ids);
    ReportContext context;
    context.title = "Copies <of> \"hot\" experts";
    const std::string page =
        expert_copies_report(price_expert_copies(config, {.spare_experts = 1}, all), {}, context);
    EXPECT_EQ(tag_trouble(page), "");
    EXPECT_EQ(page.find("<of>"), std::string::npos);
    EXPECT_NE(page.find("<b>Before</b>"), std::string::npos);
    EXPECT_NE(page.find("<b>With copies</b>"), std::string::npos);
    EXPECT_EQ(page.find("of its block") != std::string::npos, num_ranks == 300);
  }
}

}  // namespace
}  // namespace waybill::test
