#pragma once

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include "command_line.h"
#include "waybill/report/plan_summary.h"

namespace waybill::cli {

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

  /// `waybill: TEXT` on standard error, a line for each: facts that the result does not hold.
  void print_remarks(const std::vector<std::string>& texts) const;

  /// How figures look here: by the locale (UTF-8 or not), the terminal and NO_COLOR.
  /// @param gb_per_s as in TextStyle
  [[nodiscard]] TextStyle style(double gb_per_s = 0) const {
    TextStyle style = style_;
    style.gb_per_s = gb_per_s;
    return style;
  }

  /// `good` painted green, or red.
  [[nodiscard]] std::string mark(bool good) const;

  bool plain_progress = false;  ///< lines, even where standard error is no terminal

 private:
  friend class Progress;
  TextStyle style_;
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

/// Does the work, with progress on standard error while it takes its time. @return what it returns
template <class Work>
auto with_progress(const Console& console, std::string what, Work&& work) {
  const Progress progress(console, std::move(what));
  return work();
}

/// All commands share it while the program runs.
struct Program {
  Console console;
  std::string command_line;  ///< as it was typed, quoted for a shell
  std::function<int()> run;  ///< the chosen command; set while options are read

  /// Has `work` run if `command` is chosen. It returns the exit code.
  void on(Command command, std::function<int()> work);
};

/// Each adds one command with its options, help and examples to the program.
void add_demo_command(Command app, Program& program);
void add_plan_command(Command app, Program& program);
void add_metadata_command(Command app, Program& program);
void add_simulate_command(Command app, Program& program);
void add_validate_command(Command app, Program& program);
void add_show_command(Command app, Program& program);
void add_explain_command(Command app, Program& program);
void add_compare_command(Command app, Program& program);
void add_experts_command(Command app, Program& program);
void add_doctor_command(Command app, Program& program);
void add_calibrate_command(Command app, Program& program);

/// Columns of the terminal on standard output, 40..200; else those that COLUMNS says, else 80.
[[nodiscard]] std::size_t text_width();

/// Sentences as an indented list, wrapped at the width of the terminal.
[[nodiscard]] std::string sentence_list(const std::vector<std::string>& sentences);

/// The file, or standard input for "-". @throws IoError
[[nodiscard]] std::string read_input(const std::string& path);

/// How messages call that file; a terminal can show it.
[[nodiscard]] std::string input_name(const std::string& path);

/// Before work whose results go to these files; "" and "-" are none. @throws IoError
void check_outputs(std::initializer_list<std::string> paths);

/// Replaces the file and says so with `what` it holds, or prints for "-" and "".
/// @throws IoError, with the old file still there.
void write_output(Console& console, const std::string& path, std::string_view text,
                  const std::string& what);

}  // namespace waybill::cli
