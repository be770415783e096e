#include "tcp_reception.h"

#include <dirent.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <utility>

#include "core/printable.h"
#include "core/to_size.h"
#include "peer_text.h"
#include "waybill/core/error.h"
#include "waybill/core/wait.h"

namespace waybill::detail {
namespace {

constexpr double hello_patience_s = 5.0;
constexpr double farewell_s = 5.0;
constexpr std::size_t most_callers = 1024;
constexpr std::size_t callers_at_once = 64;
constexpr std::int64_t most_lines = 20;

/// That this process has open.
std::int64_t num_open_descriptors() {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir("/proc/self/fd"), closedir);
  if (folder == nullptr) return 64;                  // no /proc: more than most programs have
  std::int64_t count = -3;                           // ".", ".." and the folder itself
  while (readdir(folder.get()) != nullptr) ++count;  // NOLINT(concurrency-mt-unsafe): its own DIR
  return count;
}

std::int64_t descriptor_limit() {
  rlimit limit{};
  constexpr std::int64_t plenty = 1 << 20;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return plenty;
  return static_cast<std::int64_t>(std::min<rlim_t>(limit.rlim_cur, plenty));
}

/// How many callers may be unknown at a time: what the ranks leave over, and of that one half.
std::size_t room_for_callers(std::int32_t world_size) {
  const std::int64_t limit = descriptor_limit();
  const std::int64_t open = num_open_descriptors();
  const std::int64_t left = limit - open - (world_size - 1);
  if (left < 1) {
    throw TransportError(concat("tcp bootstrap: rank 0 of ", world_size, " needs ", world_size,
                                " descriptors, but ", open, " of ", limit,
                                " are open, expected a higher limit (ulimit -n)"));
  }
  return std::min(most_callers, std::max<std::size_t>(1, to_size(left) / 2));
}

}  // namespace

RefusalLog::~RefusalLog() {
  if (count_ <= most_lines) return;
  (void)std::fputs(
      concat("waybill: rank 0 hung up on ", count_ - most_lines, " more callers\n").c_str(),
      stderr);
}

void RefusalLog::line(std::string_view caller, std::string_view why) {
  if (++count_ > most_lines) return;
  (void)std::fputs(concat("waybill: rank 0 hung up on ", caller, ": ", why, "\n").c_str(), stderr);
}

Reception::Reception(Socket door, std::int32_t world_size, std::string job_id, std::string secret)
    : door_(std::move(door)),
      peers_(world_size),
      watched_(world_size, false),
      max_callers_(room_for_callers(world_size)) {
  admission_.world_size = world_size;
  admission_.job_id = std::move(job_id);
  admission_.secret = std::move(secret);
  admission_.taken.assign(world_size, false);
  callers_.reserve(max_callers_ + 1);
}

std::vector<TcpPeer> Reception::admit_all(const Deadline& deadline) {
  while (num_here_ < admission_.world_size && !verdict_) {
    if (deadline.passed()) {
      verdict_ = verdict_frame(FrameKind::silent, first_missing(), 0);
      break;
    }
    try {
      serve(deadline);
    } catch (const std::exception& error) {
      verdict_ = verdict_frame(FrameKind::failed, 0, 0, error.what());
      tell_verdict();
      throw;
    }
  }
  if (verdict_) explain(deadline);
  forget_closed();
  for (Caller& caller : callers_) hang_up(caller, "all ranks are here");
  return std::move(peers_);
}

/// Those that come late would find nobody and wait their own deadline out.
void Reception::explain(const Deadline& deadline) {
  const auto peer = static_cast<std::int32_t>(verdict_->header.rank);
  const double waited = deadline.waited_s();
  tell_verdict();
  if (verdict_->header.kind == FrameKind::silent) {
    throw Timeout({.operation = "tcp bootstrap: connect",
                   .what = "exchange",
                   .rank = 0,
                   .peer = peer,
                   .wanted = 1,
                   .seen = 0,
                   .seconds = waited});
  }
  const std::string reason = reason_in(*verdict_);
  const std::string what =
      reason.empty() ? concat("rank ", peer, " left") : concat("rank ", peer, " failed: ", reason);
  turn_all_away(what, Deadline(std::min(farewell_s, deadline.left_s())));
  throw PeerFailed("tcp bootstrap: connect: " + what);
}

void Reception::turn_all_away(std::string_view why, const Deadline& deadline) {
  admission_.failure = why;
  while (num_here_ < admission_.world_size && !deadline.passed()) serve(deadline);
}

