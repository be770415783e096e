#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "waybill/transport/bootstrap.h"

namespace waybill::detail {

/// A folder of this user alone in which the ranks of one run leave files for each other. Everything
/// in it is made anew and read without following links and without blocking, so that nobody else's
/// files are ever opened. All errors are TransportError with the reason of the system.
class FileMeeting {
 public:
  /// Makes the folder where it is missing. @throws TransportError unless it is a folder of this
  /// user, mode 0700
  explicit FileMeeting(std::string folder);
  FileMeeting(const FileMeeting&) = delete;
  FileMeeting& operator=(const FileMeeting&) = delete;
  ~FileMeeting();

  [[nodiscard]] const std::string& folder() const { return folder_; }
  [[nodiscard]] bool made_folder() const { return made_folder_; }

  /// A new file, which others see whole or not at all; false: there is one of this name.
  [[nodiscard]] bool publish(const std::string& name, std::span<const std::byte> bytes) const;
  [[nodiscard]] bool publish_text(const std::string& name, std::string_view text = {}) const {
    return publish(name, std::as_bytes(std::span(text)));
  }

  /// Nullopt: there is no such file (yet).
  [[nodiscard]] std::optional<Bootstrap::Bytes> read(const std::string& name,
                                                     std::size_t max_bytes) const;
  [[nodiscard]] std::optional<std::string> read_text(const std::string& name) const;
  [[nodiscard]] bool exists(const std::string& name) const noexcept;

  void remove(const std::string& name) const noexcept;
  /// True for the one rank that renames it first.
  [[nodiscard]] bool rename(const std::string& from, const std::string& to) const noexcept;
  /// Unless something is in it.
  void remove_folder() const noexcept;

 private:
  [[noreturn]] void fail(std::string_view doing, const std::string& name, int error) const;
  void open_folder();

  std::string folder_;
  std::string unfinished_;  ///< the end of names that nobody reads, another one in each object
  int descriptor_ = -1;
  bool made_folder_ = false;
};

}  // namespace waybill::detail
