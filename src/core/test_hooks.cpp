#include "core/test_hooks.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <string>

#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

struct Hook {
  std::string_view name;
  std::int64_t TestHooks::*value;
  std::int64_t min;
  std::int64_t max;
};

constexpr Hook all_hooks[] = {
    {"delay_ns", &TestHooks::delay_ns, 0, 1'000'000'000},
    {"late_streams", &TestHooks::late_streams, 1, 1'000'000'000},
    {"max_shared_kb", &TestHooks::max_shared_kb, 48, 1024},
    {"no_bulk_copies", &TestHooks::no_bulk_copies, 0, 1},
    {"unseen_gpus", &TestHooks::unseen_gpus, 0, 1},
    {"unmappable_gpus", &TestHooks::unmappable_gpus, 0, 1},
    {"copy_stage_kb", &TestHooks::copy_stage_kb, 1, 1'000'000},
    {"nvshmem_enforces", &TestHooks::nvshmem_enforces, 0, 1},
};

std::atomic<const TestHooks*> replaced{nullptr};

[[noreturn]] void refuse(std::string_view item) {
  std::string known;
  for (const Hook& hook : all_hooks) {
    known += concat(known.empty() ? "" : ", ", hook.name, "=", hook.min, "..", hook.max);
  }
  throw_invalid("WAYBILL_TEST: \"", item, "\", expected ", known, ", with commas between them");
}

void set(std::string_view item, TestHooks& hooks) {
  const std::size_t mark = item.find('=');
  if (mark == std::string_view::npos) refuse(item);
  const std::string_view name = item.substr(0, mark);
  const std::string_view text = item.substr(mark + 1);
  for (const Hook& hook : all_hooks) {
    if (hook.name != name) continue;
    std::int64_t value = 0;
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    if (error != std::errc{} || stop != end || value < hook.min || value > hook.max) refuse(item);
    hooks.*hook.value = value;
    return;
  }
  refuse(item);
}

}  // namespace

TestHooks parse_test_hooks(std::string_view text, TestHooks hooks) {
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(','), text.size());
    set(text.substr(0, end), hooks);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return hooks;
}

const TestHooks& test_hooks() {
  if (const TestHooks* const other = replaced.load()) return *other;
  static const TestHooks hooks = [] {
    const char* const text = std::getenv("WAYBILL_TEST");  // NOLINT(concurrency-mt-unsafe)
    return parse_test_hooks(text == nullptr ? "" : text);
  }();
  return hooks;
}

const TestHooks* replace_test_hooks(const TestHooks* hooks) { return replaced.exchange(hooks); }

}  // namespace waybill::detail
