#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "waybill/core/error.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

// Options without the library that reads them: only command_line.cpp includes CLI11, which takes
// seconds to compile.

namespace waybill::cli {

/// The command line asks for something that makes no sense: exit 2.
class UsageError : public Error {
 public:
  using Error::Error;
};

/// A whole decimal number and nothing else; none when it is something else or too large.
[[nodiscard]] std::optional<std::int64_t> parse_number(const std::string& text);

/// The words with `separator` between them.
[[nodiscard]] std::string joined(const std::vector<std::string>& words, std::string_view separator);

/// ", did you mean X?" where an unknown word is close to a known one; else "".
[[nodiscard]] std::string did_you_mean(std::string_view word, std::span<const std::string> known);

/// An option or a positional argument of a command: a name for it, to be copied.
class Option {
 public:
  explicit Option(CLI::Option* option) : option_(option) {}

  /// --help shows it in the place of the value; "": nothing. A FILE must not be "".
  Option& value_name(const std::string& name);
  /// --help shows the variable's present value.
  Option& show_default();
  Option& required();

  /// @param complaint returns "" for a value that is right
  Option& check(const std::function<std::string(const std::string&)>& complaint);
  /// Whatever `read` takes. @param expected the end of "got VALUE, expected ..."
  Option& read_by(const std::function<void(const std::string&)>& read,
                  const std::function<std::string(const std::string&)>& expected);
  /// A whole number in the range; `or_auto`: or the word auto.
  Option& between(std::int64_t min, std::int64_t max, bool or_auto = false);
  /// A number in the range, neither nan nor inf.
  Option& real_between(double min, double max);
  Option& one_of(const std::vector<std::string>& words);
  /// A whole number from `min` on.
  Option& at_least(std::int64_t min);

  Option& excludes(Option other);
  Option& needs(Option other);

 private:
  CLI::Option* option_;
};

/// A command, or the program before any: a name for it, to be copied.
class Command {
 public:
  explicit Command(CLI::App* app, std::string group = {}) : app_(app), group_(std::move(group)) {}

  [[nodiscard]] Command add_command(const std::string& name, const std::string& text);

  /// The same command, whose further options stand under this heading in --help.
  [[nodiscard]] Command under(const std::string& group) const { return Command(app_, group); }

  /// `names` are such as "-o,--output", or "FILE" for a positional argument. The variable takes the
  /// value, and must live until the command has run. Value: std::string, double, or an integer of
  /// 32 or 64 bits.
  template <class Value>
  Option option(const std::string& names, Value& value, const std::string& text);
  /// N, in the range; --help shows the default.
  template <class Value>
  Option number(const std::string& names, Value& value, std::int64_t min, std::int64_t max,
                const std::string& text) {
    return option(names, value, text).value_name("N").between(min, max).show_default();
  }
  /// X, a number in the range; --help shows the default.
  Option real(const std::string& names, double& value, double min, double max,
              const std::string& text) {
    return option(names, value, text).value_name("X").real_between(min, max).show_default();
  }
  /// One of the words; --help shows the default.
  Option choice(const std::string& names, std::string& value, const std::vector<std::string>& words,
                const std::string& text) {
    return option(names, value, text).one_of(words).show_default();
  }
  Option file(const std::string& names, std::string& value, const std::string& text) {
    return option(names, value, text).value_name("FILE");
  }
  Option flag(const std::string& names, bool& value, const std::string& text);

  [[nodiscard]] Option option_named(const std::string& name) const;
  /// All options of these groups, as far as they are there.
  [[nodiscard]] std::vector<Option> options_of(const std::vector<std::string>& groups) const;
  [[nodiscard]] bool is_given(const std::string& name) const;

  /// The end of --help.
  void footer(const std::string& text);
  /// Called when the command was chosen and its options are read.
  void when_chosen(const std::function<void()>& call);

 private:
  [[nodiscard]] CLI::Option* in_group(CLI::Option* option) const;

  CLI::App* app_;
  std::string group_;
};

/// A program with commands, of which at most one is given; its own options may follow the command.
[[nodiscard]] std::shared_ptr<CLI::App> make_app(const std::string& name, const std::string& text,
                                                 const std::string& version);

/// @return the help, in lines of at most `width`, or the version, if the user asked for it
/// @throws UsageError
[[nodiscard]] std::optional<std::string> parse(CLI::App& app, int argc, char** argv,
                                               std::size_t width);

}  // namespace waybill::cli
