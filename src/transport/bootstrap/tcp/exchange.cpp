#include <algorithm>
#include <utility>

#include "transport/bootstrap/tcp/rendezvous.h"
#include "transport/bootstrap/tcp/socket.h"

namespace waybill::detail {
namespace {

constexpr std::uint32_t frame_magic = 0x7761'7962;
constexpr double verdict_grace_s = 1.0;  // rank 0's deadline may have begun later than ours

/// Nullopt: these are not the bytes of a header.
std::optional<FrameHeader> decode_header(std::span<const std::byte> from) {
  if (take_number<std::uint32_t>(from) != frame_magic) return std::nullopt;
  const auto kind = take_number<std::uint32_t>(from);
  if (kind < 1 || kind > 4) return std::nullopt;
  FrameHeader header;
  header.kind = static_cast<FrameKind>(kind);
  header.rank = take_number<std::uint32_t>(from);
  (void)take_number<std::uint32_t>(from);
  header.round = take_number<std::uint64_t>(from);
  header.size_bytes = take_number<std::uint64_t>(from);
  return header;
}

}  // namespace

HeaderBytes encode(const FrameHeader& header) {
  HeaderBytes bytes{};
  std::span<std::byte> to(bytes);
  put_number(to, frame_magic);
  put_number(to, static_cast<std::uint32_t>(header.kind));
  put_number(to, header.rank);
  put_number(to, std::uint32_t{0});
  put_number(to, header.round);
  put_number(to, header.size_bytes);
  return bytes;
}

Frame verdict_frame(FrameKind kind, std::int32_t rank, std::uint64_t round,
                    std::string_view reason) {
  Frame frame;
  const auto bytes = bytes_of(reason.substr(0, max_reason_bytes));
  frame.bytes.assign(bytes.begin(), bytes.end());
  frame.header = {.kind = kind,
                  .rank = static_cast<std::uint32_t>(rank),
                  .round = round,
                  .size_bytes = frame.bytes.size()};
  return frame;
}

std::span<std::byte> FrameReader::room() {
  constexpr std::size_t piece_bytes = std::size_t{1} << 20;
  if (header_filled_ < header_bytes) return std::span(header_bytes_).subspan(header_filled_);
  const std::size_t missing = header_.size_bytes - body_filled_;
  body_.resize(body_filled_ + std::min(missing, piece_bytes));
  return std::span(body_).subspan(body_filled_);
}

bool FrameReader::add(std::size_t num_bytes) {
  if (header_filled_ == header_bytes) {
    body_filled_ += num_bytes;
    return true;
  }
  header_filled_ += num_bytes;
  if (header_filled_ < header_bytes) return true;
  const auto header = decode_header(header_bytes_);
  if (!header || header->size_bytes > max_size_bytes_) return false;
  header_ = *header;
  return true;
}

bool FrameReader::is_complete() const {
  return header_filled_ == header_bytes && body_filled_ == header_.size_bytes;
}

Frame FrameReader::take() {
  body_.resize(body_filled_);
  header_filled_ = 0;
  body_filled_ = 0;
  return {header_, std::exchange(body_, {})};
}

Bootstrap::Bytes pack_entries(const std::vector<Bootstrap::Bytes>& all) {
  std::size_t size = all.size() * sizeof(std::uint64_t);
  for (const auto& entry : all) size += entry.size();
  Bootstrap::Bytes packed(size);
  std::span<std::byte> to(packed);
  for (const auto& entry : all) put_number(to, std::uint64_t{entry.size()});
  for (const auto& entry : all) put_bytes(to, entry);
  return packed;
}

std::optional<std::vector<Bootstrap::Bytes>> unpack_entries(std::span<const std::byte> packed,
                                                            std::size_t num_entries) {
  const std::size_t table_bytes = num_entries * sizeof(std::uint64_t);
  if (packed.size() < table_bytes) return std::nullopt;
  auto sizes = packed.first(table_bytes);
  auto rest = packed.subspan(table_bytes);
  std::vector<Bootstrap::Bytes> all(num_entries);
  for (Bootstrap::Bytes& entry : all) {
    const auto size = take_number<std::uint64_t>(sizes);
    if (size > rest.size()) return std::nullopt;
    const auto bytes = rest.first(size);
    entry.assign(bytes.begin(), bytes.end());
    rest = rest.subspan(size);
  }
  if (!rest.empty()) return std::nullopt;
  return all;
}

void TcpPeer::read() {
  while (!frame_ && !gone_) {
    const std::ptrdiff_t received = socket_.receive_some(reader_.room());
    if (received == 0) return;
    gone_ = received < 0 || !reader_.add(static_cast<std::size_t>(received));
    if (!gone_ && reader_.is_complete()) frame_ = reader_.take();
  }
}

Frame TcpPeer::take_frame() { return *std::exchange(frame_, std::nullopt); }

std::optional<std::string> TcpPeer::last_reason() {
  const auto kept = std::exchange(frame_, std::nullopt);
  std::optional<std::string> reason;
  for (read(); frame_ && !reason; read()) {
    const Frame frame = take_frame();
    if (frame.header.kind == FrameKind::failed) reason = peer_text(frame.bytes);
  }
  frame_ = kept;
  return reason;
}

bool TcpPeer::write(std::span<const std::byte> header, std::span<const std::byte> body,
                    std::size_t& sent) {
  while (sent < header.size() + body.size()) {
    const auto next =
        sent < header.size() ? header.subspan(sent) : body.subspan(sent - header.size());
    const std::ptrdiff_t moved = socket_.send_some(next);
    if (moved > 0) sent += static_cast<std::size_t>(moved);
    within_frame_ = 0 < sent && sent < header.size() + body.size();
    if (moved == 0) return false;
    if (moved < 0) return true;
  }
  return true;
}

void TcpPeer::write_now(const FrameHeader& header, std::span<const std::byte> body) {
  if (within_frame_) return socket_.close();  // so the peer learns at least that this rank left
  if (!is_open()) return;
  if (socket_.send_now(encode(header)) && !body.empty()) (void)socket_.send_now(body);
}

std::uint64_t TcpBootstrap::max_frame_bytes(std::int32_t rank, std::int32_t world_size) {
  if (rank == 0) return max_entry_bytes;
  return static_cast<std::uint64_t>(world_size) * (max_entry_bytes + sizeof(std::uint64_t));
}

void TcpBootstrap::fail(std::string_view reason) noexcept {
  if (std::exchange(has_failed_, true)) return;
  try {
    const Frame frame = verdict_frame(FrameKind::failed, to_int(rank()), round_, reason);
    for (TcpPeer& peer : peers_) peer.write_now(frame.header, frame.bytes);
  } catch (const std::exception&) {
    // Without memory the peers learn only that the connection ends.
  }
}

std::vector<Bootstrap::Bytes> TcpBootstrap::exchange(std::span<const std::byte> mine,
                                                     std::string_view operation) {
  if (has_failed_) {
    throw TransportError(concat(operation, ": the bootstrap is unusable: this rank gave up"));
  }
  try {
    require(mine.size() <= max_entry_bytes, operation, ": rank ", rank(), " gives ", mine.size(),
            " bytes, expected at most ", max_entry_bytes);
    ++round_;
    if (world_size() == 1) return {Bytes(mine.begin(), mine.end())};
    return rank() == Rank{0} ? gather_and_answer(mine, operation) : send_and_wait(mine, operation);
  } catch (const std::exception& error) {
    fail(error.what());
    throw;
  }
}

std::vector<Bootstrap::Bytes> TcpBootstrap::gather_and_answer(std::span<const std::byte> mine,
                                                              std::string_view operation) {
  const Deadline deadline(timeout_s());
  std::vector<Bytes> all(world_size());
  all[0].assign(mine.begin(), mine.end());
  for (;;) {
    std::vector<WatchedSocket> missing;
    std::vector<std::int32_t> ranks;
    for (std::int32_t r = 1; r < world_size(); ++r) {
      if (peers_[r].frame() != nullptr) continue;
      missing.push_back({.descriptor = peers_[r].socket().descriptor(), .reads = true});
      ranks.push_back(r);
    }
    const bool late = deadline.passed();
    if (!ranks.empty() && !late) wait_for_any(missing, deadline);
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      if (late || missing[i].is_ready) peers_[ranks[i]].read();
    }
    for (std::int32_t r = 1; r < world_size(); ++r) {
      if (const auto verdict = verdict_on(r, late)) send_verdict(*verdict, deadline, operation);
    }
    if (ranks.empty()) break;
  }
  for (std::int32_t r = 1; r < world_size(); ++r) all[r] = peers_[r].take_frame().bytes;
  const Bootstrap::Bytes packed = pack_entries(all);
  const HeaderBytes header = encode(FrameHeader{.round = round_, .size_bytes = packed.size()});
  Bootstrap::Bytes answer(header.begin(), header.end());
  answer.insert(answer.end(), packed.begin(), packed.end());
  send_to_all(answer, Deadline(timeout_s()));
  return all;
}

