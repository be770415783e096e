#include "transport/transport.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <map>
#include <sstream>

#include "transport/bootstrap/wire.h"
#include "waybill/core/error.h"

namespace waybill {
namespace {

constexpr char end_of_text = '\0';

std::vector<Setting> settings_of(const Bootstrap::Bytes& bytes) {
  std::istringstream text{std::string(detail::text_of(bytes))};
  std::vector<Setting> settings;
  for (Setting next;
       std::getline(text, next.name, end_of_text) && std::getline(text, next.value, end_of_text);) {
    settings.push_back(next);
  }
  return settings;
}

/// Returns the value of most ranks; of equally frequent ones that of the lowest rank.
std::string usual_value(const std::vector<std::string>& values) {
  std::map<std::string, std::int64_t> count;
  for (const std::string& value : values) ++count[value];
  return *std::max_element(values.begin(), values.end(),
                           [&](const auto& a, const auto& b) { return count[a] < count[b]; });
}

/// "rank 3", "ranks 3, 5", "ranks 3, 5, 6, ...".
std::string ranks_with_other(const std::vector<std::string>& values, const std::string& value,
                             const std::string& usual) {
  constexpr std::int64_t max_named = 8;
  std::string names;
  std::int64_t count = 0;
  for (std::size_t r = 0; r < values.size(); ++r) {
    if (values[r] == usual || values[r] != value) continue;
    if (++count > max_named) return concat("ranks ", names, ", ...");
    names += concat(count > 1 ? ", " : "", r);
  }
  return concat(count > 1 ? "ranks " : "rank ", names);
}

}  // namespace

Transport::Transport(Rank rank, Topology topology, double timeout_s)
    : rank_(rank), topology_(topology), timeout_s_(timeout_s) {
  topology.check();
  require(0 <= to_int(rank) && to_int(rank) < topology.world_size, "Transport: rank = ", rank,
          ", expected 0..", topology.world_size - 1);
}

Reach Transport::reach(Rank peer) const {
  require(0 <= to_int(peer) && to_int(peer) < topology_.world_size, "reach: peer = ", peer,
          ", expected 0..", topology_.world_size - 1);
  if (peer == rank_) return Reach::self;
  return topology_.node(peer) == topology_.node(rank_) ? Reach::load_store : Reach::network;
}

void Transport::check_piece(const SymmetricBuffer& to, const PutRequest& piece) const {
  const std::int32_t peer = to_int(piece.peer);
  require(0 <= peer && peer < topology_.world_size, "put: peer = ", peer, ", expected 0..",
          topology_.world_size - 1);
  require(piece.size_bytes >= 0 && piece.dst_offset_bytes >= 0 &&
              piece.dst_offset_bytes <= to.size_bytes - piece.size_bytes,
          "put: bytes ", piece.dst_offset_bytes, " + ", piece.size_bytes,
          ", expected to fit the buffer's ", to.size_bytes);
  require(piece.source != nullptr || piece.size_bytes == 0, "put: source is null");
}

void Transport::check_slot(SignalSlot slot) const {
  require(slot.pad != nullptr, "signal: the slot has no pad");
  require(0 <= slot.idx && slot.idx < slot.pad->count, "signal: idx = ", slot.idx, ", expected 0..",
          slot.pad->count - 1);
}

void require_same(Bootstrap& bootstrap, std::string_view who, std::span<const Setting> mine) {
  std::string text;
  for (const Setting& setting : mine) {
    text += setting.name + end_of_text + setting.value + end_of_text;
  }
  const auto texts = bootstrap.all_gather(detail::bytes_of(text), who);
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
