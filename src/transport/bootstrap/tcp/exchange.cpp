#include <poll.h>

#include <algorithm>
#include <utility>

#include "transport/bootstrap/tcp/rendezvous.h"
#include "transport/bootstrap/tcp/socket.h"

namespace waybill::detail {
namespace {

constexpr double verdict_grace_s = 1.0;  // rank 0's deadline may have begun later than ours

bool is_valid(const FrameHeader& header) {
  return header.magic == FrameHeader::right_magic && FrameKind::data <= header.kind &&
         header.kind <= FrameKind::failed;
}

void append(Bootstrap::Bytes& to, std::span<const std::byte> bytes) {
  to.insert(to.end(), bytes.begin(), bytes.end());
}

Bootstrap::Bytes join(const FrameHeader& header, std::span<const std::byte> body) {
  Bootstrap::Bytes frame(sizeof(header) + body.size());
  std::ranges::copy(body, std::ranges::copy(bytes_in(header), frame.begin()).out);
  return frame;
}

}  // namespace

Frame verdict_frame(FrameKind kind, std::int32_t rank, std::uint64_t round,
                    std::string_view reason) {
  Frame frame;
  append(frame.bytes, bytes_of(reason.substr(0, max_reason_bytes)));
  frame.header = {.kind = kind,
                  .rank = static_cast<std::uint32_t>(rank),
                  .round = round,
                  .size_bytes = frame.bytes.size()};
  return frame;
}

Bootstrap::Bytes pack_entries(const std::vector<Bootstrap::Bytes>& all) {
  Bootstrap::Bytes packed;
  for (const auto& entry : all) append(packed, bytes_in(std::uint64_t{entry.size()}));
  for (const auto& entry : all) append(packed, entry);
  return packed;
}

std::optional<std::vector<Bootstrap::Bytes>> unpack_entries(std::span<const std::byte> packed,
                                                            std::size_t num_entries) {
  std::vector<std::uint64_t> sizes(num_entries);
  const auto table = std::as_writable_bytes(std::span(sizes));
  if (packed.size() < table.size()) return std::nullopt;
  std::ranges::copy(packed.first(table.size()), table.begin());
  auto rest = packed.subspan(table.size());
  std::vector<Bootstrap::Bytes> all(num_entries);
  for (std::size_t i = 0; i < num_entries; ++i) {
    if (sizes[i] > rest.size()) return std::nullopt;
    append(all[i], rest.first(sizes[i]));
    rest = rest.subspan(sizes[i]);
  }
  if (!rest.empty()) return std::nullopt;
  return all;
}

std::span<std::byte> TcpPeer::room() {
  constexpr std::size_t piece_bytes = std::size_t{1} << 20;
  if (filled_ < sizeof(FrameHeader)) return room_in(next_.header, filled_);
  const std::size_t of_body = filled_ - sizeof(FrameHeader);
  next_.bytes.resize(of_body + std::min(next_.header.size_bytes - of_body, piece_bytes));
  return std::span(next_.bytes).subspan(of_body);
}

void TcpPeer::read() {
  const FrameHeader& header = next_.header;
  while (!frame_ && !gone_) {
    const std::ptrdiff_t received = socket_.receive_some(room());
    if (received == 0) return;
    gone_ = received < 0;
    if (gone_) return;
    filled_ += received;
    if (filled_ < sizeof(header)) continue;
    gone_ = !is_valid(header) || header.size_bytes > max_frame_bytes_;
    if (gone_ || filled_ < sizeof(header) + header.size_bytes) continue;
    frame_ = std::exchange(next_, {});
    filled_ = 0;
  }
}

std::optional<std::string> TcpPeer::last_reason() {
  const auto kept = std::exchange(frame_, std::nullopt);
  std::optional<std::string> reason;
  for (read(); frame_ && !reason; read()) {
    const Frame frame = take_frame();
    if (frame.header.kind == FrameKind::failed) reason = peer_text(text_of(frame.bytes));
  }
  frame_ = kept;
  return reason;
}

bool TcpPeer::write(std::span<const std::byte> frame, std::size_t& sent) {
  while (sent < frame.size()) {
    const std::ptrdiff_t moved = socket_.send_some(frame.subspan(sent));
    if (moved > 0) sent += moved;
    within_frame_ = 0 < sent && sent < frame.size();
    if (moved == 0) return false;
    if (moved < 0) return true;
  }
  return true;
}

void TcpPeer::write_now(const Frame& frame) {
  if (within_frame_) return socket_.close();  // so the peer learns at least that this rank left
  if (socket_.is_open()) (void)socket_.send_now(join(frame.header, frame.bytes));
}

std::uint64_t TcpBootstrap::max_frame_bytes(std::int32_t rank, std::int32_t world_size) {
  if (rank == 0) return max_entry_bytes;
  return static_cast<std::uint64_t>(world_size) * (max_entry_bytes + sizeof(std::uint64_t));
}

void TcpBootstrap::fail(std::string_view reason) noexcept {
  if (std::exchange(has_failed_, true) || !process_.is_here()) return;
  try {
    const Frame frame = verdict_frame(FrameKind::failed, to_int(rank()), round_, reason);
    for (TcpPeer& peer : peers_) peer.write_now(frame);
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
  for (bool all_are_here = false; !all_are_here;) {
    std::vector<pollfd> missing;
    std::vector<std::int32_t> ranks;
    for (std::int32_t r = 1; r < world_size(); ++r) {
      if (peers_[r].frame() != nullptr) continue;
      missing.push_back(watch(peers_[r].socket(), POLLIN));
      ranks.push_back(r);
    }
    const bool late = deadline.passed();
    if (!ranks.empty() && !late) wait_for_any(missing, deadline);
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      if (late || missing[i].revents != 0) peers_[ranks[i]].read();
    }
    for (std::int32_t r = 1; r < world_size(); ++r) {
      const auto verdict = verdict_on(r, late);
      if (!verdict) continue;
      for (TcpPeer& peer : peers_) peer.write_now(*verdict);
      throw_verdict(*verdict, deadline.waited_s(), operation);
    }
    all_are_here = ranks.empty();
  }
  std::vector<Bytes> all(world_size());
  all[0].assign(mine.begin(), mine.end());
  for (std::int32_t r = 1; r < world_size(); ++r) all[r] = peers_[r].take_frame().bytes;
  const Bytes packed = pack_entries(all);
  send_to_all(join({.round = round_, .size_bytes = packed.size()}, packed));
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
    return verdict_frame(FrameKind::failed, peer, before, peer_text(text_of(frame->bytes)));
  }
  if (from.is_gone()) return verdict_frame(FrameKind::left, peer, before);
  if (deadline_passed) return verdict_frame(FrameKind::silent, peer, before);
  return std::nullopt;
}

