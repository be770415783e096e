#include "waybill/transport/bootstrap.h"

#include <algorithm>

#include "transport/bootstrap/wire.h"

namespace waybill {
namespace {

using Bytes = Bootstrap::Bytes;

constexpr std::size_t max_name_bytes = 255;  // their number fits into a byte

/// In front of what a rank gives: how long the operation's name is, and the name.
Bytes with_name(std::string_view operation, std::span<const std::byte> mine) {
  const auto name = std::as_bytes(std::span(operation.substr(0, max_name_bytes)));
  Bytes all{static_cast<std::byte>(name.size())};
  all.insert(all.end(), name.begin(), name.end());
  all.insert(all.end(), mine.begin(), mine.end());
  return all;
}

/// Takes the name away again. @throws TransportError for bytes that no rank has given
std::string take_name(Bytes& bytes, std::size_t rank, std::string_view operation) {
  const std::size_t size = bytes.empty() ? 0 : std::to_integer<std::size_t>(bytes.front());
  if (bytes.size() < 1 + size) {
    throw TransportError(concat(operation, ": the exchange returned ", bytes.size(),
                                " bytes of rank ", rank, ", which that rank has not given"));
  }
  std::string name(size, ' ');
  std::transform(bytes.begin() + 1, bytes.begin() + 1 + static_cast<std::ptrdiff_t>(size),
                 name.begin(), [](std::byte byte) { return static_cast<char>(byte); });
  bytes.erase(bytes.begin(), bytes.begin() + 1 + static_cast<std::ptrdiff_t>(size));
  return name;
}

}  // namespace

Bootstrap::Bootstrap(std::int32_t rank, std::int32_t world_size, double timeout_s)
    : rank_{rank}, world_size_(world_size), timeout_s_(timeout_s) {
  require(1 <= world_size && world_size <= max_world_size, "Bootstrap: world_size = ", world_size,
          ", expected 1..", max_world_size);
  require(0 <= rank && rank < world_size, "Bootstrap: rank = ", rank, ", expected 0..",
          world_size - 1);
  check_timeout("Bootstrap", timeout_s);
}

/// An exchange is simply the next one, whoever calls: without the names, memory of two objects that
/// ranks make in another order would be taken for that of one.
std::vector<Bootstrap::Bytes> Bootstrap::all_gather(std::span<const std::byte> mine,
                                                    std::string_view operation) {
  if (!end_.empty()) throw TransportError(concat(operation, ": the bootstrap is ", end_));
  std::vector<Bytes> all;
  try {
    ++num_exchanges_;
    all = exchange(with_name(operation, mine), operation);
  } catch (const Interrupted& error) {
    end_ = concat("unusable after an interrupt: ", error.what());
    fail(error.what());
    throw;
  } catch (const std::exception& error) {
    end_ = concat("unusable after a failure: ", error.what());
    throw;
  }
  if (std::ssize(all) != world_size_) {
    throw TransportError(concat(operation, ": the exchange returned ", all.size(),
                                " entries, expected ", world_size_));
  }
  const std::string_view own = operation.substr(0, max_name_bytes);
  std::vector<std::string> names;
  for (std::size_t r = 0; r < all.size(); ++r) names.push_back(take_name(all[r], r, operation));
  const auto other = std::ranges::find_if(names, [&](const auto& name) { return name != own; });
  if (other == names.end()) return all;
  throw Disagreement(concat(operation, ": ranks disagree in exchange ", num_exchanges_, ": rank ",
                            rank(), " calls ", own, ", rank ", other - names.begin(), " ",
                            detail::peer_text(*other),
                            "; expected calls that make, grow or free memory, and barriers, in the "
                            "same order on all ranks"));
}

void Bootstrap::barrier(std::string_view operation) { (void)all_gather({}, operation); }

void Bootstrap::fail(std::string_view /*reason*/) noexcept {}

void Bootstrap::check_peers(std::string_view /*operation*/) const {}

std::shared_ptr<FailureScope> Bootstrap::failure_scope() const { return nullptr; }

}  // namespace waybill
