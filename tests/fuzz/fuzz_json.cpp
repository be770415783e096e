// Any bytes through every reader: an error of the right kind, or a value that is written and read
// back the same.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "waybill/core/error.h"
#include "waybill/json/length_distribution_json.h"
#include "waybill/json/plan_json.h"

namespace {

using namespace waybill;

void expect(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "fuzz_json: %s\n", what);
  std::abort();
}

/// `read` may refuse the text with IoError and with nothing else. What it accepts must survive.
template <class Read>
void round_trip(std::string_view text, const char* what, Read&& read) {
  std::string once;
  try {
    once = to_json(read(text));
  } catch (const IoError&) {
    return;
  }
  expect(to_json(read(once)) == once, what);
  expect(to_json(read(to_json(read(once), JsonStyle::compact))) == once, what);
}

void lengths_round_trip(std::string_view text) {
  std::vector<std::int64_t> lengths;
  try {
    lengths = lengths_from_text(text);
  } catch (const IoError&) {
    return;
  }
  std::string again;
  for (const std::int64_t length : lengths) again += concat(length, '\n');
  expect(lengths_from_text(again) == lengths, "lengths change");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  for (const ReadCheck check : {ReadCheck::values, ReadCheck::form}) {
    round_trip(text, "a plan changes",
               [&](std::string_view t) { return plan_from_json(t, "fuzz", check); });
    round_trip(text, "an attention plan changes", [&](std::string_view t) {
      AttentionPlan plan = attention_plan_from_json(t, "fuzz", check);
      (void)validate(plan);  // never throws, whatever the plan says
      return plan;
    });
    round_trip(text, "metadata change",
               [&](std::string_view t) { return metadata_from_json(t, "fuzz", check); });
    round_trip(text, "a dispatch changes",
               [&](std::string_view t) { return dispatch_from_json(t, "fuzz", check); });
  }
  round_trip(text, "distributions change",
             [](std::string_view t) { return length_distributions_from_json(t, "fuzz"); });
  lengths_round_trip(text);
  return 0;
}