/// Says why a rank cannot take part in this round; nullopt: nothing is known.
std::optional<Frame> TcpBootstrap::verdict_on(std::int32_t peer, bool deadline_passed) {
  TcpPeer& from = peers_[peer];
  const std::uint64_t before = round_ - 1;
  if (Frame* const frame = from.frame()) {
    if (frame->header.kind == FrameKind::data && frame->header.round == round_) return std::nullopt;
    if (frame->header.kind != FrameKind::failed) {
      return verdict_frame(FrameKind::left, peer, before);
    }
    return verdict_frame(FrameKind::failed, peer, before, peer_text(frame->bytes));
  }
  if (from.is_gone()) return verdict_frame(FrameKind::left, peer, before);
  if (deadline_passed) return verdict_frame(FrameKind::silent, peer, before);
  return std::nullopt;
}

/// A rank that cannot be reached finds out by itself.
void TcpBootstrap::send_to_all(std::span<const std::byte> bytes, const Deadline& deadline) {
  std::vector<std::size_t> sent(peers_.size(), 0);
  std::vector<bool> done(peers_.size(), false);
  for (;;) {
    std::vector<WatchedSocket> blocked;
    for (std::size_t r = 1; r < peers_.size(); ++r) {
      done[r] = done[r] || peers_[r].write(bytes, {}, sent[r]);
      if (done[r]) continue;
      blocked.push_back({.descriptor = peers_[r].socket().descriptor(), .writes = true});
    }
    if (std::count(done.begin() + 1, done.end(), false) == 0 || deadline.passed()) return;
    wait_for_any(blocked, deadline);
  }
}

