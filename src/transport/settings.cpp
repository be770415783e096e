#include "transport/settings.h"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <iterator>
#include <map>
#include <vector>

#include "transport/bootstrap/wire.h"
#include "transport/transport.h"
#include "waybill/core/error.h"

namespace waybill {
namespace {

constexpr char end_of_text = '\0';

std::vector<Setting> settings_of(const Bootstrap::Bytes& bytes) {
  std::vector<std::string> texts(1);
  for (const std::byte byte : bytes) {
    const auto character = static_cast<char>(byte);
    if (character == end_of_text) {
      texts.emplace_back();
    } else {
      texts.back().push_back(character);
    }
  }
  std::vector<Setting> settings;
  for (std::size_t i = 0; i + 1 < texts.size(); i += 2)
    settings.push_back({texts[i], texts[i + 1]});
  return settings;
}

/// The value that most ranks have; of several the one of the lowest rank.
std::string usual_value(const std::vector<std::string>& values) {
  std::map<std::string, std::int64_t> count;
  for (const std::string& value : values) ++count[value];
  return *std::max_element(values.begin(), values.end(),
                           [&](const auto& a, const auto& b) { return count[a] < count[b]; });
}

/// "rank 3", "ranks 3, 5", "ranks 3, 5, 6, ...".
std::string ranks_with_other(const std::vector<std::string>& values, const std::string& value,
                             const std::string& usual) {
  constexpr std::int64_t most_named = 8;
  std::string names;
  std::int64_t count = 0;
  for (std::size_t r = 0; r < values.size(); ++r) {
    if (values[r] == usual || values[r] != value) continue;
    if (++count > most_named) return concat("ranks ", names, ", ...");
    names += concat(count > 1 ? ", " : "", r);
  }
  return concat(count > 1 ? "ranks " : "rank ", names);
}

}  // namespace

void require_same(Bootstrap& bootstrap, std::string_view who, std::span<const Setting> mine) {
  std::string text;
  for (const Setting& setting : mine) {
    text += setting.name + end_of_text + setting.value + end_of_text;
  }
  const auto texts = bootstrap.all_gather(std::as_bytes(std::span(text)), who);
  if (std::ranges::all_of(texts, [&](const auto& theirs) { return theirs == texts[0]; })) return;
  std::vector<std::vector<Setting>> all;
  for (const auto& bytes : texts) all.push_back(settings_of(bytes));
  for (std::size_t s = 0; s < mine.size(); ++s) {
    std::vector<std::string> values;
    for (const auto& settings : all) {
      const bool said = s < settings.size() && settings[s].name == mine[s].name;
      values.push_back(said ? settings[s].value : "(nothing)");
    }
    const std::string usual = usual_value(values);
    const auto other = std::ranges::find_if(values, [&](const auto& v) { return v != usual; });
    if (other == values.end()) continue;
    throw InvalidArgument(concat(who, ": ", ranks_with_other(values, *other, usual), " with ",
                                 mine[s].name, " = ", detail::peer_text(*other), ", the others ",
                                 detail::peer_text(usual), ", expected the same on all ranks"));
  }
}

void agree_on_settings(Transport& transport, std::string_view who,
                       const std::function<std::vector<Setting>()>& check) {
  std::vector<Setting> mine = {{"arguments", "right"}};
  std::exception_ptr wrong;
  try {
    std::ranges::copy(check(), std::back_inserter(mine));
  } catch (const std::exception& error) {
    wrong = std::current_exception();
    const std::string text = error.what();
    const std::string prefix = concat(who, ": ");
    const std::size_t skipped = text.starts_with(prefix) ? prefix.size() : 0;
    mine = {{"arguments", concat("wrong (", text.substr(skipped), ")")}};
  }
  try {
    transport.require_same(who, mine);
  } catch (const InvalidArgument&) {
    if (wrong == nullptr) throw;
  }
  if (wrong != nullptr) std::rethrow_exception(wrong);
}

}  // namespace waybill
