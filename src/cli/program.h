#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include "waybill/core/error.h"
#include "waybill/report/text_summary.h"

namespace waybill::cli {

/// The command line asks for something that makes no sense: exit 2.
class UsageError : public Error {
 public:
  using Error::Error;
};

/// 130 is what shells say of a program that SIGINT ended.
enum ExitCode : int { exit_good = 0, exit_failure = 1, exit_usage = 2, exit_interrupted = 130 };

/// Standard input, output and error of the program.
class Console {
 public:
  Console();

  /// Writes to standard output at once. A reader that went away is no error: the text is dropped.
  /// @throws IoError when the output cannot be written for another reason.
  void print(std::string_view text);

  /// `error: TEXT` on standard error.
  void print_error(std::string_view text) const;

  /// `waybill: TEXT` on standard error: what the user should know beside the result.
  void print_remark(std::string_view text) const;

  /// Progress as plain lines even where standard error is no terminal.
  void set_plain_progress(bool on) { plain_progress_ = on; }

  /// How figures look here: by the locale (UTF-8 or not), the terminal and NO_COLOR.
  [[nodiscard]] const TextStyle& style() const { return style_; }

  /// `good` painted green, or red.
  [[nodiscard]] std::string mark(bool good) const;

 private:
  friend class Progress;
  TextStyle style_;
  bool plain_progress_ = false;
  bool error_is_terminal_ = false;
  bool reader_gone_ = false;
};

/// Says on standard error what takes so long, once it has taken a second. Lives as long as the
/// work.
class Progress {
 public:
  Progress(const Console& console, std::string what);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

 private:
  void report();

  const Console& console_;
  std::string what_;
  std::mutex mutex_;
  std::condition_variable ended_;
  bool end_ = false;
  std::thread thread_;
};

/// Columns of the terminal on standard output, 40..200; else those that COLUMNS says, else 80.
[[nodiscard]] std::size_t text_width();

/// The file, or standard input for "-". @throws IoError
[[nodiscard]] std::string read_input(const std::string& path);

/// What messages call that file; a terminal can show it.
[[nodiscard]] std::string input_name(const std::string& path);

/// Before work whose result write_output is to write. @throws IoError
void check_output(const std::string& path);

/// Replaces the file, or prints for "-" and "". @throws IoError, with the old file still there.
void write_output(Console& console, const std::string& path, std::string_view text);

}  // namespace waybill::cli