/// One look at everybody. Callers are heard before others are taken, which may push out the oldest.
void Reception::serve(const Deadline& deadline) {
  PollSet set;
  for (const Caller& caller : callers_) (void)set.add(caller.socket, PollSet::to_read);
  std::vector<std::int32_t> ranks;
  for (std::int32_t r = 1; r < admission_.world_size; ++r) {
    if (!watched_[r]) continue;
    const bool has_spoken = peers_[r].frame() != nullptr;
    (void)set.add(peers_[r].socket(), has_spoken ? PollSet::hang_up : PollSet::to_read);
    ranks.push_back(r);
  }
  const std::size_t door = set.add(door_, PollSet::to_read);
  set.wait(deadline);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (set.is_ready(callers_.size() + i)) watch(ranks[i]);
  }
  for (std::size_t i = 0; i < callers_.size(); ++i) {
    if (set.is_ready(i)) hear(callers_[i]);
    if (callers_[i].socket.is_open() && callers_[i].deadline.passed()) {
      hang_up(callers_[i], "it has not said who it is");
    }
  }
  forget_closed();
  if (set.is_ready(door)) take_callers();
}

void Reception::hear(Caller& caller) {
  while (caller.socket.is_open()) {
    const IoResult got = caller.socket.receive_some(caller.greeter.room());
    if (got.status == IoStatus::would_block) return;
    if (got.status == IoStatus::closed) return hang_up(caller, "it hung up itself");
    switch (caller.greeter.took(got.num_bytes, admission_)) {
      case Greeter::Step::more:
        break;
      case Greeter::Step::answer:
        if (!caller.socket.send_now(caller.greeter.answer())) {
          return hang_up(caller, "it does not accept the answer");
        }
        break;
      case Greeter::Step::admit:
        return admit(caller);
      case Greeter::Step::refuse:
        if (caller.greeter.why() == admission_.failure) ++num_here_;
        (void)caller.socket.send_now(caller.greeter.answer());
        return hang_up(caller, caller.greeter.why());
      case Greeter::Step::hang_up:
        return hang_up(caller, caller.greeter.why());
    }
  }
}

void Reception::admit(Caller& caller) {
  if (!caller.socket.send_now(caller.greeter.answer())) {
    return hang_up(caller, "it does not accept the answer");
  }
  const std::size_t r = caller.greeter.rank();
  const auto most = TcpExchange::max_frame_bytes(0, admission_.world_size);
  peers_[r] = TcpPeer(std::exchange(caller.socket, Socket()), most);
  admission_.taken[r] = true;
  watched_[r] = true;
  ++num_here_;
}

void Reception::hang_up(Caller& caller, std::string_view why) {
  log_.line(caller.socket.peer_name(), why);
  caller.socket.close();
}

/// A rank that is here may have begun its first exchange, failed or died.
void Reception::watch(std::int32_t rank) {
  TcpPeer& peer = peers_[rank];
  const bool had_spoken = peer.frame() != nullptr;
  peer.read();
  const Frame* const frame = peer.frame();
  std::optional<std::string> reason;
  if (frame != nullptr && frame->header.kind == FrameKind::failed) {
    reason = reason_in(*frame);
  } else if (had_spoken) {  // what is new is that it has hung up
    reason = peer.last_words().value_or("");
  } else if (peer.is_gone()) {
    reason = "";
  }
  if (!reason) return;
  watched_[rank] = false;
  if (!verdict_) {
    verdict_ =
        verdict_frame(reason->empty() ? FrameKind::left : FrameKind::failed, rank, 0, *reason);
  }
}

void Reception::take_callers() {
  for (std::size_t i = 0; i < std::min(callers_at_once, max_callers_ / 2 + 1); ++i) {
    Socket::Accepted accepted = door_.accept();
    if (accepted.error != 0) return make_room(accepted.error);
    if (!accepted.caller.is_open()) return;
    if (callers_.size() >= max_callers_) {
      hang_up(callers_.front(), "too many callers that have not said who they are");
      forget_closed();
    }
    callers_.push_back({.socket = std::move(accepted.caller),
                        .greeter = {},
                        .deadline = Deadline(hello_patience_s)});
    hear(callers_.back());  // a rank says at once who it is
  }
  forget_closed();
}

/// The caller stays at the door until there is a descriptor for it.
void Reception::make_room(int error) {
  if (callers_.empty()) {
    throw TransportError(concat("tcp bootstrap: rank 0 cannot take a caller: ", errno_text(error),
                                ", ", num_open_descriptors(), " of ", descriptor_limit(),
                                " descriptors are open (ulimit -n)"));
  }
  hang_up(callers_.front(), "rank 0 has no descriptor left");
  forget_closed();
}

void Reception::forget_closed() {
  std::erase_if(callers_, [](const Caller& caller) { return !caller.socket.is_open(); });
}

std::int32_t Reception::first_missing() const {
  const auto missing = std::find(admission_.taken.begin() + 1, admission_.taken.end(), false);
  return static_cast<std::int32_t>(missing - admission_.taken.begin());
}

void Reception::tell_verdict() {
  const auto& text = verdict_->bytes;
  for (TcpPeer& peer : peers_) {
    peer.write_now(verdict_->header, {reinterpret_cast<const char*>(text.data()), text.size()});
  }
}

}  // namespace waybill::detail
