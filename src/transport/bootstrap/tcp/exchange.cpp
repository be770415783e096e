#include "transport/bootstrap/tcp/exchange.h"

#include <algorithm>
#include <utility>

#include "core/to_size.h"
#include "transport/bootstrap/wire.h"
#include "waybill/core/wait.h"

namespace waybill::detail {
namespace {

constexpr double verdict_grace_s = 1.0;  // rank 0's deadline may have begun later than ours

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

}  // namespace

void TcpPeer::read() {
  while (!frame_ && !gone_) {
    const IoResult got = socket_.receive_some(reader_.room());
    if (got.status == IoStatus::would_block) return;
    if (got.status == IoStatus::closed) {
      gone_ = true;
      return;
    }
    switch (reader_.took(got.num_bytes)) {
      case FrameReader::State::more:
        break;
      case FrameReader::State::frame:
        frame_ = reader_.take();
        break;
      case FrameReader::State::broken:
        gone_ = true;
        break;
    }
  }
}

Frame TcpPeer::take_frame() {
  Frame frame = std::move(*frame_);
  frame_.reset();
  return frame;
}

std::optional<std::string> TcpPeer::last_words() {
  const auto kept = std::exchange(frame_, std::nullopt);
  std::optional<std::string> words;
  for (read(); frame_ && !words; read()) {
    const Frame frame = take_frame();
    if (frame.header.kind == FrameKind::failed) words = reason_in(frame);
  }
  frame_ = kept;
  return words;
}

bool TcpPeer::write(std::span<const std::byte> header, std::span<const std::byte> body,
                    std::size_t& sent) {
  while (sent < header.size() + body.size()) {
    const auto next =
        sent < header.size() ? header.subspan(sent) : body.subspan(sent - header.size());
    const IoResult moved = socket_.send_some(next);
    sent += moved.num_bytes;
    within_frame_ = 0 < sent && sent < header.size() + body.size();
    if (moved.status == IoStatus::would_block) return false;
    if (moved.status == IoStatus::closed) return true;
  }
  return true;
}

void TcpPeer::write_now(const FrameHeader& header, std::string_view body) {
  if (within_frame_) return socket_.close();  // that says at least that it has left
  if (!is_open()) return;
  if (socket_.send_now(encode(header)) && !body.empty()) (void)socket_.send_now(bytes_of(body));
}

std::string reason_in(const Frame& frame) {
  return peer_text({reinterpret_cast<const char*>(frame.bytes.data()), frame.bytes.size()});
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

std::uint64_t TcpExchange::max_frame_bytes(std::int32_t rank, std::int32_t world_size) {
  if (rank == 0) return max_entry_bytes;
  return to_size(world_size) * (max_entry_bytes + sizeof(std::uint64_t));
}

std::vector<Bootstrap::Bytes> TcpExchange::run(std::span<const std::byte> mine,
                                               std::string_view operation) {
  require(mine.size() <= max_entry_bytes, operation, ": rank ", rank_, " gives ", mine.size(),
          " bytes, expected at most ", max_entry_bytes);
  ++round_;
  if (world_size_ == 1) return {Bootstrap::Bytes(mine.begin(), mine.end())};
  return rank_ == 0 ? gather_and_answer(mine, operation) : send_and_wait(mine, operation);
}

void TcpExchange::tell_failure(std::string_view reason) noexcept {
  try {
    const Frame frame = verdict_frame(FrameKind::failed, rank_, round_, reason);
    for (TcpPeer& peer : peers_) peer.write_now(frame.header, reason.substr(0, max_reason_bytes));
  } catch (const std::exception&) {
    // Without memory nothing is said but that the connection ends.
  }
}

TcpExchange::Entries TcpExchange::gather_and_answer(std::span<const std::byte> mine,
                                                    std::string_view operation) {
  const Deadline deadline(timeout_s_);
  Entries all(world_size_);
  all[0].assign(mine.begin(), mine.end());
  for (;;) {
    PollSet missing;
    std::vector<std::int32_t> ranks;
    for (std::int32_t r = 1; r < world_size_; ++r) {
      if (peers_[r].frame() != nullptr) continue;
      (void)missing.add(peers_[r].socket(), PollSet::to_read);
      ranks.push_back(r);
    }
    const bool late = deadline.passed();
    if (!ranks.empty() && !late) missing.wait(deadline);
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      if (late || missing.is_ready(i)) peers_[ranks[i]].read();
    }
    for (std::int32_t r = 1; r < world_size_; ++r) {
      if (const auto verdict = trouble_of(r, late)) give_verdict(*verdict, deadline, operation);
    }
    if (ranks.empty()) break;
  }
  for (std::int32_t r = 1; r < world_size_; ++r) all[r] = peers_[r].take_frame().bytes;
  const Bootstrap::Bytes packed = pack_entries(all);
  const HeaderBytes header = encode(FrameHeader{.round = round_, .size_bytes = packed.size()});
  Bootstrap::Bytes answer(header.begin(), header.end());
  answer.insert(answer.end(), packed.begin(), packed.end());
  send_to_all(answer, Deadline(timeout_s_));
  return all;
}

/// What keeps a rank from taking part in this round; nullopt: nothing is known.
std::optional<Frame> TcpExchange::trouble_of(std::int32_t peer, bool deadline_passed) {
  TcpPeer& from = peers_[peer];
  const std::uint64_t before = round_ - 1;
  if (Frame* const frame = from.frame()) {
    if (frame->header.kind == FrameKind::data && frame->header.round == round_) return std::nullopt;
    if (frame->header.kind != FrameKind::failed) {
      return verdict_frame(FrameKind::left, peer, before);
    }
    return verdict_frame(FrameKind::failed, peer, before, reason_in(*frame));
  }
  if (from.is_gone()) return verdict_frame(FrameKind::left, peer, before);
  if (deadline_passed) return verdict_frame(FrameKind::silent, peer, before);
  return std::nullopt;
}

/// A rank that cannot be told finds out by itself.
void TcpExchange::send_to_all(std::span<const std::byte> bytes, const Deadline& deadline) {
  std::vector<std::size_t> sent(peers_.size(), 0);
  std::vector<bool> done(peers_.size(), false);
  for (;;) {
    PollSet blocked;
    for (std::size_t r = 1; r < peers_.size(); ++r) {
      done[r] = done[r] || peers_[r].write(bytes, {}, sent[r]);
      if (!done[r]) (void)blocked.add(peers_[r].socket(), PollSet::to_write);
    }
    if (std::count(done.begin() + 1, done.end(), false) == 0 || deadline.passed()) return;
    blocked.wait(deadline);
  }
}

void TcpExchange::give_verdict(const Frame& verdict, const Deadline& deadline,
                               std::string_view operation) {
  const auto& text = verdict.bytes;
  for (TcpPeer& peer : peers_) {
    peer.write_now(verdict.header, {reinterpret_cast<const char*>(text.data()), text.size()});
  }
  fail_with(verdict, deadline.waited_s(), operation);
}

/// Rank 0 says nothing while it takes a frame, unless there is no use in sending on.
TcpExchange::Entries TcpExchange::send_and_wait(std::span<const std::byte> mine,
                                                std::string_view operation) {
  const Deadline deadline(timeout_s_ + verdict_grace_s);
  TcpPeer& root = peers_[0];
  const HeaderBytes header = encode(FrameHeader{
      .rank = static_cast<std::uint32_t>(rank_), .round = round_, .size_bytes = mine.size()});
  std::size_t sent = 0;
  bool all_sent = false;
  while (root.frame() == nullptr) {
    all_sent = all_sent || root.write(header, mine, sent);
    root.read();
    if (root.frame() != nullptr) break;
    if (root.is_gone()) fail_with(verdict_frame(FrameKind::left, 0, round_ - 1), 0, operation);
    if (deadline.passed()) {
      fail_with(verdict_frame(FrameKind::silent, 0, round_ - 1), deadline.waited_s(), operation);
    }
    PollSet set;
    (void)set.add(root.socket(), PollSet::to_read | (all_sent ? 0 : PollSet::to_write));
    set.wait(deadline);
  }
  const Frame answer = root.take_frame();
  if (answer.header.kind != FrameKind::data) fail_with(answer, deadline.waited_s(), operation);
  auto all =
      answer.header.round == round_ ? unpack_entries(answer.bytes, world_size_) : std::nullopt;
  if (!all) throw TransportError(concat(operation, ": rank 0 sent an incomplete table of entries"));
  return std::move(*all);
}

void TcpExchange::fail_with(const Frame& verdict, double seconds,
                            std::string_view operation) const {
  const auto [kind, peer, seen, size] = verdict.header;
  if (peer >= static_cast<std::uint32_t>(world_size_)) {
    throw TransportError(
        concat(operation, ": rank 0 sent a verdict on rank ", peer, " of ", world_size_));
  }
  if (kind == FrameKind::failed) {
    throw PeerFailed(concat(operation, ": rank ", peer, " failed: ", reason_in(verdict)));
  }
  if (kind == FrameKind::left) {
    throw PeerFailed(concat(operation, ": rank ", peer, " left (seen by rank ", rank_,
                            " in exchange ", round_, ", it took part in ", seen, ")"));
  }
  if (static_cast<std::int32_t>(peer) == rank_) {
    throw PeerFailed(concat(operation, ": the other ranks have given up waiting for rank ", rank_));
  }
  throw Timeout({.operation = std::string(operation),
                 .what = "exchange",
                 .rank = rank_,
                 .peer = static_cast<std::int32_t>(peer),
                 .wanted = round_,
                 .seen = seen,
                 .seconds = seconds});
}

}  // namespace waybill::detail
