#include "program.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include "core/printable.h"
#include "report/format.h"
#include "waybill/json/file.h"

namespace waybill::cli {
namespace {

// 0, or the errno of the first write that failed.
int write_all(int file, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(file, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return errno;
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  return 0;
}

std::string_view environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

bool locale_is_utf8() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    std::string value(environment(name));
    if (value.empty()) continue;
    for (char& c : value) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    return value.find("utf-8") != std::string::npos || value.find("utf8") != std::string::npos;
  }
  return false;
}

}  // namespace

std::size_t text_width() {
  winsize size = {};
  std::size_t columns = 0;
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0) columns = size.ws_col;
  if (columns == 0) {
    const std::optional<std::int64_t> number = parse_number(std::string(environment("COLUMNS")));
    columns = number && 0 < *number && *number <= 1000 ? static_cast<std::size_t>(*number) : 80;
  }
  return std::clamp<std::size_t>(columns, 40, 200);
}

Console::Console() {
  style_.width = static_cast<int>(text_width());
  std::signal(SIGPIPE, SIG_IGN);
  style_.unicode = locale_is_utf8();
  style_.colour = ::isatty(STDOUT_FILENO) == 1 && environment("NO_COLOR").empty() &&
                  environment("TERM") != "dumb";
  error_is_terminal_ = ::isatty(STDERR_FILENO) == 1 && environment("TERM") != "dumb";
}

void Console::print(std::string_view text) {
  if (reader_gone_) return;
  const int status = write_all(STDOUT_FILENO, text);
  reader_gone_ = status == EPIPE;
  if (status != 0 && !reader_gone_)
    throw IoError(concat("standard output: cannot write: ", std::strerror(status)));
}

void Console::print_error(std::string_view text) const {
  write_all(STDERR_FILENO, concat("error: ", printable(text), "\n"));
}

void Console::print_remarks(const std::vector<std::string>& texts) const {
  for (const std::string& text : texts)
    write_all(STDERR_FILENO, concat("waybill: ", printable(text), "\n"));
}

std::string Console::mark(bool good) const {
  const std::string_view text = style_.unicode ? (good ? "✓" : "✗") : (good ? "ok" : "FAILED");
  return style_.colour ? concat("\x1b[", good ? "32" : "31", ";1m", text, "\x1b[0m")
                       : std::string(text);
}

Progress::Progress(const Console& console, std::string what)
    : console_(console), what_(std::move(what)) {
  if (console_.error_is_terminal_ || console_.plain_progress)
    thread_ = std::thread([this] { report(); });
}

Progress::~Progress() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    end_ = true;
  }
  ended_.notify_all();
  thread_.join();
}

void Progress::report() {
  using namespace std::chrono_literals;
  std::unique_lock lock(mutex_);
  bool shown = false;
  for (int seconds = 1; !ended_.wait_for(lock, 1s, [this] { return end_; }); ++seconds) {
    const bool in_place = console_.error_is_terminal_ && !console_.plain_progress;
    write_all(STDERR_FILENO, in_place ? concat("\r\x1b[K  ", what_, " ... ", seconds, " s")
                                      : concat("waybill: ", what_, " ... ", seconds, " s\n"));
    shown = in_place;
  }
  if (shown) write_all(STDERR_FILENO, "\r\x1b[K");
}

void Program::on(Command command, std::function<int()> work) {
  command.when_chosen([this, work = std::move(work)] { run = work; });
}

std::string sentence_list(const std::vector<std::string>& sentences) {
  std::string text;
  for (const std::string& sentence : sentences)
    text += concat("  - ", detail::wrapped(sentence, text_width() - 6, "    "), "\n");
  return text;
}

std::string read_input(const std::string& path) {
  return path == "-" ? read_standard_input() : read_file(path);
}

std::string input_name(const std::string& path) {
  return path == "-" ? "standard input" : printable_line(path);
}

void check_outputs(std::initializer_list<std::string> paths) {
  for (const std::string& path : paths) {
    if (!path.empty() && path != "-") require_writable(path);
  }
}

void write_output(Console& console, const std::string& path, std::string_view text,
                  const std::string& what) {
  if (path.empty() || path == "-") {
    console.print(text);
  } else {
    write_file(path, text);
    console.print(concat("Wrote ", printable_line(path), ": ", what, "\n"));
  }
}

}  // namespace waybill::cli