/// A rank that cannot be reached finds out by itself.
void TcpBootstrap::send_to_all(std::span<const std::byte> frame) {
  const Deadline deadline(timeout_s());
  std::vector<std::size_t> sent(peers_.size(), 0);
  std::vector<bool> done(peers_.size(), false);
  for (;;) {
    std::vector<pollfd> blocked;
    for (std::size_t r = 1; r < peers_.size(); ++r) {
      done[r] = done[r] || peers_[r].write(frame, sent[r]);
      if (!done[r]) blocked.push_back(watch(peers_[r].socket(), POLLOUT));
    }
    if (blocked.empty() || deadline.passed()) return;
    wait_for_any(blocked, deadline);
  }
}

/// Rank 0 sends nothing while it reads a frame, unless the rest of the frame is useless.
std::vector<Bootstrap::Bytes> TcpBootstrap::send_and_wait(std::span<const std::byte> mine,
                                                          std::string_view operation) {
  const Deadline deadline(timeout_s() + verdict_grace_s);
  TcpPeer& root = peers_[0];
  const Bytes frame = join({.rank = static_cast<std::uint32_t>(to_int(rank())),
                            .round = round_,
                            .size_bytes = mine.size()},
                           mine);
  std::size_t sent = 0;
  bool all_sent = false;
  while (root.frame() == nullptr) {
    all_sent = all_sent || root.write(frame, sent);
    root.read();
    if (root.frame() != nullptr) break;
    if (root.is_gone()) throw_verdict(verdict_frame(FrameKind::left, 0, round_ - 1), 0, operation);
    if (deadline.passed()) {
      throw_verdict(verdict_frame(FrameKind::silent, 0, round_ - 1), deadline.waited_s(),
                    operation);
    }
    pollfd watched = watch(root.socket(), all_sent ? POLLIN : POLLIN | POLLOUT);
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
  const FrameHeader& header = verdict.header;
  const auto peer = static_cast<std::int32_t>(header.rank);
  if (header.rank >= static_cast<std::uint32_t>(world_size())) {
    throw TransportError(
        concat(operation, ": rank 0 sent a verdict on rank ", header.rank, " of ", world_size()));
  }
  if (header.kind == FrameKind::failed) {
    throw PeerFailed(
        concat(operation, ": rank ", peer, " failed: ", peer_text(text_of(verdict.bytes))));
  }
  if (header.kind == FrameKind::left) {
    throw PeerFailed(concat(operation, ": rank ", peer, " left (seen by rank ", rank(),
                            " in exchange ", round_, ", it took part in ", header.round, ")"));
  }
  if (peer == to_int(rank())) {
    throw PeerFailed(
        concat(operation, ": the other ranks have given up waiting for rank ", rank()));
  }
  throw_timeout(operation, to_int(rank()), peer, round_, header.round, seconds);
}

}  // namespace waybill::detail
