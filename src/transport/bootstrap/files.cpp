#include <string>
#include <utility>

#include "transport/file_meeting.h"
#include "transport/bootstrap/wire.h"
#include "transport/bootstrap/tcp/handshake.h"
#include "waybill/core/wait.h"
#include "waybill/transport/bootstraps.h"

namespace waybill {
namespace {

using detail::FileMeeting;
using detail::max_entry_bytes;
using detail::peer_text;

constexpr double look_for_ends_every_s = 0.02;

/// The files of a run:
///   job     what it is: ranks of another one go away
///   made    the ranks made the folder
///   rank.R  rank R is here; made once, so that there is no second one
///   K.R     what rank R gave to exchange K; gone when all have begun exchange K + 1
///   end.R   rank R has gone, and why, if it failed
/// The rank that leaves last takes all of them away.
class FileBootstrap final : public Bootstrap {
 public:
  FileBootstrap(std::int32_t rank, std::int32_t world_size, const std::string& folder,
                double timeout_s, const JobIdentity& job)
      : Bootstrap(rank, world_size, timeout_s), meeting_(folder) {
    check_job(concat("job id = ", detail::quoted_or_none(job.id), ", world_size = ", world_size));
    if (!meeting_.publish_text(of_rank("rank.", rank))) {
      throw TransportError(
          concat("file bootstrap: rank ", rank, " has been in ", meeting_.folder(),
                 " before, expected a folder for this run only, and another rank (RANK, "
                 "or what its launcher sets) in each process"));
    }
    if (meeting_.made_folder()) (void)meeting_.publish_text("made");
  }
  FileBootstrap(const FileBootstrap&) = delete;
  FileBootstrap& operator=(const FileBootstrap&) = delete;
  ~FileBootstrap() override {
    leave({});
    clean_up();
  }

  void fail(std::string_view reason) noexcept override {
    leave(reason.empty() ? "no reason given" : reason);
  }

 private:
  [[nodiscard]] static std::string of_rank(std::string_view kind, std::int32_t rank) {
    return concat(kind, rank);
  }
  [[nodiscard]] static std::string entry_name(std::uint64_t round, std::int32_t rank) {
    return concat(round, ".", rank);
  }

  void check_job(const std::string& mine) const {
    std::optional<std::string> theirs;
    while (!theirs) {  // again where the last rank of a run takes it away just now
      if (meeting_.publish_text("job", mine)) return;
      theirs = meeting_.read_text("job");
    }
    if (*theirs == mine) return;
    throw TransportError(concat("file bootstrap: ", meeting_.folder(), " is of a run with ",
                                peer_text(*theirs), ", expected ", mine));
  }

  std::vector<Bytes> exchange(std::span<const std::byte> mine,
                              std::string_view operation) override {
    if (has_left_) {
      throw TransportError(concat(operation, ": the bootstrap is unusable: this rank gave up"));
    }
    try {
      return give_and_gather(mine, operation);
    } catch (const std::exception& error) {
      fail(error.what());
      throw;
    }
  }

  std::vector<Bytes> give_and_gather(std::span<const std::byte> mine, std::string_view operation) {
    require(mine.size() <= max_entry_bytes, operation, ": rank ", rank(), " gives ", mine.size(),
            " bytes, expected at most ", max_entry_bytes);
    ++round_;
    if (!meeting_.publish(entry_name(round_, to_int(rank())), mine)) {
      throw TransportError(concat("file bootstrap: ", entry_name(round_, to_int(rank())), " is in ",
                                  meeting_.folder(), " already"));
    }
    std::vector<std::optional<Bytes>> found(world_size());
    PollingWait wait(timeout_s());
    double next_look_s = 0;
    while (const auto missing = first_missing(found)) {
      if (wait.waited_s() >= next_look_s) {
        look_for_ends(found, operation);
        next_look_s = wait.waited_s() + look_for_ends_every_s;
      }
      if (!wait.pause()) throw_timeout(*missing, wait.waited_s(), operation);
    }
    meeting_.remove(entry_name(round_ - 1, to_int(rank())));  // all have begun this one
    std::vector<Bytes> all;
    for (auto& entry : found) all.push_back(std::move(*entry));
    return all;
  }

  /// Reads what has come.
  std::optional<std::int32_t> first_missing(std::vector<std::optional<Bytes>>& found) const {
    std::optional<std::int32_t> missing;
    for (std::int32_t r = 0; r < world_size(); ++r) {
      auto& entry = found[r];
      if (!entry) entry = meeting_.read(entry_name(round_, r), max_entry_bytes);
      if (!entry && !missing) missing = r;
    }
    return missing;
  }

  /// A rank that has gone may have given its bytes before.
  void look_for_ends(const std::vector<std::optional<Bytes>>& found,
                     std::string_view operation) const {
    for (std::int32_t r = 0; r < world_size(); ++r) {
      if (found[r]) continue;
      const auto reason = meeting_.read_text(of_rank("end.", r));
      if (!reason || meeting_.exists(entry_name(round_, r))) continue;
      if (!reason->empty()) {
        throw PeerFailed(concat(operation, ": rank ", r, " failed: ", peer_text(*reason)));
      }
      throw PeerFailed(concat(operation, ": rank ", r, " left (seen by rank ", rank(),
                              " in exchange ", round_, ", it took part in ", round_ - 1, ")"));
    }
  }

  [[noreturn]] void throw_timeout(std::int32_t peer, double seconds,
                                  std::string_view operation) const {
    throw Timeout({.operation = std::string(operation),
                   .what = "exchange",
                   .rank = to_int(rank()),
                   .peer = peer,
                   .wanted = round_,
                   .seen = round_ - 1,
                   .seconds = seconds});
  }

  /// @param reason empty: nothing went wrong
  void leave(std::string_view reason) noexcept {
    if (has_left_) return;
    has_left_ = true;
    try {
      (void)meeting_.publish_text(of_rank("end.", to_int(rank())),
                                  reason.substr(0, detail::max_reason_bytes));
    } catch (const std::exception&) {
      // A folder that is gone or full: the others find out by their deadlines.
    }
  }

  /// Whoever leaves last does it. A rank of a later run cannot be in the folder before rank.R has
  /// gone, so those go last.
  void clean_up() const noexcept {
    try {
      for (std::int32_t r = 0; r < world_size(); ++r) {
        if (!meeting_.exists(of_rank("end.", r))) return;
      }
      if (!meeting_.rename("job", "closing")) return;  // another rank does it
      for (std::int32_t r = 0; r < world_size(); ++r) {
        for (std::uint64_t k = round_ == 0 ? 0 : round_ - 1; k <= round_ + 1; ++k) {
          meeting_.remove(entry_name(k, r));  // ranks may end one exchange before or after
        }
        meeting_.remove(of_rank("end.", r));
      }
      const bool made = meeting_.exists("made");
      meeting_.remove("made");
      for (std::int32_t r = 0; r < world_size(); ++r) meeting_.remove(of_rank("rank.", r));
      meeting_.remove("closing");
      if (made) meeting_.remove_folder();
    } catch (const std::exception&) {
      // No memory for a name: files stay.
    }
  }

  FileMeeting meeting_;
  std::uint64_t round_ = 0;
  bool has_left_ = false;
};

}  // namespace

std::unique_ptr<Bootstrap> make_file_bootstrap(std::int32_t rank, std::int32_t world_size,
                                               const std::string& folder, double timeout_s,
                                               const JobIdentity& job) {
  require(!folder.empty(), "make_file_bootstrap: folder is empty");
  return std::make_unique<FileBootstrap>(rank, world_size, folder, timeout_s, job);
}

}  // namespace waybill