void TcpBootstrap::send_verdict(const Frame& verdict, const Deadline& deadline,
                                std::string_view operation) {
  for (TcpPeer& peer : peers_) peer.write_now(verdict.header, verdict.bytes);
  throw_verdict(verdict, deadline.waited_s(), operation);
}

/// Rank 0 sends nothing while it reads a frame, unless the rest of the frame is useless.
std::vector<Bootstrap::Bytes> TcpBootstrap::send_and_wait(std::span<const std::byte> mine,
                                                          std::string_view operation) {
  const Deadline deadline(timeout_s() + verdict_grace_s);
  TcpPeer& root = peers_[0];
  const HeaderBytes header = encode(FrameHeader{.rank = static_cast<std::uint32_t>(to_int(rank())),
                                                .round = round_,
                                                .size_bytes = mine.size()});
  std::size_t sent = 0;
  bool all_sent = false;
  while (root.frame() == nullptr) {
    all_sent = all_sent || root.write(header, mine, sent);
    root.read();
    if (root.frame() != nullptr) break;
    if (root.is_gone()) throw_verdict(verdict_frame(FrameKind::left, 0, round_ - 1), 0, operation);
    if (deadline.passed()) {
      throw_verdict(verdict_frame(FrameKind::silent, 0, round_ - 1), deadline.waited_s(),
                    operation);
    }
    WatchedSocket watched{
        .descriptor = root.socket().descriptor(), .reads = true, .writes = !all_sent};
    wait_for_any({&watched, 1}, deadline);
  }
  const Frame answer = root.take_frame();
  if (answer.header.kind != FrameKind::data) throw_verdict(answer, deadline.waited_s(), operation);
  auto all =
      answer.header.round == round_ ? unpack_entries(answer.bytes, world_size()) : std::nullopt;
  if (!all) throw TransportError(concat(operation, ": rank 0 sent an incomplete table of entries"));
  return std::move(*all);
}

void TcpBootstrap::throw_verdict(const Frame& verdict, double seconds,
                                 std::string_view operation) const {
  const auto [kind, peer, seen, size] = verdict.header;
  if (peer >= static_cast<std::uint32_t>(world_size())) {
    throw TransportError(
        concat(operation, ": rank 0 sent a verdict on rank ", peer, " of ", world_size()));
  }
  if (kind == FrameKind::failed) {
    throw PeerFailed(concat(operation, ": rank ", peer, " failed: ", peer_text(verdict.bytes)));
  }
  if (kind == FrameKind::left) {
    throw PeerFailed(concat(operation, ": rank ", peer, " left (seen by rank ", rank(),
                            " in exchange ", round_, ", it took part in ", seen, ")"));
  }
  if (static_cast<std::int32_t>(peer) == to_int(rank())) {
    throw PeerFailed(
        concat(operation, ": the other ranks have given up waiting for rank ", rank()));
  }
  throw_timeout(operation, to_int(rank()), static_cast<std::int32_t>(peer), round_, seen, seconds);
}

}  // namespace waybill::detail
